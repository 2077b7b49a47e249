"""A folder on this machine as a source: walked once, each file opened when its turn comes and checked against what was listed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import SourceError, UsageError
from ..location import Location
from ..shards.index import Batch
from ..shards.plan import PlannedSample
from ..store.base import Data
from .base import Listing, Payload, Read
from .files import TEXT, FileRules, Files, text_of

SMALL = 8 * 2**20  # a sample up to this size is read whole, which costs one system call a file and moves every error to the front
_PIECE = 2**20
_BATCHED = 256 * 1024  # a file up to this size goes with others
_BATCH_BYTES = 512 * 1024
# Without O_NONBLOCK, opening a pipe that took the file's place would wait for ever.
_FOLLOW = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_STAY = _FOLLOW | os.O_NOFOLLOW


@dataclass(frozen=True)
class FolderSource:
    """The files below ``path`` that ``rules`` let through, sorted by name.

    ``symlinks="follow"`` packs what a link points to, ``"skip"`` leaves links out and counts them. Sockets, pipes and devices are never
    packed, and counted. A broken link, a link that leads back up, or a directory that cannot be listed raises ``SourceError`` with the
    path; with ``on_bad="skip"`` it is counted and listed instead.
    """

    path: str
    rules: FileRules = field(default_factory=FileRules)
    symlinks: Literal["follow", "skip"] = "follow"

    def __post_init__(self) -> None:
        if self.symlinks not in ("follow", "skip"):
            raise UsageError(f"symlinks: {self.symlinks!r} is neither 'follow' nor 'skip'")

    @property
    def readers(self) -> int:
        return 1

    @property
    def name(self) -> str:
        return self.path

    @property
    def location(self) -> Location:
        return Location.parse(self.path)

    def listing(self) -> Listing:
        return _Walk(self).listing()

    def read(self, sample: PlannedSample) -> Payload:
        small = sum([size for _, size, _, _ in sample.fields]) <= SMALL
        follow = self.symlinks == "follow"
        payload: Payload = []
        for name, size, ref, mark in sample.fields:
            text = text_of(ref)
            if text is not None:
                payload.append((name, size, (text,)))
                continue
            opened = OpenedLate(f"{self.path}/{ref}", size, mark, follow=follow)
            payload.append((name, size, (opened.whole(),) if small else opened.checked()))
        return payload

    def read_in_order(self, samples: Sequence[PlannedSample]) -> Iterator[Read]:
        """Samples of one small file each come several at once, which is what most folders of many files hold."""
        follow = self.symlinks == "follow"
        batched, total = "", 0
        keys: list[str] = []
        payloads: list[bytes] = []
        for sample in samples:
            name, size, ref, mark = sample.fields[0]
            single = len(sample.fields) == 1 and size <= _BATCHED and not ref.startswith(TEXT)
            if keys and (not single or name != batched or total + size > _BATCH_BYTES):
                yield Batch(keys, batched, payloads)
                keys, payloads, total = [], [], 0
            try:
                if single:
                    payloads.append(OpenedLate(f"{self.path}/{ref}", size, mark, follow=follow).whole())
                    keys.append(sample.key)
                    batched, total = name, total + size
                    continue
                payload = self.read(sample)
            except SourceError as error:
                if keys:
                    yield Batch(keys, batched, payloads)
                    keys, payloads, total = [], [], 0
                yield sample.key, error
            else:
                yield sample.key, payload
        if keys:
            yield Batch(keys, batched, payloads)


class _Walk:
    """One walk over the folder, handing every file to ``Files``."""

    def __init__(self, source: FolderSource) -> None:
        self._source = source
        self._files = Files(source.path, source.rules)

    def listing(self) -> Listing:
        root = self._source.path
        try:
            top = os.stat(root)
        except FileNotFoundError:
            raise SourceError(f"reading {root}: there is no such folder; check the path") from None
        except OSError as error:
            raise SourceError(f"reading {root}: {_reason(error)}") from error
        if not stat.S_ISDIR(top.st_mode):
            raise SourceError(f"reading {root}: it is a file; a source is the folder that holds the files to pack")
        self._walk("", root, frozenset({(top.st_dev, top.st_ino)}))
        return self._files.listing()

    def _walk(self, relative: str, path: str, above: frozenset[tuple[int, int]]) -> None:
        """Everything below ``relative``. ``above`` are the directories on the way here, so that a link to one of them ends."""
        files = self._files
        try:
            with os.scandir(path) as entries:
                found = list(entries)
        except OSError as error:
            files.bad(relative or path, f"the directory cannot be listed: {_reason(error)}")
            return
        for entry in found:
            name = f"{relative}/{entry.name}" if relative else entry.name
            if not files.may_enter(name):
                continue
            try:
                if self._source.symlinks == "skip" and entry.is_symlink():
                    files.skip("symbolic links")
                    continue
                info = entry.stat()
            except OSError as error:
                files.bad(name, "a link to something that is not there" if error.errno in (errno.ENOENT, errno.ELOOP) else _reason(error))
                continue
            if stat.S_ISDIR(info.st_mode):
                identity = (info.st_dev, info.st_ino)
                if identity in above:
                    files.bad(name, "a link to a directory that holds it, so following it would never end; exclude it")
                    continue
                files.add_directory(name)
                self._walk(name, entry.path, above | {identity})
            elif stat.S_ISREG(info.st_mode):
                files.add(name, info.st_size, info.st_mtime_ns)
            else:
                files.skip("sockets, pipes and devices")


class OpenedLate:
    """One file that must still be what it was when it was listed. ``mark`` is its time of change then, in nanoseconds, if known."""

    __slots__ = ("_flags", "_mark", "_path", "_size")

    def __init__(self, path: str, size: int, mark: int | str | None, *, follow: bool) -> None:
        self._path = path
        self._size = size
        self._mark = mark
        self._flags = _FOLLOW if follow else _STAY

    def whole(self) -> bytes:
        """The content, in one read: it asks for a byte too many, so that a file that grew is noticed by the same call."""
        size = self._size
        try:
            descriptor = os.open(self._path, self._flags)
            try:
                data = os.read(descriptor, size + 1)
                after = os.fstat(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            return self._whole()
        # Not written to since it was listed, so not while it was read either: one look is enough.
        if len(data) == size == after.st_size and after.st_mtime_ns == self._mark and stat.S_ISREG(after.st_mode):
            return data
        return self._whole()

    def _whole(self) -> bytes:
        """``whole``, step by step: it can tell what is wrong."""
        descriptor, before = self._open()
        try:
            data = os.read(descriptor, self._size + 1)
            if len(data) < self._size:
                pieces = [data]
                while len(data) and sum(map(len, pieces)) <= self._size:
                    data = os.read(descriptor, self._size + 1 - sum(map(len, pieces)))
                    pieces.append(data)
                data = b"".join(pieces)
            self._check(descriptor, before, len(data))
        except OSError as error:
            raise self._error(_reason(error)) from error
        finally:
            os.close(descriptor)
        return data

    def checked(self) -> Iterable[Data]:
        """The content in pieces, the file opened at the first one. What can be found out before that is found out now."""
        descriptor, _ = self._open()
        os.close(descriptor)
        return self._pieces()

    def _pieces(self) -> Iterator[Data]:
        descriptor, before = self._open()
        try:
            count = 0
            while data := os.read(descriptor, _PIECE):
                count += len(data)
                if count > self._size:
                    break
                yield data
            self._check(descriptor, before, count)
        except OSError as error:
            raise self._error(_reason(error)) from error
        finally:
            os.close(descriptor)

    def _open(self) -> tuple[int, os.stat_result]:
        try:
            descriptor = os.open(self._path, self._flags)
        except FileNotFoundError:
            raise self._error("it was there when the folder was listed and is gone") from None
        except PermissionError as error:
            raise self._error(_reason(error), "look at the owner and mode there") from error
        except OSError as error:
            raise self._error(_reason(error)) from error
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise self._error("it was a file when the folder was listed and is none any more")
            if info.st_size != self._size:
                raise self._changed(info.st_size)
            if self._mark is not None and info.st_mtime_ns != self._mark:
                raise self._error("it was written to after the folder was listed")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, info

    def _check(self, descriptor: int, before: os.stat_result, count: int) -> None:
        after = os.fstat(descriptor)
        if count != self._size:
            raise self._changed(after.st_size if after.st_size != self._size else count)
        if after.st_mtime_ns != before.st_mtime_ns:
            raise self._error("it was written to while it was read")

    def _changed(self, size: int) -> SourceError:
        verb = "shrank" if size < self._size else "grew"
        return self._error(f"it {verb} from {self._size} to {size} bytes after the folder was listed")

    def _error(self, reason: str, remedy: str = "run again once the folder stands still") -> SourceError:
        return SourceError(f"reading {self._path}: {reason}; {remedy}, or run with --on-bad skip to count such files and go on")


def _reason(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "permission denied"
    return error.strerror or str(error)
