"""Whether files that another program saves are finished. Nothing is unpickled but the ``.metadata`` that this training wrote itself.

A save seen from outside is a directory in which files appear one by one, some of them while they are being written. What each format
writes last tells whether a file is all there.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

METADATA = ".metadata"


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
        if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
            with path.open("rb") as file:
                if file.read(2) != b"PK":
                    return True  # the older format of torch.save, which has no end
            return zipfile.is_zipfile(path)
        if path.suffix == ".json":
            json.loads(path.read_bytes())
    except (OSError, ValueError, struct.error):
        return False
    return True


def _safetensors_bytes(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            return -1
        header = json.loads(file.read(length))
    return int(8 + length + max((value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"), default=0))


def dcp_lengths(directory: Path) -> dict[str, int]:
    """How long each file is that ``.metadata`` of torch.distributed.checkpoint names. Raises ``OSError`` when there is no ``.metadata``.

    ``.metadata`` is a pickle: call this only for what this training wrote.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    lengths: dict[str, int] = {}
    for info in (FileSystemReader(directory).read_metadata().storage_data or {}).values():
        lengths[info.relative_path] = max(lengths.get(info.relative_path, 0), info.offset + info.length)
    return lengths


def dcp_problems(lengths: Mapping[str, int], sizes: Mapping[str, int]) -> list[str]:
    """One sentence for each file that ``.metadata`` names and that is missing or too short. ``sizes``: the files there are."""
    problems = []
    for path, length in sorted(lengths.items()):
        size = sizes.get(path)
        if size is None:
            problems.append(f"{path} is missing")
        elif size < length:
            problems.append(f"{path} has {size} bytes, .metadata names {length}")
    return problems


def sizes(directory: Path) -> dict[str, int]:
    """The files below ``directory`` with their sizes, by path with slashes."""
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files(directory)}


def files(directory: Path) -> Iterator[Path]:
    """All files below ``directory``, sorted by folder."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file():
                yield path


def missing_dcp(directory: Path) -> list[str]:
    """What a directory of torch.distributed.checkpoint still lacks; nothing when it is whole."""
    try:
        lengths = dcp_lengths(directory)
    except FileNotFoundError:
        return [f"{directory.name}/{METADATA}"]
    except Exception as error:  # a pickle that is cut ends in anything
        return [f"{directory.name}/{METADATA} (it cannot be read: {type(error).__name__})"]
    return [f"{directory.name}/{problem}" for problem in dcp_problems(lengths, sizes(directory))]
