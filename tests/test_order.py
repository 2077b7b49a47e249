"""The reading order's promises, over drawn data sets, worlds, batch sizes and stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.errors import StateMismatch, UsageError
from stagekit.order import Epoch, Intervals, Position, State, batches, left_after, permutation, share, size

DIGEST = "5f" * 32


@dataclass
class Plan:
    """A small stand-in for a loader: which positions every share hands out."""

    total: int
    shares: int
    per_share: int
    drop_last: bool
    position: Position = field(default_factory=Position)

    @property
    def count(self) -> int:
        return batches(size(self.position.left(self.total)), self.shares, self.per_share, drop_last=self.drop_last)

    def take(self, count: int) -> list[list[list[int]]]:
        """``count`` global batches; each is, per share, the list of positions."""
        left = self.position.left(self.total)
        self.position = self.position.advanced(self.shares, self.per_share, count)
        return [
            [flat(share(left, number, self.shares, skip=i * self.per_share, limit=self.per_share)) for number in range(self.shares)]
            for i in range(count)
        ]


def flat(intervals: Intervals) -> list[int]:
    return [position for begin, end in intervals for position in range(begin, end)]


def sequence(epoch: Epoch, intervals: Intervals | None = None) -> list[tuple[int, int]]:
    """(block, sample) in reading order."""
    found = []
    for stretch in epoch.stretches(((0, epoch.samples),) if intervals is None else intervals):
        found += [(int(stretch.blocks[slot]), int(number)) for slot, number in zip(stretch.slots, stretch.samples, strict=True)]
    return found


def an_epoch(counts: list[int], number: int = 0, *, seed: int = 0, shuffle: bool = True, window: int = 4, digest: str = DIGEST) -> Epoch:
    return Epoch(counts, number, digest=digest, seed=seed, shuffle=shuffle, window=window)


block_counts = st.lists(st.integers(1, 9), min_size=0, max_size=25)


@settings(deadline=None, max_examples=300)
@given(counts=block_counts, window=st.integers(1, 8), seed=st.integers(-5, 2**70), number=st.integers(0, 5), shuffle=st.booleans())
def test_an_epoch_holds_every_sample_exactly_once(counts: list[int], window: int, seed: int, number: int, shuffle: bool) -> None:
    epoch = an_epoch(counts, number, seed=seed, shuffle=shuffle, window=window)
    found = sequence(epoch)
    everything = [(block, sample) for block, held in enumerate(counts) for sample in range(held)]
    assert sorted(found) == everything
    assert epoch.samples == len(everything)
    if not shuffle:
        assert found == everything


@settings(deadline=None, max_examples=300)
@given(counts=block_counts.filter(bool), window=st.integers(1, 6), data=st.data())
def test_any_interval_reads_what_the_whole_epoch_has_there_and_fetches_no_other_block(
    counts: list[int], window: int, data: st.DataObject
) -> None:
    epoch = an_epoch(counts, window=window)
    whole = sequence(epoch)
    borders = sorted(data.draw(st.lists(st.integers(0, epoch.samples), max_size=6)))
    intervals = tuple((a, b) for a, b in zip(borders[::2], borders[1::2], strict=False) if a < b)
    assert sequence(epoch, intervals) == [whole[position] for position in flat(intervals)]
    offset = 0
    for stretch in epoch.stretches(intervals):
        assert stretch.offset == offset
        assert len(stretch.blocks) <= window
        assert sorted(set(stretch.slots.tolist())) == list(range(len(stretch.blocks)))
        offset += len(stretch)


def test_neighbouring_intervals_in_one_window_fetch_it_once() -> None:
    epoch = an_epoch([5] * 8, window=4)
    stretches = list(epoch.stretches(((0, 3), (7, 9), (12, 26))))
    assert [stretch.window for stretch in stretches] == [0, 1]
    assert [len(stretch) for stretch in stretches] == [13, 6]


@settings(deadline=None, max_examples=500)
@given(total=st.integers(0, 400), shares=st.integers(1, 9), per_share=st.integers(1, 9), drop_last=st.booleans())
def test_every_share_gives_the_same_number_of_batches_and_no_sample_comes_twice(
    total: int, shares: int, per_share: int, drop_last: bool
) -> None:
    plan = Plan(total, shares, per_share, drop_last)
    count = plan.count
    got = [position for batch in plan.take(count) for part in batch for position in part]
    assert len(got) == len(set(got))
    if drop_last:
        assert len(got) == count * shares * per_share
        assert total - len(got) < shares * per_share
    else:
        assert sorted(got) == list(range(total))


def test_three_small_shards_on_two_ranks() -> None:
    plan = Plan(13, 2, 2, drop_last=False)
    assert plan.count == 4
    got = plan.take(4)
    assert [[len(part) for part in batch] for batch in got] == [[2, 2], [2, 2], [2, 2], [1, 0]]
    assert sorted(position for batch in got for part in batch for position in part) == list(range(13))
    assert Plan(13, 2, 2, drop_last=True).count == 3


def test_few_samples() -> None:
    assert batches(2, 1, 1, drop_last=True) == 2
    assert batches(5, 1, 8, drop_last=True) == 0
    assert batches(5, 1, 8, drop_last=False) == 1
    assert batches(0, 3, 8, drop_last=False) == 0


@settings(deadline=None, max_examples=500)
@given(
    total=st.integers(0, 300),
    drop_last=st.booleans(),
    legs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6),
)
def test_stops_and_other_worlds_take_what_is_left_exactly_once(total: int, drop_last: bool, legs: list[tuple[int, int, int]]) -> None:
    """Each leg is (shares, samples a share and batch, batches before the stop); the last one runs to the end."""
    position, got = Position(), list[int]()
    for number, (shares, per_share, stop) in enumerate(legs):
        plan = Plan(total, shares, per_share, drop_last, position)
        count = plan.count if number == len(legs) - 1 else min(stop, plan.count)
        got += [position for batch in plan.take(count) for part in batch for position in part]
        position = State.from_dict(json.loads(json.dumps(state(plan.position).to_dict()))).position
        state(position).check(digest=DIGEST, seed=0, shuffle=True, source="x", samples=total)
    assert len(got) == len(set(got))
    left = flat(position.left(total))
    assert sorted(got + left) == list(range(total))
    if not drop_last:
        assert left == []
    else:
        assert len(left) < legs[-1][0] * legs[-1][1]


@settings(deadline=None, max_examples=400)
@given(total=st.integers(0, 200), shares=st.integers(1, 6), per_share=st.integers(1, 5), drop_last=st.booleans(), data=st.data())
def test_stopping_and_going_on_with_the_same_world_changes_nothing(
    total: int, shares: int, per_share: int, drop_last: bool, data: st.DataObject
) -> None:
    straight = Plan(total, shares, per_share, drop_last)
    count = straight.count
    expected = straight.take(count)
    position, got = Position(), list[list[list[int]]]()
    while len(got) < count:
        plan = Plan(total, shares, per_share, drop_last, position)
        assert plan.count == count - len(got)
        got += plan.take(data.draw(st.integers(1, count - len(got))))
        position = plan.position
        # A cut made anew from the bare intervals, with no memory of the shares, gives the same as the remembered one.
        assert position.left(total) == left_after(((0, total),) if total else (), shares, per_share * len(got))
    assert got == expected
    assert len(position.cuts) <= 1
    assert position.batches == count


@settings(deadline=None, max_examples=200)
@given(total=st.integers(0, 300), each=st.integers(1, 4), stop=st.integers(0, 20), drop_last=st.booleans())
def test_virtual_ranks_give_the_same_global_batches_in_every_world_that_divides_them(
    total: int, each: int, stop: int, drop_last: bool
) -> None:
    """Four virtual ranks on 1, 2 and 4 ranks are one plan, whichever rank reads which share: the plan never sees the world."""
    expected = Plan(total, 4, each, drop_last)
    first = expected.take(min(stop, expected.count))
    rest = expected.take(expected.count)
    again = Plan(total, 4, each, drop_last)
    assert again.take(len(first)) + again.take(again.count) == first + rest


@settings(deadline=None, max_examples=200)
@given(
    counts=st.lists(st.integers(1, 9), min_size=20, max_size=80),
    window=st.integers(1, 8),
    shares=st.integers(1, 6),
    stop=st.integers(0, 40),
)
def test_all_ranks_together_fetch_the_data_once_and_at_most_a_window_more_each(
    counts: list[int], window: int, shares: int, stop: int
) -> None:
    epoch = an_epoch(counts, window=window)
    own = [share(((0, epoch.samples),), number, shares) for number in range(shares)]
    fetched = [block for intervals in own for stretch in epoch.stretches(intervals) for block in stretch.blocks]
    assert len(fetched) <= len(counts) + window * (shares - 1)
    # Resuming: the first stretch is all that is fetched before the first sample, and it is one window at most.
    left = Position().advanced(shares, 1, stop).left(epoch.samples)
    for number in range(shares):
        first = next(iter(epoch.stretches(share(left, number, shares))), None)
        assert first is None or len(first.blocks) <= window


def test_the_order_depends_on_digest_seed_epoch_and_window_and_on_nothing_else() -> None:
    counts = [6] * 20
    base = sequence(an_epoch(counts))
    assert base == sequence(an_epoch(counts))
    for other in (an_epoch(counts, 1), an_epoch(counts, seed=1), an_epoch(counts, window=5), an_epoch(counts, digest="60" * 32)):
        assert sequence(other) != base


def test_the_order_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from stagekit.order import Epoch; e = Epoch([3, 4, 5] * 9, 2, digest='5f' * 32, seed=9, shuffle=True, window=4);"
        "print([(int(s.blocks[a]), int(b)) for s in e.stretches(((0, e.samples),)) for a, b in zip(s.slots, s.samples)])"
    )
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        assert shown.strip() == str(sequence(an_epoch([3, 4, 5] * 9, 2, seed=9)))


def test_vectors() -> None:
    """The vectors printed in docs/format.md. A change here is a new version of the order."""
    zeros, ones = "00" * 32, "ff" * 32
    assert permutation(10, digest=zeros, seed=0, epoch=0, purpose="blocks").tolist() == [0, 3, 5, 7, 4, 9, 2, 1, 8, 6]
    assert permutation(10, digest=zeros, seed=0, epoch=1, purpose="blocks").tolist() == [3, 1, 5, 6, 7, 0, 9, 4, 8, 2]
    assert permutation(10, digest=zeros, seed=0, epoch=0, purpose="window", number=3).tolist() == [3, 5, 4, 2, 8, 0, 6, 7, 1, 9]
    assert permutation(10, digest=ones, seed=-7, epoch=12, purpose="blocks").tolist() == [0, 3, 5, 8, 6, 9, 1, 7, 4, 2]


@settings(deadline=None, max_examples=100)
@given(count=st.integers(0, 500), seed=st.integers(0, 9))
def test_a_permutation_is_one(count: int, seed: int) -> None:
    assert sorted(permutation(count, digest=DIGEST, seed=seed, epoch=0, purpose="blocks").tolist()) == list(range(count))


def test_places_are_taken_evenly() -> None:
    """Over 3,000 seeds each of 8 numbers comes first about as often as any other (chi-square with 7 degrees, 99.99 %)."""
    firsts = np.bincount([permutation(8, digest=DIGEST, seed=seed, epoch=0, purpose="blocks")[0] for seed in range(3000)], minlength=8)
    assert float(((firsts - 375) ** 2 / 375).sum()) < 30
    order = permutation(20_000, digest=DIGEST, seed=1, epoch=0, purpose="blocks")
    assert abs(float(np.corrcoef(order, np.arange(20_000))[0, 1])) < 0.03
    neighbours = np.abs(np.diff(order)) == 1
    assert neighbours.mean() < 0.001


def test_a_million_blocks_take_about_a_second_at_most() -> None:
    """O(blocks) in array operations: a Python loop over blocks or samples would take many times this generous limit."""
    began = time.process_time()
    epoch = Epoch(np.full(1_000_000, 5000), 0, digest=DIGEST, seed=0, shuffle=True, window=16)
    next(epoch.stretches(share(((0, epoch.samples),), 3, 8)))
    assert time.process_time() - began < 5


def state(position: Position) -> State:
    return State(DIGEST, 0, True, 16, None, position)


def test_a_state_is_small_whatever_the_world() -> None:
    position = Position(epoch=123_456)
    for change in range(40):
        position = position.advanced(1024 + change % 2, 64, 100_000)
    text = json.dumps(state(position).to_dict(), separators=(",", ":"))
    assert len(text) < 1024
    assert State.from_dict(json.loads(text)).position == position


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2 and this Stagekit reads version 1"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": True}, "seed is True"),
        ({"cuts": [[0, 4]]}, "below what it can be"),
        ({"cuts": [[2, -4]]}, "a cut holds -4"),
        ({"cuts": [[2, 0]]}, "below what it can be"),
        ({"cuts": [[10**12, 4]]}, "for more ranks than there can be"),
        ({"cuts": [[2]]}, "damaged"),
        ({"epoch": -1}, "below what it can be"),
        ({"window": 0}, "below what it can be"),
    ],
)
def test_a_damaged_state_is_refused_with_the_reason(change: dict[str, object], words: str) -> None:
    with pytest.raises(StateMismatch, match=words):
        State.from_dict({**state(Position()).to_dict(), **change})


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(StateMismatch, match="pass what state_dict"):
        State.from_dict({"model": 1})
    incomplete = state(Position()).to_dict()
    del incomplete["digest"]
    with pytest.raises(StateMismatch, match="digest"):
        State.from_dict(incomplete)


def test_a_state_of_other_data_or_another_order_is_refused_saying_both() -> None:
    saved = state(Position())
    saved.check(digest=DIGEST, seed=0, shuffle=True, source="s3://b/x")
    with pytest.raises(StateMismatch, match=r"5f5f5f5f5f5f5f5f… and s3://b/x is abababababababab…"):
        saved.check(digest="ab" * 32, seed=0, shuffle=True, source="s3://b/x")
    with pytest.raises(StateMismatch, match="saved with seed=0 and this loader has seed=4"):
        saved.check(digest=DIGEST, seed=4, shuffle=True, source="x")
    with pytest.raises(StateMismatch, match="saved with shuffle=True and this loader has shuffle=False"):
        saved.check(digest=DIGEST, seed=0, shuffle=False, source="x")


def test_arguments_that_cannot_be_meant() -> None:
    with pytest.raises(UsageError, match="window: 0 is below 1 block"):
        an_epoch([1], window=0)
    with pytest.raises(UsageError, match="at least one sample"):
        an_epoch([1, 0])
    with pytest.raises(UsageError, match="epoch: -1"):
        an_epoch([1], -1)


@pytest.mark.parametrize(
    ("cuts", "batches"),
    [
        (((2, 60),), 51),  # of 50 each: a batch began behind the end
        (((2, 60_000_000),), 6),
        (((2, 51),), 0),  # counted sample by sample
        (((3, 34), (2, 1)), 4),  # from nothing
        (((2, 64), (3, 8)), 5),
    ],
)
def test_a_state_that_took_more_than_there_is_is_refused(cuts: tuple[tuple[int, int], ...], batches: int) -> None:
    with pytest.raises(StateMismatch, match=r"says that .* shares was taken from s3://b/x, which has 100 samples"):
        state(Position(cuts=cuts, batches=batches)).check(digest=DIGEST, seed=0, shuffle=True, source="s3://b/x", samples=100)


def test_a_last_batch_that_was_filled_up_is_no_damage() -> None:
    for cuts, count in ((((2, 64),), 1), (((2, 56),), 7), (((2, 50),), 0), (((2, 10), (4, 64)), 2)):
        state(Position(cuts=cuts, batches=count)).check(digest=DIGEST, seed=0, shuffle=True, source="x", samples=100)
