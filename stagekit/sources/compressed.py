"""Files that may be compressed, read as what they hold. The suffix decides."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from ..errors import MissingExtra
from .table import COMPRESSED, cannot_read

_BUFFER = 2**20


def is_compressed(path: str) -> bool:
    """Whether the file has no place to start from but its beginning."""
    return os.path.splitext(path)[1].lower() in COMPRESSED


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The content of the file at ``path``, decompressed while it is read.

    ``.gz``, ``.bz2`` and ``.xz`` are read by the standard library; ``.zst`` by Python from 3.14 on, else by pyarrow. Raises
    ``SourceError`` naming the file when it cannot be opened, or ends too early, or is not what its suffix says.
    """
    try:
        with _open(path) as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise cannot_read(path, error) from error


def _open(path: str) -> BinaryIO:
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "rb"))
    if suffix == ".bz2":
        return cast("BinaryIO", bz2.open(path, "rb"))
    if suffix == ".xz":
        return cast("BinaryIO", lzma.open(path, "rb"))
    if suffix == ".zst":
        return _zstandard(path)
    return open(path, "rb", buffering=_BUFFER)  # noqa: PTH123 - the caller's with-block closes it


def _zstandard(path: str) -> BinaryIO:
    try:
        return cast("BinaryIO", importlib.import_module("compression.zstd").open(path, "rb"))
    except ImportError:
        pass
    try:
        import pyarrow
    except ImportError:
        raise MissingExtra.of("tables", "pyarrow", f"reading {path}") from None
    # Its own streams have no lines; this wrapper of the standard library gives them.
    import io

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(path, "rb"), "zstd"), _BUFFER)
