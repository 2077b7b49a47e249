"""Files that may be compressed, read as what they hold. The suffix decides."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import BinaryIO, cast

from ..errors import MissingExtra
from .table import COMPRESSED, Opener, cannot_read

_BUFFER = 2**20


def is_compressed(path: str) -> bool:
    """Whether the file has no place to start from but its beginning."""
    return os.path.splitext(path)[1].lower() in COMPRESSED


@contextmanager
def opened(path: str, open_file: Opener) -> Iterator[BinaryIO]:
    """The content of the file at ``path``, which ``open_file`` opens, decompressed while it is read.

    ``.gz``, ``.bz2`` and ``.xz`` are read by the standard library; ``.zst`` by Python from 3.14 on, else by pyarrow. Raises
    ``SourceError`` naming the file when it cannot be opened, or ends too early, or is not what its suffix says.
    """
    try:
        with open_file(path) as raw, _content(path, raw) as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise cannot_read(path, error) from error


def _content(path: str, raw: BinaryIO) -> AbstractContextManager[BinaryIO]:
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".gz":
        return cast("AbstractContextManager[BinaryIO]", gzip.open(raw, "rb"))
    if suffix == ".bz2":
        return cast("AbstractContextManager[BinaryIO]", bz2.open(raw, "rb"))
    if suffix == ".xz":
        return cast("AbstractContextManager[BinaryIO]", lzma.open(raw, "rb"))
    return _zstandard(path, raw) if suffix == ".zst" else nullcontext(raw)


def _zstandard(path: str, raw: BinaryIO) -> AbstractContextManager[BinaryIO]:
    try:
        return cast("AbstractContextManager[BinaryIO]", importlib.import_module("compression.zstd").open(raw, "rb"))
    except ImportError:
        pass
    try:
        import pyarrow
    except ImportError:
        raise MissingExtra.of("tables", "pyarrow", f"reading {path}") from None
    # Its own streams have no lines; this wrapper of the standard library gives them.
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"), _BUFFER)
