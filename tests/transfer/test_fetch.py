"""Downloads: checked, in order, bounded in memory, and never a thread left behind."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.errors import BadDigest, Conflict, CorruptShard, InvalidReply, NotFound, StallTimeout, Unreachable
from stagekit.location import Location
from stagekit.shards.index import block_digest
from stagekit.store.base import Data, Store, WrappedStore
from stagekit.store.memory import MemoryStore
from stagekit.transfer.fetch import Fetcher, Range, fetch, fetch_file, fetch_object, fetch_pieces

DATA = bytes(i * 7 % 256 for i in range(10_000))


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    made = MemoryStore(Location.parse(f"memory://fetch-{request.node.name.split('[')[0]}"))
    made.put("object", DATA)
    return made


class Faulty(WrappedStore):
    """Flips a bit in the first ``bad`` answers, or in all of them."""

    def __init__(self, inner: Store, bad: int) -> None:
        super().__init__(inner)
        self.bad = bad
        self.gets: list[tuple[int, int | None]] = []

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        self.gets.append((start, length))
        data = bytearray(self.inner.get(key, start, length, if_match=if_match))
        if self.bad > 0:
            self.bad -= 1
            data[-1] ^= 1
        return bytes(data)


class Gated(WrappedStore):
    """Answers only once the gate is open, and counts who waits."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.started = 0
        self._lock = threading.Lock()

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        with self._lock:
            self.started += 1
        self.gate.wait(30)
        return self.inner.get(key, start, length, if_match=if_match)


def fetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stagekit-fetch")]


def test_a_flipped_bit_is_fetched_again(store: MemoryStore) -> None:
    faulty = Faulty(store, bad=1)
    assert bytes(fetch(faulty, Range("object", 100, 50, block_digest(DATA[100:150])))) == DATA[100:150]
    assert faulty.gets == [(100, 50)] * 2


def test_damage_where_it_lies_is_named(store: MemoryStore) -> None:
    with pytest.raises(CorruptShard, match=r"fetch-test_damage.*/object: 50 bytes at offset 100 should have xxh3-128 .* found .* again"):
        fetch(Faulty(store, bad=9), Range("object", 100, 50, block_digest(DATA[100:150])))


@pytest.mark.parametrize(("parts", "asked"), [(1, 1), (4, 4), (16, 6)])
def test_a_range_in_parts_is_the_same_range(store: MemoryStore, parts: int, asked: int) -> None:
    """No part is smaller than half a MiB. When the whole differs from its digest, it is fetched again in one piece."""
    data = DATA * 310  # 3.1 MB
    store.put("large", data)
    wanted = Range("large", 7, len(data) - 9, block_digest(data[7:-2]), parts=parts)
    for bad in (0, 1):
        faulty = Faulty(store, bad=bad)
        assert bytes(fetch(faulty, wanted)) == data[7:-2]
        gets = sorted(faulty.gets)
        assert len(gets) == asked + bad
        assert sum(length or 0 for _, length in gets) == (bad + 1) * wanted.length
        assert all((length or 0) >= 2**19 for start, length in gets if start != gets[-1][0])
    with pytest.raises(CorruptShard, match="large: 3099991 bytes at offset 7"):
        fetch(Faulty(store, bad=99), wanted)
    store.delete("large")
    with pytest.raises(NotFound):
        fetch(store, wanted)


def joined(*lengths: int, digests: bytes = DATA) -> Range:
    """Neighbouring ranges from the object's beginning, to be asked for together."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    first, *others = (Range("object", at, size, block_digest(digests[at : at + size])) for at, size in zip(starts, lengths, strict=True))
    return replace(first, following=tuple(others))


def test_neighbours_are_asked_for_together_and_checked_one_by_one(store: MemoryStore) -> None:
    ran: list[str] = []
    for bad in (0, 1):
        faulty = Faulty(store, bad=bad)
        with Fetcher(faulty, [joined(50, 70, 30), lambda: ran.append("errand"), Range("object", 150, 10)], threads=1) as fetcher:
            assert [bytes(data) for data in fetcher] == [DATA[:50], DATA[50:120], DATA[120:150], DATA[150:160]]
        # A flipped bit costs one request more, for the one of them that it is in.
        assert faulty.gets == [(0, 150), *[(120, 30)] * bad, (150, 10)]
    assert ran == ["errand"] * 2


def test_damage_among_neighbours_is_named_in_its_place(store: MemoryStore) -> None:
    damaged = DATA[:60] + b"?" + DATA[61:]
    with Fetcher(store, [joined(50, 70, 30, digests=damaged)], threads=1) as fetcher:
        assert bytes(next(fetcher)) == DATA[:50]
        with pytest.raises(CorruptShard, match="object: 70 bytes at offset 50 should have xxh3-128"):
            next(fetcher)
    store.put("object", DATA[:100])  # one that was cut: what is there can be had
    with Fetcher(store, [joined(50, 30, 70)], threads=1) as fetcher:
        assert [bytes(next(fetcher)), bytes(next(fetcher))] == [DATA[:50], DATA[50:80]]
        with pytest.raises(InvalidReply, match="object"):
            next(fetcher)


def test_memory_of_neighbours_counts_until_the_last_is_taken(store: MemoryStore) -> None:
    gated = Gated(store)
    gated.gate.set()
    with Fetcher(gated, [joined(50, 50), Range("object", 100, 50)], threads=2, budget_bytes=140) as fetcher:
        next(fetcher)
        assert gated.started == 1
        assert [bytes(data) for data in fetcher] == [DATA[50:100], DATA[100:150]]


def test_where_answers_are_quick_less_is_fetched_ahead(store: MemoryStore) -> None:
    """In a microsecond nobody takes more than some kilobytes, so the least is enough."""
    ticks = itertools.count()
    gated = Gated(store)
    gated.gate.set()
    ranges = [Range("object", i * 1000, 1000) for i in range(10)]
    with Fetcher(gated, ranges, threads=1, budget_bytes=9000, least_bytes=2000, clock=lambda: next(ticks) * 1e-8) as fetcher:
        for number, data in enumerate(fetcher):
            assert len(data) == 1000
            assert gated.started <= number + 1 + 2


def test_a_replaced_object_is_a_conflict(store: MemoryStore) -> None:
    etag = store.head("object").etag
    store.put("object", DATA[::-1])
    with pytest.raises(Conflict):
        fetch(store, Range("object", 0, 10, if_match=etag))


@given(st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 1000)), max_size=40), st.integers(1, 6), st.integers(1, 3000))
@settings(deadline=None, max_examples=60)
def test_order_is_kept_whatever_the_threads_and_budget(spans: list[tuple[int, int]], threads: int, budget: int) -> None:
    store = MemoryStore(Location.parse("memory://fetch-order"))
    store.put("object", DATA)
    ranges = [Range("object", start, length, block_digest(DATA[start : start + length])) for start, length in spans]
    with Fetcher(store, ranges, threads=threads, budget_bytes=budget) as fetcher:
        got = [bytes(data) for data in fetcher]
    assert got == [DATA[start : start + length] for start, length in spans]
    assert fetcher.bytes_fetched == sum(length for _, length in spans)
    assert fetch_threads() == []


def test_the_budget_bounds_what_is_under_way(store: MemoryStore) -> None:
    gated = Gated(store)
    with Fetcher(gated, [Range("object", i * 100, 100) for i in range(50)], threads=8, budget_bytes=300) as fetcher:
        gated.gate.set()
        for i, data in enumerate(fetcher):
            assert bytes(data) == DATA[i * 100 : i * 100 + 100]
            assert gated.started <= i + 1 + 3  # what was handed out, and three ranges within the budget


def test_an_error_comes_in_its_place(store: MemoryStore) -> None:
    ranges = [Range("object", 0, 10), Range("object", 10, 10), Range("missing", 0, 10), Range("object", 20, 10)]
    fetcher = Fetcher(store, ranges, threads=3)
    assert [bytes(next(fetcher)), bytes(next(fetcher))] == [DATA[:10], DATA[10:20]]
    with pytest.raises(NotFound):
        next(fetcher)
    with pytest.raises(StopIteration):
        next(fetcher)
    assert fetch_threads() == []


def test_an_error_in_the_list_of_ranges_comes_in_its_place(store: MemoryStore) -> None:
    def ranges() -> Iterator[Range]:
        yield Range("object", 0, 10)
        raise Unreachable("the block table of shards/000001.tar could not be read")

    fetcher = Fetcher(store, ranges(), threads=2)
    assert bytes(next(fetcher)) == DATA[:10]
    with pytest.raises(Unreachable, match="block table"):
        next(fetcher)


def test_closing_early_stops_the_threads(store: MemoryStore) -> None:
    fetcher = Fetcher(store, (Range("object", 0, 10) for _ in iter(int, 1)), threads=4, budget_bytes=50)
    next(fetcher)
    fetcher.close()
    assert fetch_threads() == []
    assert list(fetcher) == []


def test_a_stall_names_the_object_and_shows_the_threads(store: MemoryStore) -> None:
    gated = Gated(store)
    fetcher = Fetcher(gated, [Range("object", 0, 10)], threads=1, stall_timeout_s=0.05)
    with pytest.raises(
        StallTimeout, match=r"no data for 0.05 s while reading object at offset 0 from memory:(.|\n)*stagekit-fetch-0"
    ) as caught:
        next(fetcher)
    assert isinstance(caught.value, TimeoutError)
    gated.gate.set()
    fetcher.close()


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_pieces_and_files_are_the_object(store: MemoryStore, tmp_path: Path, size: int) -> None:
    store.put("sized", DATA[:size])
    assert b"".join(bytes(piece) for piece in fetch_pieces(store, "sized", piece=100)) == DATA[:size]
    counted: list[int] = []
    fetch_file(
        store, "sized", tmp_path / "file", size=size, sha256=hashlib.sha256(DATA[:size]).hexdigest(), piece=100, on_bytes=counted.append
    )
    assert (tmp_path / "file").read_bytes() == DATA[:size]
    assert sum(counted) == size
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_one_bad_body_of_a_file_is_fetched_again(store: MemoryStore, tmp_path: Path) -> None:
    fetch_file(Faulty(store, bad=1), "object", tmp_path / "file", size=len(DATA), sha256=hashlib.sha256(DATA).hexdigest(), piece=3000)
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_file_damaged_where_it_lies_leaves_what_was_there(store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(BadDigest, match=r"expected sha-256 [0-9a-f]{64}, found [0-9a-f]{64} and then [0-9a-f]{64}"):
        fetch_file(Faulty(store, bad=99), "object", tmp_path / "file", size=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    assert (tmp_path / "file").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_of_another_size_is_told_before_it_is_fetched(store: MemoryStore, tmp_path: Path) -> None:
    faulty = Faulty(store, bad=0)
    with pytest.raises(InvalidReply, match="expected 5 bytes, the store holds 10000"):
        fetch_file(faulty, "object", tmp_path / "file", size=5)
    assert faulty.gets == []
    assert list(tmp_path.iterdir()) == []


def test_small_objects(store: MemoryStore) -> None:
    digest = hashlib.sha256(DATA).hexdigest()
    assert bytes(fetch_object(Faulty(store, bad=1), "object", sha256=digest)) == DATA
    with pytest.raises(BadDigest, match=r"expected 10000 bytes, sha-256 .* found 10000 bytes, sha-256 .* twice"):
        fetch_object(Faulty(store, bad=2), "object", size=10_000, sha256=digest)
