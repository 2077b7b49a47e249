"""Parquet files, and the Arrow files of Hugging Face's ``datasets``, through pyarrow: read a few hundred rows at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import MissingExtra, SourceError
from .table import BadRow, Opener, Row, cannot_read

_ROWS = 256  # converted to Python at once


def _arrow(path: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingExtra.of("tables", "pyarrow", f"reading {path}") from None
    return pyarrow


@contextmanager
def _reading(path: str, pyarrow: Any) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise cannot_read(path, error) from error


class _Columns:
    """What both formats have in common: rows come as values by column."""

    @property
    def counts(self) -> str:
        return "row"

    @property
    def raw(self) -> bool:
        return False

    def values(self, row: Row) -> dict[str, Any]:
        assert isinstance(row, dict)
        return row


@dataclass(frozen=True)
class Parquet(_Columns):
    """``.parquet``. A position is the number of a row group, which is read in pages: memory does not depend on its size."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (".parquet",)

    def listed(self, folder: str) -> None:  # noqa: ARG002 - a folder of such files says nothing about them
        return None

    def rows(self, path: str, position: int, line: int, open_file: Opener) -> Iterator[tuple[int, int, Row | BadRow]]:
        pyarrow = _arrow(path)
        from pyarrow import parquet

        with (
            _reading(path, pyarrow),
            open_file(path, straight=False) as opened,
            parquet.ParquetFile(opened, pre_buffer=False, buffer_size=2**20) as file,
        ):
            _check_columns(path, file.schema_arrow.names)
            for group in range(position, file.num_row_groups):
                for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], use_threads=False):
                    for row in batch.to_pylist():
                        yield group, line, row
                        line += 1


@dataclass(frozen=True)
class Arrow(_Columns):
    """``.arrow``, as ``datasets`` writes it (a stream), or Arrow's file format. A position is the number of a record batch."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (".arrow",)

    def listed(self, folder: str) -> list[str] | None:
        return saved_files(folder)

    def rows(self, path: str, position: int, line: int, open_file: Opener) -> Iterator[tuple[int, int, Row | BadRow]]:  # noqa: ARG002 - a disk maps it
        pyarrow = _arrow(path)
        from pyarrow import ipc

        with _reading(path, pyarrow), pyarrow.memory_map(path) as file:
            try:
                reader = ipc.open_stream(file)
            except pyarrow.ArrowInvalid:
                file.seek(0)
                whole = ipc.open_file(file)
                batches = (whole.get_batch(number) for number in range(whole.num_record_batches))
                names = whole.schema.names
            else:
                batches, names = iter(reader), reader.schema.names
            _check_columns(path, names)
            for number, batch in enumerate(batches):
                if number < position:
                    continue  # mapped, so passing it over reads nothing of it
                for begin in range(0, batch.num_rows, _ROWS):
                    for row in batch.slice(begin, _ROWS).to_pylist():
                        yield number, line, row
                        line += 1


def _check_columns(path: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SourceError(f"reading {path}: it has the column {twice[0]!r} twice; rename one")


def is_saved_dataset(path: str) -> bool:
    """Whether the folder at ``path`` is what ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` makes."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def saved_files(path: str) -> list[str] | None:
    """The Arrow files of a saved data set, in their order, relative to its folder; ``None`` when the folder is none.

    Raises ``SourceError`` for a folder of several splits, and for one that is damaged.
    """
    splits = os.path.join(path, "dataset_dict.json")
    if os.path.isfile(splits):
        names = _json(splits).get("splits")
        found = ", ".join(map(str, names)) if isinstance(names, list) else "none that can be read"
        example = os.path.join(path, str(names[0])) if isinstance(names, list) and names else path
        raise SourceError(f"reading {path}: it holds several splits ({found}); shard each into a data set of its own, such as {example}")
    state = os.path.join(path, "state.json")
    if not os.path.isfile(state):
        return None
    listed = _json(state).get("_data_files")
    names = [one.get("filename") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    files = [name for name in names if isinstance(name, str) and os.path.basename(name) == name]
    if not files or len(files) != len(names):
        raise SourceError(f"reading {state}: it does not list the data set's files; save the data set again")
    return files


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            value = json.load(file)
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from error
    return value if isinstance(value, dict) else {}
