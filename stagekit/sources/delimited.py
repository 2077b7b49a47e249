"""CSV and TSV: the first row names the columns, quoted values may hold separators and newlines, every value is text."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from ..errors import SourceError
from .compressed import is_compressed, opened
from .table import BadRow, Opener, Row, check_encoding, plain_name

_SEPARATORS = {",": "commas", "\t": "tabs"}
_OTHERS = {";": "semicolons", "|": "bars"}
_CONVERT = "import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={!r}))"


@dataclass(frozen=True)
class Delimited:
    """``.csv`` and ``.tsv``; the suffix decides about the separator. Empty lines are passed over.

    A file without a header, or with a column twice, raises ``SourceError``; a row with more or fewer values than the header has, or
    with a quote that does not fit, is a bad row.
    """

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (".csv", ".tsv")

    @property
    def counts(self) -> Literal["line"]:
        return "line"

    @property
    def raw(self) -> bool:
        return False

    def listed(self, folder: str, open_file: Opener) -> None:  # noqa: ARG002 - a folder of such files says nothing about them
        return None

    def rows(self, path: str, position: int, line: int, open_file: Opener) -> Iterator[tuple[int, int, Row | BadRow]]:
        separator = "\t" if plain_name(path).lower().endswith(".tsv") else ","
        # The module's limit is for the whole process, and 128 KiB are less than a page of text; it is never lowered.
        csv.field_size_limit(max(csv.field_size_limit(), min(sys.maxsize, 2**31 - 1)))
        with opened(path, open_file) as file:
            text = _Text(file, path)
            reader = csv.reader(text, delimiter=separator, strict=True)
            columns = self._header(path, reader, separator)
            if position:
                file.seek(position)
                text.position = position
                begin_line = line
                reader, lines_before = csv.reader(text, delimiter=separator, strict=True), line - 1
            else:
                begin_line, lines_before = reader.line_num + 1, 0
            seekable = not is_compressed(path)
            while True:
                begin = text.position if seekable else 0
                row: Row | BadRow
                values: list[str] = []
                try:
                    values = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    row = BadRow(f"its quotes or line ends do not fit ({error})")
                else:
                    row = self._row(columns, values)
                here, begin_line = begin_line, lines_before + reader.line_num + 1
                if values or isinstance(row, BadRow):
                    yield begin, here, row

    def values(self, row: Row) -> dict[str, Any]:
        assert isinstance(row, dict)
        return row

    def _header(self, path: str, reader: Any, separator: str) -> list[str]:
        try:
            columns: list[str] = next(reader, [])
            "".join(columns).encode()
        except (csv.Error, UnicodeEncodeError) as error:
            raise SourceError(f"reading {path}: line 1 is no header ({error}); the first line names the columns, in UTF-8") from None
        if not columns or not all(columns):
            raise SourceError(f"reading {path}: line 1 is no header: {'it is empty' if not columns else 'a column has no name'}; name each")
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise SourceError(f"reading {path}: the header has the column {twice[0]!r} twice; rename one")
        if len(columns) == 1:
            _refuse_another_separator(path, columns[0], separator)
        return columns

    def _row(self, columns: list[str], values: list[str]) -> Row | BadRow:
        if not values:
            return {}
        if len(values) != len(columns):
            return BadRow(f"it has {len(values)} values, and the header names {len(columns)} columns")
        try:
            "".join(values).encode()
        except UnicodeEncodeError:
            return BadRow("it is not UTF-8")
        return dict(zip(columns, values, strict=True))


def _refuse_another_separator(path: str, header: str, separator: str) -> None:
    """Raise ``SourceError`` when the only column of a header looks like several, separated by something else."""
    names = _SEPARATORS
    (other,) = names.keys() - {separator}
    if other in header:
        suffix = ".tsv" if other == "\t" else ".csv"
        raise SourceError(f"reading {path}: the header has {names[other]} and no {names[separator]}; name the file {suffix}")
    for other, name in _OTHERS.items():
        if other in header:
            raise SourceError(
                f"reading {path}: the header has {name} and no {names[separator]}, by which columns are told apart; rename the column if "
                f'it is one, or convert the file with: python -c "{_CONVERT.format(other)}" < OLD > NEW.csv'
            )


class _Text:
    """The lines of a file as text, counting the bytes that were taken. What is not UTF-8 is marked, so that its row is found out."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file = file
        self._path = path
        self.position = 0

    def __iter__(self) -> _Text:
        return self

    def __next__(self) -> str:
        data = self._file.readline()
        if not data:
            raise StopIteration
        first = not self.position
        if first:
            check_encoding(self._path, data)
        self.position += len(data)
        text = data.decode(errors="surrogateescape")
        return text.removeprefix("\ufeff") if first else text
