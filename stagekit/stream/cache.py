"""Blocks kept on a local disk between epochs and jobs: found by digest, checked when they are used, never above a limit.

::

    CACHE_DIR/ledger                      bytes held (8 bytes, little-endian); its byte ranges are the locks
    CACHE_DIR/incoming/<slot>-<n>         being written; as large as the block from the moment it is there
    CACHE_DIR/<data set>/<block>          a block: both names are the first 32 digits of digests

The ledger is raised before a file is made and lowered after one is gone, under a lock, so the files never hold more than it says and it
never says more than the limit, whoever is killed in between. What it says too much is found when the cache is full: then the files are
counted.

All locks are POSIX record locks on the ledger: byte 0 guards it, and each process holds one byte of its own, its *slot*, as long as it
lives. The kernel drops them with the process, does not hand them on to forked children, and keeps them wherever the directory is shared, so
that a killed process leaves nothing but files which the next one recognises and removes.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..budget import left_to_cache
from ..errors import UsageError
from ..location import Location
from ..mounts import refuse_mount
from ..progress import Message, Subscriber, ignore
from ..shards.index import block_digest
from ..store.base import Data, Store
from ..transfer.fetch import Range, fetch
from ..units import format_size

ON_THIS_MACHINE = frozenset({"file", "local", "memory"})
"""Schemes of locations whose data is here already, or means nothing elsewhere."""

_NAME = re.compile(r"[0-9a-f]{32}")
_INCOMING = "incoming"
_SLOTS = 2**62
_COUNT_AGAIN_S = 60.0


class Cache:
    """Blocks of one data set, kept in ``directory`` beside those of others, at most ``limit`` bytes together at every moment.

    Any number of processes of one user may share the directory: a block that one rank fetched is there for all. A block is written under
    a temporary name and renamed, and compared with its digest each time it is read: one that is damaged is removed and fetched again. When
    the limit is reached, blocks of *other* data sets go, longest unused first, but none that is being read. Blocks of this one stay, and no
    more are added: of a data set that is read in a new order every epoch, that keeps the most.

    A disk that is full, or that fails, never ends the training: it goes on without caching, and says so once. Blocks that lie on this
    machine are not cached. A process may be killed at any point and leaves nothing to clean.

    :param dataset: the data set's digest
    :param largest_block: the largest of its blocks, in bytes; a limit below that raises ``UsageError`` with both numbers
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit: int,
        *,
        dataset: str,
        largest_block: int,
        allow_mount: bool = False,
        on_event: Subscriber = ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limit < largest_block:
            raise UsageError(
                f"cache_limit: {format_size(limit)} ({limit} bytes) is less than one block of this data set, whose largest has "
                f"{format_size(largest_block)} ({largest_block} bytes); raise cache_limit=, or leave out the cache"
            )
        wanted = Path(directory).expanduser().absolute()
        judged = refuse_mount(wanted, "caching blocks in", allow_mount=allow_mount)
        if judged.warning:
            on_event(Message(judged.warning, "warning"))
        self.directory = wanted.resolve()  # only now: touching a mount that hangs would block
        self.limit = limit
        self._own = self.directory / dataset[:32]
        self._kept = {self._own.name}
        self._on_event = on_event
        self._clock = clock
        self._off = False
        self._candidates: list[_File] = []
        self._counted_at: float | None = None
        self._ledger: _Ledger | None = None
        try:
            for folder in (self.directory / _INCOMING, self._own):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise UsageError(
                    f"cache_dir: {self.directory} cannot be used ({error.strerror or error}); give a directory that you may write to"
                ) from error
            self._switch_off(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_event": ignore, "_ledger": None, "_candidates": [], "_counted_at": None}

    def __repr__(self) -> str:
        return f"<Cache {self.directory}: up to {format_size(self.limit)}>"

    def share_with(self, datasets: Iterable[str]) -> None:
        """Treat blocks of the data sets with these digests like this one's own, since all are read together."""
        self._kept |= {digest[:32] for digest in datasets}

    @property
    def held_bytes(self) -> int:
        """What the directory holds at most, of all data sets and with what is being written."""
        with self._open().locked() as ledger:
            return ledger.held

    def fetch(self, store: Store, wanted: Range) -> tuple[Data, bool]:
        """The bytes of ``wanted``, checked, and whether they were here. Raises what ``transfer.fetch.fetch`` does."""
        if self._off or wanted.digest is None or _is_here(store, wanted):
            return fetch(store, wanted), False
        found = self._read(wanted, wanted.digest)
        if found is not None:
            return found, True
        data = fetch(store, wanted)
        try:
            self._keep(wanted.digest, data)
        except OSError as error:
            self._switch_off(error)
        return data, False

    def _open(self) -> _Ledger:
        if self._ledger is None:
            self._ledger = _Ledger.of(self.directory)
            with self._ledger.locked() as ledger:
                if not ledger.written:
                    ledger.held = 0
                    self._count(ledger)
                for one in list(_entries(self.directory / _INCOMING)):
                    if not ledger.lives(one.path.name):
                        _remove(ledger, one.path)
                if ledger.held > self.limit:
                    # An earlier job was allowed more. Nobody promised that its blocks stay.
                    self._count(ledger)
                    self._evict(ledger, self.limit, [*self._candidates, *_oldest_first(_entries(self._own))])
        return self._ledger

    def _switch_off(self, error: OSError) -> None:
        if self._off:
            return
        self._off = True
        told = f"the cache in {self.directory} cannot be written ({error.strerror or error}); reading goes on without it"
        self._on_event(Message(told, "warning"))
        warnings.warn(told, RuntimeWarning, stacklevel=2)

    def _path(self, digest: bytes) -> Path:
        return self._own / digest.hex()

    def _read(self, wanted: Range, digest: bytes) -> bytes | None:
        path = self._path(digest)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # whoever makes room leaves it alone
            data = os.pread(descriptor, wanted.length + 1, 0)
            with suppress(OSError):
                os.utime(descriptor)  # a directory that may only be read is a cache, too
        except OSError:
            data = b""
        finally:
            os.close(descriptor)
        if len(data) == wanted.length and block_digest(data) == digest:
            return data
        with suppress(OSError), self._open().locked() as ledger:
            _remove(ledger, path, booked=wanted.length)
        return None

    def _keep(self, digest: bytes, data: Data) -> None:
        path, size = self._path(digest), len(data)
        with self._open().locked() as ledger:
            if path.exists() or not self._make_room(ledger, size):
                return
            ledger.held += size
            temporary = self.directory / _INCOMING / ledger.new_name()
            descriptor = -1
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                os.truncate(descriptor, size)  # so that it counts as what it will be
            except OSError:
                if descriptor >= 0:
                    os.close(descriptor)
                    temporary.unlink(missing_ok=True)
                ledger.held -= size
                raise
        done = False
        try:
            try:
                _write(descriptor, data)
            finally:
                os.close(descriptor)
            with self._open().locked() as ledger:
                if not path.exists():
                    temporary.rename(path)
                    done = True
        finally:
            if not done:  # another process was faster, or the disk is full
                with self._open().locked() as ledger:
                    _remove(ledger, temporary)

    def _make_room(self, ledger: _Ledger, size: int) -> bool:
        """Whether ``size`` more bytes fit, after others' blocks went where that is needed."""
        left = left_to_cache()
        limit = self.limit if left is None else min(self.limit, left)
        if ledger.held + size <= limit:
            return True
        self._evict(ledger, limit - size, self._candidates)
        if ledger.held + size > limit and (self._counted_at is None or self._clock() - self._counted_at >= _COUNT_AGAIN_S):
            self._count(ledger)
            self._evict(ledger, limit - size, self._candidates)
        return ledger.held + size <= limit

    def _evict(self, ledger: _Ledger, target: int, candidates: list[_File]) -> None:
        """Remove ``candidates``, which are drawn off, until no more than ``target`` bytes are held."""
        candidates.reverse()
        while ledger.held > target and candidates:
            one = candidates.pop()
            with suppress(OSError):
                if one.path.stat().st_mtime_ns == one.used_ns:
                    _remove(ledger, one.path, unless_read=True)
        candidates.reverse()

    def _count(self, ledger: _Ledger) -> None:
        """Set the ledger to what the files hold, remove what killed processes left, and see what others' blocks there are."""
        self._counted_at = self._clock()
        held, others = 0, list[_File]()
        for folder in os.scandir(self.directory):
            if folder.name == _INCOMING:
                for one in _entries(Path(folder.path)):
                    if ledger.lives(one.path.name):
                        held += one.size
                    else:
                        one.path.unlink(missing_ok=True)
            elif _NAME.fullmatch(folder.name):
                found = [one for one in _entries(Path(folder.path)) if _NAME.fullmatch(one.path.name)]
                held += sum(one.size for one in found)
                if folder.name not in self._kept:
                    others += found
        ledger.held = held
        self._candidates = _oldest_first(others)


def give_way(directory: Path, target: int) -> tuple[int, int]:
    """Remove blocks of the cache in ``directory``, longest unused first and none that is being read, until it holds ``target`` bytes.

    Returns the bytes removed, and those still held, with what is being written. A directory without a cache holds none.
    """
    if not (directory / "ledger").exists():
        return 0, 0
    with _Ledger.of(directory.resolve()).locked() as ledger:
        before = ledger.held
        blocks = [
            one
            for folder in os.scandir(directory)
            if _NAME.fullmatch(folder.name)
            for one in _entries(Path(folder.path))
            if _NAME.fullmatch(one.path.name)
        ]
        for one in _oldest_first(blocks):
            if ledger.held <= target:
                break
            with suppress(OSError):
                _remove(ledger, one.path, unless_read=True)
        return before - ledger.held, ledger.held


class CachedFetch:
    """``transfer.fetch.fetch`` through a cache, counting the bytes that were there."""

    def __init__(self, cache: Cache) -> None:
        self.cached_bytes = 0
        self._cache = cache
        self._lock = threading.Lock()

    def __call__(self, store: Store, wanted: Range) -> Data:
        data, here = self._cache.fetch(store, wanted)
        if here:
            with self._lock:
                self.cached_bytes += len(data)
        return data


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    size: int
    used_ns: int


def _is_here(store: Store, wanted: Range) -> bool:
    location = store.location if wanted.url is None else Location.parse(wanted.url)
    return location.scheme in ON_THIS_MACHINE


def _entries(folder: Path) -> Iterator[_File]:
    with os.scandir(folder) as found:
        for one in found:
            with suppress(FileNotFoundError):
                stat = one.stat(follow_symlinks=False)
                yield _File(Path(one.path), stat.st_size, stat.st_mtime_ns)


def _oldest_first(files: Iterator[_File] | list[_File]) -> list[_File]:
    return sorted(files, key=lambda one: one.used_ns)


def _remove(ledger: _Ledger, path: Path, *, booked: int | None = None, unless_read: bool = False) -> None:
    """Unlink ``path``, if it is there, and lower the ledger by its size, or by ``booked`` where the file may not have that size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if unless_read:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError when somebody reads it
        size = os.fstat(descriptor).st_size if booked is None else booked
        path.unlink()
    finally:
        os.close(descriptor)
    ledger.held -= size


def _write(descriptor: int, data: Data) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


class _Ledger:
    """The open ledger of one directory: one for all caches of this process, since closing any descriptor of it drops all its locks."""

    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory / "ledger", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self.renew()

    @classmethod
    def of(cls, directory: Path) -> _Ledger:
        """The ledger of ``directory`` in this process."""
        with _registry_lock:
            found = _registry.get(directory)
            if found is None:
                found = _registry[directory] = cls(directory)
            return found

    def renew(self) -> None:
        """In a forked child: the parent's locks are not ours, the descriptor is."""
        self._mutex = threading.Lock()
        self._slot: int | None = None
        self._numbers = itertools.count()

    @contextmanager
    def locked(self) -> Iterator[_Ledger]:
        """Alone in this directory, over all threads and processes."""
        with self._mutex:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, 0)
            try:
                yield self
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 0)

    @property
    def written(self) -> bool:
        return os.fstat(self._descriptor).st_size == 8

    @property
    def held(self) -> int:
        return int.from_bytes(os.pread(self._descriptor, 8, 0), "little")

    @held.setter
    def held(self, value: int) -> None:
        os.pwrite(self._descriptor, max(value, 0).to_bytes(8, "little"), 0)

    def new_name(self) -> str:
        """A name for a file in ``incoming`` that tells whose it is."""
        while self._slot is None:
            slot = 1 + secrets.randbelow(_SLOTS)
            with suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
                self._slot = slot
        return f"{self._slot}-{next(self._numbers)}"

    def lives(self, name: str) -> bool:
        """Whether the process that made the file ``name`` still lives."""
        slot = name.partition("-")[0]
        if not slot.isdigit() or int(slot) == self._slot:
            return slot.isdigit()
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(slot))
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, int(slot))
        return False


_registry: weakref.WeakValueDictionary[Path, _Ledger] = weakref.WeakValueDictionary()
_registry_lock = threading.Lock()


def _after_fork() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()
    for ledger in list(_registry.values()):
        ledger.renew()


os.register_at_fork(after_in_child=_after_fork)
