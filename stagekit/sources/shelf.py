"""Where tables and the files they name lie: on this machine's disk, or in a bucket (``sources.bucket``)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, Protocol

from ..errors import SourceError
from ..store.base import Data
from .files import FileRules
from .folder import FolderSource, OpenedLate
from .prefix import PrefixSource
from .table import BadRow, cannot_read

_BUFFER = 2**20


class Stamp(NamedTuple):
    """What a file was when it was listed: its bytes, and what changes when they are replaced."""

    size: int
    mark: int | str | None


class Shelf(Protocol):
    """A place of named files. Paths are those that messages show. It holds settings only and can be pickled."""

    @property
    def readers(self) -> int:
        """How many files that rows name are worth reading at the same time."""

    def is_folder(self, path: str) -> bool:
        """Whether there are files below ``path``."""

    def names(self, path: str, hidden: Callable[[str], bool]) -> Iterator[str]:
        """Every file below ``path``, relative to it. ``hidden`` is asked once for each name of a folder or file whether to leave it out."""

    def stamp(self, path: str) -> Stamp:
        """Raises ``FileNotFoundError`` when there is no such file, ``SourceError`` when it cannot be told or cannot be read twice."""

    def open(self, path: str, *, straight: bool = True, mark: int | str | None = None, size: int | None = None) -> BinaryIO:
        """The file, to be read from any position. ``straight`` says that it will mostly be read on from there. With ``mark``, one that was
        replaced since raises ``SourceError`` where the place can tell. ``size``, where it is known, spares a question."""

    def files(self, path: str, rules: FileRules) -> FolderSource | PrefixSource:
        """The files below ``path`` as a source of their own."""

    def sizes(self) -> Callable[[str], int]:
        """A function that tells the bytes of a file that a row names, with a memory of its own. It raises ``BadRow``."""

    def content(self, path: str, size: int, *, whole: bool) -> Iterable[Data]:
        """The bytes of a file that a row names, which must be ``size``; all read when this returns if ``whole``. Raises ``SourceError``."""


@dataclass(frozen=True)
class Disk:
    """This machine's file systems."""

    @property
    def readers(self) -> int:
        return 1

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def names(self, path: str, hidden: Callable[[str], bool]) -> Iterator[str]:
        for folder, folders, files in os.walk(path, onerror=_cannot_list):
            folders[:] = [name for name in folders if not hidden(name)]
            for name in files:
                if not hidden(name):
                    yield os.path.relpath(os.path.join(folder, name), path)

    def stamp(self, path: str) -> Stamp:
        try:
            info = os.stat(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise cannot_read(path, error) from error
        if not stat.S_ISREG(info.st_mode):
            raise SourceError(f"reading {path}: it is no file that could be read twice; write it to a file first")
        return Stamp(info.st_size, info.st_mtime_ns)

    def open(self, path: str, *, straight: bool = True, mark: int | str | None = None, size: int | None = None) -> BinaryIO:  # noqa: ARG002 - a disk is asked when it is read
        return open(path, "rb", buffering=_BUFFER if straight else -1)  # noqa: PTH123 - the caller's with-block closes it

    def files(self, path: str, rules: FileRules) -> FolderSource:
        return FolderSource(path, rules)

    def sizes(self) -> Callable[[str], int]:
        return _size

    def content(self, path: str, size: int, *, whole: bool) -> Iterable[Data]:
        opened = OpenedLate(path, size, None, follow=True)
        return (opened.whole(),) if whole else opened.checked()


def _size(path: str) -> int:
    try:
        info = os.stat(path)
    except FileNotFoundError:
        raise not_there(path) from None
    except OSError as error:
        raise BadRow(f"it names the file {path}, which cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode):
        raise BadRow(f"it names {path}, which is no file")
    return info.st_size


def not_there(path: str) -> BadRow:
    """The error for a row that names a file which does not exist."""
    return BadRow(f"it names the file {path}, which is not there")


def _cannot_list(error: OSError) -> None:
    raise SourceError(f"reading {error.filename}: the directory cannot be listed: {error.strerror}") from error
