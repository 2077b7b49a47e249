"""Which source a path means: the rules behind ``--source-format``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from ..config import StoreConfig
from ..errors import SourceError, UsageError
from ..location import Location
from .arrow import DESCRIPTION, Arrow, Parquet, is_saved_dataset, refuse_remains
from .base import OnBad, Source
from .bucket import Bucket
from .delimited import Delimited
from .jsonl import JsonLines
from .rows import RowRules, RowSource
from .shelf import Disk, Shelf
from .table import Table, has_suffix
from .text import SUFFIX, TextSource

SourceFormat = Literal["auto", "files", "jsonl", "csv", "parquet", "hf", "text"]

_TABLES: dict[SourceFormat, Table] = {"jsonl": JsonLines(), "csv": Delimited(), "parquet": Parquet(), "hf": Arrow()}
_LOOKED_AT = 1000  # entries of a folder: telling a folder of tables from one of pictures must not take a listing of its own
_TEXT_FIELD = "text"


@dataclass(frozen=True)
class RowOptions:
    """What only means something for tables and text."""

    key: str | None = None
    file_columns: tuple[str, ...] = ()
    text_field: str | None = None

    @property
    def given(self) -> bool:
        return self != RowOptions()


def table_source(
    location: Location, source_format: SourceFormat, options: RowOptions, on_bad: OnBad, *, store: StoreConfig | None = None
) -> Source | None:
    """The source for a path or a URL that holds rows or documents; ``None`` when its files are to be packed as they are.

    ``auto`` decides by the suffix of a file, and takes a folder for one of files unless ``datasets`` saved it. Raises ``UsageError``
    for a folder of nothing but tables, where both could be meant, and for options that do not fit.
    """
    if source_format not in get_args(SourceFormat):
        raise UsageError(f"source_format: {source_format!r} is not one of {', '.join(get_args(SourceFormat))}")
    chosen = _by_looking(location, store) if source_format == "auto" else source_format
    if chosen == "files":
        if options.given:
            raise UsageError(
                f"key, file_columns and text_field are for tables, and {location} is read as files; say which with "
                f"--source-format {' or '.join(_TABLES)} or text"
            )
        return None
    if chosen == "text":
        return _text(location, options, on_bad, store)
    path, table = _path(location), _TABLES[chosen]
    single = has_suffix(path, table.suffixes)
    if not single and location.is_directory and os.path.isfile(path):
        raise UsageError(
            f"reading {path} as {chosen}: its name does not end with {_either(table.suffixes)}, "
            "by which files are told apart; rename it or link to it"
        )
    rules = RowRules(options.key, options.file_columns, options.text_field, on_bad)
    return RowSource(path, table, rules, _shelf(location, store, single=single))


def _path(location: Location) -> str:
    return location.path if location.is_directory else str(location)


def _shelf(location: Location, store: StoreConfig | None, *, single: bool) -> Shelf:
    """Where the files at ``location`` lie, which is a ``single`` one of them or the folder that holds them."""
    return Disk() if location.is_directory else Bucket(location.parent if single else location, store)


def _text(location: Location, options: RowOptions, on_bad: OnBad, store: StoreConfig | None) -> Source:
    """Text files, or rows that have a column of text. In a folder not both, since their keys and their order have nothing in common."""
    path, lines = _path(location), _TABLES["jsonl"]
    table = next((table for table in _TABLES.values() if has_suffix(path, table.suffixes)), None)
    ends_as_text = path.lower().endswith(SUFFIX)
    # What a URL names is told by its end alone.
    single = not os.path.isdir(path) if location.is_directory else table is not None or ends_as_text
    shelf = _shelf(location, store, single=single)
    rules = RowRules(options.key, options.file_columns, options.text_field or _TEXT_FIELD, on_bad)
    if single:
        if table is not None:
            return RowSource(path, table, rules, shelf)
        if os.path.isfile(path) and not ends_as_text:
            raise UsageError(f"reading {path} as text: its name ends with none of {SUFFIX}, {', '.join(lines.suffixes)}; rename it")
    else:
        texts, tables = _holds(path, shelf, lines)
        if texts and tables:
            raise UsageError(
                f"reading {path} as text: it holds both {SUFFIX} and {_either(lines.suffixes)} files; shard them one after the other, "
                f"the latter with --source-format jsonl --text-field {rules.text}"
            )
        if tables:
            return RowSource(path, lines, rules, shelf)
    if options.given:
        raise UsageError(f"key, file_columns and text_field are for tables, and {path} is read as text files; leave them out")
    return TextSource(path, on_bad, shelf, single)


def _holds(path: str, shelf: Shelf, table: Table) -> tuple[bool, bool]:
    """Whether there are text files in a folder, and whether files of ``table`` are."""
    texts = tables = False
    for name in shelf.names(path, lambda name: name.startswith(".")):
        texts = texts or name.lower().endswith(SUFFIX)
        tables = tables or has_suffix(name, table.suffixes)
        if texts and tables:
            break
    return texts, tables


def _by_looking(location: Location, store: StoreConfig | None) -> SourceFormat:
    path = _path(location)
    if location.is_directory and os.path.isdir(path):
        if is_saved_dataset(path, Disk()):
            return "hf"
        kind = _only_kind(path)
        if kind is not None:
            raise UsageError(
                f"reading {path}: it holds nothing but {_either(_TABLES[kind].suffixes)} files; say --source-format {kind} for a sample "
                "from each of their rows, or --source-format files to pack the files as they are"
            )
        refuse_remains(path, _upper_names(path))
        return "files"
    if path.lower().endswith(SUFFIX):
        return "text"
    if path.lower().endswith(".tar"):
        raise UsageError(f"reading {path}: it is a tar, which has its samples already; stagekit index makes it a data set where it lies")
    named = next((name for name, table in _TABLES.items() if has_suffix(path, table.suffixes)), None)
    if named is None and not location.is_directory:
        bucket = Bucket(location, store)
        if is_saved_dataset(path, bucket):
            return "hf"
        refuse_remains(path, _first_names(path, bucket))
    return named or "files"


def _upper_names(path: str) -> Iterator[str]:
    """The names of files in a folder of this machine, and in the folders in it that may hold a Hugging Face data set."""
    for name, is_file in _entries(path):
        if is_file:
            yield name
        elif os.path.isfile(os.path.join(path, name, DESCRIPTION)):
            yield from (f"{name}/{below}" for below, _ in _entries(os.path.join(path, name)))


def _first_names(path: str, shelf: Shelf) -> Iterator[str]:
    try:
        yield from islice(shelf.names(path, lambda name: name.startswith(".")), _LOOKED_AT)
    except (FileNotFoundError, PermissionError, SourceError):
        return  # whoever lists it says so


def _only_kind(path: str) -> SourceFormat | None:
    """The format of all files in a folder, if they are tables of one format and there is no other folder in it."""
    kinds: set[SourceFormat] = set()
    for name, is_file in _entries(path):
        kind = next((kind for kind, table in _TABLES.items() if is_file and has_suffix(name, table.suffixes)), None)
        if kind is None:
            return None
        kinds.add(kind)
    return kinds.pop() if len(kinds) == 1 else None


def _entries(path: str) -> Iterable[tuple[str, bool]]:
    try:
        with os.scandir(path) as entries:
            for entry, _ in zip(entries, range(_LOOKED_AT), strict=False):
                if not entry.name.startswith("."):
                    yield entry.name, entry.is_file()
    except OSError:
        return  # whoever lists it says so


def _either(suffixes: Sequence[str]) -> str:
    return " or ".join(suffixes)
