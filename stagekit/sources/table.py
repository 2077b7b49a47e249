"""A file of rows, whatever its format: read from its start, or from a place that was noted on the way.

Each format is one small class behind ``Table``; what becomes of a row is the business of ``sources.rows``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol

from ..errors import SourceError, StoreError

Row = bytes | dict[str, Any]
"""A row as its format has it: the bytes of a line that holds JSON, or the values by column."""


class Opener(Protocol):
    """How the file of a table is opened; see ``sources.shelf.Shelf.open``."""

    def __call__(self, path: str, *, straight: bool = True) -> BinaryIO: ...


class BadRow(Exception):
    """A row that cannot become a sample; the text says why."""


class Table(Protocol):
    """How the rows of one kind of file are found. It holds settings only and can be pickled."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """How the names of such files end, lower-case, compression left out."""

    @property
    def counts(self) -> str:
        """What messages count in such a file: ``line`` or ``row``."""

    @property
    def raw(self) -> bool:
        """Whether rows are the bytes of their own JSON, which ``rows`` does not parse."""

    def listed(self, folder: str, open_file: Opener) -> list[str] | None:
        """The names of the files in ``folder`` that are one table, in order, when a file of the folder says so."""

    def rows(self, path: str, position: int, line: int, open_file: Opener) -> Iterator[tuple[int, int, Row | BadRow]]:
        """Every row from a place on: the place's position, its line (from 1), and the row. ``open_file`` opens ``path``.

        The start of the file is position 0, line 1. Rows may share a position, such as those of a row group; reading from there then
        begins with the first of them. A row that is broken comes as ``BadRow``, and the next one follows. Raises ``SourceError`` naming
        the file when it cannot be read further.
        """

    def values(self, row: Row) -> dict[str, Any]:
        """The row's values by column. Raises ``BadRow``."""


def has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file of this name is of a kind with these suffixes, compressed or not."""
    return plain_name(name).lower().endswith(suffixes)


COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def plain_name(name: str) -> str:
    """The name without the suffix of a compression."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in COMPRESSED else name


def cannot_read(path: str, error: Exception) -> SourceError | StoreError:
    """The error for a file that the operating system or a library gave up on. A store's own error says what is wrong already."""
    if isinstance(error, StoreError) and not isinstance(error, FileNotFoundError | PermissionError):
        return error
    if isinstance(error, FileNotFoundError):
        reason = "there is no such file; check the path"
    elif isinstance(error, PermissionError):
        reason = "permission denied"
    elif isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    else:
        first = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        reason = f"it is damaged, or no file of this kind ({first}); make it again, or name another"
    return SourceError(f"reading {path}: {reason}")


def check_encoding(path: str, start: bytes) -> None:
    """Raise ``SourceError`` when a file of text whose first bytes are ``start`` is in UTF-16 or UTF-32, by its mark or by its zeros."""
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        encoding = "UTF-32"
    elif start.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "UTF-16"
    elif start[1:2] == b"\0" or start[:1] == b"\0":
        encoding = "UTF-16LE" if start[:1] != b"\0" else "UTF-16BE"
    else:
        return
    raise SourceError(
        f"reading {path}: it is in {encoding}, as what Excel calls Unicode is, and not in UTF-8; convert it with: "
        f"iconv -f {encoding} -t UTF-8 OLD > NEW"
    )
