"""``index.json`` of MosaicML's format: what it says of each shard, merged from what ``MDSWriter`` said of the shards one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..errors import ManifestError

INDEX = "index.json"
HASH = "sha256"
Entry = dict[str, Any]
"""What the index says of one shard."""

_VERSION = 2
_SHARD = re.compile(r"shard\.[0-9]{5,}(\.[0-9]+)?\.mds")


def shard_name(number: int, part: int = 0) -> str:
    """The name of a shard's file. ``part`` counts from 0 where one planned shard became several files."""
    return f"shard.{number:05d}{f'.{part}' if part else ''}.mds"


def is_shard(key: str) -> bool:
    """Whether ``key`` is a name that ``shard_name`` gives."""
    return _SHARD.fullmatch(key) is not None


def renamed(entry: Entry, name: str) -> Entry:
    """``entry`` for a file of another name."""
    return {**entry, "raw_data": {**entry["raw_data"], "basename": name}}


def name_of(entry: Entry) -> str:
    name: str = entry["raw_data"]["basename"]
    return name


def bytes_of(entry: Entry) -> int:
    size: int = entry["raw_data"]["bytes"]
    return size


def sha256_of(entry: Entry) -> str:
    digest: str = entry["raw_data"]["hashes"][HASH]
    return digest


def to_bytes(entries: Sequence[Entry]) -> bytes:
    """The content of ``index.json`` for shards in this order, written as ``MDSWriter`` writes it."""
    return json.dumps({"version": _VERSION, "shards": list(entries)}, sort_keys=True).encode()


def from_bytes(data: bytes, *, source: str) -> list[Entry]:
    """The entries of an ``index.json``. Raises ``ManifestError`` naming ``source`` for anything that lists no shards of this format."""
    try:
        value = json.loads(data)
        entries = list(value["shards"])
        for entry in entries:
            if not isinstance(name_of(entry), str) or not isinstance(bytes_of(entry), int) or not isinstance(entry["samples"], int):
                raise TypeError("an entry without name, size or samples")
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{source} is no index of MosaicML's format ({error!r}); choose another destination") from None
    return entries
