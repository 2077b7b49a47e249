"""Whether files that another program saves are finished. Nothing is unpickled.

A save seen from outside is a directory in which files appear one by one, some of them while they are being written. What each format
writes last tells whether a file is all there.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_ZIP = b"PK"


def is_whole(path: Path) -> bool:
    """Whether ``path`` is a file that was written to its end, as far as its format tells; any other file counts when it is not empty.

    ``.safetensors``: its header says how long it is. What ``torch.save`` writes is a zip, whose directory comes last. ``.json`` parses.
    """
    try:
        size = path.stat().st_size
        if not path.is_file() or size == 0:
            return False
        if path.suffix == ".safetensors":
            return _safetensors_bytes(path) == size
        if path.suffix in _OF_TORCH:
            with path.open("rb") as file:
                if file.read(2) != _ZIP:
                    return True  # the older format of torch.save, which has no end
            return zipfile.is_zipfile(path)
        if path.suffix == ".json":
            json.loads(path.read_bytes())
    except (OSError, ValueError, struct.error):
        return False
    return True


def tells_its_end(path: Path) -> bool:
    """Whether the format of ``path`` says where it ends, so that ``is_whole`` would notice a file that was cut."""
    if path.suffix in _OF_TORCH:
        try:
            with path.open("rb") as file:
                return file.read(2) == _ZIP
        except OSError:
            return False
    return path.suffix in (".safetensors", ".json")


def _safetensors_bytes(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            return -1
        header = json.loads(file.read(length))
    return int(8 + length + max((value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"), default=0))


def sizes(directory: Path) -> dict[str, int]:
    """The files below ``directory`` with their sizes, by path with slashes."""
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files(directory)}


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def files(directory: Path) -> Iterator[Path]:
    """All files below ``directory``, sorted by folder. Raises ``OSError`` for a folder that cannot be read, unless it is gone."""
    for folder, folders, names in os.walk(directory, onerror=_raise):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file():
                yield path
