"""Verified uploads. Bytes are hashed while they leave, and an upload counts only once the store was asked what it holds.

An object is *verified* when its size is the one sent and, besides,

1. the store checks the digest of every put and part (``Store.checks_digest``), or
2. its etag is the MD5 (of the parts' MD5s) of what was sent, or
3. it was read back and its sha-256 is the one sent.

Nothing here overwrites with less: an object that fails verification raises ``BadDigest``, and whatever commits it (a manifest, a
block table) is never written. A store that answers that what it just took is not there is asked again; ``InvalidReply`` when it stays so.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import BadDigest, SourceError
from ..parallel import each
from ..pieces import Pieces
from ..store.base import Data, Multipart, Store
from ..store.retry import after_writing
from .fetch import PIECE

_MIB = 2**20
PART_SIZE = 16 * _MIB
_MOST_PARTS = 1000  # some Ceph installations refuse more; S3 itself allows 10,000
_JOIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that is in the store and verified: size in bytes, sha-256 as hex."""

    key: str
    size: int
    sha256: str
    etag: str | None = None


def part_size_for(size: int | None) -> int:
    """Bytes per part for an object of ``size`` (``None``: unknown): constant within an object, since R2 wants equal parts, and at most
    1,000 of them, since some Ceph gateways allow no more."""
    if size is None:
        return PART_SIZE
    needed = -(-size // _MOST_PARTS)
    return max(PART_SIZE, -(-needed // _MIB) * _MIB)


def file_sha256(path: Path) -> str:
    """The sha-256 of a local file as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def put_object(store: Store, key: str, data: Data, *, if_absent: bool = False, gone: Callable[[], None] = lambda: None) -> Stored:
    """Store ``data`` under ``key`` and verify it. Raises ``Conflict`` with ``if_absent`` when the key exists, ``BadDigest`` when the
    store holds something else afterwards. ``gone`` is called when it answers that there is no such object, before that is asked again,
    and may raise."""
    store.put(key, data, if_absent=if_absent)
    # MD5 is for comparison with an etag only; a store that checks digests spares it.
    md5 = None if store.checks_digest() else hashlib.md5(data, usedforsecurity=False).hexdigest()
    return _verify(store, key, len(data), hashlib.sha256(data).hexdigest(), md5, gone)


def put_file(
    store: Store,
    key: str,
    path: Path,
    *,
    threads: int = 4,
    part_size: int | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
    check: Callable[[], None] | None = None,
) -> Stored:
    """Store a local file in one pass: parts leave in ``threads`` threads while the next one is read and hashed.

    ``check`` is called after the last byte was read and before the object becomes visible; what it raises aborts the upload. A file
    whose length changed while it was read raises ``SourceError``. ``on_bytes`` gets the number of bytes handed to the store.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        step = part_size or part_size_for(size)
        with object_writer(store, key, threads=threads, part_size=step, check=check) as writer:
            # Never beyond the announced size: a file that grows as fast as it is read would not end.
            while piece := _read(file, min(step, size - writer.size)):
                writer.write(piece)
                on_bytes(len(piece))
            if writer.size != size or file.read(1):
                raise SourceError(
                    f"uploading {path}: it had {size} bytes when it was opened and its length changed while it was read; "
                    "repeat once nobody writes to it"
                )
    return writer.stored


def _read(file: object, size: int) -> bytes:
    """``size`` bytes; fewer only at the end of the file. Raw reads may return short, and a part must not."""
    pieces = []
    missing = size
    while missing and (piece := file.read(missing)):  # type: ignore[attr-defined]  # FileIO, whose class is private to typeshed's io
        pieces.append(piece)
        missing -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class ObjectWriter:
    """An object of unknown length on its way into a store, with at most ``threads + 2`` parts in memory. Made by ``object_writer``.

    A part that fails raises at the next ``write`` or at the end of the block, whichever comes first.
    """

    def __init__(self, store: Store, key: str, *, threads: int, part_size: int, digest: Callable[[], str] | None) -> None:
        self.key = key
        self.size = 0
        self._store = store
        self._threads = threads
        self._sha256 = None
        if digest is None:
            self._sha256 = hashlib.sha256()
            digest = self._sha256.hexdigest
        self._digest = digest
        self._md5s: list[bytes] | None = None if store.checks_digest() else []
        self._pieces = Pieces(part_size)
        self._stack = ExitStack()
        self._senders: _PartSenders | None = None
        self._parts = 0
        self._stored: Stored | None = None

    @property
    def stored(self) -> Stored:
        """What was stored. Available once the block has ended without an exception."""
        if self._stored is None:
            raise RuntimeError(f"{self.key} is not stored before its block has ended")
        return self._stored

    def write(self, data: Data) -> None:
        """Append ``data``. It may be reused by the caller once this returns, unless it is ``bytes``."""
        self.size += len(data)
        if self._sha256 is not None:
            self._sha256.update(data)
        if self._pieces.add(data):
            for part in self._pieces.full():
                self._send(part)

    def _send(self, part: Data) -> None:
        if self._senders is None:
            multipart = self._stack.enter_context(self._store.multipart(self.key, part_size=self._pieces.size))
            # Entered after the multipart, so that it is left first: no part may arrive behind the abort or the completion.
            self._senders = self._stack.enter_context(_PartSenders(multipart, self._threads, self.key))
        if self._md5s is not None:
            self._md5s.append(hashlib.md5(part, usedforsecurity=False).digest())
        self._senders.send(self._parts, part)
        self._parts += 1

    def _finish(self, check: Callable[[], None] | None) -> None:
        rest = self._pieces.rest()
        if self._senders is None:
            if check is not None:
                check()
            if self._md5s is not None:
                self._md5s.append(hashlib.md5(rest, usedforsecurity=False).digest())
            self._store.put(self.key, rest)
        else:
            if rest:
                self._send(rest)
            self._senders.wait()
            if check is not None:
                check()
        self._stack.close()
        self._stored = _verify(self._store, self.key, self.size, self._digest(), _expected_etag(self._md5s, self._parts))

    def _abandon(self, error: BaseException) -> None:
        self._stack.__exit__(type(error), error, error.__traceback__)


@contextmanager
def object_writer(
    store: Store,
    key: str,
    *,
    threads: int = 2,
    part_size: int | None = None,
    check: Callable[[], None] | None = None,
    digest: Callable[[], str] | None = None,
) -> Iterator[ObjectWriter]:
    """Write an object of unknown length: ``with object_writer(store, key) as w: w.write(…)``, then ``w.stored``.

    Leaving the block normally makes the object visible and verifies it. Leaving it by an exception, ``check`` raising, or a killed
    process leaves nothing visible under ``key``. An object shorter than one part goes as a single put. ``digest`` is asked at the end
    for the sha-256 of all that was written, when somebody else takes it; without it the writer does.
    """
    writer = ObjectWriter(store, key, threads=threads, part_size=part_size or PART_SIZE, digest=digest)
    try:
        yield writer
        writer._finish(check)
    except BaseException as error:
        writer._abandon(error)
        raise


class _PartSenders:
    """Daemon threads that send parts; at most one waits beside those on their way. Without a thread, parts are sent by the caller."""

    def __init__(self, multipart: Multipart, threads: int, key: str) -> None:
        self._multipart = multipart
        self._limit = threads + 1
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Data]] = deque()
        self._unfinished = 0
        self._closed = False
        self._error: BaseException | None = None
        self._names = [f"stagekit-put-{i} {key}" for i in range(threads)]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> _PartSenders:
        for name in self._names:
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends (Python 3.12 and later), or the system has no thread left
                break
            self._threads.append(thread)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def send(self, number: int, part: Data) -> None:
        if not self._threads:
            self._multipart.put_part(number, part)
            return
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._unfinished < self._limit)
            self._raise()
            self._waiting.append((number, part))
            self._unfinished += 1
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._unfinished)
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._waiting))
                if not self._waiting:
                    return
                number, part = self._waiting.popleft()
            try:
                self._multipart.put_part(number, part)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return
            del part  # its memory is free before the wait for the next one
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()


def _expected_etag(md5s: list[bytes] | None, parts: int) -> str | None:
    if md5s is None:
        return None
    if not parts:
        return md5s[0].hex()
    return f"{hashlib.md5(b''.join(md5s), usedforsecurity=False).hexdigest()}-{len(md5s)}"


def _verify(store: Store, key: str, size: int, sha256: str, expected_etag: str | None, gone: Callable[[], None] = lambda: None) -> Stored:
    """Ask the store what it holds: the answer to a put proves nothing."""
    info = after_writing(store, key, lambda: store.head(key), gone)
    where = store.location / key
    if info.size != size:
        raise BadDigest(
            f"uploading {where}: {size} bytes were sent and the store holds {info.size}; repeat the command, and if it stays so, "
            "the store or a proxy before it cuts uploads"
        )
    if expected_etag is None or info.etag == expected_etag:
        return Stored(key, size, sha256, info.etag)
    found = hashlib.sha256()

    def read(start: int) -> Data:
        return after_writing(store, key, lambda: store.get(key, start, min(PIECE, size - start)), gone)

    for piece in each(read, range(0, size, PIECE), threads=2):
        found.update(piece)
    if found.hexdigest() != sha256:
        raise BadDigest(
            f"uploading {where}: sha-256 {sha256} was sent and {found.hexdigest()} came back; repeat the command, and if it stays so, "
            "the store damages what it stores"
        )
    return Stored(key, size, sha256, info.etag)
