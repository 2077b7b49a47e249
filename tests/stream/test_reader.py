"""From intervals to samples: order, memory, and everything that can be wrong with the bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.dataset import Dataset
from stagekit.errors import CorruptShard, Denied, StallTimeout, UsageError
from stagekit.order import Epoch, Intervals, share
from stagekit.store.base import Data
from stagekit.store.memory import MemoryStore
from stagekit.stream.reader import Budget, OnBad, Reader, plan_memory
from stagekit.testing.faults import Call, FaultStore

from .build import build, numbered

BLOCK = 3 * 1024  # three samples of a header and a small payload


@pytest.fixture
def store(request: pytest.FixtureRequest) -> FaultStore:
    inner = MemoryStore(f"memory://reader-{request.node.name}/digits")
    build(inner, numbered(60), shards=[20, 30, 10])
    return FaultStore(inner)


def epoch_of(dataset: Dataset, *, shuffle: bool = True, window: int = 4, number: int = 0) -> Epoch:
    return Epoch(dataset.block_samples, number, digest=dataset.digest, seed=0, shuffle=shuffle, window=window)


def a_reader(
    dataset: Dataset,
    lanes: list[Intervals] | None = None,
    per_lane: int = 4,
    *,
    shuffle: bool = True,
    window: int = 4,
    on_bad: OnBad = "raise",
    connections: int = 4,
    stall_timeout_s: float | None = 30.0,
) -> Reader:
    return Reader(
        dataset,
        epoch_of(dataset, shuffle=shuffle, window=window),
        [((0, len(dataset)),)] if lanes is None else lanes,
        per_lane,
        budget=Budget(window * BLOCK, 8 * BLOCK),
        connections=connections,
        on_bad=on_bad,
        stall_timeout_s=stall_timeout_s,
    )


def keys(reader: Reader) -> list[int | None]:
    return [None if sample is None else int(sample["__key__"]) for group in reader for sample in group]


def expected(dataset: Dataset, intervals: Intervals, *, window: int = 4, shuffle: bool = True) -> list[int]:
    firsts = [0, *dataset.block_samples.cumsum().tolist()]
    return [
        firsts[stretch.blocks[slot]] + int(number)
        for stretch in epoch_of(dataset, window=window, shuffle=shuffle).stretches(intervals)
        for slot, number in zip(stretch.slots.tolist(), stretch.samples.tolist(), strict=True)
    ]


class TestOrder:
    @settings(max_examples=30)
    @given(data=st.data(), window=st.integers(1, 6), lanes=st.integers(1, 4), per_lane=st.integers(1, 9), shuffle=st.booleans())
    def test_each_lane_gives_its_samples_in_reading_order(
        self, data: st.DataObject, window: int, lanes: int, per_lane: int, shuffle: bool
    ) -> None:
        inner = MemoryStore("memory://reader-order/d")
        lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
        build(inner, numbered(sum(lengths)), shards=lengths)
        dataset = Dataset(inner)
        cuts = [share(((0, len(dataset)),), number, lanes) for number in range(lanes)]
        groups = list(a_reader(dataset, cuts, per_lane, window=window, shuffle=shuffle))
        wanted = [expected(dataset, cut, window=window, shuffle=shuffle) for cut in cuts]
        for number, group in enumerate(groups):
            due = [key for lane in wanted for key in lane[number * per_lane : (number + 1) * per_lane]]
            assert [int(sample["__key__"]) for sample in group if sample is not None] == due
        assert sum(map(len, groups)) == len(dataset)

    def test_nothing_to_read_fetches_nothing(self, store: FaultStore) -> None:
        dataset = Dataset(store)
        calls = len(store.calls)
        assert list(a_reader(dataset, [(), ()])) == []
        assert len(store.calls) == calls

    def test_before_the_first_list_one_window_is_fetched_and_no_more(self, store: FaultStore) -> None:
        dataset = Dataset(store)
        blocks = next(epoch_of(dataset).stretches(((31, 60),))).blocks.tolist()
        first = {(wanted.key, wanted.start) for wanted in map(dataset.block_range, blocks)}
        ran_ahead = threading.Event()

        def watch(call: Call) -> None:
            if (call.key, call.start) not in first:
                ran_ahead.set()
            elif (call.key, call.start) == max(first):
                # Three other threads have nothing to do now. One that fetches ahead does so at once.
                assert not ran_ahead.wait(0.2)

        store.act("get", watch, "*.tar", times=None)
        reader = a_reader(dataset, [((31, 60),)])
        groups = iter(reader)
        next(groups)
        assert sum(len(group) for group in groups) == 29 - 4
        assert ran_ahead.is_set()

    def test_in_source_order_neighbours_are_asked_for_together(self, store: FaultStore) -> None:
        """Two at a time behind the first list, fewer towards the end, and never across shards. Each table is fetched once."""
        dataset = Dataset(store)
        began = len(store.calls)
        reader = a_reader(dataset, shuffle=False, window=1, connections=2)
        assert keys(reader) == list(range(60))
        asked = [call for call in store.calls[began:] if call.key.endswith(".tar")]
        assert max(call.length or 0 for call in asked) == 2 * BLOCK
        assert len(asked) < len(dataset.block_samples) - 3
        assert sum(call.length or 0 for call in asked) == dataset.nbytes - 3 * 1024
        tables = [call.key for call in store.calls[began:] if call.key.endswith(".blocks")]
        assert sorted(tables) == sorted(set(tables))

    def test_bytes_fetched_and_time_waited_are_counted(self, store: FaultStore) -> None:
        dataset = Dataset(store)
        reader = a_reader(dataset)
        assert len(keys(reader)) == 60
        assert reader.bytes_fetched == dataset.nbytes - 3 * 1024  # each shard's two end blocks are not needed
        assert reader.waited_s >= 0


class TestMemory:
    def test_a_window_that_does_not_fit_is_refused_with_both_numbers(self, store: FaultStore) -> None:
        with pytest.raises(UsageError, match=r"memory: .* needs 18\.4 kB \(a window of 4 blocks .* memory=10\.0 kB is allowed.*window="):
            plan_memory(Dataset(store), 10_000, lanes=1, window=4, connections=4)

    def test_two_lanes_hold_two_windows(self, store: FaultStore) -> None:
        dataset = Dataset(store)
        budget = plan_memory(dataset, 10 * BLOCK, lanes=2, window=4, connections=4)
        assert budget.window_bytes == 8 * BLOCK
        assert budget.ahead_bytes == BLOCK
        with pytest.raises(UsageError, match="2 windows of 4 blocks"):
            plan_memory(dataset, 10 * BLOCK - 1, lanes=2, window=4, connections=4)

    def test_one_large_block_does_not_stand_for_all(self) -> None:
        inner = MemoryStore("memory://reader-outlier/d")
        samples = numbered(30)
        samples[7] = ("000007", {"txt": bytes(1_000_000)})
        build(inner, samples, shards=[7, 1, 22])
        budget = plan_memory(Dataset(inner), 4_000_000, lanes=1, window=8, connections=4)
        assert 1_000_000 < budget.window_bytes < 1_100_000
        with pytest.raises(UsageError, match=r"needs 3\.02 MB"):
            plan_memory(Dataset(inner), 2_000_000, lanes=1, window=8, connections=4)

    def test_a_small_data_set_needs_no_more_than_itself(self, store: FaultStore) -> None:
        assert plan_memory(Dataset(store), 2**30, lanes=1, window=1000, connections=4).window_bytes <= Dataset(store).nbytes

    def test_raw_bytes_held_stay_within_the_budget(self, store: FaultStore) -> None:
        """No more is on its way or waiting than ``ahead_bytes``, whatever the number of connections."""
        dataset = Dataset(store)
        reader = Reader(
            dataset, epoch_of(dataset, shuffle=False), [((0, 60),)], 1, budget=Budget(BLOCK, 2 * BLOCK), connections=8, stall_timeout_s=30
        )
        groups = iter(reader)
        for taken in range(1, 61):
            next(groups)
            opened = -(-taken // 3)
            fetched = sum(1 for call in store.calls if call.key.endswith(".tar"))
            assert fetched <= opened + 2 + 3  # blocks of a shard's end are shorter, so one more may fit
        reader.close()


class TestClosing:
    def test_no_thread_is_left(self, store: FaultStore) -> None:
        before = set(threading.enumerate())
        reader = a_reader(Dataset(store))
        for _ in reader:
            break
        reader.close()
        reader.close()
        assert set(threading.enumerate()) == before
        complete = a_reader(Dataset(store))
        keys(complete)
        assert set(threading.enumerate()) == before

    def test_closing_from_another_thread_wakes_one_that_waits(self, store: FaultStore) -> None:
        held, waiting = threading.Event(), threading.Event()

        def hold(_: object) -> None:
            waiting.set()
            held.wait(30)

        dataset = Dataset(store)
        dataset.load_tables(range(3))
        store.act("get", hold, "*.tar", times=None)
        reader = a_reader(dataset, connections=1)
        found: list[list[int | None]] = []
        thread = threading.Thread(target=lambda: found.append(keys(reader)))
        thread.start()
        assert waiting.wait(60)
        closer = threading.Thread(target=reader.close)
        closer.start()
        thread.join(60)
        assert not thread.is_alive()
        assert found == [[]]
        held.set()
        closer.join(60)

    def test_a_stall_is_an_error_with_the_object_and_the_threads(self, store: FaultStore) -> None:
        held = threading.Event()
        dataset = Dataset(store)
        dataset.load_tables(range(3))
        store.act("get", lambda _: held.wait(30) and None, "*.tar", times=None)
        with pytest.raises(StallTimeout, match=r"(?s)no data for 0\.05 s while reading shards/.*\.tar.*stagekit-fetch-0"):
            keys(a_reader(dataset, stall_timeout_s=0.05, connections=1))
        held.set()


def flip_in_header(data: bytearray) -> bytes:
    data[BLOCK + 3] ^= 4
    return bytes(data)


def flip_in_payload(data: bytearray) -> bytes:
    data[BLOCK + 512] ^= 1
    return bytes(data)


SPOILERS: dict[str, Callable[[bytearray], bytes]] = {
    "flipped bit in a header": flip_in_header,
    "flipped bit in a payload": flip_in_payload,
    "cut at a member border": lambda data: bytes(data[: BLOCK + 1024]),
    "cut inside a header": lambda data: bytes(data[: BLOCK + 100]),
    "cut inside a payload": lambda data: bytes(data[: BLOCK + 513]),
    "replaced by another shard": lambda data: bytes(data[:BLOCK]) + bytes(data[2 * BLOCK :]) + bytes(BLOCK),
}
WHOLE = {
    "zero bytes": lambda data: b"",
    "an HTML page with status 200": lambda data: b"<html><body>Service Unavailable</body></html>" * 2000,
}


class TestDamage:
    """Shard 1 holds samples 20 to 49; block 1 of its ten holds 23 to 25."""

    @pytest.mark.parametrize("name", [*SPOILERS, *WHOLE])
    def test_it_is_an_error_that_names_shard_block_offset_expected_and_found(self, store: FaultStore, name: str) -> None:
        spoil = {**SPOILERS, **WHOLE}[name]
        store.put("shards/000001.tar", spoil(bytearray(store.get("shards/000001.tar"))))
        got, error = read_until_error(store)
        first = 20 if name in WHOLE else 23
        assert got == list(range(first))
        block = 0 if name in WHOLE else 1
        assert f"block {block} of 10 of {store.location}/shards/000001.tar (samples {first - 20} to {first - 18} of the shard" in str(error)
        assert f"3072 bytes at offset {block * BLOCK}" in str(error)
        assert ("expected" in str(error) or "should have" in str(error)) or "reach beyond its end" in str(error)

    @pytest.mark.parametrize("name", list(SPOILERS))
    def test_skipping_leaves_out_the_damaged_blocks_and_nothing_else(self, store: FaultStore, name: str) -> None:
        store.put("shards/000001.tar", SPOILERS[name](bytearray(store.get("shards/000001.tar"))))
        dataset = Dataset(store)
        reader = a_reader(dataset, shuffle=False, on_bad="skip")
        got = keys(reader)
        assert len(got) == 60
        damaged = list(range(23, 50)) if "cut" in name or "replaced" in name else [23, 24, 25]
        assert [number for number, key in enumerate(got) if key is None] == damaged
        assert [key for key in got if key is not None] == [number for number in range(60) if number not in damaged]
        assert reader.bad.samples == len(damaged)
        assert "block 1 of 10" in reader.bad.reasons[0]

    def test_skipping_while_shuffled_over_several_lanes_keeps_every_place(self, store: FaultStore) -> None:
        store.put("shards/000001.tar", flip_in_payload(bytearray(store.get("shards/000001.tar"))))
        dataset = Dataset(store)
        cuts = [share(((0, 60),), number, 3) for number in range(3)]
        groups = list(a_reader(dataset, cuts, 5, on_bad="skip"))
        wanted = [expected(dataset, cut) for cut in cuts]
        for number, group in enumerate(groups):
            due = [None if key in (23, 24, 25) else key for lane in wanted for key in lane[number * 5 : number * 5 + 5]]
            assert [None if sample is None else int(sample["__key__"]) for sample in group] == due

    def test_a_bit_flipped_on_the_way_heals(self, store: FaultStore) -> None:
        store.corrupt("shards/000001.tar", offset=BLOCK + 512, times=1)
        assert keys(a_reader(Dataset(store), shuffle=False)) == list(range(60))

    def test_a_missing_shard_is_damage_and_a_missing_bucket_is_not(self, store: FaultStore) -> None:
        dataset = Dataset(store)
        store.delete("shards/000001.tar")
        got, error = read_until_error(store)
        assert got == list(range(20))
        assert isinstance(error, CorruptShard)
        assert "000001.tar" in str(error)
        store.fail("get", Denied("reading is forbidden"), "*.tar", times=None)
        with pytest.raises(Denied, match="forbidden"):
            keys(a_reader(dataset, shuffle=False, on_bad="skip"))

    @pytest.mark.parametrize("on_bad", ["raise", "skip"])
    def test_a_damaged_block_table(self, store: FaultStore, on_bad: OnBad) -> None:
        data = bytearray(store.get("shards/000001.blocks"))
        data[-1] ^= 1
        store.put("shards/000001.blocks", bytes(data))
        reader = a_reader(Dataset(store), shuffle=False, on_bad=on_bad)
        if on_bad == "raise":
            with pytest.raises(CorruptShard, match=r"block 0 of 10 of .*000001\.tar.*block table"):
                keys(reader)
        else:
            got = keys(reader)
            assert [key for key in got if key is not None] == [*range(20), *range(50, 60)]
            assert reader.bad.samples == 30

    def test_an_object_replaced_while_it_is_read(self, store: FaultStore) -> None:
        other = MemoryStore("memory://reader-other/d")
        build(other, numbered(60, size=400), shards=[20, 30, 10])
        dataset = Dataset(store)
        reader = a_reader(dataset, shuffle=False, connections=1)
        groups = iter(reader)
        next(groups)
        # One connection is at most the budget ahead, so the rest of this shard still lies in the store.
        store.put("shards/000001.tar", bytes(other.get("shards/000001.tar")))
        with pytest.raises(CorruptShard, match=r"000001\.tar"):
            list(groups)


def read_until_error(store: FaultStore) -> tuple[list[int], CorruptShard]:
    reader = a_reader(Dataset(store), shuffle=False, per_lane=1)
    got: list[int] = []
    with pytest.raises(CorruptShard) as caught:
        got.extend(int(sample["__key__"]) for group in reader for sample in group if sample is not None)
    return got, caught.value


def test_a_parsed_sample_does_not_depend_on_the_buffer(store: FaultStore) -> None:
    """Fields are copies: a sample that is kept does not keep its block alive, nor change with it."""
    dataset = Dataset(store)
    wanted = dataset.block_range(0)
    data: Data = bytearray(store.get(wanted.key, wanted.start, wanted.length))
    sample = dataset.parse(0, data)[1]
    assert isinstance(data, bytearray)
    data[:] = bytes(len(data))
    assert sample == {"__key__": "000001", "txt": b"1"}


def test_connections_that_wait_for_nothing_share_the_first_block(request: pytest.FixtureRequest) -> None:
    """A line is as fast as all its connections: the first batch waits for one block, so they all fetch a part of it."""
    inner = MemoryStore(f"memory://reader-{request.node.name}/digits")
    build(inner, numbered(12, size=700_000))
    store = FaultStore(inner)
    dataset = Dataset(store)
    blocks = [dataset.block_range(block) for block in range(len(dataset.block_samples))]
    assert len(blocks) == 4
    reader = Reader(dataset, epoch_of(dataset, shuffle=False, window=1), [((0, 12),)], 2, budget=Budget(2**23, 2**24), connections=4)
    store.calls.clear()
    assert keys(reader) == list(range(12))
    asked = [(call.start, call.length) for call in store.calls if call.key.endswith(".tar")]
    first = sorted(span for span in asked if span[0] < blocks[1].start)
    assert len(first) == 4
    assert first[0][0] == blocks[0].start
    assert sum(length or 0 for _, length in first) == blocks[0].length
    assert sorted(span for span in asked if span not in first) == [(one.start, one.length) for one in blocks[1:]]
