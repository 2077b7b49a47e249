"""Parquet files, and the Arrow files of Hugging Face's ``datasets``, through pyarrow: read a few rows at a time."""

from __future__ import annotations

import io
import json
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import MissingExtra, SourceError
from ..units import format_size
from .shelf import Shelf
from .table import BadRow, Opener, Row, cannot_read

_ROWS = 256  # converted to Python at once, at most
_CONVERTED_BYTES = 8 * 2**20  # and about so many bytes of them, unless one row alone is larger
_IN_MEMORY = 16 * 2**20  # a larger record batch is mapped from a disk
_PIECE = 4 * 2**20
_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_MAGIC = b"ARROW1"  # how Arrow's file format begins; a stream begins with its first message

DESCRIPTION = "dataset_info.json"
"""What lies beside the Arrow files of every Hugging Face data set."""


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

    def listed(self, folder: str, open_file: Opener) -> None:  # noqa: ARG002 - a folder of such files says nothing about them
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
                held = file.metadata.row_group(group)
                for batch in file.iter_batches(
                    batch_size=_at_once(held.num_rows, held.total_byte_size), row_groups=[group], use_threads=False
                ):
                    for row in batch.to_pylist():
                        yield group, line, row
                        line += 1


@dataclass(frozen=True)
class Arrow(_Columns):
    """``.arrow``, as ``datasets`` writes it (a stream), or Arrow's file format. A position is where a record batch begins, in bytes, or
    its number."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (".arrow",)

    def listed(self, folder: str, open_file: Opener) -> list[str] | None:
        return saved_files(folder, open_file)

    def rows(self, path: str, position: int, line: int, open_file: Opener) -> Iterator[tuple[int, int, Row | BadRow]]:
        pyarrow = _arrow(path)
        with _reading(path, pyarrow), open_file(path) as opened, pyarrow.PythonFile(_Batches(path, opened), mode="r") as file:
            batches = _of_file if file.read(len(_MAGIC)) == _MAGIC else _of_stream
            file.seek(0)
            for begin, batch in batches(path, file, position):
                step = _at_once(batch.num_rows, batch.nbytes)
                for first in range(0, batch.num_rows, step):
                    for row in batch.slice(first, step).to_pylist():
                        yield begin, line, row
                        line += 1


def _at_once(rows: int, size: int) -> int:
    """How many of ``rows`` that take ``size`` bytes become Python's values at once."""
    return max(1, min(_ROWS, rows * _CONVERTED_BYTES // max(1, size)))


class _Batches:
    """A file as pyarrow wants it. It asks for a record batch with one call of ``read``, whatever its size; a large one is not held in
    memory, but mapped: from the disk where the file lies there, else from a file without a name that goes with the batch."""

    closed = False

    def __init__(self, path: str, opened: BinaryIO) -> None:
        self._path = path
        self._opened = opened

    def read(self, size: int) -> bytes | memoryview:
        begin = self._opened.tell()
        if size > _IN_MEMORY:
            size = min(size, self._opened.seek(0, io.SEEK_END) - begin)  # a damaged file may announce anything
            self._opened.seek(begin)
        if size <= _IN_MEMORY:
            return self._opened.read(size)
        try:
            descriptor = self._opened.fileno()
        except io.UnsupportedOperation:
            with tempfile.TemporaryFile() as file:
                for at in range(0, size, _PIECE):
                    self._keep(file, self._opened.read(min(_PIECE, size - at)))
                return _mapped(file.fileno(), 0, size)
        self._opened.seek(begin + size)
        return _mapped(descriptor, begin, size)

    def _keep(self, file: BinaryIO, data: bytes) -> None:
        try:
            file.write(data)
            file.flush()
        except OSError as error:
            raise SourceError(
                f"reading {self._path}: a record batch of it is too large for memory and finds no room in {tempfile.gettempdir()} "
                f"({error.strerror}); free space there, or name another place in TMPDIR"
            ) from error

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._opened.seek(offset, whence)

    def tell(self) -> int:
        return self._opened.tell()

    def close(self) -> None:
        """Whoever opened the file closes it."""


def _mapped(descriptor: int, begin: int, size: int) -> memoryview:
    inside = begin % mmap.ALLOCATIONGRANULARITY
    return memoryview(mmap.mmap(descriptor, size + inside, access=mmap.ACCESS_READ, offset=begin - inside))[inside:]


def _of_file(path: str, file: Any, position: int) -> Iterator[tuple[int, Any]]:
    from pyarrow import ipc

    whole = ipc.open_file(file)
    _check_columns(path, whole.schema.names)
    for number in range(position, whole.num_record_batches):
        yield number, whole.get_batch(number)


def _of_stream(path: str, file: Any, position: int) -> Iterator[tuple[int, Any]]:
    from pyarrow import ipc

    reader = ipc.open_stream(file)
    _check_columns(path, reader.schema.names)
    if position and not any(map(_has_dictionary, reader.schema.types)):
        file.seek(position)
    while True:
        begin = file.tell()
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            if begin == file.size():
                raise SourceError(
                    f"reading {path}: it has no end mark after {format_size(begin)}, so what wrote it may have been stopped in the middle; "
                    "make it again"
                ) from None
            return
        if begin >= position:
            yield begin, batch


def _has_dictionary(kind: Any) -> bool:
    """Whether values of this type stand in a dictionary, which comes before the record batches and may change between them."""
    from pyarrow import types

    if isinstance(kind, types.lib.BaseExtensionType):
        kind = kind.storage_type
    return types.is_dictionary(kind) or any(_has_dictionary(kind.field(number).type) for number in range(kind.num_fields))


def _check_columns(path: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SourceError(f"reading {path}: it has the column {twice[0]!r} twice; rename one")


def is_saved_dataset(path: str, shelf: Shelf) -> bool:
    """Whether the folder at ``path`` is what ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` makes."""
    return any(_is_file(os.path.join(path, name), shelf) for name in (_STATE, _SPLITS))


def _is_file(path: str, shelf: Shelf) -> bool:
    try:
        shelf.stamp(path)
    except (FileNotFoundError, PermissionError, SourceError):  # whoever lists the source says what is wrong with it
        return False
    return True


def refuse_remains(path: str, names: Iterable[str]) -> None:
    """Raise ``SourceError`` when ``names``, of files below a folder that is no saved data set, are those of an incomplete copy of one, or
    of several. Packed as files they would look whole."""
    described: set[str] = set()
    filled: set[str] = set()
    for name in names:
        folder, _, file = name.rpartition("/")
        if file == DESCRIPTION:
            described.add(folder)
        elif file.endswith(Arrow().suffixes):
            filled.add(folder)
    found = sorted(described & filled)
    if "" in found:
        raise SourceError(
            f"reading {path}: {DESCRIPTION} and Arrow files say that it is a Hugging Face data set, and {_STATE}, which lists its files, "
            "is missing. Copy or save it again, whole; --source-format hf takes the rows of the files that are there, and files packs the "
            "files as they are"
        )
    if found:
        raise SourceError(
            f"reading {path}: it holds Hugging Face data sets in folders ({', '.join(found)}); shard each into a data set of its own, such "
            f"as {path.rstrip('/')}/{found[0]}, or say --source-format files to pack the files as they are"
        )


def saved_files(path: str, open_file: Opener) -> list[str] | None:
    """The Arrow files of a saved data set, in their order, relative to its folder; ``None`` when the folder is none.

    Raises ``SourceError`` for a folder of several splits, and for one that is damaged.
    """
    splits = _json(os.path.join(path, _SPLITS), open_file)
    if splits is not None:
        names = splits.get("splits")
        found = ", ".join(map(str, names)) if isinstance(names, list) else "none that can be read"
        example = os.path.join(path, str(names[0])) if isinstance(names, list) and names else path
        raise SourceError(f"reading {path}: it holds several splits ({found}); shard each into a data set of its own, such as {example}")
    state = _json(os.path.join(path, _STATE), open_file)
    if state is None:
        return None
    listed = state.get("_data_files")
    names = [one.get("filename") if isinstance(one, dict) else None for one in listed] if isinstance(listed, list) else []
    files = [name for name in names if isinstance(name, str) and os.path.basename(name) == name]
    if not isinstance(listed, list) or len(files) != len(listed):
        raise SourceError(f"reading {os.path.join(path, _STATE)}: it does not list the data set's files; save the data set again")
    return files


def _json(path: str, open_file: Opener) -> dict[str, Any] | None:
    """The object in a file; ``None`` when there is no file."""
    try:
        with open_file(path) as file:
            value = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from error
    return value if isinstance(value, dict) else {}
