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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class DcpContents:
    """What ``.metadata`` of torch.distributed.checkpoint says: how long each file is, and which parts of the state lie in none."""

    lengths: Mapping[str, int]
    unwritten: tuple[str, ...] = ()

    def problems(self, sizes: Mapping[str, int]) -> list[str]:
        """One sentence for each part that was not written, and each file that is missing or too short. ``sizes``: the files there are."""
        found = [f"{name} was not written" for name in self.unwritten]
        for path, length in sorted(self.lengths.items()):
            size = sizes.get(path)
            if size is None:
                found.append(f"{path} is missing")
            elif size < length:
                found.append(f"{path} has {size} bytes, .metadata names {length}")
        return found


def dcp_contents(directory: Path) -> DcpContents:
    """Read ``.metadata``. Raises ``FileNotFoundError`` when there is none.

    It is a pickle: call this only for what this training wrote. When one of several writing threads fails, torch loses the error, and
    ``.metadata`` tells of the tensors that thread had to write and of no file that they lie in.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    metadata = FileSystemReader(directory).read_metadata()
    placed: Mapping[Any, Any] = metadata.storage_data or {}
    lengths: dict[str, int] = {}
    for info in placed.values():
        lengths[info.relative_path] = max(lengths.get(info.relative_path, 0), info.offset + info.length)
    unwritten = [
        name
        for name, item in metadata.state_dict_metadata.items()
        for part in (
            [MetadataIndex(name, chunk.offsets) for chunk in item.chunks]
            if isinstance(item, TensorStorageMetadata)
            else [MetadataIndex(name)]
        )
        if part not in placed
    ]
    return DcpContents(lengths, tuple(dict.fromkeys(unwritten)))


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
        contents = dcp_contents(directory)
    except FileNotFoundError:
        return [f"{directory.name}/{METADATA}"]
    except Exception as error:  # a pickle that is cut ends in anything
        return [f"{directory.name}/{METADATA} (it cannot be read: {type(error).__name__})"]
    return [f"{directory.name}/{problem}" for problem in contents.problems(sizes(directory))]
