"""The manifest of a data set: which shards are complete, and what every one of their bytes must be.

``docs/format.md`` section 5 is the specification.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import KeyNotAllowed, LocationError, ManifestError
from ..location import Location
from .archive import END, RECORD, Data
from .index import BuiltShard, FieldTotals
from .sample import check_field

MANIFEST = "manifest.json"
WIDS = "wids.json"
FORMAT = "stagekit-dataset"
VERSION = 1

_LIMIT = 2**63
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHECKSUM = re.compile(rb'"checksum"[ \t\r\n]*:[ \t\r\n]*"([0-9a-f]{64})"')
_NAME = re.compile(r"[^\x00-\x1f\x7f\\]+")
_BLANK_CHECKSUM = "0" * 64
_REPUBLISH = "Publish the data set again, or fetch the file again if it was copied"


def shard_name(number: int) -> str:
    """``shards/000000.tar``."""
    return f"shards/{number:06d}.tar"


def index_name(name: str) -> str:
    """The sample index beside the shard ``name``: ``shards/000000.tar.idx``."""
    return name + ".idx"


def blocks_name(name: str) -> str:
    """The block table beside the shard ``name``: ``shards/000000.blocks``."""
    return name.removesuffix(".tar") + ".blocks"


def samples_name(name: str) -> str:
    """The digests of single samples beside the shard ``name``: ``shards/000000.samples``. No manifest names it, and it may be missing."""
    return name.removesuffix(".tar") + ".samples"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard as its manifest knows it. Digests are lower-case hexadecimal; ``block_samples`` counts the samples of each block.

    ``url`` is where the tar lies when it is not below the data set: one that was indexed where it was. Side files always lie below the
    data set, under ``name``.
    """

    name: str
    bytes: int
    samples: int
    sha256: str
    idx_sha256: str
    blocks_sha256: str
    block_samples: tuple[int, ...]
    url: str | None = None

    @classmethod
    def of(cls, name: str, built: BuiltShard, *, url: str | None = None) -> ShardRecord:
        """The record of a shard that was built under ``name``, or lies at ``url``."""
        return cls(
            name,
            built.bytes,
            built.samples,
            built.sha256,
            hashlib.sha256(built.index).hexdigest(),
            hashlib.sha256(built.table.to_bytes()).hexdigest(),
            built.table.block_samples,
            url,
        )


@dataclass(frozen=True)
class Manifest:
    """A complete data set. Making one checks that its parts fit together (``ManifestError``), so there is no other kind.

    ``fields`` maps each field to ``(samples, bytes)``; ``largest_block`` is in bytes.
    """

    shards: tuple[ShardRecord, ...]
    fields: Mapping[str, FieldTotals]
    largest_block: int
    digest: str = field(init=False)
    """The data set's identity, wherever it lies: over sizes, counts and digests of the shards, without their names."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(self.shards))
        object.__setattr__(self, "fields", {name: FieldTotals(*self.fields[name]) for name in sorted(self.fields)})
        _check(self)
        object.__setattr__(self, "digest", _digest(self.shards))

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def to_bytes(self) -> builtins.bytes:
        """The content of ``manifest.json``: equal manifests give equal bytes."""
        blank = _json(
            {
                "bytes": self.bytes,
                "checksum": _BLANK_CHECKSUM,
                "digest": self.digest,
                "fields": {name: {"bytes": totals.bytes, "samples": totals.samples} for name, totals in self.fields.items()},
                "format": FORMAT,
                "largest_block": self.largest_block,
                "samples": self.samples,
                "shards": [
                    {
                        "block_samples": list(shard.block_samples),
                        "blocks_sha256": shard.blocks_sha256,
                        "bytes": shard.bytes,
                        "idx_sha256": shard.idx_sha256,
                        "name": shard.name,
                        "samples": shard.samples,
                        "sha256": shard.sha256,
                        **({} if shard.url is None else {"url": shard.url}),
                    }
                    for shard in self.shards
                ],
                "version": VERSION,
            }
        )
        checksum = hashlib.sha256(blank).hexdigest()
        return blank.replace(f'"checksum":"{_BLANK_CHECKSUM}"'.encode(), f'"checksum":"{checksum}"'.encode(), 1)

    def gathered(self) -> Manifest:
        """The same data set with all its shards below it: what a copy of it has, whose digest is the same."""
        return Manifest(tuple(replace(shard, url=None) for shard in self.shards), self.fields, self.largest_block)

    @classmethod
    def from_bytes(cls, data: Data, *, source: str) -> Manifest:
        """Parse ``manifest.json``; everything that ``docs/format.md`` 5.3 asks for is checked.

        Raises ``ManifestError`` naming ``source``. Of a version that this release does not read it says which ones it reads.
        """
        raw = bytes(data)
        try:
            return _parse(raw, source)
        except _Defect as defect:
            raise ManifestError(f"{source} is no valid manifest: {defect}. {_REPUBLISH}") from None


def wids_json(manifest: Manifest) -> bytes:
    """The content of ``wids.json``: the shard list as WebDataset's ``wids`` package reads it, URLs relative to the file."""
    return _json(
        {
            "__kind__": "wids-shard-index-v1",
            # wids keeps its cache under this name, so it must not be shared by two data sets.
            "name": f"stagekit-{manifest.digest[:16]}",
            "shardlist": [
                {"filesize": shard.bytes, "nsamples": shard.samples, "url": shard.url or shard.name} for shard in manifest.shards
            ],
            "wids_version": 1,
        }
    )


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _digest(shards: tuple[ShardRecord, ...]) -> str:
    lines = "".join(f"{shard.bytes} {shard.samples} {shard.sha256} {shard.blocks_sha256}\n" for shard in shards)
    return hashlib.sha256(lines.encode()).hexdigest()


class _Defect(Exception):
    """What is wrong with a manifest, before its name is known."""


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise _Defect(what)


def _check(manifest: Manifest) -> None:
    try:
        _check_parts(manifest)
    except _Defect as defect:
        raise ManifestError(f"these shards make no manifest: {defect}") from None


def _check_parts(manifest: Manifest) -> None:
    _need(bool(manifest.shards), "it lists no shard")
    names: set[str] = set()
    for number, shard in enumerate(manifest.shards):
        _check_shard(shard, number)
        _need(shard.name not in names, f"the shard {shard.name!r} is listed twice")
        names.add(shard.name)
    largest_shard = max(shard.bytes for shard in manifest.shards)
    _need(
        RECORD <= _count(manifest.largest_block, "largest_block") <= largest_shard - len(END),
        f"largest_block is {manifest.largest_block}, which fits no shard",
    )
    samples, size = manifest.samples, manifest.bytes
    _need(size < _LIMIT, f"bytes adds up to {size}, above 2^63")
    for name, totals in manifest.fields.items():
        try:
            check_field(name)
        except KeyNotAllowed as error:
            raise _Defect(str(error)) from None
        _need(
            1 <= _count(totals.samples, f"samples of the field {name!r}") <= samples,
            f"the field {name!r} is in {totals.samples} of {samples} samples",
        )
        _count(totals.bytes, f"bytes of the field {name!r}")
    _need(
        sum(totals.samples for totals in manifest.fields.values()) >= samples,
        f"its fields are in fewer samples than the {samples} there are",
    )
    payload = sum(totals.bytes + totals.samples * RECORD for totals in manifest.fields.values())
    _need(
        payload + len(END) * len(manifest.shards) <= size,
        f"its fields with their headers have {payload} bytes, more than the shards' {size}",
    )


def is_shard_name(name: str) -> bool:
    """Whether a shard may be called ``name`` below its data set: relative, printable, no ``..``, no backslash, ending in ``.tar``."""
    return (
        _NAME.fullmatch(name) is not None
        and name.endswith(".tar")
        and not any(part in ("", ".", "..", ".tar") for part in name.split("/"))
        and name.isprintable()
    )


def is_shard_url(url: str) -> bool:
    """Whether a manifest may say that a shard lies at ``url``: one spelling of an absolute location, whose path would be a name."""
    try:
        location = Location.parse(url)
    except LocationError:
        return False
    return str(location) == url and is_shard_name(location.path.lstrip("/"))


def _check_shard(shard: ShardRecord, number: int) -> None:
    what = f"shard {number}"
    name = shard.name
    _need(isinstance(name, str), f"{what} has a name that is no text")
    _need(is_shard_name(name), f"{what} is called {name!r}; a name is relative, without '..', and ends in .tar")
    if shard.url is not None:
        _need(isinstance(shard.url, str), f"{what} has a URL that is no text")
        _need(is_shard_url(shard.url), f"{what} lies at {shard.url!r}; a URL is absolute, without '..', and ends in .tar")
    _count(shard.bytes, f"bytes of {what}")
    _count(shard.samples, f"samples of {what}")
    for label in ("sha256", "idx_sha256", "blocks_sha256"):
        digest = getattr(shard, label)
        _need(
            isinstance(digest, str) and _SHA256.fullmatch(digest) is not None, f"{label} of {what} is {digest!r}, not 64 hexadecimal digits"
        )
    for samples in shard.block_samples:
        _need(_count(samples, f"block_samples of {what}") >= 1, f"{what} has a block without a sample")
    total = sum(shard.block_samples)
    _need(shard.samples >= 1 and shard.samples == total, f"{what} has {shard.samples} samples, and its blocks {total}")
    _need(
        shard.bytes >= shard.samples * RECORD + len(END),
        f"{what} has {shard.bytes} bytes, too few for {shard.samples} samples",
    )


def _count(value: object, what: str) -> int:
    # A JSON true is an int to Python.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LIMIT:
        raise _Defect(f"{what} is {value!r}, not a number from 0 to 2^63 - 1")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Defect(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice in one object")
    return found


def _object(value: object, keys: frozenset[str], what: str, optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Defect(f"{what} is not an object")
    missing, unknown = sorted(keys - value.keys()), sorted(value.keys() - keys - optional)
    _need(not missing, f"{what} lacks {', '.join(map(repr, missing))}")
    _need(not unknown, f"{what} has {', '.join(map(repr, unknown))}, which version {VERSION} does not know")
    return value


_TOP = frozenset({"bytes", "checksum", "digest", "fields", "format", "largest_block", "samples", "shards", "version"})
_SHARD = frozenset({"block_samples", "blocks_sha256", "bytes", "idx_sha256", "name", "samples", "sha256"})
_SHARD_OPTIONAL = frozenset({"url"})
_FIELD = frozenset({"bytes", "samples"})


def _parse(raw: bytes, source: str) -> Manifest:
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _Defect(f"it is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _Defect(f"it is not JSON ({error.msg} at byte {error.pos})") from None
    except RecursionError:
        raise _Defect("it is nested too deeply") from None
    except ValueError as error:
        # Python refuses to read numbers of thousands of digits.
        raise _Defect(f"it holds a number that is too long ({error})") from None
    _need(isinstance(value, dict) and value.get("format") == FORMAT, f"its format is not {FORMAT!r}")
    version = value.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ManifestError(
            f"{source} is a manifest of version {version!r}, and this release reads version {VERSION}. "
            "Install a release of Stagekit that knows it"
        )
    top = _object(value, _TOP, "the manifest")
    _check_checksum(raw, top["checksum"])
    _need(isinstance(top["shards"], list), "shards is not a list")
    shards = tuple(_shard(entry, number) for number, entry in enumerate(top["shards"]))
    _need(isinstance(top["fields"], dict), "fields is not an object")
    fields = {name: _field(entry, name) for name, entry in top["fields"].items()}
    try:
        manifest = Manifest(shards, fields, _count(top["largest_block"], "largest_block"))
    except ManifestError as error:
        raise _Defect(str(error).partition(": ")[2]) from None
    for label in ("samples", "bytes"):
        _need(
            _count(top[label], label) == getattr(manifest, label),
            f"{label} is {top[label]}, and its shards add up to {getattr(manifest, label)}",
        )
    _need(top["digest"] == manifest.digest, f"digest is {top['digest']!r}, and its shards give {manifest.digest}")
    return manifest


def _shard(entry: object, number: int) -> ShardRecord:
    found = _object(entry, _SHARD, f"shard {number}", _SHARD_OPTIONAL)
    _need(isinstance(found["block_samples"], list), f"block_samples of shard {number} is not a list")
    # An ordinary shard has no such key: one manifest, one spelling.
    _need(found.get("url", "") is not None, f"the URL of shard {number} is null")
    return ShardRecord(**{**found, "block_samples": tuple(found["block_samples"])})


def _field(entry: object, name: str) -> FieldTotals:
    found = _object(entry, _FIELD, f"the field {name!r}")
    return FieldTotals(found["samples"], found["bytes"])


def _check_checksum(raw: bytes, stored: object) -> None:
    found = list(_CHECKSUM.finditer(raw))
    _need(len(found) == 1 and found[0].group(1).decode() == stored, f"checksum is {stored!r}, not 64 hexadecimal digits")
    start, end = found[0].span(1)
    counted = hashlib.sha256(raw[:start] + _BLANK_CHECKSUM.encode() + raw[end:]).hexdigest()
    _need(counted == stored, f"its checksum is {stored}, and its bytes give {counted}: it was changed or damaged")


def _no_constant(name: str) -> None:
    raise _Defect(f"it holds {name}, which is not JSON")
