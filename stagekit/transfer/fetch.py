"""Checked downloads: ranges in parallel, handed out in order, compared with the digest that the block table or manifest holds.

Every request goes through ``fetch``: a body that differs from its digest is fetched once more (a flipped bit on the way heals), then
``CorruptShard`` names the object, the offset and both digests (it is damaged where it lies).
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import BadDigest, CorruptShard, InvalidReply, OutOfSpace, StallTimeout, StoreError
from ..parallel import each
from ..shards.index import block_digest
from ..store.abandon import Caller, carried
from ..store.base import Data, Store
from ..store.buffers import Buffers

PIECE = 8 * 2**20
_FASTEST = 2.5e9  # bytes a second: more than anybody takes
_LEAST_PART = 2**19  # bytes; less costs more in requests than it saves in time
_JOIN_S = 0.5  # only for what cannot be broken off


@dataclass(frozen=True, slots=True)
class Range:
    """``length`` bytes of an object from ``start``, with the xxh3-128 they must have (``None``: not known).

    ``url`` is what messages call the object where the store keeps it elsewhere (``store.routed``). With ``parts`` it is asked for by up to
    that many requests at the same time, where somebody waits for this range alone and connections are idle. ``following`` are ranges
    that begin where the one before ends: a ``Fetcher`` asks for all of them with one request, and hands them out one by one.
    """

    key: str
    start: int
    length: int
    digest: bytes | None = None
    if_match: str | None = None
    url: str | None = None
    parts: int = 1
    following: tuple[Range, ...] = ()


Errand = Callable[[], object]
"""Something that what comes later needs, to be done beside the fetching. It keeps its errors to itself."""


def fetch(store: Store, wanted: Range) -> Data:
    """The bytes of ``wanted``, checked. Raises ``CorruptShard`` when they differ from their digest twice, ``Conflict`` when the object
    was replaced (``if_match``), and the store's own errors."""
    return _checked(store, wanted, _get(store, wanted))


def fetch_joined(store: Store, wanted: Range) -> Iterator[Data]:
    """The bytes of ``wanted`` and of those ``following`` it, out of one request, each checked like ``fetch`` does when it is taken.

    Where the store says that it cannot be so (an object that is shorter, say), each is asked for alone, and is what it is.
    """
    ranges = (wanted, *wanted.following)
    try:
        whole = memoryview(store.get(wanted.key, wanted.start, sum(one.length for one in ranges), if_match=wanted.if_match))
    except StoreError as error:
        if error.transient:
            raise
        yield from (fetch(store, one) for one in ranges)
        return
    for one in ranges:
        yield _checked(store, one, whole[one.start - wanted.start :][: one.length])


def _checked(store: Store, wanted: Range, data: Data) -> Data:
    if wanted.digest is None:
        return data
    first = block_digest(data)
    if first == wanted.digest:
        return data
    data = store.get(wanted.key, wanted.start, wanted.length, if_match=wanted.if_match)
    second = block_digest(data)
    if second == wanted.digest:
        return data
    again = "again" if second == first else f"{second.hex()} when fetched again"
    raise CorruptShard(
        f"{wanted.url or store.location / wanted.key}: {wanted.length} bytes at offset {wanted.start} should have xxh3-128 "
        f"{wanted.digest.hex()}, found {first.hex()}, {again}; check the data set with `stagekit verify --deep`, and shard that part anew"
    )


def _get(store: Store, wanted: Range) -> Data:
    size = max(_LEAST_PART, -(-wanted.length // wanted.parts))
    if size >= wanted.length:
        return store.get(wanted.key, wanted.start, wanted.length, if_match=wanted.if_match)
    end = wanted.start + wanted.length
    starts = range(wanted.start, end, size)
    get = carried(lambda at: store.get(wanted.key, at, min(size, end - at), if_match=wanted.if_match))
    return b"".join(each(get, starts, threads=len(starts)))


def fetch_object(store: Store, key: str, *, size: int | None = None, sha256: str | None = None) -> Data:
    """A small object whole. With ``size`` or ``sha256`` it is compared, fetched once more when it differs, then ``BadDigest``."""
    problem = ""
    for _ in range(2):
        data = store.get(key)
        found = hashlib.sha256(data).hexdigest() if sha256 is not None else None
        if (size is None or len(data) == size) and found == sha256:
            return data
        problem = f"{len(data)} bytes" + (f", sha-256 {found}" if found else "")
    expected = ", ".join(filter(None, [f"{size} bytes" if size is not None else "", f"sha-256 {sha256}" if sha256 else ""]))
    raise BadDigest(f"reading {store.location / key}: expected {expected}, found {problem} twice; the object is damaged or was replaced")


class Fetcher:
    """Iterate over ``ranges`` and get their bytes in the same order, fetched ahead by ``threads`` daemon threads.

    Bytes on their way or waiting to be taken stay within ``budget_bytes``; a single larger request is let through alone. With
    ``least_bytes`` they may be as few as that, where answers are so quick that more would be of no use. ``ranges`` is drawn lazily, in
    the threads, one draw at a time; an ``Errand`` among them is run by the thread that drew it. An error is raised in its range's place,
    after everything before it was handed out; then the iteration is over. A wait longer than ``stall_timeout_s`` raises ``StallTimeout``
    with the object's name and what every fetch thread is doing. Leaving the ``with`` block, or ``close()``, stops the threads; a read
    that one is in is broken off where it can be (``store.abandon``), else the thread ends with it.

    ``get`` is what reads a range without others behind it: ``fetch``, or something in front of it such as a cache.
    """

    def __init__(
        self,
        store: Store,
        ranges: Iterable[Range | Errand],
        *,
        threads: int = 4,
        budget_bytes: int = 16 * PIECE,
        least_bytes: int | None = None,
        stall_timeout_s: float | None = None,
        get: Callable[[Store, Range], Data] = fetch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_fetched = 0
        self.waited_s = 0.0
        self._store = store
        self._ranges = iter(ranges)
        self._budget = budget_bytes
        self._least = budget_bytes if least_bytes is None else least_bytes
        self._quickest_s = math.inf
        self._stall_timeout_s = stall_timeout_s
        self._get = get
        self._clock = clock
        self._drawing = threading.Lock()
        self._changed = threading.Condition()
        self._slots: deque[_Slot] = deque()
        self._held = 0
        self._exhausted = False
        self._closed = False
        self._caller = Caller()
        self._buffers = Buffers()
        self._threads = [threading.Thread(target=self._run, name=f"stagekit-fetch-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Data:
        with self._changed:
            if not self._ready():
                self._wait()
            if not self._slots:
                raise StopIteration
            slot = self._slots.popleft()
            self._held -= slot.frees
            self._changed.notify_all()
        if slot.error is not None:
            self.close()
            raise slot.error
        assert slot.data is not None
        return slot.data

    def _ready(self) -> bool:
        return self._slots[0].done if self._slots else self._exhausted or self._closed

    def _wait(self) -> None:
        began = self._clock()
        answered = self._changed.wait_for(self._ready, self._stall_timeout_s)
        self.waited_s += self._clock() - began
        if not answered:
            waiting_for = self._slots[0].what if self._slots else "the next block table"
            stacks = self._stacks()
            self._closed = True
            self._changed.notify_all()
            self._caller.abandon()
            raise StallTimeout(
                f"no data for {self._stall_timeout_s:g} s while reading {waiting_for} from {self._store.location}; check the link and the "
                f"endpoint, or raise stall_timeout_s. The fetch threads were here:\n{stacks}"
            )

    def _stacks(self) -> str:
        frames = sys._current_frames()
        shown = []
        for thread in self._threads:
            frame = frames.get(thread.ident or 0)
            if frame is not None:
                last = "".join(traceback.format_stack(frame)[-4:])
                shown.append(f"{thread.name}:\n{last}")
        return "\n".join(shown)

    def close(self) -> None:
        """Stop fetching. What was not taken yet is dropped. May be called twice."""
        with self._changed:
            self._closed = True
            self._slots.clear()
            self._changed.notify_all()
        self._caller.abandon()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _draw(self) -> tuple[list[_Slot], Range] | Errand | None:
        """The next request and its places in the order, once the budget admits it. One thread at a time, so that places follow the draw."""
        with self._drawing:
            if self._exhausted or self._closed:
                return None
            try:
                wanted = next(self._ranges, None)
            except BaseException as error:
                with self._changed:
                    self._exhausted = True
                    self._slots.append(_Slot("the list of ranges", 0, error=error, done=True))
                    self._changed.notify_all()
                return None
            with self._changed:
                if wanted is None:
                    self._exhausted = True
                    self._changed.notify_all()
                    return None
                if not isinstance(wanted, Range):
                    return wanted
                ranges = (wanted, *wanted.following)
                length = sum(one.length for one in ranges)
                self._changed.wait_for(lambda: self._closed or not self._held or self._held + length <= self._allowed)
                if self._closed:
                    return None
                slots = [_Slot(f"{one.url or one.key} at offset {one.start}") for one in ranges]
                slots[-1].frees = length  # they are parts of one piece of memory
                self._slots += slots
                self._held += length
                return slots, wanted

    @property
    def _allowed(self) -> int:
        """The bytes that may be held now: as many as anybody could take while a few requests are answered, one after another. More memory
        than that only costs time where the link is quick: the system clears it first, and it is too much for the processor's cache."""
        return int(min(self._budget, max(self._least, 3 * self._quickest_s * _FASTEST)))

    def _run(self) -> None:
        with self._caller.calling(), self._buffers.lent():
            while drawn := self._draw():
                if not isinstance(drawn, tuple):
                    drawn()
                elif not self._fetch(*drawn):
                    return
                del drawn

    def _fetch(self, slots: list[_Slot], wanted: Range) -> bool:
        """Fill ``slots``. False after an error."""
        found = fetch_joined(self._store, wanted) if wanted.following else None
        began = self._clock()
        for slot in slots:
            try:
                data = self._get(self._store, wanted) if found is None else next(found)
            except BaseException as error:
                with self._changed:
                    slot.error, slot.done = error, True
                    self._exhausted = True  # nothing behind an error is handed out, so nothing more is fetched
                    self._changed.notify_all()
                return False
            with self._changed:
                self._quickest_s = min(self._quickest_s, self._clock() - began)
                slot.data, slot.done = data, True
                self.bytes_fetched += len(data)
                self._changed.notify_all()
            del data
        return True


@dataclass(slots=True)
class _Slot:
    what: str
    frees: int = 0
    data: Data | None = None
    error: BaseException | None = None
    done: bool = False


def fetch_pieces(
    store: Store, key: str, *, size: int | None = None, etag: str | None = None, threads: int = 4, piece: int = PIECE
) -> Iterator[Data]:
    """A whole object in order, as pieces of ``piece`` bytes, in ``O(threads * piece)`` memory.

    ``size`` and ``etag`` spare the HEAD. An object that is replaced meanwhile raises ``Conflict`` where the store has etags.
    """
    if size is None:
        info = store.head(key)
        size, etag = info.size, info.etag
    ranges = (Range(key, start, min(piece, size - start), if_match=etag) for start in range(0, size, piece))
    with Fetcher(store, ranges, threads=min(threads, max(1, -(-size // piece))), budget_bytes=(threads + 1) * piece) as fetcher:
        yield from fetcher


def fetch_file(
    store: Store,
    key: str,
    path: Path,
    *,
    size: int,
    sha256: str | None = None,
    threads: int = 8,
    piece: int = PIECE,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Write an object to ``path``: parallel ranges into a temporary name beside it, hashed on the way, then renamed.

    ``path`` is there completely or not at all; what was there before stays until then. A body whose sha-256 differs is fetched once
    more, then ``BadDigest`` names both. A full disk or an exceeded quota raises ``OutOfSpace`` and removes the temporary file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident():x}.part")
    try:
        found = _fetch_to(store, key, temporary, size, threads, piece, on_bytes)
        if sha256 is not None and found != sha256:
            on_bytes(-size)
            again = _fetch_to(store, key, temporary, size, threads, piece, on_bytes)
            if again != sha256:
                raise BadDigest(
                    f"reading {store.location / key}: expected sha-256 {sha256}, found {found} and then {again}; "
                    "the object is damaged or was replaced"
                )
        temporary.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"writing {path}: the disk or quota is full ({size} bytes were needed); free space and repeat") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _fetch_to(store: Store, key: str, path: Path, size: int, threads: int, piece: int, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    info = store.head(key)
    if info.size != size:
        raise InvalidReply(f"reading {store.location / key}: expected {size} bytes, the store holds {info.size}", transient=False)
    with path.open("wb") as file:
        for data in fetch_pieces(store, key, size=size, etag=info.etag, threads=threads, piece=piece):
            digest.update(data)
            file.write(data)
            on_bytes(len(data))
    return digest.hexdigest()
