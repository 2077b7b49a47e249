"""What a publication in MosaicML's format would be, before a byte is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import SourceError, UsageError
from ..publishing.outline import Outline, near_duplicate_notes, outline, oversized_keys, oversized_notes
from ..shards.plan import Plan, PlannedShard
from ..sources.base import Source
from ..units import counted, format_count, format_size, parse_size
from .columns import Columns, chosen, columns_of
from .index import shard_name
from .job import LARGEST

SHARD_SIZE = "64MiB"
_HEADS = 8  # bytes beside a value's own: the sample's place in the shard, and a size for each value of any length
_HEAD = 512  # bytes of a file's own head, about
_MARGIN = 0.98  # of the shard size is aimed at, so that files seldom have to be cut in two


@dataclass(frozen=True, slots=True)
class MdsOutline:
    """A plan for files of MosaicML's format. Their sizes are known when they are written, since some values are stored in another way
    than they were found; no file exceeds ``shard_size`` unless one sample alone does."""

    plan: Outline
    columns: Columns
    shard_size: int
    shards: tuple[PlannedShard, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all files, about."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def lines(self) -> list[str]:
        """The plan as text."""
        plan = self.plan
        fields = [
            f"  {name}: {counted(totals.samples, 'sample')}, {format_size(totals.bytes)}, as {self.columns[name]}"
            for name, totals in plan.fields.items()
        ]
        lines = [
            f"{counted(plan.files, 'field')} in {counted(plan.plan.samples, 'sample')}: {format_size(plan.plan.payload_bytes)}, as about "
            f"{counted(len(self.shards), 'file')} of MosaicML's format",
            *fields,
        ]
        if plan.classes:
            lines.append(f"{counted(len(plan.classes), 'class', 'classes')}: classes.json")
        if plan.left_out:
            lines.append(f"left out: {plan.left_out}")
        return lines + [f"note: {note}" for note in plan.notes]

    @property
    def record(self) -> dict[str, Any]:
        """The plan for programs."""
        return {
            **self.plan.record,
            "format": "mds",
            "columns": dict(self.columns),
            "shards": [{"name": shard.name, "bytes": shard.bytes, "samples": len(shard.samples)} for shard in self.shards],
            "bytes": self.bytes,
        }


def mds_outline(
    source: Source,
    *,
    columns: Iterable[str] | Mapping[str, str] = (),
    shard_size: str | int = SHARD_SIZE,
    samples_per_shard: int | None = None,
) -> MdsOutline:
    """List ``source`` and plan its files. A pure function of the listing and the options.

    Raises ``UsageError`` for options that cannot be meant, ``SourceError`` when samples have different fields or cannot be packed.
    """
    options = chosen(columns)
    most = parse_size(shard_size, name="shard_size")
    if most > LARGEST:
        raise UsageError(f"shard_size: MosaicML's format counts in 32 bits, so a file has at most {format_count(LARGEST)} bytes")
    made = outline(source, shard_size=most, samples_per_shard=samples_per_shard, fit=lambda plan: _as_tar(plan, most))
    planned = made.plan
    known = columns_of({name: totals.samples for name, totals in made.fields.items()}, planned.samples, options, source=source.name)
    large = [planned.shards[number] for number in planned.oversized if planned.shards[number].bytes > LARGEST]
    if large:
        raise SourceError(
            f"reading {source.name}: the sample {large[0].samples[0].key!r} has {format_count(large[0].bytes)} bytes, and MosaicML's "
            "format counts in 32 bits; split it, or leave it out"
        )
    share = _bytes(planned) / planned.bytes
    shards = tuple(replace(shard, name=shard_name(shard.number), bytes=int(shard.bytes * share)) for shard in planned.shards)
    # Tar's headers, about which the outline may have a note, are in none of these files.
    notes = (*oversized_notes(oversized_keys(planned), most), *near_duplicate_notes(planned.near_duplicates))
    return MdsOutline(replace(made, notes=(*made.source_notes, *notes)), known, most, shards)


def _bytes(plan: Plan) -> int:
    """Bytes that the samples of ``plan`` take in this format, about: values are counted as they were found."""
    fields = sum(totals.samples for totals in plan.fields.values())
    return plan.payload_bytes + _HEADS * (fields + plan.samples)


def _as_tar(plan: Plan, shard_size: int) -> int:
    """The size of tars that hold as many samples as a file of ``shard_size`` in this format."""
    return max(1, int(_MARGIN * (shard_size - _HEAD) * plan.bytes / _bytes(plan)))
