"""Tables as a source: each row is a sample, its file columns and binary columns are fields, and what is left is the field ``json``.

A table of a hundred million rows must not become as many objects. So the listing keeps eight bytes a sample, its size, and a place for
every few hundred rows (see ``sources.ranges``); samples are made from their rows again by whoever reads them.
"""

from __future__ import annotations

import atexit
import datetime
import decimal
import hashlib
import json
import math
import os
import threading
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

import numpy as np
import xxhash

from ..errors import DuplicateKey, KeyNotAllowed, SourceError, UsageError
from ..location import Location
from ..parallel import each
from ..shards.archive import member_bytes
from ..shards.index import Batch, FieldTotals
from ..shards.plan import PlannedSample, folded, near_duplicates
from ..shards.sample import member_name
from .base import Bad, Listing, OnBad, Payload, Read
from .compressed import is_compressed
from .folder import SMALL
from .ranges import START, InFile, Listed, Made, Part, Place, RowRange, Rows, RowSample, Run
from .shelf import Disk, Shelf
from .table import BadRow, Row, Table, cannot_read, has_suffix, plain_name

_EVERY = 256  # rows between two places that are remembered
_BATCH = 256  # samples of one small field that are handed on together
_BATCHED_BYTES = 16 * 1024
_HELD_BYTES = 2**20  # of such samples, beyond which they are handed on however few they are


@dataclass(frozen=True)
class RowRules:
    """What becomes of a row.

    - ``key`` is the column whose text or whole number is the sample's key; without it, the key is the row's number.
    - ``files`` are columns that hold paths relative to the table; a file's bytes become the field ``<column>.<extension>``.
    - ``text`` is the column whose text becomes the field ``txt``, the only one: a document. Blank ones are counted and left out.
    - A row that can be no sample (broken, without its key, with a file that is not there or lies outside the table's folder, with a
      key that was there before) raises ``SourceError``, ``KeyNotAllowed`` or ``DuplicateKey`` with path and line; ``on_bad="skip"``
      counts and lists it instead.
    """

    key: str | None = None
    files: tuple[str, ...] = ()
    text: str | None = None
    on_bad: OnBad = "raise"

    def __post_init__(self) -> None:
        if isinstance(self.files, str):
            raise UsageError("file_columns: give a list of columns, not one text")
        if self.on_bad not in ("raise", "skip"):
            raise UsageError(f"on_bad: {self.on_bad!r} is neither 'raise' nor 'skip'")
        if self.text is not None and self.files:
            raise UsageError("text_field and file_columns: a document is its text alone; give one of them")

    @property
    def plain(self) -> bool:
        """Whether a row is taken as it is."""
        return self.key is None and self.text is None and not self.files


@dataclass(frozen=True)
class RowSource:
    """The rows of the file at ``path``, or of all files of the format ``table`` in the folder ``path``, sorted by name.

    In a folder, the keys of rows that have no key column start with the file's name. A file that changed since it was listed raises
    ``SourceError``.
    """

    path: str
    table: Table
    rules: RowRules = field(default_factory=RowRules)
    shelf: Shelf = field(default_factory=Disk)

    @property
    def name(self) -> str:
        return self.path

    @property
    def location(self) -> Location:
        return Location.parse(self.path)

    @property
    def readers(self) -> int:
        return 1

    def listing(self) -> Listing:
        """Every row is looked at once, and parsed only when its key, its text or its files must be known."""
        same: set[int] = set()
        alike: set[int] = set()
        while True:
            scan = _Scan(self, same, alike)
            scan.run()
            more_same, more_alike = scan.repeated()
            if more_same <= same and more_alike <= alike:
                return scan.listing()
            # A digest came twice, so look at those keys themselves. Seldom: two rows, or two spellings, in a whole table.
            same |= more_same
            alike |= more_alike

    def read(self, sample: PlannedSample) -> Payload:
        assert isinstance(sample, RowSample)
        self.unchanged(sample.part)
        made = next(_samples(self, sample.part, sample.place, sample.number), None)
        if made is None or [name for name, _ in made.fields] != [planned.field for planned in sample.fields]:
            raise _changed(sample.part)
        self._check(sample.part, made)
        in_files = [planned.size for planned, (_, value) in zip(sample.fields, made.fields, strict=True) if isinstance(value, InFile)]
        return self._payload(made, iter(in_files))

    def read_in_order(self, samples: Sequence[PlannedSample]) -> Iterator[Read]:
        """Every sample's payload in order, or the error that takes its place; a file is read straight on."""
        if not isinstance(samples, RowRange):
            for sample in samples:
                try:
                    yield sample.key, self.read(sample)
                except SourceError as error:
                    yield sample.key, error
            return
        sizes = iter(samples.file_sizes)
        plain = self.as_it_is and not samples.file_sizes
        found = (
            read
            for run in samples.runs
            # A compressed file has no place to begin but its start, so whoever reads it goes on where the last shard ended.
            for read in (self._read_lines(run) if plain and not is_compressed(run.part.path) else self._read_run(run, sizes))
        )
        readers = self.shelf.readers if samples.file_sizes else 1
        yield from map(_call, found) if readers == 1 else each(_call, found, threads=readers)

    def _read_lines(self, run: Run) -> Iterator[Read]:
        """``_read_run`` for rows that are taken as they are, in a fraction of the time."""
        part, left = run.part, run.count
        self.unchanged(part)
        passed = run.number - run.place.sample
        number = run.place.row + passed
        rows: list[bytes] = []
        lines: list[int] = []
        held = 0
        for _, line, row in islice(self.rows(part, run.place), passed, passed + left):
            rows.append(row)  # type: ignore[arg-type]  # such a table has no bad rows before they are parsed
            lines.append(line)
            held += len(rows[-1])
            if len(rows) == _BATCH or held > _HELD_BYTES:
                yield from self._parsed(part, number, rows, lines)
                number, left = number + len(rows), left - len(rows)
                rows, lines, held = [], [], 0
        yield from self._parsed(part, number, rows, lines)
        self.unchanged(part)
        if left != len(rows):
            raise _changed(part)

    def _parsed(self, part: Part, first: int, rows: list[bytes], lines: list[int]) -> Iterator[Read]:
        """The rows from number ``first`` on as samples, each compared with what JSON is."""
        keys = [part.key(number) for number in range(first, first + len(rows))]
        parse = self.table.values
        begin = 0
        for at, row in enumerate(rows):
            try:
                parse(row)
            except BadRow as error:
                if at > begin:
                    yield Batch(keys[begin:at], "json", rows[begin:at])
                yield keys[at], self.bad(part, lines[at], str(error))
                begin = at + 1
        if len(rows) > begin:
            yield Batch(keys[begin:], "json", rows[begin:])

    def _read_run(self, run: Run, sizes: Iterator[int]) -> Iterator[Read | Callable[[], Read]]:
        """What ``read_in_order`` gives for ``run``. What takes files to be read comes as a function that reads them."""
        part = run.part
        self.unchanged(part)
        count = 0
        keys: list[str] = []
        payloads: list[bytes] = []
        batched = ""
        unparsed, parse = self.as_it_is, self.table.values
        for made in islice(_samples(self, part, run.place, run.number), run.count):
            count += 1
            field_name, value = made.fields[0]
            single = len(made.fields) == 1 and isinstance(value, bytes) and len(value) <= _BATCHED_BYTES
            if keys and (not single or field_name != batched or len(keys) == _BATCH):
                yield Batch(keys, batched, payloads)
                keys, payloads = [], []
            try:
                if unparsed:
                    parse(value)  # type: ignore[arg-type]  # a row as it is lies in no file
            except BadRow as error:
                if keys:
                    yield Batch(keys, batched, payloads)
                    keys, payloads = [], []
                yield made.key, self.bad(part, made.line, str(error))
                continue
            if single:
                batched = field_name
                keys.append(made.key)
                payloads.append(value)  # type: ignore[arg-type]  # "single" says that it is bytes
                continue
            in_files = [next(sizes) for _, value in made.fields if isinstance(value, InFile)]
            yield partial(self._read_made, made, in_files)
        if keys:
            yield Batch(keys, batched, payloads)
        self.unchanged(part)
        if count != run.count:
            raise _changed(part)

    def _read_made(self, made: Made, in_files: Sequence[int]) -> Read:
        try:
            return made.key, self._payload(made, iter(in_files))
        except SourceError as error:
            return made.key, error

    def made(self, part: Part, place: Place, number: int) -> Iterator[Made]:
        self.unchanged(part)
        return _samples(self, part, place, number)

    def where(self, part: Part, line: int) -> str:
        return f"{part.path}, {self._row(line)}"

    def rows(self, part: Part, place: Place = START) -> Iterator[tuple[int, int, Row | BadRow]]:
        """The rows of ``part`` from ``place`` on."""

        def opened(path: str, *, straight: bool = True) -> BinaryIO:
            return self.shelf.open(path, straight=straight, mark=part.mark)

        return self.table.rows(part.path, place.position, place.line, opened)

    def unchanged(self, part: Part) -> None:
        """Raise ``SourceError`` unless the file is the one that was listed."""
        try:
            now = self.shelf.stamp(part.path)
        except FileNotFoundError:
            raise SourceError(f"reading {part.path}: it was there when the source was listed and is gone; run again") from None
        if now != (part.size, part.mark):
            raise _changed(part)

    def _row(self, line: int) -> str:
        """Lines are counted from 1, as editors do, and rows from 0, as their keys are."""
        return f"line {line}" if self.table.counts == "line" else f"row {line - 1}"

    def bad(self, part: Part, line: int, reason: str) -> SourceError:
        advice = " (--on-bad skip counts such rows and goes on)" if self.rules.on_bad == "raise" else ""
        return SourceError(f"reading {self.where(part, line)}: {reason}{advice}")

    @property
    def as_it_is(self) -> bool:
        """Whether the bytes of a row are the bytes of its field."""
        return self.table.raw and self.rules.plain

    def _check(self, part: Part, made: Made) -> None:
        """What is not parsed in the listing is parsed here: raises ``SourceError`` for a row that is no JSON object."""
        if self.as_it_is:
            try:
                self.table.values(made.fields[0][1])  # type: ignore[arg-type]  # a row as it is lies in no file
            except BadRow as error:
                raise self.bad(part, made.line, str(error)) from None

    def _payload(self, made: Made, sizes: Iterator[int]) -> Payload:
        """``sizes`` are those that the fields in files had when they were listed."""
        listed = [(name, value, next(sizes) if isinstance(value, InFile) else len(value)) for name, value in made.fields]
        small = sum(size for _, _, size in listed) <= SMALL
        payload: Payload = []
        for name, value, size in listed:
            if isinstance(value, InFile):
                payload.append((name, size, self.shelf.content(value.path, size, whole=small)))
            else:
                payload.append((name, size, (value,)))
        return payload

    # ------------------------------------------------------------------------------------------------------------ from row to sample

    def fields_of(self, part: Part, number: int, row: Row) -> tuple[str, list[tuple[str, bytes | InFile]]] | None:
        """Key and fields of a row that is not taken as it is, sorted by name; ``None`` for a blank document. Raises ``BadRow``."""
        rules = self.rules
        values = self.table.values(row)
        key = part.key(number) if rules.key is None else _key(values, rules.key)
        if rules.text is not None:
            text = _column(values, rules.text)
            if text is None or (isinstance(text, str) and not text.strip()):
                return None
            if not isinstance(text, str):
                raise BadRow(f"its column {rules.text!r} holds {type(text).__name__}, and a document is text")
            return key, [("txt", _utf8(text))]
        fields: dict[str, bytes | InFile] = {}
        rest: dict[str, Any] = {}
        for column, value in values.items():
            if column in rules.files:
                if value is not None and value != "":
                    _add(fields, *_file(part, column, value))
            elif isinstance(value, bytes):
                _add(fields, column.lower(), value)
            elif isinstance(value, dict) and value.keys() == {"bytes", "path"} and not isinstance(value["bytes"], str):
                _add_media(fields, part, column, value)
            else:
                rest[column] = value
        missing = [column for column in rules.files if column not in values]
        if missing:
            raise BadRow(f"it has no column {missing[0]!r}")
        if rest:
            _add(fields, "json", row if isinstance(row, bytes) and len(rest) == len(values) else _json(rest))
        if not fields:
            raise BadRow("it holds no value")
        return key, sorted(fields.items())


def _call(read: Read | Callable[[], Read]) -> Read:
    return read() if callable(read) else read


def _column(values: dict[str, Any], column: str) -> Any:
    if column not in values:
        shown = ", ".join(list(values)[:8])
        raise BadRow(f"it has no column {column!r}; it has {shown or 'none'}")
    return values[column]


def _key(values: dict[str, Any], column: str) -> str:
    value = _column(values, column)
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise BadRow(f"its key column {column!r} holds {'nothing' if value is None else type(value).__name__}; a key is text or a whole number")


def _file(part: Part, column: str, value: Any) -> tuple[str, InFile]:
    if not isinstance(value, str):
        raise BadRow(f"its file column {column!r} holds {type(value).__name__}; a path is text")
    folder = os.path.dirname(part.path)
    relative = os.path.normpath(value)
    if os.path.isabs(relative) or relative.split(os.sep)[0] == os.pardir or "\0" in value:
        raise BadRow(f"its file column {column!r} names {value!r}, which lies outside the folder of the table ({folder})")
    suffix = os.path.splitext(relative)[1].lower()
    return column.lower() + suffix, InFile(os.path.join(folder, relative))


_MAGIC = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"GIF8", ".gif"),
    (b"fLaC", ".flac"),
    (b"OggS", ".ogg"),
    (b"ID3", ".mp3"),
    (b"%PDF", ".pdf"),
)


def _add_media(fields: dict[str, bytes | InFile], part: Part, column: str, value: dict[str, Any]) -> None:
    """A picture or a sound as ``datasets`` keeps it: its bytes and the name it had, or its path alone."""
    data, path = value["bytes"], value["path"]
    if data is not None:
        suffix = os.path.splitext(path or "")[1].lower()
        if not suffix:
            suffix = next((suffix for magic, suffix in _MAGIC if data.startswith(magic)), "")
        if not suffix and data[:4] == b"RIFF":
            suffix = {b"WEBP": ".webp", b"WAVE": ".wav"}.get(data[8:12], "")
        _add(fields, column.lower() + suffix, data)
    elif path:
        _add(fields, *_file(part, column, path))


def _add(fields: dict[str, bytes | InFile], name: str, value: bytes | InFile) -> None:
    if name in fields:
        raise BadRow(f"two of its columns become the field {name!r}; rename one")
    fields[name] = value


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"its text holds half a character (a lone surrogate) at {error.start}") from None


def _json(values: dict[str, Any]) -> bytes:
    try:
        try:
            text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
        except ValueError:  # JSON has neither NaN nor infinity
            text = json.dumps(_finite(values), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as error:
        raise BadRow(f"it cannot be written as JSON ({error})") from None
    return _utf8(text)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID | datetime.timedelta):
        return str(value)
    raise TypeError(f"a value of the type {type(value).__name__} inside a list or a struct")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


# --------------------------------------------------------------------------------------------------------------------- reading


class _Cursor:
    """A file that is being read: its samples, and the number of the next one. Nothing it holds may refer to it, so that its file is
    closed at once when it is given up."""

    def __init__(self, source: RowSource, part: Part, place: Place) -> None:
        self.of = (source, part)
        self.next = place.sample
        self.samples = _made(source, part, place)


def _made(source: RowSource, part: Part, place: Place) -> Iterator[Made]:
    """Every sample of ``part`` from ``place`` on."""
    row_number, sample = place.row, place.sample
    position = place.position
    as_it_is, dropped = source.as_it_is, part.dropped
    for begin, line, row in source.rows(part, place):
        if begin != position:
            position = begin
            if row_number - place.row >= _EVERY:
                place = Place(begin, line, row_number, sample)
        if as_it_is:
            yield Made(part.key(row_number), [("json", row)], place, sample, line)  # type: ignore[list-item]  # bytes
            sample += 1
        elif row_number not in dropped and not isinstance(row, BadRow):
            try:
                made = source.fields_of(part, row_number, row)
            except BadRow:
                raise _changed(part) from None  # it was no bad row when it was listed
            if made is not None:
                yield Made(*made, place, sample, line)
                sample += 1
        row_number += 1


_lock = threading.Lock()
_kept: list[_Cursor] = []
"""At most one cursor, for the next shard of the same file: a compressed file has no other place to begin than its start."""
atexit.register(_kept.clear)  # its file is closed while the modules that close it are still there


def _samples(source: RowSource, part: Part, place: Place, number: int) -> Iterator[Made]:
    """The samples of ``part`` from ``number`` on."""
    with _lock:
        cursor = _kept.pop() if _kept else None
    if cursor is None or cursor.of != (source, part) or not place.sample <= cursor.next <= number:
        cursor = _Cursor(source, part, place)
    try:
        for made in cursor.samples:
            cursor.next = made.number + 1
            if made.number >= number:
                yield made
    except GeneratorExit:
        with _lock:
            _kept[:] = [cursor]
        raise


def _changed(part: Part) -> SourceError:
    return SourceError(
        f"reading {part.path}: it was written to after the source was listed, so its rows may be others; run again once it stands still"
    )


# --------------------------------------------------------------------------------------------------------------------- listing


class _Scan:
    """One look at every row. ``same`` and ``alike`` are digests of keys, and of folded keys, that are known to come more than once."""

    def __init__(self, source: RowSource, same: set[int], alike: set[int]) -> None:
        self._source = source
        self._rules = source.rules
        self._size = source.shelf.sizes()
        self._listing = Listing([])
        self._files: list[Listed] = []
        self._sizes = array("Q")
        self._file_counts = array("B")
        self._file_sizes = array("Q")
        self._identity = hashlib.sha256()
        self._totals: dict[str, list[int]] = {}
        self._same, self._alike = same, alike
        self._first: dict[str, str] = {}
        self._similar: set[str] = set()
        self._digests, self._folded = array("Q"), array("Q")

    def run(self) -> None:
        numbered = 0
        for path, prefix in self._paths():
            numbered += self._part(path, prefix, numbered if prefix is None else 0)

    def repeated(self) -> tuple[set[int], set[int]]:
        """Digests of keys that came twice, and of folded keys that did."""
        return _twice(self._digests), _twice(self._folded)

    def listing(self) -> Listing:
        listing = self._listing
        if not self._sizes:
            left = [f"{count} {reason}" for reason, count in sorted(listing.skipped.items())]
            left += [f"{len(listing.bad)} bad"] if listing.bad else []
            out = f" (left out: {', '.join(left)})" if left else ""
            raise SourceError(f"reading {self._source.path}: there is no row in it{out}; name the table that holds the data")
        listing.samples = Rows(
            self._source,
            self._files,
            self._sizes,
            self._identity.hexdigest(),
            {name: FieldTotals(*sums) for name, sums in self._totals.items()},
            near_duplicates(self._similar),
            self._file_counts,
            self._file_sizes,
        )
        return listing

    def _paths(self) -> Iterator[tuple[str, str | None]]:
        """Each file with what its rows' keys start with; ``None`` when rows are counted through all files."""
        root, table = self._source.path, self._source.table
        shelf = self._source.shelf
        if not shelf.is_folder(root):
            yield root, None
            return
        saved = table.listed(root, shelf.open)
        if saved is not None:
            for name in saved:
                yield os.path.join(root, name), None
            return
        found: list[str] = []
        for name in shelf.names(root, self._hidden):
            if has_suffix(name, table.suffixes):
                found.append(name)
            else:
                self._listing.skipped["files of another kind"] += 1
        if not found:
            raise SourceError(f"reading {root}: no file in it ends with {' or '.join(table.suffixes)}; check the path, or --source-format")
        for name in sorted(found):
            folder, base = os.path.split(os.path.splitext(plain_name(name))[0])
            yield os.path.join(root, name), os.path.join(folder, base).replace(os.sep, "/") + "/"

    def _hidden(self, name: str) -> bool:
        if name.startswith("."):
            self._listing.skipped["AppleDouble files" if name.startswith("._") else "dot-files"] += 1
            return True
        return False

    def _part(self, path: str, prefix: str | None, first: int) -> int:
        """Look at one file; returns how many rows it has."""
        try:
            stamp = self._source.shelf.stamp(path)
        except FileNotFoundError as error:
            raise cannot_read(path, error) from error
        part = Part(path, stamp.size, stamp.mark, prefix or "", first)
        before = len(self._sizes)
        places: list[Place] = []
        dropped: set[int] = set()
        rows = self._look_as_it_is(part, places) if self._source.as_it_is else self._look(part, places, dropped)
        self._source.unchanged(part)
        self._files.append(Listed(replace(part, dropped=frozenset(dropped)), len(self._sizes) - before, places or [START]))
        return rows

    def _look_as_it_is(self, part: Part, places: list[Place]) -> int:
        """``_look`` for rows whose bytes are their field: nothing is parsed, and their names and sizes follow from very little."""
        row_number, next_place, last = 0, 0, -1
        self._identity.update(f"numbered {part.prefix} {part.first}\n".encode())
        lengths: list[int] = []
        append = lengths.append
        for begin, line, row in self._source.rows(part):
            if row_number >= next_place and begin != last:
                places.append(Place(begin, line, row_number, row_number))
                next_place = row_number + _EVERY
            last = begin
            append(len(row))  # type: ignore[arg-type]  # such a table has no bad rows before they are parsed
            row_number += 1
            if not row_number % _EVERY:
                self._note_lengths(part, row_number, lengths)
                lengths.clear()
        self._note_lengths(part, row_number, lengths)
        self._identity.update(f"{row_number}\n".encode())
        return row_number

    def _note_lengths(self, part: Part, rows: int, lengths: list[int]) -> None:
        """The bytes of the last rows, ``rows`` being how many there were."""
        if not lengths:
            return
        member_bytes(member_name(part.key(rows - 1), "json"), max(lengths))
        sizes = np.array(lengths, np.uint64)
        self._identity.update(sizes.astype("<u8").tobytes())
        self._sizes.frombytes((512 + (sizes + np.uint64(511)) // np.uint64(512) * np.uint64(512)).astype(np.uint64).tobytes())
        self._count("json", len(lengths), sum(lengths))

    def _look(self, part: Part, places: list[Place], dropped: set[int]) -> int:
        row_number, next_place, last, sample = 0, 0, -1, 0
        for begin, line, row in self._source.rows(part):
            if row_number >= next_place and begin != last:
                places.append(Place(begin, line, row_number, sample))
                next_place = row_number + _EVERY
            last = begin
            try:
                if isinstance(row, BadRow):
                    raise row
                made = self._source.fields_of(part, row_number, row)
                if made is None:
                    self._listing.skipped["blank documents"] += 1
                else:
                    self._add(part, line, *made)
                    sample += 1
            except (BadRow, KeyNotAllowed, DuplicateKey) as error:
                if self._rules.on_bad == "raise":
                    raise self._refused(part, line, error) from None
                self._listing.bad.append(Bad(self._source.where(part, line), str(error)))
                dropped.add(row_number)
            row_number += 1
        return row_number

    def _refused(self, part: Part, line: int, error: Exception) -> Exception:
        if isinstance(error, BadRow):
            return self._source.bad(part, line, str(error))
        return type(error)(f"reading {self._source.where(part, line)}: {error}")

    def _add(self, part: Part, line: int, key: str, fields: list[tuple[str, bytes | InFile]]) -> None:
        """Raises before anything is noted of a sample that is refused."""
        sizes = [self._size(value.path) if isinstance(value, InFile) else len(value) for _, value in fields]
        total = sum(member_bytes(member_name(key, name), size) for (name, _), size in zip(fields, sizes, strict=True))
        if self._rules.key is not None:
            self._note_key(part, line, key)
        files = [size for (_, value), size in zip(fields, sizes, strict=True) if isinstance(value, InFile)]
        self._file_counts.append(len(files))
        self._file_sizes.extend(files)
        self._sizes.append(total)
        self._identity.update(f"{key}\n".encode())
        for (name, _), size in zip(fields, sizes, strict=True):
            self._identity.update(f"{size} {name}\n".encode())
            self._count(name, 1, size)

    def _note_key(self, part: Part, line: int, key: str) -> None:
        digest = xxhash.xxh3_64_intdigest(key.encode())
        if digest in self._same:
            where = self._source.where(part, line)
            first = self._first.setdefault(key, where)
            if first != where:
                raise DuplicateKey(f"the key {key!r} is that of {first} already; give each row its own key")
        alike = folded(key)
        alike_digest = xxhash.xxh3_64_intdigest(alike.encode())
        if alike_digest in self._alike:
            self._similar.add(key)
        self._digests.append(digest)
        self._folded.append(alike_digest)

    def _count(self, name: str, samples: int, size: int) -> None:
        sums = self._totals.get(name) or self._totals.setdefault(name, [0, 0])
        sums[0] += samples
        sums[1] += size


def _twice(digests: array[int]) -> set[int]:
    values = np.sort(np.frombuffer(digests, np.uint64)) if digests else np.empty(0, np.uint64)
    return set(map(int, values[1:][values[1:] == values[:-1]]))
