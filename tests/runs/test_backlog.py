"""Which saves give way: for any queue, only what may, and no more than needed."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as some

from stagekit.runs.backlog import BACKLOG, giving_way, is_over
from stagekit.runs.retention import Policy
from stagekit.runs.spool import Entry, PinnedFile

losses = some.one_of(some.none(), some.just(math.nan), some.integers(0, 5).map(float))


@some.composite
def queues(draw: some.DrawFn) -> list[Entry]:
    count = draw(some.integers(0, 12))
    return [
        Entry(
            run="memory://bucket/run",
            store=None,
            step=step,
            counter=step,
            directory=Path(f"/spool/{step}"),
            files=[PinnedFile("model.bin", draw(some.integers(1, 100)), 0, step, "out")],
            metrics={} if (loss := draw(losses)) is None else {"loss": loss},
            final=draw(some.integers(0, 5)) == 0,
            passing=draw(some.booleans()),
        )
        for step in range(1, count + 1)
    ]


@given(
    queues(),
    some.integers(-1, 12),
    some.one_of(some.none(), some.integers(1, 600)),
    some.booleans(),
    some.booleans(),
    some.sampled_from([BACKLOG, None]),
)
def test_only_what_may_gives_way_and_no_more_than_needed(
    pending: list[Entry], sending: int, disk_bytes: int | None, best: bool, every: bool, bound: int | None
) -> None:
    policy = Policy(keep_best=("loss", "min", 2) if best else None, keep_every=3 if every else None)
    sent = pending[sending] if 0 <= sending < len(pending) else None
    dropped = giving_way(pending, sent, policy, disk_bytes, bound=bound)
    left = [entry for entry in pending if entry not in dropped]
    assert len({entry.step for entry in dropped}) == len(dropped)
    assert len(dropped) + len(left) == len(pending)
    for entry in dropped:
        assert entry is not pending[-1], "never the newest"
        assert entry is not sent, "nor the one on its way"
        assert not entry.final
        assert not (every and entry.step % 3 == 0)
    if best and (known := [entry for entry in pending if not math.isnan(entry.metrics.get("loss", math.nan))]):
        assert min(known, key=lambda one: (one.metrics["loss"], one.step)) in left, "nor the best"
    if dropped:
        assert is_over([*left, dropped[-1]], disk_bytes, bound=bound), "the last one had to go"
    if any(not entry.passing for entry in dropped):
        kept = [entry for entry in left[:-1] if entry.passing and entry is not sent and not entry.final]
        assert best or every or not kept, "those from the middle of an epoch go first"
    if not dropped and not is_over(pending, disk_bytes, bound=bound):
        assert left == pending
    if is_over(left, disk_bytes, bound=bound and bound + 1) and not best and not every:
        assert all(entry.final or entry is sent for entry in left[:-1]), "what is over is all to be kept"


@given(some.integers(1, 9), some.integers(1, 9), some.sampled_from([1, 50, 250, 7]))
def test_ranks_that_are_differently_slow_keep_steps_in_common(slow: int, slower: int, stride: int) -> None:
    """Each sends one of its saves for so many that are made. What both have sent is committed."""

    def sent(every: int) -> set[int]:
        done, pending = set[int](), list[Entry]()
        for number in range(1, 201):
            pending.append(Entry(run="memory://bucket/run", store=None, step=stride * number, counter=number, world_size=2))
            for entry in giving_way(pending, pending[0], Policy(), None):
                pending.remove(entry)
            if number % every == 0:
                done.add(pending.pop(0).step)
        return done | {entry.step for entry in pending}

    both = sorted(sent(slow) & sent(slower))
    gaps = [(after - before) // stride for before, after in zip([0, *both], both, strict=False)]
    assert both[-1] == 200 * stride, "the newest in any case"
    assert max(gaps) <= 4 * BACKLOG * max(slow, slower), "and never long without any"
