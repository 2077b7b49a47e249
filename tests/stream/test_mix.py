"""Several data sets as one: proportions, passes, ranks, resume, memory."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stagekit
from stagekit.dataset import Dataset
from stagekit.errors import CorruptShard, RandomAccessRefused, StateMismatch, UsageError
from stagekit.order import Blend, share
from stagekit.store.memory import MemoryStore
from stagekit.stream.mix import Mix
from stagekit.testing.faults import FaultStore
from stagekit.torch import StreamDataset, StreamLoader

from .build import build, numbered
from .remote import Remote


def a_dataset(name: str, shards: list[int]) -> Dataset:
    store = MemoryStore(f"memory://mix-{name}/d")
    build(store, [(f"{name}-{key}", held) for key, held in numbered(sum(shards), field="cls")], shards=shards)
    return Dataset(store)


@pytest.fixture(scope="module")
def web() -> Dataset:
    return a_dataset("web", [20, 30, 10])


@pytest.fixture(scope="module")
def code() -> Dataset:
    return a_dataset("code", [9, 4])


def loader(mix: Mix, batch_size: int = 4, **options: Any) -> StreamLoader:
    return StreamLoader(mix, batch_size, **{"threads": 0, "connections": 4, "window": 4, **options})


def keys(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch["__key__"] if key]


@settings(deadline=None, max_examples=60)
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_every_beginning_of_a_blend_holds_each_source_in_proportion(counts: list[int]) -> None:
    blend = Blend(counts)
    sources = blend.sources(0, sum(counts)).tolist()
    assert [sources.count(number) for number in range(len(counts))] == counts
    for position in range(sum(counts) + 1):
        before = blend.before(position)
        assert before == tuple(sources[:position].count(number) for number in range(len(counts)))
        for count, held in zip(counts, before, strict=True):
            assert abs(held - position * count / sum(counts)) < len(counts)
    middle = sum(counts) // 2
    assert blend.sources(middle, sum(counts)).tolist() == sources[middle:]


def test_a_blend_of_billions() -> None:
    blend = Blend([2_000_000_000, 1_000_000_000, 7])
    assert sum(blend.before(2_999_999_999)) == 2_999_999_999
    assert Counter(blend.sources(10**9, 10**9 + 3000).tolist()) == {0: 2000, 1: 1000}
    with pytest.raises(UsageError, match="too long for a mix"):
        Blend([3_000_000_000, 100_000_000])


class TestProportions:
    def test_without_weights_each_source_comes_once_an_epoch(self, web: Dataset, code: Dataset) -> None:
        mix = Mix({"web": web, "code": code})
        assert len(mix) == 73
        for _ in range(2):
            made = loader(mix, 4, drop_last=False)
            assert sorted(keys(made)) == sorted([f"web-{n:06d}" for n in range(60)] + [f"code-{n:06d}" for n in range(13)])

    def test_weights_hold_in_every_batch(self, web: Dataset, code: Dataset) -> None:
        mix = stagekit.Mix({"web": web, "code": code}, weights={"web": 3, "code": 1}, samples=80)
        assert mix.counts == {"code": 20, "web": 60}
        for batch in loader(mix, 8):
            assert Counter(batch["__source__"]) == {"web": 6, "code": 2}
            assert [key.partition("-")[0] for key in batch["__key__"]] == batch["__source__"]

    def test_each_sources_pass_is_whole_before_it_comes_again(self, web: Dataset, code: Dataset) -> None:
        made = loader(Mix({"web": web, "code": code}, weights=[1, 1], samples=40), 4)
        got = [key for _ in range(6) for key in keys(made)]
        for name, size in (("web", 60), ("code", 13)):
            of_it = [key for key in got if key.startswith(name)]
            assert len(of_it) == 120
            passes = [of_it[first : first + size] for first in range(0, 120 - size + 1, size)]
            assert all(len(set(one)) == size for one in passes)
            assert len({tuple(one) for one in passes}) == len(passes)

    def test_the_order_of_the_names_means_nothing_and_the_weights_do(self, web: Dataset, code: Dataset) -> None:
        one, other = Mix({"web": web, "code": code}), Mix({"code": code, "web": web})
        assert one.digest == other.digest
        assert keys(loader(one)) == keys(loader(other))
        assert Mix({"web": web, "code": code}, weights=[2, 1]).digest != one.digest
        # A quotient decides, not how the numbers are written.
        assert Mix({"web": web, "code": code}, weights=[0.5, 0.25]).digest == Mix({"web": web, "code": code}, weights=[2, 1]).digest

    def test_the_same_data_twice_has_two_orders(self, code: Dataset) -> None:
        made = loader(Mix({"a": code, "b": code}), 2)
        got = [(source, key) for batch in made for source, key in zip(batch["__source__"], batch["__key__"], strict=True)]
        a, b = ([key for source, key in got if source == name] for name in "ab")
        assert sorted(a) == sorted(b)
        assert a != b

    def test_a_mix_in_a_dataloader(self, web: Dataset, code: Dataset) -> None:
        made = StreamDataset(Mix({"web": web, "code": code}), window=4)
        assert len(made) == 73
        assert len({sample["__key__"] for sample in made}) == 73


class TestRanksAndResume:
    @settings(max_examples=12)
    @given(
        weights=st.tuples(st.integers(1, 5), st.integers(1, 5)),
        samples=st.integers(20, 150),
        world=st.integers(1, 3),
        batch_size=st.integers(1, 6),
        epoch=st.integers(0, 3),
    )
    def test_ranks_together_read_the_epoch(
        self, web: Dataset, code: Dataset, weights: tuple[int, int], samples: int, world: int, batch_size: int, epoch: int
    ) -> None:
        mix = Mix({"web": web, "code": code}, weights=weights, samples=samples)
        straight, ranks = loader(mix, 1), []
        for made in (straight, *(loader(mix, batch_size, rank=rank, world_size=world, drop_last=False) for rank in range(world))):
            made.load_state_dict({**made.state_dict(), "epoch": epoch})
            ranks.append(list(made))
        assert len({len(batches) for batches in ranks[1:]}) == 1
        assert Counter(key for batches in ranks[1:] for key in keys(batches)) == Counter(keys(ranks[0]))
        assert len(keys(ranks[0])) == samples

    @settings(max_examples=12)
    @given(stops=st.lists(st.integers(0, 6), min_size=1, max_size=4), threads=st.sampled_from([0, 2]))
    def test_any_number_of_stops_changes_nothing(self, web: Dataset, code: Dataset, stops: list[int], threads: int) -> None:
        mix = Mix({"web": web, "code": code}, weights=[2, 1], samples=50)
        undisturbed = loader(mix)
        wanted = [key for _ in range(3) for key in keys(undisturbed)]
        state, got = None, []
        for stop in [*stops, 100]:
            made = loader(mix, threads=threads)
            if state is not None:
                made.load_state_dict(json.loads(json.dumps(state)))
            while made.epoch < 3 and stop >= 0:
                batches = iter(made)
                for batch in batches:
                    got += keys([batch])
                    stop -= 1
                    if stop < 0:
                        break
                state = made.state_dict()
                batches.close()  # type: ignore[attr-defined]
        assert got == wanted
        assert len(json.dumps(state)) < 1024

    def test_other_worlds_read_what_is_left(self, web: Dataset, code: Dataset) -> None:
        mix = Mix({"web": web, "code": code})
        got: list[str] = []
        state: dict[str, Any] | None = None
        for world, batch_size, stop in ((2, 3, 4), (1, 5, 3), (3, 1, 100)):
            for rank in range(world):
                made = loader(mix, batch_size, rank=rank, world_size=world, drop_last=False)
                if state is not None:
                    made.load_state_dict(state)
                batches = iter(made)
                for _, batch in zip(range(stop), batches, strict=False):
                    got += keys([batch])
                after = made.state_dict()
                batches.close()  # type: ignore[attr-defined]
            state = after
        assert len(got) == len(set(got)) == 73

    def test_virtual_ranks_give_the_same_global_batches(self, web: Dataset, code: Dataset) -> None:
        mix = Mix({"web": web, "code": code}, weights=[1, 1])
        worlds = []
        for world in (1, 2, 4):
            ranks = [list(loader(mix, 8 // world, rank=rank, world_size=world, virtual_ranks=4)) for rank in range(world)]
            worlds.append([sorted(keys(step)) for step in zip(*ranks, strict=True)])
        assert worlds[0] == worlds[1] == worlds[2]

    def test_a_state_of_another_mix_is_refused(self, web: Dataset, code: Dataset) -> None:
        state = loader(Mix({"web": web, "code": code})).state_dict()
        with pytest.raises(StateMismatch, match=r"belongs to the data set .* and the mix of code \(memory://.*\), web \(memory://"):
            loader(Mix({"web": web, "code": code}, weights=[3, 1])).load_state_dict(state)

    def test_it_can_be_pickled(self, web: Dataset, code: Dataset) -> None:
        made = loader(Mix({"web": web, "code": code}))
        assert keys(pickle.loads(pickle.dumps(made))) == keys(made)


class TestReading:
    def test_blocks_are_fetched_once_and_a_receipt_adds_up(self, web: Dataset, code: Dataset) -> None:
        mix = Mix({"web": web, "code": code})
        made = loader(mix, 4, drop_last=False, threads=2)
        list(made)
        assert made.receipt is not None
        assert (made.receipt.expected, made.receipt.delivered, made.receipt.complete) == (73, 73, True)
        assert made.receipt.data_bytes == web.nbytes + code.nbytes
        assert made.receipt.bytes_fetched == mix.nbytes - 5 * 1024  # without each shard's end blocks

    def test_damage_names_the_source_and_skipping_keeps_every_place(self, web: Dataset) -> None:
        store = FaultStore(MemoryStore("memory://mix-code/d"))
        store.corrupt("shards/000000.tar", offset=600, times=None)
        mix = Mix({"web": web, "code": store})
        with pytest.raises(CorruptShard, match=r"block 0 of 3 of memory://mix-code/d/shards/000000.tar"):
            list(loader(mix))
        made = loader(mix, 4, drop_last=False, on_bad="skip")
        with pytest.warns(RuntimeWarning, match="3 skipped as damaged"):
            got = keys(made)
        assert len(got) == len(set(got)) == 70

    def test_memory_is_divided_and_refused_with_both_numbers(self, web: Dataset, code: Dataset) -> None:
        mix = Mix({"web": web, "code": code}, weights=[3, 1], samples=80)
        assert mix.windows(16) == [4, 12]
        with pytest.raises(UsageError, match=r"memory: reading memory://mix-.* needs .* is allowed"):
            loader(mix, memory="12kB")

    def test_a_cache_serves_all_sources(self, tmp_path: Any) -> None:
        sources = {}
        for name in ("web", "code"):
            MemoryStore(f"memory://mix-{name}/d")
            sources[name] = Remote(MemoryStore(f"memory://mix-{name}/d"))
        mix = Mix(sources, cache_dir=tmp_path, cache_limit="1MB")
        made = loader(mix, drop_last=False)
        for _ in range(2):
            list(made)
        assert made.receipt is not None
        assert made.receipt.bytes_fetched == 0
        with pytest.raises(UsageError, match="cache_limit belong to the Mix here"):
            loader(mix, cache_limit="1MB")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": {"web": 1}}, "'code' is in one of the two only"),
        ({"weights": [1]}, "there are 1 for 2 sources"),
        ({"weights": [1, 0]}, "0 for 'code' is not above 0"),
        ({"weights": [1, float("nan")]}, "nan for 'code' is not above 0"),
        ({"weights": [1000, 1], "samples": 100}, "'code' would get none"),
        ({"samples": 0}, "an epoch of 0 samples is none"),
    ],
)
def test_arguments_that_cannot_be_meant(web: Dataset, code: Dataset, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Mix({"web": web, "code": code}, **options)


def test_what_a_mix_says(web: Dataset, code: Dataset) -> None:
    mix = Mix({"web": web, "code": code})
    assert repr(mix) == "<Mix of 73 samples an epoch: 13 of code, 60 of web>"
    assert mix.fields["cls"].samples == 73
    with pytest.raises(RandomAccessRefused, match="StreamLoader reads it"):
        mix[0]
    with pytest.raises(UsageError, match="at least one source"):
        Mix({})
    with pytest.raises(UsageError, match=r"takes a mapping from names to data sets, such as .* not 5"):
        Mix(5)  # type: ignore[arg-type]
    # What a lane reads of a source is in one piece where the mix's positions are.
    assert mix.passes(0, 0, ((0, 73),)) == [(0, ((0, 13),))]
    assert mix.passes(0, 2, share(((0, 73),), 0, 2)) == [(2, ((0, mix.blend.before(37)[0]),))]
