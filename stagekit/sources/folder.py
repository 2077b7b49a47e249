"""A folder of files as samples: files that share directory and base name up to its first dot are the fields of one sample.

``cats/a.jpg`` + ``cats/a.json`` is the sample ``cats/a`` with the fields ``jpg`` and ``json``: WebDataset's rule. With
``labels="dir"`` the folder is read as torchvision's ``ImageFolder`` does: the top-level directory is the class, and every sample
gets a field ``cls`` holding the class index as text.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import KeyNotAllowed, SourceError, UsageError
from ..location import Location
from ..shards.plan import Dots, PlannedField, PlannedSample, group
from ..shards.sample import check_member, member_name, split_name
from ..store.base import Data
from .base import Bad, Listing, OnBad, Payload
from .glob import matcher

_SMALL = 8 * 2**20  # a sample up to this size is read whole, which costs one system call a file and moves every error to the front
_PIECE = 2**20
_TEXT = "\0"  # starts the ref of a field whose bytes are the ref itself; any other ref is a path, which cannot hold a NUL


@dataclass(frozen=True)
class FolderSource:
    """The files below ``path``, sorted by name.

    - ``labels="dir"`` adds the field ``cls``, the index of the top-level directory among all of them, sorted by name.
    - ``dots`` says what ``cat.v1.jpg`` beside ``cat.v2.jpg`` means (see ``shards.plan.group``).
    - ``include`` and ``exclude`` are globs (see ``sources.glob``) on the path relative to ``path``; exclude wins.
    - ``symlinks="follow"`` packs what a link points to, ``"skip"`` leaves links out and counts them.
    - Never packed, and counted: dot-files and dot-directories, AppleDouble files (``._x``), sockets, pipes, devices.
    - A file that can be no field (no extension, a name that is not UTF-8 or too long for a tar), a broken link, or a directory that
      cannot be listed raises ``SourceError`` or ``KeyNotAllowed`` with the path; ``on_bad="skip"`` counts and lists it instead.
    """

    path: str
    labels: Literal["dir"] | None = None
    dots: Dots = "refuse"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    symlinks: Literal["follow", "skip"] = "follow"
    on_bad: OnBad = "raise"

    def __post_init__(self) -> None:
        if self.labels not in (None, "dir"):
            raise UsageError(f"labels: {self.labels!r} is neither 'dir' nor None")
        if self.symlinks not in ("follow", "skip"):
            raise UsageError(f"symlinks: {self.symlinks!r} is neither 'follow' nor 'skip'")
        if self.on_bad not in ("raise", "skip"):
            raise UsageError(f"on_bad: {self.on_bad!r} is neither 'raise' nor 'skip'")
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), str):
                raise UsageError(f"{name}: give a list of patterns, not one text")

    @property
    def name(self) -> str:
        return self.path

    @property
    def location(self) -> Location:
        return Location.parse(self.path)

    def listing(self) -> Listing:
        return _Walk(self).listing()

    def read(self, sample: PlannedSample) -> Payload:
        small = sum(field.size for field in sample.fields) <= _SMALL
        payload: Payload = []
        for field in sample.fields:
            if field.ref.startswith(_TEXT):
                payload.append((field.field, field.size, (field.ref[1:].encode(),)))
                continue
            opened = _OpenedLate(os.path.join(self.path, field.ref), field.size, self.symlinks == "follow")
            payload.append((field.field, field.size, (opened.whole(),) if small else opened.checked()))
        return payload


class _Walk:
    """One walk over the folder, collecting the listing."""

    def __init__(self, source: FolderSource) -> None:
        self._source = source
        self._included = matcher(source.include) if source.include else None
        self._excluded = matcher(source.exclude)
        self._listing = Listing([])
        self._packed: list[tuple[str, int, str]] = []
        self._without_extension: list[str] = []

    def listing(self) -> Listing:
        root, result = self._source.path, self._listing
        try:
            top = os.stat(root)
        except FileNotFoundError:
            raise SourceError(f"reading {root}: there is no such folder; check the path") from None
        except OSError as error:
            raise SourceError(f"reading {root}: {_reason(error)}") from error
        if not stat.S_ISDIR(top.st_mode):
            raise SourceError(f"reading {root}: it is a file; a source is the folder that holds the files to pack")
        for path, info in self._files("", root, frozenset({(top.st_dev, top.st_ino)})):
            self._add(path, info.st_size)
        if self._without_extension:
            self._refuse_without_extension()
        samples = group(sorted(self._packed), dots=self._source.dots).samples
        if self._source.labels == "dir":
            samples = self._labelled(samples)
        if not samples:
            raise SourceError(f"reading {root}: {_nothing(result)}")
        result.samples = sorted(samples, key=lambda sample: sample.key)
        return result

    def _files(self, relative: str, path: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, os.stat_result]]:
        """Every file to pack below ``relative``. ``above`` are the directories on the way here, so that a link to one of them ends."""
        try:
            with os.scandir(path) as entries:
                found = list(entries)
        except OSError as error:
            self._bad(relative or path, f"the directory cannot be listed: {_reason(error)}")
            return
        skipped = self._listing.skipped
        for entry in found:
            name = f"{relative}/{entry.name}" if relative else entry.name
            if entry.name.startswith("."):
                skipped["AppleDouble files" if entry.name.startswith("._") else "dot-files"] += 1
                continue
            if self._excluded(name):
                skipped["excluded by a pattern"] += 1
                continue
            try:
                if entry.is_symlink() and self._source.symlinks == "skip":
                    skipped["symbolic links"] += 1
                    continue
                info = entry.stat()
            except OSError as error:
                what = "a link to something that is not there" if error.errno in (errno.ENOENT, errno.ELOOP) else _reason(error)
                self._bad(name, what)
                continue
            if stat.S_ISDIR(info.st_mode):
                identity = (info.st_dev, info.st_ino)
                if identity in above:
                    self._bad(name, "a link to a directory that holds it, so following it would never end; exclude it")
                    continue
                if not relative and self._source.labels == "dir":
                    self._listing.classes += (entry.name,)
                yield from self._files(name, entry.path, above | {identity})
            elif not stat.S_ISREG(info.st_mode):
                skipped["sockets, pipes and devices"] += 1
            elif self._included is not None and not self._included(name):
                skipped["not matched by an include pattern"] += 1
            else:
                yield name, info

    def _add(self, path: str, size: int) -> None:
        try:
            check_member(path)  # first, so that no name that is not UTF-8 gets into another message
            name = split_name(path)
            if name is None:
                self._without_extension.append(path)
                return
            member_name(*name)
        except KeyNotAllowed as error:
            if self._source.on_bad == "raise":
                raise
            self._listing.bad.append(Bad(ascii(path), str(error)))
            return
        self._packed.append((path, size, path))

    def _refuse_without_extension(self) -> None:
        paths = sorted(self._without_extension)
        if self._source.on_bad == "skip":
            self._listing.bad += [Bad(path, "no extension, so it has no field name") for path in paths]
            return
        one = len(paths) == 1
        raise SourceError(
            f"reading {self._source.path}: {_some(paths)} {'has' if one else 'have'} no extension, so there is no field name for "
            f"{'it' if one else 'them'}; leave {'it' if one else 'such files'} out with --exclude {paths[0]!r}, or all of them "
            "with --on-bad skip"
        )

    def _labelled(self, samples: Iterable[PlannedSample]) -> tuple[PlannedSample, ...]:
        """The samples with the index of their class; the classes are torchvision's: all top-level directories, sorted by name."""
        classes = self._listing.classes = tuple(sorted(self._listing.classes))
        index = {name: str(number) for number, name in enumerate(classes)}
        used: set[str] = set()
        labelled = []
        for sample in samples:
            top, slash, _ = sample.fields[0].ref.partition("/")
            if not slash:
                self._bad(
                    sample.fields[0].ref, "it lies in no class directory, and labels='dir' takes the class from the top-level directory"
                )
                continue
            own = next((field.ref for field in sample.fields if field.field == "cls"), None)
            if own is not None:
                raise SourceError(
                    f"reading {self._source.path}: {own} is the field cls already, and labels='dir' would add a second one to its sample; "
                    "shard without labels, or leave such files out with --exclude '*.cls'"
                )
            used.add(top)
            labelled.append(PlannedSample(sample.key, (*sample.fields, PlannedField("cls", len(index[top]), _TEXT + index[top]))))
        empty = [name for name in classes if name not in used]
        if empty:
            self._listing.notes.append(f"{_some(empty)}: no sample in {'this class' if len(empty) == 1 else 'these classes'}")
        return tuple(labelled)

    def _bad(self, path: str, reason: str) -> None:
        if self._source.on_bad == "raise":
            raise SourceError(f"reading {self._source.path}: {path}: {reason} (--on-bad skip counts such files and goes on)")
        self._listing.bad.append(Bad(path, reason))


class _OpenedLate:
    """One file that must still be what it was when it was listed."""

    def __init__(self, path: str, size: int, follow: bool) -> None:
        self._path = path
        self._size = size
        # Without O_NONBLOCK, opening a pipe that took the file's place would wait for ever.
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)

    def whole(self) -> Data:
        """The content, in one read: it asks for a byte too many, so that a file that grew is noticed by the same call."""
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
        except OSError as error:
            raise self._error(_reason(error)) from error
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise self._error("it was a file when the folder was listed and is none any more")
            if info.st_size != self._size:
                raise self._changed(info.st_size)
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

    def _error(self, reason: str) -> SourceError:
        return SourceError(
            f"reading {self._path}: {reason}; run again once the folder stands still, or with --on-bad skip to count such files and go on"
        )


def _reason(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "permission denied"
    return error.strerror or str(error)


def _some(paths: list[str]) -> str:
    shown = ", ".join(paths[:5])
    return shown if len(paths) <= 5 else f"{shown} and {len(paths) - 5} more"


def _nothing(listing: Listing) -> str:
    reasons = [f"{count} {reason}" for reason, count in sorted(listing.skipped.items())]
    reasons += [f"{len(listing.bad)} that could not be packed"] if listing.bad else []
    left = f" (left out: {', '.join(reasons)})" if reasons else ""
    return f"there is no file to pack in it{left}; name the folder that holds the raw files"
