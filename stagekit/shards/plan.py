"""Plans: which files make a sample, and which samples go into which shard. Pure functions of what a source lists.

``docs/format.md`` 2.3, 2.4 and 3.3 are the specification.
"""

from __future__ import annotations

import hashlib
import unicodedata
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, overload

import numpy as np
import xxhash

from ..errors import DuplicateKey, UsageError
from .archive import END, LARGEST_MEMBER, RECORD, member_bytes
from .index import FieldTotals
from .manifest import shard_name
from .sample import member_name, split_name

Dots = Literal["refuse", "field", "rewrite"]

_SHOWN = 5


class PlannedField(NamedTuple):
    """A field that will be written: its size in bytes, and what its source calls it (a path, a row).

    ``mark`` is what the source will know a change by that leaves the size as it is (a time, an etag); a plan does not depend on it.
    """

    field: str
    size: int
    ref: str
    mark: int | str | None = None


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A sample that will be written."""

    key: str
    fields: tuple[PlannedField, ...]

    @property
    def bytes(self) -> int:
        """Bytes it takes in a shard, headers and padding included. Raises ``KeyNotAllowed`` for what a shard cannot hold."""
        total = 0
        for extension, size, _, _ in self.fields:
            name = member_name(self.key, extension)
            total += RECORD + size + -size % RECORD if size <= LARGEST_MEMBER else member_bytes(name, size)
        return total


class SampleRange(Sequence[PlannedSample]):
    """Samples in a row that are made when somebody looks at them, so that a plan of many takes a few bytes for each.

    Its keys are unique, its samples have their fields in order, and all of it is known to fit a shard.
    """

    @property
    @abstractmethod
    def sizes(self) -> Sequence[int]:
        """Bytes that each sample takes in a shard, headers and padding included."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A digest of all keys, fields and sizes."""

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, FieldTotals]:
        """Samples and bytes of each field."""

    @property
    @abstractmethod
    def near_duplicates(self) -> tuple[tuple[str, ...], ...]:
        """What the function of that name finds in the keys."""

    @abstractmethod
    def cut(self, start: int, stop: int) -> Sequence[PlannedSample]:
        """The samples ``start`` to ``stop``, made when somebody looks at them. It can be pickled, in no more bytes than a few."""

    @abstractmethod
    def picked(self, positions: Sequence[int]) -> SampleRange:
        """The samples at ``positions``, in that order, as a range of their own."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[PlannedSample]:
        return iter(self.cut(0, len(self)))

    @overload
    def __getitem__(self, index: int) -> PlannedSample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PlannedSample]: ...
    def __getitem__(self, index: int | slice) -> PlannedSample | Sequence[PlannedSample]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self.cut(start, max(start, stop)) if step == 1 else tuple(self)[index]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(index)
        return self.cut(number, number + 1)[0]


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A shard that will be written. ``bytes`` is exactly the tar's size."""

    number: int
    name: str
    samples: Sequence[PlannedSample]
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards of a data set before the first byte is read.

    ``digest`` (SHA-256) is the plan's identity: keys, fields, sizes and cuts, but not where they come from. ``oversized`` has the
    numbers of the shards above the shard size, each of one sample. ``near_duplicates`` has the groups of keys that differ only in
    case or Unicode normalisation, which file systems and people mix up; they stay apart. ``fields`` has the totals of each field, by name.
    """

    shards: tuple[PlannedShard, ...]
    digest: str
    fields: Mapping[str, FieldTotals]
    oversized: tuple[int, ...] = ()
    near_duplicates: tuple[tuple[str, ...], ...] = ()

    @property
    def samples(self) -> int:
        return sum(len(shard.samples) for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the fields alone, without headers and padding."""
        return sum(totals.bytes for totals in self.fields.values())


def plan(samples: Iterable[PlannedSample], *, shard_size: int, samples_per_shard: int | None = None) -> Plan:
    """Cut ``samples`` into shards, in their order; a pure function of its arguments.

    No shard exceeds ``shard_size`` bytes, headers, padding and end blocks counted, unless a single sample alone does. None has more
    than ``samples_per_shard`` samples.

    Raises ``DuplicateKey``, listing where the samples come from, when a key occurs twice or a sample has a field twice;
    ``KeyNotAllowed`` for what a shard cannot hold; ``UsageError`` for sizes that cannot be meant.
    """
    if shard_size < 1:
        raise UsageError(f"shard_size: {shard_size} bytes is no size for a shard")
    if samples_per_shard is not None and samples_per_shard < 1:
        raise UsageError(f"samples_per_shard: {samples_per_shard} is no number of samples for a shard")
    if isinstance(samples, SampleRange):
        return _plan_range(samples, shard_size, samples_per_shard)
    shards: list[PlannedShard] = []
    oversized: list[int] = []
    totals: dict[str, list[int]] = {}
    current: list[PlannedSample] = []
    size = len(END)
    seen: dict[str, PlannedSample] = {}
    duplicates: dict[str, list[PlannedSample]] = {}
    digest = hashlib.sha256()

    def close() -> None:
        nonlocal current, size
        number = len(shards)
        name = shard_name(number)
        if size > shard_size:
            oversized.append(number)
        shards.append(PlannedShard(number, name, tuple(current), size))
        # Names hold no newline, so the lines are unambiguous.
        lines = [f"shard {name} {size}\n"]
        for sample in current:
            lines.append(f"sample {sample.key}\n")
            lines += [f"{planned.size} {planned.field}\n" for planned in sample.fields]
        digest.update("".join(lines).encode())
        current = []
        size = len(END)

    for given in samples:
        sample = _ordered(given)
        if sample.key in seen:
            duplicates.setdefault(sample.key, [seen[sample.key]]).append(sample)
            continue
        seen[sample.key] = sample
        for planned in sample.fields:
            sums = totals.get(planned.field) or totals.setdefault(planned.field, [0, 0])
            sums[0] += 1
            sums[1] += planned.size
        added = sample.bytes
        if current and (size + added > shard_size or len(current) == samples_per_shard):
            close()
        current.append(sample)
        size += added
    if duplicates:
        raise _duplicate_keys(duplicates)
    if current:
        close()
    fields = {name: FieldTotals(*totals[name]) for name in sorted(totals)}
    return Plan(tuple(shards), digest.hexdigest(), fields, tuple(oversized), near_duplicates(seen))


def _plan_range(samples: SampleRange, shard_size: int, samples_per_shard: int | None) -> Plan:
    """``plan`` by the same rules, without looking at a single sample."""
    digest = hashlib.sha256(f"range {samples.identity}\n".encode())
    shards: list[PlannedShard] = []
    oversized: list[int] = []
    start, size = 0, len(END)

    def close(stop: int) -> None:
        name = shard_name(len(shards))
        if size > shard_size:
            oversized.append(len(shards))
        shards.append(PlannedShard(len(shards), name, samples.cut(start, stop), size))
        digest.update(f"shard {name} {size} {stop - start}\n".encode())

    for number, added in enumerate(samples.sizes):
        if number > start and (size + added > shard_size or number - start == samples_per_shard):
            close(number)
            start, size = number, len(END)
        size += added
    if size > len(END):
        close(len(samples))
    return Plan(tuple(shards), digest.hexdigest(), dict(sorted(samples.fields.items())), tuple(oversized), samples.near_duplicates)


def _ordered(sample: PlannedSample) -> PlannedSample:
    if len(sample.fields) == 1:
        return sample
    fields = tuple(sorted(sample.fields, key=lambda field: field.field))
    if not fields:
        raise UsageError(f"the sample {sample.key!r} has no field; a shard cannot hold it")
    for before, after in pairwise(fields):
        if before.field == after.field:
            raise DuplicateKey(
                f"the sample {sample.key!r} has the field {after.field!r} twice: {before.ref} and {after.ref}; rename one or leave one out"
            )
    return sample if fields == sample.fields else PlannedSample(sample.key, fields)


def _duplicate_keys(duplicates: dict[str, list[PlannedSample]]) -> DuplicateKey:
    shown = [
        f"{key!r} comes from " + ", ".join(field.ref for sample in found for field in sample.fields[:1])
        for key, found in list(duplicates.items())[:_SHOWN]
    ]
    more = f" and {len(duplicates) - _SHOWN} more keys" if len(duplicates) > _SHOWN else ""
    return DuplicateKey(
        f"{len(duplicates)} {'key is' if len(duplicates) == 1 else 'keys are'} used by more than one sample: {'; '.join(shown)}{more}. "
        "Rename the files or rows so that each sample has its own key"
    )


def near_duplicates(keys: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of different keys that are equal when case and Unicode normalisation (NFC, NFD) are ignored, sorted.

    Beyond the keys it takes eight bytes for each: mostly there is no group, and then nothing else is made.
    """
    digests = np.sort(np.fromiter((_folded_digest(key) for key in keys), np.uint64, len(keys)))
    again = set(digests[1:][digests[1:] == digests[:-1]].tolist())
    groups: dict[str, list[str]] = {}
    if again:
        for key in keys:
            if _folded_digest(key) in again:
                groups.setdefault(folded(key), []).append(key)
    return tuple(sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1))


def _folded_digest(key: str) -> int:
    return xxhash.xxh3_64_intdigest(folded(key).encode())


def folded(key: str) -> str:
    """``key`` without what people and file systems mix up: case and Unicode normalisation."""
    return key.lower() if key.isascii() else unicodedata.normalize("NFC", unicodedata.normalize("NFD", key).casefold())


@dataclass(frozen=True, slots=True)
class Grouping:
    """Files grouped into samples. ``ungrouped`` has the paths that have no key or no extension, and so are no sample's."""

    samples: tuple[PlannedSample, ...]
    ungrouped: tuple[str, ...]


def group(files: Iterable[tuple[str, int, str] | tuple[str, int, str, int | str | None]], *, dots: Dots = "refuse") -> Grouping:
    """Group ``(name, size_bytes, ref)``, or the same with a mark, into samples by WebDataset's key rule, in the order in which keys
    first come.

    When two fields of one key have the same last extension (``cat.v1.jpg``, ``cat.v2.jpg``), two pictures would become one sample.
    ``dots="refuse"`` raises ``DuplicateKey`` listing the files, ``"field"`` takes them for fields of one sample, and ``"rewrite"``
    makes them samples of their own by replacing the dots in the base name: ``cat_v1``, ``cat_v2``. The latter does the same to a group
    in which no file has a simple extension; ``img.jpg`` with ``img.seg.png`` stays one sample.
    """
    if dots not in ("refuse", "field", "rewrite"):
        raise UsageError(f"dots: {dots!r} is not one of 'refuse', 'field', 'rewrite'")
    groups: dict[str, list[tuple[str, PlannedField]]] = {}
    ungrouped: list[str] = []
    for name, size, ref, *mark in files:
        parts = split_name(name)
        if parts is None:
            ungrouped.append(name)
        else:
            groups.setdefault(parts[0], []).append((name, PlannedField(parts[1], size, ref, *mark)))
    clashes: dict[str, list[str]] = {}
    samples: list[PlannedSample] = []
    rewritten: dict[str, list[PlannedField]] = {}
    for key, found in groups.items():
        if len(found) == 1 and dots != "rewrite":
            samples.append(PlannedSample(key, (found[0][1],)))
            continue
        refs = _same_last_extension(found)
        if dots == "refuse" and refs:
            clashes[key] = refs
        elif dots == "rewrite" and (refs or all("." in field.field for _, field in found)):
            for name, planned in found:
                new_key, new_field = _split_at_last_dot(name)
                rewritten.setdefault(new_key, []).append(planned._replace(field=new_field))
        else:
            samples.append(PlannedSample(key, tuple(planned for _, planned in found)))
    if clashes:
        raise _clash(clashes)
    if rewritten:
        samples.extend(PlannedSample(key, tuple(fields)) for key, fields in rewritten.items())
        samples.sort(key=lambda sample: sample.key)
    return Grouping(tuple(samples), tuple(ungrouped))


def _same_last_extension(found: list[tuple[str, PlannedField]]) -> list[str]:
    """The refs of files whose last extension another file of the sample has too; a field twice is a duplicate, not a matter of dots."""
    if len(found) == 1:
        return []
    refs: dict[str, dict[str, str]] = {}
    for _, planned in found:
        refs.setdefault(planned.field.rpartition(".")[2], {}).setdefault(planned.field, planned.ref)
    return [ref for same in refs.values() if len(same) > 1 for ref in same.values()]


def _split_at_last_dot(name: str) -> tuple[str, str]:
    directory, slash, base = name.rpartition("/")
    stem, _, extension = base.rpartition(".")
    return directory + slash + stem.replace(".", "_"), extension.lower()


def _clash(clashes: dict[str, list[str]]) -> DuplicateKey:
    shown = "; ".join(f"{key!r}: {', '.join(refs)}" for key, refs in list(clashes.items())[:_SHOWN])
    more = f" and {len(clashes) - _SHOWN} more keys" if len(clashes) > _SHOWN else ""
    return DuplicateKey(
        "files that look like separate samples would become one, since a key ends at the first dot of a file name. "
        f"{shown}{more}. "
        "Say dots='rewrite' (--dots rewrite) to make each a sample of its own, or dots='field' (--dots field) to keep them together"
    )
