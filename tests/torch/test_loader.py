"""``StreamLoader``: what a training loop sees."""

from __future__ import annotations

import json
import pickle
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.config import StoreConfig
from stagekit.dataset import Dataset
from stagekit.errors import CorruptShard, ManifestError, RandomAccessRefused, StateMismatch, UsageError
from stagekit.order import Epoch
from stagekit.progress import Event, Message
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore
from stagekit.torch import StreamLoader

from ..stream.build import build, numbered

Batch = dict[str, Any]
BLOCK = 3 * 1024


def a_store(name: str, lengths: list[int]) -> MemoryStore:
    made = MemoryStore(f"memory://loader-{name}/d")
    build(made, numbered(sum(lengths), field="cls"), shards=lengths)
    return made


def loader(source: Any, batch_size: int = 4, **options: Any) -> StreamLoader:
    return StreamLoader(source, batch_size, **{"threads": 0, "connections": 2, "window": 4, **options})


def real(batch: Batch) -> list[int]:
    """The numbers of a batch's real samples, each checked against its key."""
    mask = batch.get("__mask__", torch.ones(len(batch["__key__"]), dtype=torch.bool))
    assert [key != "" for key in batch["__key__"]] == mask.tolist()
    numbers = [int(key) for key in batch["__key__"] if key]
    assert batch["cls"][mask].tolist() == numbers
    return numbers


def plain(batch: Batch) -> dict[str, Any]:
    """A batch as values that compare bit for bit."""
    return {name: (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def everything(batches: list[Batch]) -> list[int]:
    return [number for batch in batches for number in real(batch)]


class TestBatches:
    def test_a_batch_is_a_dict_of_keys_and_values(self, store: FaultStore) -> None:
        batch = next(iter(loader(store, shuffle=False)))
        assert batch["__key__"] == ["000000", "000001", "000002", "000003"]
        assert batch["cls"].equal(torch.tensor([0, 1, 2, 3]))
        assert set(batch) == {"__key__", "cls"}

    def test_unshuffled_is_source_order(self, store: FaultStore) -> None:
        assert everything(list(loader(store, shuffle=False))) == list(range(60))

    def test_shuffled_epochs_differ_and_each_holds_everything_once(self, store: FaultStore) -> None:
        made = loader(store)
        assert made.epoch == 0
        first, second = everything(list(made)), everything(list(made))
        assert made.epoch == 2
        assert sorted(first) == sorted(second) == list(range(60))
        assert first != second
        assert everything(list(loader(store))) == first
        assert everything(list(loader(store, seed=1))) != first

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_threads_change_nothing(self, store: FaultStore, threads: int) -> None:
        wanted = [plain(batch) for batch in loader(store, 7, drop_last=False)]
        assert [plain(batch) for batch in loader(store, 7, drop_last=False, threads=threads)] == wanted

    def test_bytes_stay_bytes_when_nothing_is_decoded(self, store: FaultStore) -> None:
        for threads in (0, 2):
            batch = next(iter(loader(store, decode=None, shuffle=False, threads=threads)))
            assert batch == {"__key__": ["000000", "000001", "000002", "000003"], "cls": [b"0", b"1", b"2", b"3"]}

    def test_a_tail_is_dropped_or_masked(self, store: FaultStore) -> None:
        dropped = list(loader(store, 7, shuffle=False))
        assert len(dropped) == 8
        assert all("__mask__" not in batch for batch in dropped)
        masked = list(loader(store, 7, shuffle=False, drop_last=False))
        assert len(masked) == 9
        assert all(batch["__mask__"].shape == (7,) and batch["__mask__"].dtype is torch.bool for batch in masked)
        assert masked[-1]["__key__"] == ["000056", "000057", "000058", "000059", "", "", ""]
        assert masked[-1]["cls"].tolist() == [56, 57, 58, 59, 59, 59, 59]
        assert masked[-1]["__mask__"].tolist() == [True] * 4 + [False] * 3
        assert masked[0]["__mask__"].all()

    def test_three_small_shards_on_two_ranks(self) -> None:
        store = a_store("small", [7, 1, 5])
        ranks = [list(loader(store, 2, rank=rank, world_size=2, drop_last=False)) for rank in (0, 1)]
        assert [len(batches) for batches in ranks] == [4, 4]
        assert sorted(everything(ranks[0]) + everything(ranks[1])) == list(range(13))
        # 7 + 6 samples: the second rank's last batch holds none of its own, and is all mask.
        assert ranks[1][-1]["__key__"] == ["", ""]
        assert not ranks[1][-1]["__mask__"].any()

    def test_more_ranks_than_samples(self) -> None:
        store = a_store("few", [2])
        ranks = [list(loader(store, 2, rank=rank, world_size=5, drop_last=False)) for rank in range(5)]
        assert [len(batches) for batches in ranks] == [1] * 5
        assert sorted(number for batches in ranks for number in everything(batches)) == [0, 1]

    def test_two_samples_with_the_default_settings(self) -> None:
        made = StreamLoader(a_store("two", [1, 1]), 1)
        assert len(made) == 2
        assert sorted(everything(list(made))) == [0, 1]

    def test_a_batch_larger_than_the_data_is_told_when_the_loader_is_made(self) -> None:
        store = a_store("five", [5])
        with pytest.warns(UserWarning, match=r"has 5 samples, too few for a batch of 8: with drop_last=True an epoch has 0 batches"):
            made = loader(store, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (len(made), list(made)) == (0, [])  # told once
        [batch] = loader(store, 8, drop_last=False)
        assert sorted(real(batch)) == [0, 1, 2, 3, 4]
        with pytest.warns(UserWarning, match=r"a batch of 2 on each of 3 ranks"):
            loader(store, 2, rank=0, world_size=3)

    @settings(max_examples=30)
    @given(
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
        world=st.integers(1, 4),
        batch_size=st.integers(1, 9),
        window=st.integers(1, 5),
        drop_last=st.booleans(),
        shuffle=st.booleans(),
    )
    def test_any_world_gives_equal_counts_and_the_exact_union(
        self, lengths: list[int], world: int, batch_size: int, window: int, drop_last: bool, shuffle: bool
    ) -> None:
        store, total = a_store("any", lengths), sum(lengths)
        ranks = []
        for rank in range(world):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                made = loader(
                    store, batch_size, rank=rank, world_size=world, window=window, drop_last=drop_last, shuffle=shuffle, threads=rank % 2
                )
                count = len(made)
                ranks.append(list(made))
            assert len(ranks[-1]) == count
            assert made.receipt is not None
            assert made.receipt.complete
            assert made.receipt.expected == made.receipt.delivered == len(everything(ranks[-1]))
        assert len({len(batches) for batches in ranks}) == 1
        got = sorted(number for batches in ranks for number in everything(batches))
        if drop_last:
            assert len(got) == len(set(got)) == len(ranks[0]) * batch_size * world
            assert total - len(got) < batch_size * world
        else:
            assert got == list(range(total))

    def test_all_ranks_together_fetch_the_data_once_and_a_window_more_each(self, store: FaultStore) -> None:
        fetched = 0
        for rank in range(4):
            made = loader(store, 5, rank=rank, world_size=4, drop_last=False)
            list(made)
            assert made.receipt is not None
            fetched += made.receipt.bytes_fetched
        assert fetched <= Dataset(store).nbytes + 3 * 4 * BLOCK


class TestRanks:
    def test_the_environment_is_looked_up_when_iteration_begins(self, store: FaultStore, monkeypatch: pytest.MonkeyPatch) -> None:
        made = loader(store, 5)
        assert len(made) == 12
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "3")
        assert len(made) == 4
        mine = everything(list(made))
        assert mine == everything(list(loader(store, 5, rank=1, world_size=3)))
        assert len(mine) == 20

    def test_ranks_that_cannot_be_meant(self, store: FaultStore, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UsageError, match="rank and world_size belong together"):
            loader(store, rank=1)
        with pytest.raises(UsageError, match=r"rank: 2 is not in a world of 2 \(0 to 1\)"):
            loader(store, rank=2, world_size=2)
        monkeypatch.setenv("RANK", "x")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UsageError, match="RANK='x' is no number"):
            loader(store)

    def test_virtual_ranks_give_the_same_global_batches_on_1_2_and_4_ranks(self, store: FaultStore) -> None:
        worlds = []
        for world in (1, 2, 4):
            ranks = [list(loader(store, 8 // world, rank=rank, world_size=world, virtual_ranks=4)) for rank in range(world)]
            worlds.append([sorted(number for batch in step for number in real(batch)) for step in zip(*ranks, strict=True)])
        assert worlds[0] == worlds[1] == worlds[2]
        assert len(worlds[0]) == 7

    def test_virtual_ranks_that_do_not_divide(self, store: FaultStore, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UsageError, match=r"virtual_ranks: 4 virtual ranks cannot be divided among 3 ranks.*virtual_ranks=3"):
            loader(store, rank=0, world_size=3, virtual_ranks=4)
        with pytest.raises(UsageError, match=r"batch_size: 3 cannot be divided among the 2 virtual ranks.*a multiple of 2"):
            loader(store, 3, rank=0, world_size=2, virtual_ranks=4)
        # Before the world is known nothing is refused that may turn out right.
        made = loader(store, 2, virtual_ranks=4)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert len(made) == 7


class TestResume:
    @pytest.mark.parametrize("drop_last", [True, False])
    @pytest.mark.parametrize("world", [1, 2])
    def test_stopping_after_any_batch_changes_nothing(self, store: FaultStore, world: int, drop_last: bool) -> None:
        def fresh(rank: int) -> StreamLoader:
            return loader(store, 7, rank=rank, world_size=world, drop_last=drop_last)

        for rank in range(world):
            straight = fresh(rank)
            wanted = [plain(batch) for _ in range(2) for batch in straight]
            per_epoch = len(straight)
            for stop in range(per_epoch + 1):
                got, first = [], fresh(rank)
                batches = iter(first)
                got += [plain(next(batches)) for _ in range(stop)]
                state = json.loads(json.dumps(first.state_dict()))
                batches.close()  # type: ignore[attr-defined]
                second = fresh(rank)
                second.load_state_dict(state)
                assert len(second) == per_epoch
                assert second.batches_left == per_epoch - stop
                while second.epoch < 2:
                    got += [plain(batch) for batch in second]
                assert got == wanted

    @settings(max_examples=20)
    @given(stops=st.lists(st.integers(0, 5), min_size=1, max_size=5), batch_size=st.integers(1, 8), threads=st.sampled_from([0, 2]))
    def test_any_number_of_stops(self, stops: list[int], batch_size: int, threads: int) -> None:
        store = a_store("stops", [9, 12, 4])
        wanted = [plain(batch) for batch in loader(store, batch_size, drop_last=False)]
        state, got = None, []
        for stop in [*stops, 100]:
            made = loader(store, batch_size, drop_last=False, threads=threads)
            if state is not None:
                made.load_state_dict(state)
            batches = iter(made)
            for _ in range(min(stop, len(wanted) - len(got))):
                got.append(plain(next(batches)))  # noqa: PERF401
            state = made.state_dict()
            batches.close()  # type: ignore[attr-defined]
        assert got == wanted

    def test_other_worlds_read_what_is_left_exactly_once(self, store: FaultStore) -> None:
        got: list[int] = []
        state: dict[str, Any] | None = None
        for world, batch_size, stop in ((2, 3, 4), (1, 5, 2), (4, 2, 1), (3, 1, 100)):
            states = []
            for rank in range(world):
                made = loader(store, batch_size, rank=rank, world_size=world, drop_last=False, threads=rank % 3)
                if state is not None:
                    made.load_state_dict(state)
                batches = iter(made)
                for _, batch in zip(range(stop), batches, strict=False):
                    got += real(batch)
                states.append(made.state_dict())
                batches.close()  # type: ignore[attr-defined]
            if stop < 100:
                assert all(other == states[0] for other in states)
            state = states[0]
            assert len(json.dumps(state)) < 1024
        assert sorted(got) == list(range(60))

    def test_the_state_counts_what_was_taken_and_not_what_was_fetched_ahead(self, store: FaultStore) -> None:
        decoded = threading.Semaphore(0)

        def transform(sample: Batch) -> Batch:
            decoded.release()
            return sample

        made = loader(store, 2, threads=2, transform=transform)
        batches = iter(made)
        first = next(batches)
        for _ in range(6):  # three batches are made by now
            assert decoded.acquire(timeout=60)
        assert made.state_dict()["batches"] == 1
        rest = loader(store, 2)
        rest.load_state_dict(made.state_dict())
        assert sorted(real(first) + everything(list(rest))) == list(range(60))
        batches.close()  # type: ignore[attr-defined]

    def test_eight_batches_that_are_ready_do_not_count(self, store: FaultStore) -> None:
        ahead = threading.Semaphore(0)
        store.act("get", lambda _: ahead.release(), "*.tar", times=None)
        # A batch is a block, and only one more block than there are batches can be on its way.
        made = loader(store, 3, shuffle=False, decode=None, threads=2, memory=3 * BLOCK)
        batches = iter(made)
        first = next(batches)
        for _ in range(9):
            assert ahead.acquire(timeout=60)
        assert made.state_dict()["batches"] == 1
        again = loader(store, 3, shuffle=False, decode=None, drop_last=False)
        again.load_state_dict(made.state_dict())
        keys = [key for batch in [first, *again] for key in batch["__key__"] if key]
        assert keys == [f"{number:06d}" for number in range(60)]
        batches.close()  # type: ignore[attr-defined]

    def test_frameworks_that_count_batches_get_the_next_epoch(self, store: FaultStore) -> None:
        """They never ask behind the last batch, and keep the iterator until they have another one."""
        told: list[Event] = []
        straight = loader(store)
        wanted = [[plain(batch) for batch in straight] for _ in range(3)]
        made, got = loader(store, on_event=told.append), []
        for _ in range(3):
            batches = iter(made)
            got.append([plain(next(batches)) for _ in range(len(made))])
        assert got == wanted
        assert made.receipt is not None
        assert made.receipt.complete
        del batches
        assert [one.text.split(":")[0] for one in told if isinstance(one, Message)] == ["epoch 0", "epoch 1", "epoch 2"]

    def test_a_state_at_the_end_of_an_epoch_and_before_the_first_batch(self, store: FaultStore) -> None:
        made = loader(store, 10)
        before = made.state_dict()
        batches = iter(made)
        first = [next(batches) for _ in range(6)]
        at_the_last = made.state_dict()
        assert next(batches, None) is None
        after = made.state_dict()
        second = everything(list(made))
        for state, wanted in ((before, [everything(first), second]), (at_the_last, [[], second]), (after, [second])):
            again = loader(store, 10)
            again.load_state_dict(state)
            assert [everything(list(again)) for _ in wanted] == wanted
        assert (before["epoch"], at_the_last["epoch"], after["epoch"]) == (0, 0, 1)

    def test_the_window_of_the_state_wins(self, store: FaultStore) -> None:
        made = loader(store, 6, window=2)
        wanted = everything(list(loader(store, 6, window=2)))
        batches = iter(made)
        got = everything([next(batches) for _ in range(3)])
        other = loader(store, 6, window=7)
        other.load_state_dict(made.state_dict())
        assert got + everything(list(other)) == wanted
        assert other.state_dict()["window"] == 2
        batches.close()  # type: ignore[attr-defined]

    def test_virtual_ranks_of_the_state_are_kept(self, store: FaultStore) -> None:
        made = loader(store, 8, virtual_ranks=4)
        whole = [sorted(real(batch)) for batch in loader(store, 8, virtual_ranks=4)]
        batches = iter(made)
        got = [sorted(real(next(batches))) for _ in range(3)]
        batches.close()  # type: ignore[attr-defined]
        ranks = []
        for rank in (0, 1):
            again = loader(store, 4, rank=rank, world_size=2)
            again.load_state_dict(made.state_dict())
            ranks.append(list(again))
        got += [sorted(real(a) + real(b)) for a, b in zip(*ranks, strict=True)]
        assert got == whole

    def test_it_does_not_matter_where_the_data_lies(self, store: FaultStore) -> None:
        elsewhere = MemoryStore("memory://loader-elsewhere/a/b")
        for info in store.list():
            elsewhere.put(info.key, bytes(store.get(info.key)))
        made = loader(store)
        batches = iter(made)
        got = everything([next(batches) for _ in range(5)])
        there = loader(elsewhere)
        there.load_state_dict(made.state_dict())
        assert sorted(got + everything(list(there))) == list(range(60))
        assert str(store.location) not in json.dumps(made.state_dict())
        batches.close()  # type: ignore[attr-defined]

    def test_a_state_of_other_data_seed_or_shuffle_is_refused(self, store: FaultStore) -> None:
        state = loader(store).state_dict()
        other = a_store("other", [9])
        with pytest.raises(StateMismatch, match=f"{Dataset(store).digest[:16]}… and {other.location} is {Dataset(other).digest[:16]}…"):
            loader(other).load_state_dict(state)
        with pytest.raises(StateMismatch, match="seed=0 and this loader has seed=3"):
            loader(store, seed=3).load_state_dict(state)
        with pytest.raises(StateMismatch, match="shuffle=True and this loader has shuffle=False"):
            loader(store, shuffle=False).load_state_dict(state)

    @pytest.mark.parametrize("stop", [0, 2, 7, 11, 14])
    def test_the_first_resumed_batch_needs_what_is_left_of_its_window_and_no_more(self, store: FaultStore, stop: int) -> None:
        made = loader(store, 4)
        batches = iter(made)
        for _ in range(stop):
            next(batches)
        batches.close()  # type: ignore[attr-defined]
        dataset = Dataset(store)
        epoch = Epoch(dataset.block_samples, 0, digest=dataset.digest, seed=0, shuffle=True, window=4)
        stretches = [stretch for stretch in epoch.stretches(((4 * stop, 60),)) if stretch.offset < 4]
        assert len(stretches) == 1 or len(stretches[0]) < 4
        ranges = [dataset.block_range(block) for stretch in stretches for block in stretch.blocks.tolist()]
        needed = {(wanted.key, wanted.start) for wanted in ranges}
        taken = threading.Event()
        # Everything else is held back until the batch was taken: it came without it.
        store.act("get", lambda call: None if (call.key, call.start) in needed else taken.wait(30) and None, "*.tar", times=None)
        again = loader(store, 4)
        again.load_state_dict(made.state_dict())
        store.calls.clear()
        resumed = iter(again)
        next(resumed)
        asked = {(call.key, call.start) for call in list(store.calls) if call.key.endswith(".tar")}
        assert needed <= asked
        assert len(asked - needed) <= 2  # the two connections, which began to fetch ahead when the batch was complete
        taken.set()
        resumed.close()  # type: ignore[attr-defined]

    def test_an_iteration_that_was_left_early_starts_anew(self, store: FaultStore) -> None:
        made = loader(store)
        for batch in made:
            first = plain(batch)
            break
        assert made.epoch == 0
        assert made.receipt is not None
        assert not made.receipt.complete
        assert "left early" in str(made.receipt)
        batches = iter(made)
        assert plain(next(batches)) == first
        # To go on instead, its own state is loaded.
        made.load_state_dict(made.state_dict())
        assert len(everything(list(made))) == 56
        batches.close()  # type: ignore[attr-defined]

    def test_a_loaded_state_is_not_lost_by_an_iteration_that_nobody_began(self, store: FaultStore) -> None:
        made = loader(store)
        batches = iter(made)
        next(batches)
        made.load_state_dict(made.state_dict())
        iter(made)
        assert len(list(made)) == 14
        batches.close()  # type: ignore[attr-defined]

    def test_two_iterations_at_the_same_time_are_refused(self, store: FaultStore) -> None:
        made = loader(store)
        first = iter(made)
        next(first)
        second = iter(made)
        next(second)
        with pytest.raises(UsageError, match="another one was started"):
            next(first)
        assert len(list(second)) == 14


class TestTransform:
    def test_it_sees_decoded_samples_and_its_result_is_used(self, store: FaultStore) -> None:
        made = loader(store, shuffle=False, transform=lambda sample: {"x": torch.full((2,), sample["cls"])}, threads=2)
        batch = next(iter(made))
        assert batch["__key__"] == ["000000", "000001", "000002", "000003"]
        assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
        assert "cls" not in batch

    @pytest.mark.parametrize("threads", [0, 3])
    def test_none_drops_a_sample_and_leaves_the_batch_short_or_masked(self, store: FaultStore, threads: int) -> None:
        def odd(sample: Batch) -> Batch | None:
            return sample if sample["cls"] % 4 else None

        short = loader(store, shuffle=False, transform=odd, threads=threads)
        assert [real(batch) for batch in short] == [[first + 1, first + 2, first + 3] for first in range(0, 60, 4)]
        assert short.receipt is not None
        assert (short.receipt.expected, short.receipt.delivered, short.receipt.dropped) == (60, 45, 15)
        assert "15 dropped by the transform" in str(short.receipt)
        masked = list(loader(store, shuffle=False, transform=odd, threads=threads, drop_last=False))
        assert masked[0]["__key__"] == ["000001", "000002", "000003", ""]
        assert masked[0]["__mask__"].tolist() == [True, True, True, False]

    def test_a_batch_of_which_nothing_is_left(self, store: FaultStore) -> None:
        def late(sample: Batch) -> Batch | None:
            return sample if sample["cls"] >= 6 else None

        passed = loader(store, shuffle=False, transform=late)
        assert real(next(iter(passed))) == [6, 7], "with one rank it is passed over"
        for threads in (0, 3):
            whole = loader(store, shuffle=False, transform=late, threads=threads)
            assert [len(real(batch)) for batch in whole] == [2, *[4] * 13]
            assert whole.receipt is not None
            assert (whole.receipt.delivered, whole.receipt.dropped, whole.receipt.complete) == (54, 6, True)
        with pytest.raises(UsageError, match=r"every sample of a batch of 4 was dropped or skipped.*drop_last=False"):
            list(loader(store, shuffle=False, transform=late, rank=0, world_size=2))
        with pytest.raises(UsageError, match=r"every sample of .* was dropped or skipped, so that there was no batch in epoch 0"):
            list(loader(store, transform=lambda _: None))
        first, second, *_ = loader(store, shuffle=False, transform=late, drop_last=False)
        assert first["__key__"] == [""] * 4
        assert first["cls"].tolist() == [6] * 4  # the epoch's first sample that can be used
        assert real(second) == [6, 7]
        with pytest.raises(UsageError, match="so there is none to fill a batch with"):
            list(loader(store, transform=lambda _: None, drop_last=False))

    def test_dropping_keeps_resume_exact(self, store: FaultStore) -> None:
        def some(sample: Batch) -> Batch | None:
            return sample if sample["cls"] % 3 else None

        straight = [plain(batch) for batch in loader(store, transform=some)]
        made = loader(store, transform=some)
        batches = iter(made)
        got = [plain(next(batches)) for _ in range(5)]
        again = loader(store, transform=some)
        again.load_state_dict(made.state_dict())
        assert got + [plain(batch) for batch in again] == straight
        batches.close()  # type: ignore[attr-defined]

    @pytest.mark.parametrize("threads", [0, 3])
    def test_its_error_comes_in_its_place_and_says_for_which_sample(self, store: FaultStore, threads: int) -> None:
        def fail(sample: Batch) -> Batch:
            if sample["cls"] == 10:
                raise ZeroDivisionError("mine")
            return sample

        made, got = loader(store, shuffle=False, transform=fail, threads=threads), list[int]()
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            for batch in made:
                got += real(batch)
        assert got == list(range(8))
        assert "transform for the sample '000010' of memory://" in caught.value.__notes__[0]
        assert made.state_dict()["batches"] == 2

    def test_samples_that_are_no_dicts(self, store: FaultStore) -> None:
        numbers, texts = next(iter(loader(store, shuffle=False, transform=lambda sample: (sample["cls"], sample["__key__"]))))
        assert numbers.tolist() == [0, 1, 2, 3]
        assert texts[1] == "000001"
        with pytest.raises(UsageError, match=r"drop_last=False needs samples that are dicts, and transform returned tuple"):
            list(loader(store, 7, transform=lambda sample: (1,), drop_last=False))

    def test_a_collate_of_ones_own(self, store: FaultStore) -> None:
        made = loader(store, shuffle=False, collate=lambda samples: [sample["cls"] for sample in samples], threads=2)
        assert next(iter(made)) == [0, 1, 2, 3]

    def test_packing_several_samples_into_one_keeps_resume_exact(self, store: FaultStore) -> None:
        def packed(samples: Any) -> list[int]:
            return [sum(sample["cls"] for sample in samples)]

        straight = list(loader(store, collate=packed))
        made = loader(store, collate=packed)
        batches = iter(made)
        got = [next(batches) for _ in range(3)]
        again = loader(store, collate=packed)
        again.load_state_dict(made.state_dict())
        assert got + list(again) == straight
        batches.close()  # type: ignore[attr-defined]


class TestFaults:
    @pytest.mark.parametrize("threads", [0, 3])
    def test_damage_is_an_error_and_never_a_short_epoch(self, store: FaultStore, threads: int) -> None:
        store.corrupt("shards/000001.tar", offset=4 * BLOCK + 512, times=None)
        got: list[int] = []
        made = loader(store, 3, shuffle=False, threads=threads)
        with pytest.raises(CorruptShard, match=r"block 4 of 10 of .*000001\.tar"):
            for batch in made:
                got += real(batch)
        # Blocks of the first shard are 6 times 3 and 2 samples, so the damaged one begins at sample 32.
        assert got == list(range(30))

    @pytest.mark.parametrize("threads", [0, 3])
    def test_skipping_is_counted_told_and_leaves_batches_short(self, store: FaultStore, threads: int) -> None:
        store.corrupt("shards/000001.tar", offset=4 * BLOCK + 512, times=None)
        told: list[Event] = []
        made = loader(store, 4, shuffle=False, on_bad="skip", on_event=told.append, threads=threads)
        with pytest.warns(RuntimeWarning, match=r"(?s)57 of 60 samples.*3 skipped as damaged.*\n- block 4 of 10 of .*000001\.tar"):
            got = list(made)
        assert [len(batch["__key__"]) for batch in got] == [4] * 8 + [1] + [4] * 6
        assert sorted(everything(got)) == [number for number in range(60) if number not in (32, 33, 34)]
        assert made.receipt is not None
        assert (made.receipt.skipped, made.receipt.delivered, made.receipt.complete) == (3, 57, True)
        assert told == [Message(str(made.receipt), "warning")]

    def test_a_sample_that_cannot_be_decoded(self) -> None:
        store = MemoryStore("memory://loader-undecodable/d")
        samples = numbered(6, field="cls")
        samples[2] = ("000002", {"cls": b"cat"})
        build(store, samples)
        with pytest.raises(Exception, match=r"field 'cls' of the sample '000002' cannot be decoded \(ValueError.*decode=.*on_bad='skip'"):
            list(loader(store, 2, shuffle=False))
        made = loader(store, 2, shuffle=False, on_bad="skip")
        with pytest.warns(RuntimeWarning, match="1 skipped as damaged"):
            assert everything(list(made)) == [0, 1, 3, 4, 5]

    def test_no_data_set(self) -> None:
        with pytest.raises(ManifestError, match="holds no data set"):
            StreamLoader("memory://loader-nowhere/d", 4)

    def test_memory_that_is_too_small(self, store: FaultStore) -> None:
        with pytest.raises(UsageError, match=r"memory: reading memory://.* needs 18\.4 kB .* memory=10\.0 kB is allowed"):
            loader(store, memory="10kB")
        with pytest.raises(UsageError, match="2 windows of 4 blocks"):
            loader(store, rank=0, world_size=2, virtual_ranks=4, memory=20_000)
        assert len(list(loader(store, memory=18_432))) == 15

    def test_by_number_is_refused(self, store: FaultStore) -> None:
        with pytest.raises(RandomAccessRefused, match="StreamLoader"):
            loader(store)[0]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"batch_size": 0}, "batch_size: 0 is below 1"),
            ({"batch_size": 2.5}, "batch_size: 2.5 is no whole number"),
            ({"batch_size": "a"}, "batch_size: 'a' is no whole number"),
            ({"batch_size": True}, "batch_size: True is no whole number"),
            ({"threads": -1}, "threads: -1 is below 0"),
            ({"threads": 1.0}, "threads: 1.0 is no whole number"),
            ({"workers": "2"}, "workers: '2' is no whole number"),
            ({"virtual_ranks": 2.0}, "virtual_ranks: 2.0 is no whole number"),
            ({"rank": "0", "world_size": 2}, "rank: '0' is no whole number"),
            ({"transform": 5}, "transform: 5 is no function"),
            ({"collate": 3}, "collate: 3 is no function"),
            ({"decode": {"cls": 3}}, "decode: 3 for 'cls' is no function"),
            ({"window": 1.5}, "window: 1.5 is no whole number"),
            ({"connections": None}, "connections: None is no whole number"),
            ({"stall_timeout_s": "1min"}, "stall_timeout_s: '1min' is no number of seconds"),
            ({"virtual_ranks": 0}, "virtual_ranks: 0 is below 1"),
            ({"window": 0}, "window: 0 is below 1 block"),
            ({"connections": 0}, "connections: 0 is below 1"),
            ({"on_bad": "ignore"}, "on_bad: 'ignore' is neither 'raise' nor 'skip'"),
            ({"stall_timeout_s": 0}, "stall_timeout_s: 0 is not above 0"),
            ({"seed": 1.5}, "seed: 1.5 is no whole number"),
            ({"decode": "rgb"}, "decode: 'rgb' is none of"),
            ({"memory": "lots"}, "memory: 'lots' is not a size"),
        ],
    )
    def test_arguments_that_cannot_be_meant(self, store: FaultStore, options: dict[str, Any], words: str) -> None:
        with pytest.raises(UsageError, match=words):
            loader(store, **options)

    def test_a_field_that_is_not_there_is_told(self, store: FaultStore) -> None:
        told: list[Event] = []
        with pytest.warns(UserWarning, match=r"has no field 'clss'; its fields are cls$"):
            made = loader(store, decode={"clss": int, "cls": bytes}, on_event=told.append)
        assert [event.level for event in told if isinstance(event, Message)] == ["warning"]
        assert next(iter(made))["cls"][0] in [b"%d" % number for number in range(60)]

    def test_numbers_of_numpy_are_numbers(self, store: FaultStore) -> None:
        assert len(list(loader(store, np.int64(4), threads=np.int32(0)))) == 15


class TestLeaving:
    """The fixture ``nothing_left`` looks for threads and files after each of these."""

    @pytest.mark.parametrize("threads", [0, 1, 4])
    def test_break(self, store: FaultStore, threads: int) -> None:
        for _ in loader(store, threads=threads):
            break

    @pytest.mark.parametrize("threads", [0, 4])
    def test_an_exception_in_the_loop(self, store: FaultStore, threads: int) -> None:
        def train() -> None:
            for _ in loader(store, threads=threads):
                raise KeyError("mine")

        with pytest.raises(KeyError):
            train()

    def test_an_interrupt_while_waiting_for_a_batch(self, store: FaultStore) -> None:
        class Interrupted:
            """A transform during which ctrl-C arrives: in the main thread, which waits for the batch."""

            def __call__(self, sample: Batch) -> Batch:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(loader(store, threads=2, transform=Interrupted()))

    def test_many_epochs(self, store: FaultStore) -> None:
        made = loader(store, threads=3)
        for _ in range(5):
            assert len(list(made)) == 15
        assert made.epoch == 5


def test_the_epochs_line(store: FaultStore) -> None:
    told: list[Event] = []
    made = loader(store, on_event=told.append)
    assert made.receipt is None
    list(made)
    receipt = made.receipt
    assert receipt is not None
    assert told == [Message(str(receipt), "info")]
    assert str(receipt).startswith("epoch 0: 60 of 60 samples in 15 batches, ")
    assert receipt.bytes_fetched < receipt.data_bytes == Dataset(store).nbytes


def test_a_loader_can_be_pickled_with_its_position(store: FaultStore) -> None:
    made = loader(store)
    batches = iter(made)
    next(batches)
    again: StreamLoader = pickle.loads(pickle.dumps(made))
    assert again.state_dict() == made.state_dict()
    batches.close()  # type: ignore[attr-defined]
    again.load_state_dict(again.state_dict())
    assert len(list(again)) == 14


def test_connections_asked_for_are_allowed_to_the_store(monkeypatch: pytest.MonkeyPatch, store: FaultStore) -> None:
    opened: list[StoreConfig] = []

    def open_store(where: Any, config: StoreConfig, **_: Any) -> FaultStore:
        opened.append(config)
        return store

    monkeypatch.setattr("stagekit.dataset.open_store", open_store)
    loader("s3://bucket/digits", connections=40)
    loader("s3://bucket/digits", connections=4, store=StoreConfig(connections=8, region="x"))
    assert opened == [StoreConfig(connections=40), StoreConfig(connections=8, region="x")]


def test_a_generator_is_what_iterating_gives(store: FaultStore) -> None:
    assert isinstance(iter(loader(store)), Iterator)


class Pair(NamedTuple):
    pixels: torch.Tensor
    label: str


class TestPinning:
    def test_without_cuda_it_does_nothing(self, store: FaultStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for threads in (0, 2):
            batches = list(loader(store, 10, pin_memory=True, threads=threads))
            assert len(batches) == 6
            assert not any(batch["cls"].is_pinned() for batch in batches)

    @pytest.mark.parametrize("threads", [0, 2])
    def test_with_cuda_every_tensor_of_a_batch_is_pinned(self, store: FaultStore, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        """As far as that can be seen without it: each tensor is asked to pin itself, and the batch holds what that gave."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1000)

        def together(samples: Sequence[Any]) -> Any:
            numbers = torch.tensor([sample["cls"] for sample in samples])
            return {"one": numbers, "two": [numbers, {"three": numbers}], "four": Pair(numbers, "text"), "five": ["a", "b"]}

        made = loader(store, 10, pin_memory=True, threads=threads, shuffle=False, collate=together)
        pinned = torch.arange(10) + 1000
        batch = next(iter(made))
        found = [batch["one"], batch["two"][0], batch["two"][1]["three"], batch["four"].pixels]
        assert all(torch.equal(tensor, pinned) for tensor in found)
        assert (batch["four"].label, batch["five"]) == ("text", ["a", "b"])
