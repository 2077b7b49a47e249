"""What an interrupted run has read already: one object for each tar, gone when the data set is there.

A journal says of which bytes it speaks (the tar's size and etag), holds the tar's manifest entry, and the hashes of its samples' keys. It
is written when the tar's side files are stored, so it commits them. One that cannot be read, or that speaks of other bytes, counts as
none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..shards.index import FieldTotals
from ..shards.manifest import ShardRecord
from ..store.base import ObjectInfo

FOLDER = ".indexing/"
_FORMAT = "stagekit-index/1"
_DIGEST_BYTES = 16


def journal_name(name: str) -> str:
    """Where the journal of the shard ``name`` lies while a run is unfinished."""
    return f"{FOLDER}{name}.journal"


@dataclass(frozen=True, slots=True)
class Found:
    """What was found in one tar: its manifest entry, and what a person wants to be told."""

    record: ShardRecord
    fields: dict[str, FieldTotals]
    largest_block: int
    skipped: dict[str, int]
    unnamed: int
    examples: dict[str, str]


def identity(info: ObjectInfo) -> dict[str, Any]:
    """What tells that a tar is the one that was read. The time counts only where the store has no etags."""
    return {"size": info.size, "etag": info.etag, "modified_s": None if info.etag else info.modified_s}


def to_bytes(info: ObjectInfo, found: Found, keys: NDArray[np.uint64]) -> bytes:
    """The journal of the tar ``info``."""
    head = {"format": _FORMAT, "tar": identity(info), "found": asdict(found)}
    body = json.dumps(head, sort_keys=True, separators=(",", ":")).encode() + b"\n" + keys.astype("<u8").tobytes()
    return body + xxhash.xxh3_128_digest(body)


def from_bytes(data: bytes, info: ObjectInfo | None) -> tuple[Found, NDArray[np.uint64]] | None:
    """What the journal holds, when it is whole and speaks of the tar ``info`` (``None``: of whichever)."""
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != digest:
        return None
    line, _, keys = body.partition(b"\n")
    head = json.loads(line)  # its digest is right, so we wrote it
    if head["format"] != _FORMAT or (info is not None and head["tar"] != identity(info)):
        return None
    found = head["found"]
    record = ShardRecord(**{**found["record"], "block_samples": tuple(found["record"]["block_samples"])})
    fields = {name: FieldTotals(*totals) for name, totals in found["fields"].items()}
    return Found(**{**found, "record": record, "fields": fields}), np.frombuffer(keys, dtype="<u8").astype(np.uint64)
