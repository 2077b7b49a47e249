"""Uploads count only once the store was asked what it holds; anything else leaves nothing visible."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.errors import BadDigest, Conflict, InvalidReply, NotFound, SourceError, Unreachable
from stagekit.location import Location
from stagekit.store.base import Data, Multipart, ObjectInfo, Store, WrappedStore
from stagekit.store.memory import MemoryStore
from stagekit.store.retry import RetryStore
from stagekit.transfer.put import PART_SIZE, object_writer, part_size_for, put_file, put_object

PART = 1000


@pytest.fixture
def store(request: pytest.FixtureRequest) -> MemoryStore:
    return MemoryStore(Location.parse(f"memory://{request.node.name.replace('[', '-').replace(']', '')}"))


class Truncating(WrappedStore):
    """Accepts everything and keeps one byte less."""

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        return self.inner.put(key, bytes(data)[:-1], if_absent=if_absent)


class Damaging(WrappedStore):
    """Keeps the length and flips a bit, and has neither digests nor MD5 etags to tell it by."""

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        damaged = bytearray(data)
        damaged[len(damaged) // 2] ^= 1
        return self.inner.put(key, damaged, if_absent=if_absent)

    def checks_digest(self) -> bool:
        return False

    def head(self, key: str) -> ObjectInfo:
        info = self.inner.head(key)
        return ObjectInfo(info.key, info.size, '"not-an-md5"')


class Md5Etags(WrappedStore):
    """Like S3 without digest checks: etags are MD5s, and reading back is counted."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.gets = 0
        self.md5s: dict[int, bytes] = {}
        self.etag: str | None = None

    def checks_digest(self) -> bool:
        return False

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        self.etag = hashlib.md5(data).hexdigest()
        return self.inner.put(key, data, if_absent=if_absent)

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[Multipart]:
        outer = self

        class Recorded:
            part_size: int
            info: ObjectInfo

            def put_part(self, number: int, data: Data) -> None:
                outer.md5s[number] = hashlib.md5(data).digest()
                inner.put_part(number, data)

        with self.inner.multipart(key, part_size=part_size) as inner:
            yield Recorded()
        self.etag = hashlib.md5(b"".join(self.md5s[n] for n in sorted(self.md5s))).hexdigest() + f"-{len(self.md5s)}"

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, self.inner.head(key).size, self.etag)

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        self.gets += 1
        return self.inner.get(key, start, length)


class FailingPart(WrappedStore):
    """The third part cannot be sent."""

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[Multipart]:
        class Failing:
            part_size: int
            info: ObjectInfo

            def put_part(self, number: int, data: Data) -> None:
                if number == 2:
                    raise Unreachable("sending part 2: connection reset")
                inner.put_part(number, data)

        with self.inner.multipart(key, part_size=part_size) as inner:
            yield Failing()


@given(pieces=st.lists(st.binary(max_size=2500), max_size=12), threads=st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_any_cut_of_writes_gives_the_same_object(pieces: list[bytes], threads: int) -> None:
    store = MemoryStore(Location.parse("memory://cuts"))
    with object_writer(store, "object", threads=threads, part_size=PART) as writer:
        for piece in pieces:
            writer.write(piece)
    whole = b"".join(pieces)
    assert bytes(store.get("object")) == whole
    assert (writer.stored.size, writer.stored.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())


def test_a_buffer_may_be_reused_after_write(store: MemoryStore) -> None:
    buffer = bytearray(PART)
    with object_writer(store, "object", part_size=PART) as writer:
        for value in range(5):
            buffer[:] = bytes([value]) * PART
            writer.write(buffer)
    assert bytes(store.get("object")) == b"".join(bytes([value]) * PART for value in range(5))


@pytest.mark.parametrize("written", [10, 3 * PART, 3 * PART + 1])
def test_an_exception_in_the_block_leaves_nothing(store: MemoryStore, written: int) -> None:
    with pytest.raises(ZeroDivisionError), object_writer(store, "object", part_size=PART) as writer:
        writer.write(bytes(written))
        raise ZeroDivisionError
    with pytest.raises(NotFound):
        store.head("object")
    assert list(store.open_uploads()) == []
    with pytest.raises(RuntimeError, match="not stored"):
        _ = writer.stored


def test_a_failed_part_surfaces_and_leaves_nothing_and_no_thread(store: MemoryStore) -> None:
    with pytest.raises(Unreachable, match="part 2"), object_writer(FailingPart(store), "object", part_size=PART) as writer:
        for _ in range(50):
            writer.write(bytes(PART))
    assert list(store.list()) == []
    assert list(store.open_uploads()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stagekit-put")]


def test_a_check_that_raises_keeps_the_object_invisible(store: MemoryStore, tmp_path: Path) -> None:
    def changed() -> None:
        raise SourceError("the file was rewritten")

    for size in (5, 3 * PART):
        (tmp_path / "file").write_bytes(bytes(size))
        with pytest.raises(SourceError, match="rewritten"):
            put_file(store, "object", tmp_path / "file", part_size=PART, check=changed)
    assert list(store.list()) == []


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 7 * PART, 7 * PART + 13])
def test_put_file(store: MemoryStore, tmp_path: Path, size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(data)
    sent: list[int] = []
    stored = put_file(store, "object", tmp_path / "file", part_size=PART, on_bytes=sent.append)
    assert bytes(store.get("object")) == data
    assert (stored.size, stored.sha256, sum(sent)) == (size, hashlib.sha256(data).hexdigest(), size)


def test_a_file_that_grows_while_it_is_read_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    path = tmp_path / "growing"
    path.write_bytes(bytes(3 * PART))

    def grow(_: int) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.raises(SourceError, match=r"growing: it had 3000 bytes .* its length changed .* repeat once"):
        put_file(store, "object", path, part_size=PART, on_bytes=grow)
    assert list(store.list()) == []


def test_a_truncating_store_is_caught(store: MemoryStore) -> None:
    with pytest.raises(BadDigest, match=r"object: 9 bytes were sent and the store holds 8"):
        put_object(Truncating(store), "object", b"123456789")


def test_a_damaging_store_is_caught_by_reading_back(store: MemoryStore) -> None:
    with pytest.raises(BadDigest, match=r"sha-256 [0-9a-f]{64} was sent and [0-9a-f]{64} came back"):
        put_object(Damaging(store), "object", b"123456789")


@pytest.mark.parametrize("size", [9, 5 * PART + 1])
def test_md5_etags_spare_reading_back(store: MemoryStore, size: int) -> None:
    lookup = Md5Etags(store)
    with object_writer(lookup, "object", part_size=PART) as writer:
        writer.write(bytes(size))
    assert lookup.gets == 0
    lookup.etag = None
    put_object(lookup, "other", b"x")
    assert lookup.gets == 0


class Forgetful(WrappedStore):
    """Answers that there is nothing of that name, so many times."""

    def __init__(self, inner: Store, times: int) -> None:
        super().__init__(inner)
        self.times = times

    def _answer(self, key: str) -> None:
        if self.times:
            self.times -= 1
            raise NotFound(f"looking up {self.location / key}: there is no such object")

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        self._answer(key)
        return self.inner.put(key, data, if_absent=if_absent)

    def head(self, key: str) -> ObjectInfo:
        self._answer(key)
        return self.inner.head(key)


def test_an_object_that_the_store_just_took_is_asked_for_again(store: MemoryStore) -> None:
    slept: list[float] = []
    patient = RetryStore(Forgetful(store, 3), clock=lambda: 0.0, sleep=slept.append)
    assert put_object(WrappedStore(patient), "object", b"bytes").size == 5
    assert len(slept) == 3
    with pytest.raises(InvalidReply, match=r"writing memory://\S+object: the store was given the object and answers that there is no such"):
        put_object(RetryStore(Forgetful(store, 10**9), 0), "object", b"bytes")
    with pytest.raises(NotFound):  # nothing was written before this question
        RetryStore(Forgetful(store, 1)).head("object")


def test_if_absent(store: MemoryStore) -> None:
    put_object(store, "object", b"first", if_absent=True)
    with pytest.raises(Conflict):
        put_object(store, "object", b"second", if_absent=True)
    assert bytes(store.get("object")) == b"first"


@pytest.mark.parametrize("size", [None, 0, 10**6, PART_SIZE * 1000, PART_SIZE * 1000 + 1, 5 * 2**40])
def test_part_sizes(size: int | None) -> None:
    part = part_size_for(size)
    assert part >= PART_SIZE
    assert part % 2**20 == 0
    if size is not None:
        assert -(-size // part) <= 1000
