"""``StreamDataset`` inside people's own ``DataLoader``: real workers, every start method."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from stagekit.errors import CorruptShard, RandomAccessRefused, StateMismatch, UsageError
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore
from stagekit.torch import StreamDataset, StreamLoader
from stagekit.torch.turns import Turns

from ..stream.build import build, numbered

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # five workers on two cores are meant
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),  # what Python 3.12 says of every fork
]


@pytest.fixture(scope="module", autouse=True)
def start_method_servers() -> Iterator[None]:
    """The helpers of ``forkserver`` and ``spawn``, which live as long as the process, are there before files are counted.

    The fork server imports torch once, so that its workers need not.
    """
    multiprocessing.set_forkserver_preload(["stagekit.torch"])
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # there for tests, and missing in the stubs
    multiprocessing.set_forkserver_preload(["__main__"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digits")
    build(DirectoryStore(path), numbered(130, field="cls"), shards=[70, 10, 50])
    return path


def dataset(source: Any, **options: Any) -> StreamDataset:
    return StreamDataset(source, **{"connections": 2, "window": 4, **options})


def numbers(samples: Any) -> list[int]:
    return [sample["cls"] for sample in samples]


def flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["cls"].tolist()]


class TestAlone:
    def test_it_gives_decoded_samples_each_once(self, directory: Path) -> None:
        made = dataset(directory)
        assert len(made) == 130
        first = list(made)
        assert first[0]["__key__"] == f"{first[0]['cls']:06d}"
        assert sorted(numbers(first)) == list(range(130))

    def test_two_samples_with_the_default_settings(self) -> None:
        store = MemoryStore("memory://samples-two/d")
        build(store, numbered(2, field="cls"), shards=[1, 1])
        made = StreamDataset(store)
        assert (len(made), sorted(numbers(made))) == (2, [0, 1])

    def test_every_iteration_is_the_next_epoch(self, directory: Path) -> None:
        made = dataset(directory)
        epochs = [numbers(made) for _ in range(3)]
        assert made.epoch == 3
        assert len({tuple(epoch) for epoch in epochs}) == 3
        made.set_epoch(1)
        assert numbers(made) == epochs[1]
        assert numbers(StreamLoader(directory, 1, window=4, transform=lambda s: s, collate=lambda s: s[0])) == epochs[0]
        with pytest.raises(UsageError, match="epoch: -1 is below 0"):
            made.set_epoch(-1)

    def test_ranks_are_disjoint_and_equal(self, directory: Path) -> None:
        ranks = [numbers(dataset(directory, rank=rank, world_size=4)) for rank in range(4)]
        assert [len(rank) for rank in ranks] == [32] * 4
        assert len({number for rank in ranks for number in rank}) == 128
        uneven = [numbers(dataset(directory, rank=rank, world_size=4, drop_last=False)) for rank in range(4)]
        assert [len(rank) for rank in uneven] == [33, 33, 32, 32]
        assert sorted(number for rank in uneven for number in rank) == list(range(130))

    def test_a_transform_and_its_none(self, directory: Path) -> None:
        made = dataset(directory, transform=lambda sample: sample["cls"] if sample["cls"] % 2 else None)
        assert sorted(made) == list(range(1, 130, 2))
        assert made.receipt is not None
        assert (made.receipt.expected, made.receipt.delivered, made.receipt.dropped) == (130, 65, 65)

    def test_by_number_is_refused(self, directory: Path) -> None:
        with pytest.raises(RandomAccessRefused, match="StreamLoader"):
            dataset(directory)[0]

    def test_arguments_that_cannot_be_meant(self, directory: Path) -> None:
        with pytest.raises(UsageError, match="batch_size: 0"):
            dataset(directory, batch_size=0)
        with pytest.raises(UsageError, match=r"memory: .* needs"):
            dataset(directory, memory="10kB")

    def test_damage_is_an_error_and_skipping_is_counted(self, directory: Path) -> None:
        store = FaultStore(DirectoryStore(directory))
        store.corrupt("shards/000000.tar", offset=600, times=None)
        with pytest.raises(CorruptShard, match=r"block 0 of 24 of .*000000\.tar"):
            list(dataset(store))
        made = dataset(store, on_bad="skip")
        with pytest.warns(RuntimeWarning, match="3 skipped as damaged"):
            assert sorted(numbers(made)) == list(range(3, 130))


class TestState:
    @settings(max_examples=15)
    @given(stops=st.lists(st.integers(0, 40), min_size=1, max_size=4), world=st.integers(1, 3))
    def test_any_number_of_stops_changes_nothing(self, directory: Path, stops: list[int], world: int) -> None:
        wanted = numbers(dataset(directory, rank=0, world_size=world))
        got: list[int] = []
        state: dict[str, Any] | None = None
        for stop in [*stops, 200]:
            made = dataset(directory, rank=0, world_size=world)
            if state is not None:
                made.load_state_dict(json.loads(json.dumps(state)))
            samples = iter(made)
            got += [sample["cls"] for _, sample in zip(range(min(stop, len(wanted) - len(got))), samples, strict=False)]
            state = made.state_dict()
            samples.close()  # type: ignore[attr-defined]
        assert got == wanted

    def test_after_the_epoch_it_is_the_next_ones(self, directory: Path) -> None:
        made = dataset(directory)
        assert made.state_dict()["epoch"] == 0
        first = numbers(made)
        state = made.state_dict()
        assert (state["epoch"], state["cuts"]) == (1, [])
        again = dataset(directory)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert numbers(again) == numbers(made) != first

    def test_a_loaders_state_can_be_loaded(self, directory: Path) -> None:
        loader = StreamLoader(directory, 10, window=4, threads=0)
        batches = iter(loader)
        got = [number for _ in range(3) for number in next(batches)["cls"].tolist()]
        batches.close()  # type: ignore[attr-defined]
        made = dataset(directory)
        made.load_state_dict(loader.state_dict())
        assert got + numbers(made) == numbers(dataset(directory))
        # Only once: the next iteration is a whole epoch again.
        assert len(numbers(made)) == 130

    def test_other_data_is_refused(self, directory: Path) -> None:
        store = MemoryStore("memory://samples-other/d")
        build(store, numbered(9, field="cls"))
        with pytest.raises(StateMismatch, match="belongs to the data set"):
            dataset(store).load_state_dict(dataset(directory).state_dict())


# Each number of workers with each way to start them, and each of both with and without persistent ones.
WORKERS = [
    (0, None, False),
    (1, "fork", True),
    (1, "forkserver", False),
    (1, "spawn", False),  # each of these workers imports torch
    (2, "fork", False),
    (2, "fork", True),
    (2, "forkserver", False),
    (2, "forkserver", True),
    (2, "spawn", True),
    (5, "fork", False),
    (5, "fork", True),
    (5, "forkserver", True),
    (5, "spawn", True),
]


class TestWorkers:
    @pytest.mark.parametrize(("workers", "method", "persistent"), WORKERS)
    def test_each_epoch_is_the_exact_multiset_and_another_order(
        self, directory: Path, workers: int, method: str | None, persistent: bool
    ) -> None:
        made = dataset(directory, batch_size=8)
        loader = DataLoader(made, batch_size=8, num_workers=workers, multiprocessing_context=method, persistent_workers=persistent)
        epochs = [flat(loader) for _ in range(2)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(130))] * 2
        assert epochs[0] != epochs[1]
        if workers:
            with pytest.raises(UsageError, match=r"only they know how far they are.*StatefulDataLoader.*StreamLoader"):
                made.state_dict()
        # The same again, from the same settings.
        if method == "fork":
            again = DataLoader(dataset(directory, batch_size=8), batch_size=8, num_workers=workers, multiprocessing_context=method)
            assert flat(again) == epochs[0]
        del loader

    def test_no_workers(self, directory: Path) -> None:
        made = dataset(directory)
        loader = DataLoader(made, batch_size=8)
        assert len(loader) == len(list(loader)) == 17
        batches = iter(loader)
        got = [number for _ in range(4) for number in next(batches)["cls"].tolist()]
        state = made.state_dict()
        del batches
        again = dataset(directory)
        again.load_state_dict(state)
        wanted = dataset(directory)
        wanted.set_epoch(1)
        assert got + flat(DataLoader(again, batch_size=8)) == numbers(wanted)

    @pytest.mark.parametrize("workers", [2, 3, 5])
    def test_the_length_is_exact_when_the_batch_size_is_told(self, directory: Path, workers: int) -> None:
        loader = DataLoader(dataset(directory, batch_size=8), batch_size=8, num_workers=workers, multiprocessing_context="fork")
        batches = list(loader)
        assert len(batches) == len(loader) == 17
        assert [len(batch["cls"]) for batch in batches].count(8) == 16

    def test_ranks_with_workers_give_equal_numbers_of_batches(self, directory: Path) -> None:
        got = []
        for rank in range(3):
            made = dataset(directory, rank=rank, world_size=3)
            got.append(list(DataLoader(made, batch_size=4, num_workers=2, multiprocessing_context="fork")))
        assert len({len(batches) for batches in got}) == 1
        assert len({number for batches in got for number in flat(batches)}) == 129

    def test_three_shards_on_two_ranks_of_four_workers(self, tmp_path: Path) -> None:
        build(DirectoryStore(tmp_path), numbered(13, field="cls"), shards=[7, 1, 5])
        got: list[int] = []
        for rank in range(2):
            made = dataset(tmp_path, rank=rank, world_size=2, drop_last=False, batch_size=2)
            got += flat(DataLoader(made, batch_size=2, num_workers=4, multiprocessing_context="fork"))
        assert sorted(got) == list(range(13))

    def test_an_iteration_that_was_left_early_does_not_confuse_the_workers(self, directory: Path) -> None:
        for persistent in (False, True):
            loader = DataLoader(
                dataset(directory), batch_size=8, num_workers=3, multiprocessing_context="fork", persistent_workers=persistent
            )
            for _ in range(3):
                next(iter(loader))
            assert sorted(flat(loader)) == list(range(130))
            del loader

    def test_set_epoch_reaches_workers_that_live_already(self, directory: Path) -> None:
        made = dataset(directory)
        loader = DataLoader(made, batch_size=8, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
        first = flat(loader)
        assert flat(loader) != first
        made.set_epoch(0)
        assert flat(loader) == first
        del loader

    def test_a_state_loaded_here_is_continued_by_the_workers_once(self, directory: Path) -> None:
        loader = StreamLoader(directory, 10, window=4, threads=0)
        batches = iter(loader)
        got = [number for _ in range(3) for number in next(batches)["cls"].tolist()]
        batches.close()  # type: ignore[attr-defined]
        made = dataset(directory)
        made.load_state_dict(loader.state_dict())
        workers = DataLoader(made, batch_size=8, num_workers=2, multiprocessing_context="fork")
        assert sorted(got + flat(workers)) == list(range(130))
        assert sorted(flat(workers)) == list(range(130))

    def test_an_error_in_a_worker_reaches_the_trainer(self, directory: Path, tmp_path: Path) -> None:
        store = DirectoryStore(tmp_path / "damaged")
        build(store, numbered(30, field="cls"))
        shard = bytearray(store.get("shards/000000.tar"))
        shard[20 * 1024 + 512] ^= 1
        store.put("shards/000000.tar", bytes(shard))
        batches = iter(DataLoader(dataset(store), batch_size=4, num_workers=2, multiprocessing_context="fork"))
        with pytest.raises(CorruptShard, match=r"block 6 of 10"):
            list(batches)
        batches._shutdown_workers()  # else the error keeps them until garbage is collected, and torch waits 5 s for each then

    def test_memory_is_divided_among_workers(self, directory: Path) -> None:
        made = dataset(directory, memory=20_000)
        batches = iter(DataLoader(made, batch_size=4, num_workers=2, multiprocessing_context="fork"))
        with pytest.raises(UsageError, match=r"memory=10\.0 kB is allowed"):
            list(batches)
        batches._shutdown_workers()


@contextmanager
def worker(number: int, workers: int, directory: Path) -> Iterator[StreamDataset]:
    """What a worker of ``torchdata``'s ``StatefulDataLoader`` is, in this process: its own copy of the data set, and its worker info."""
    made = dataset(directory)
    info = type("WorkerInfo", (), {"id": number, "num_workers": workers, "seed": 1000 + number})()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stagekit.torch.samples.get_worker_info", lambda: info)
        yield made


class TestStatefulWorkers:
    def test_each_worker_goes_on_where_it_was(self, directory: Path) -> None:
        straight: list[list[int]] = []
        resumed: list[list[int]] = []
        for number in range(3):
            with worker(number, 3, directory) as made:
                straight.append(numbers(made))
            with worker(number, 3, directory) as made:
                samples = iter(made)
                got = [next(samples)["cls"] for _ in range(5 + number)]
                state = json.loads(json.dumps(made.state_dict()))
                samples.close()  # type: ignore[attr-defined]
            assert state["worker"] == [number, 3, 5 + number]
            with worker(number, 3, directory) as made:
                made.load_state_dict(state)
                resumed.append(got + numbers(made))
                assert made.state_dict()["worker"] == [number, 3, len(straight[-1])]
        assert resumed == straight
        assert sorted(number for part in straight for number in part) == list(range(130))

    def test_another_number_of_workers_is_refused(self, directory: Path) -> None:
        with worker(1, 3, directory) as made:
            samples = iter(made)
            next(samples)
            state = made.state_dict()
            samples.close()  # type: ignore[attr-defined]
        with worker(1, 2, directory) as made:
            made.load_state_dict(state)
            with pytest.raises(StateMismatch, match=r"saved by worker 1 of 3 and is loaded by worker 1 of 2; use num_workers=3"):
                next(iter(made))


class TestTurns:
    def test_the_first_worker_takes_the_turn_and_the_others_look_it_up(self) -> None:
        turns = Turns()
        assert [turns.take_as_worker((77, 0)).epoch for _ in range(3)] == [0, 0, 0]
        assert [turns.take_as_worker((78, 0)).epoch, turns.take_as_worker((77, 1)).epoch, turns.take_as_worker((78, 0)).epoch] == [1, 2, 1]
        assert turns.take().epoch == 3

    def test_a_start_is_given_to_one_iteration(self) -> None:
        turns = Turns()
        turns.set_next(4, {"cuts": []})
        assert [turns.take_as_worker((1, 0)).start for _ in range(2)] == [{"cuts": []}] * 2
        assert turns.take_as_worker((2, 0)).start is None
        assert turns.next.epoch == 6

    def test_old_iterations_are_forgotten(self) -> None:
        turns = Turns()
        for seed in range(200):
            turns.take_as_worker((seed, 0))
        assert len(turns._read()["turns"]) == 64

    def test_a_copy_for_another_purpose_is_apart(self) -> None:
        turns = Turns()
        turns.take()
        other = pickle.loads(pickle.dumps(turns))
        other.take()
        assert (turns.next.epoch, other.next.epoch) == (1, 2)


def test_a_data_set_can_be_pickled_and_copied(directory: Path) -> None:
    made = dataset(directory)
    samples = iter(made)
    first = next(samples)
    again: StreamDataset = pickle.loads(pickle.dumps(made))
    assert again.epoch == 1
    again.set_epoch(0)
    assert next(iter(again))["cls"] == first["cls"]
    assert isinstance(samples, Iterator)
    assert torch.utils.data.get_worker_info() is None
