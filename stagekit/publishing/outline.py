"""What a publication would be, before a byte is read: shards, samples, sizes, overhead. The answer to ``--dry-run``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..shards.index import FieldTotals
from ..shards.plan import Plan, plan
from ..sources.base import Bad, Source
from ..units import format_count, format_size

_NOTED_OVERHEAD = 0.2
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Outline:
    """A plan with what a person wants to know about it. ``skipped`` counts what was left out by rule (reason → files), ``bad`` is what
    ``on_bad="skip"`` left out. ``notes`` are sentences: a large overhead, oversized samples, keys that are easily mixed up, empty classes.
    """

    plan: Plan
    fields: dict[str, FieldTotals]
    skipped: dict[str, int]
    bad: tuple[Bad, ...]
    classes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def files(self) -> int:
        """How many fields are packed."""
        return sum(totals.samples for totals in self.fields.values())

    @property
    def overhead(self) -> float:
        """What the tars hold beyond payload (headers, padding, ends), relative to the payload."""
        payload = self.plan.payload_bytes
        return (self.plan.bytes - payload) / payload if payload else float("inf")

    @property
    def left_out(self) -> str:
        """``3 dot-files, 1 symbolic links``; empty when everything is packed."""
        parts = [f"{format_count(count)} {reason}" for reason, count in sorted(self.skipped.items())]
        return ", ".join(parts + ([f"{format_count(len(self.bad))} that cannot be packed"] if self.bad else []))


def outline(source: Source, *, shard_size: int, samples_per_shard: int | None = None) -> Outline:
    """List ``source`` and plan its shards. A pure function of the listing and the options: no payload is read, nothing is written.

    Raises ``SourceError``, ``DuplicateKey`` and ``KeyNotAllowed`` for what cannot be packed.
    """
    listing = source.listing()
    made = plan(listing.samples, shard_size=shard_size, samples_per_shard=samples_per_shard)
    fields: dict[str, FieldTotals] = {}
    for shard in made.shards:
        for sample in shard.samples:
            for field in sample.fields:
                count, size = fields.get(field.field, (0, 0))
                fields[field.field] = FieldTotals(count + 1, size + field.size)
    return Outline(
        plan=made,
        fields=dict(sorted(fields.items())),
        skipped=dict(listing.skipped),
        bad=tuple(listing.bad),
        classes=listing.classes,
        notes=(*listing.notes, *_notes(made, sum(totals.samples for totals in fields.values()), shard_size)),
    )


def _notes(made: Plan, files: int, shard_size: int) -> Iterable[str]:
    payload, total = made.payload_bytes, made.bytes
    if total - payload > _NOTED_OVERHEAD * payload:
        yield (
            f"tar headers and padding add {format_size(total - payload)} to {format_size(payload)} of payload, since a field has "
            f"{format_size(payload / files)} on average and tar spends 512 bytes and padding on each; put the small fields of a sample "
            "into one (a .json, an .npz) to avoid that"
        )
    if made.oversized:
        keys = [made.shards[number].samples[0].key for number in made.oversized]
        one = len(keys) == 1
        yield (
            f"{format_count(len(keys))} sample{'' if one else 's'} larger than the shard size of {format_size(shard_size)}, "
            f"{'in a larger shard of its own' if one else 'each in a larger shard of its own'}: {', '.join(keys[:_SHOWN])}"
            f"{' …' if len(keys) > _SHOWN else ''}"
        )
    if made.near_duplicates:
        groups = ["; ".join(map(ascii, keys)) for keys in made.near_duplicates[:_SHOWN]]
        yield (
            f"keys that differ only in case or Unicode normalisation stay apart; make sure that is meant "
            f"({format_count(len(made.near_duplicates))} groups): {' | '.join(groups)}{' …' if len(made.near_duplicates) > _SHOWN else ''}"
        )
