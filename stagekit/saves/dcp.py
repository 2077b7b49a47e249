"""What a directory of torch.distributed.checkpoint must hold before it is complete, as its ``.metadata`` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import pickles
from ..pickles import Stand
from .whole import sizes

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class DcpContents:
    """What ``.metadata`` says: how long each file is, and which parts of the state lie in none."""

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
    """Read ``.metadata``. Raises ``FileNotFoundError`` when there is none, ``ValueError`` when it is damaged.

    It is a pickle, and nothing of it is run. When one of several writing threads fails, torch loses the error, and ``.metadata`` tells of
    the tensors that thread had to write and of no file that they lie in.
    """
    metadata = pickles.read((directory / METADATA).read_bytes())
    try:
        placed = {_index(key): value for key, value in (metadata.get("storage_data") or {}).items()}
        lengths: dict[str, int] = {}
        for info in placed.values():
            path = str(info.get("relative_path"))
            lengths[path] = max(lengths.get(path, 0), int(info.get("offset")) + int(info.get("length")))
        unwritten = [
            name
            for name, item in metadata.get("state_dict_metadata").items()
            for part in (
                [(name, _size(chunk.get("offsets"))) for chunk in item.get("chunks")] if item.get("chunks") is not None else [(name, None)]
            )
            if part not in placed
        ]
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{directory / METADATA} does not tell which files belong to it ({error})") from None
    return DcpContents(lengths, tuple(dict.fromkeys(unwritten)))


def missing_dcp(directory: Path) -> list[str]:
    """What a directory of torch.distributed.checkpoint still lacks; nothing when it is whole."""
    try:
        contents = dcp_contents(directory)
    except FileNotFoundError:
        return [f"{directory.name}/{METADATA}"]
    except (OSError, ValueError) as error:
        return [f"{directory.name}/{METADATA} (it cannot be read: {type(error).__name__})"]
    try:
        return [f"{directory.name}/{problem}" for problem in contents.problems(sizes(directory))]
    except OSError as error:
        return [f"{directory.name} (it cannot be read: {error.strerror})"]


def _index(key: Stand) -> tuple[str, tuple[int, ...] | None]:
    return str(key.get("fqn")), _size(key.get("offset"))


def _size(value: Any) -> tuple[int, ...] | None:
    """A ``torch.Size``, which a pickle makes from one tuple."""
    return tuple(value.args[0]) if isinstance(value, Stand) and value.args else None
