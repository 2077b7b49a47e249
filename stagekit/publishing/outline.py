"""What a publication would be, before a byte is read: shards, samples, sizes, overhead. The answer to ``--dry-run``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..shards.index import FieldTotals
from ..shards.plan import Plan, PlannedSample, plan
from ..sources.base import Bad, Source
from ..units import counted, format_count, format_duration, format_rate, format_size

_NOTED_OVERHEAD = 0.2
_SHOWN = 3
_LISTED = 10
_RATES = (5e6, 100e6)  # 40 Mbit/s, which homes have, and a server's link


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
    source_notes: tuple[str, ...] = ()
    """Those of ``notes`` that the source made."""
    samples: Sequence[PlannedSample] = ()
    """All samples, in order."""

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
    def lines(self) -> list[str]:
        """The plan as text."""
        plan = self.plan
        shown = plan.shards if len(plan.shards) <= _LISTED + 1 else plan.shards[:_LISTED]
        lines = [f"{shard.name}  {format_size(shard.bytes):>8}  {counted(len(shard.samples), 'sample')}" for shard in shown]
        if len(shown) < len(plan.shards):
            lines.append(f"… {counted(len(plan.shards) - len(shown), 'more shard')}")
        digits = 1 if self.overhead < 1 else 0
        lines.append(
            f"{counted(self.files, 'field')} in {counted(plan.samples, 'sample')}: {format_size(plan.payload_bytes)}, as "
            f"{counted(len(plan.shards), 'shard')}: {format_size(plan.bytes)} (headers and padding add {100 * self.overhead:.{digits}f} %)"
        )
        lines += [f"  {name}: {counted(totals.samples, 'sample')}, {format_size(totals.bytes)}" for name, totals in self.fields.items()]
        lines.append("sending takes " + ", ".join(f"{format_duration(plan.bytes / rate)} at {format_rate(rate)}" for rate in _RATES))
        if self.classes:
            lines.append(f"{counted(len(self.classes), 'class', 'classes')}: {', '.join(self.classes[:_LISTED])}{_more(self.classes)}")
        if self.left_out:
            lines.append(f"left out: {self.left_out}")
        lines += [f"  {bad.path}: {bad.reason}" for bad in self.bad[:_LISTED]]
        return lines + [f"note: {note}" for note in self.notes]

    @property
    def record(self) -> dict[str, Any]:
        """The plan for programs."""
        plan = self.plan
        return {
            "digest": plan.digest,
            "samples": plan.samples,
            "bytes": plan.bytes,
            "payload_bytes": plan.payload_bytes,
            "fields": {name: {"samples": totals.samples, "bytes": totals.bytes} for name, totals in self.fields.items()},
            "shards": [{"name": shard.name, "bytes": shard.bytes, "samples": len(shard.samples)} for shard in plan.shards],
            "classes": list(self.classes),
            "left_out": dict(sorted(self.skipped.items())),
            "bad": [{"path": bad.path, "reason": bad.reason} for bad in self.bad],
            "notes": list(self.notes),
        }

    @property
    def left_out(self) -> str:
        """``3 dot-files, 1 symbolic links``; empty when everything is packed."""
        return self.left_out_with(len(self.bad))

    def left_out_with(self, bad: int) -> str:
        """``left_out`` when ``bad`` could not be packed in all, those included that only reading told."""
        parts = [f"{format_count(count)} {reason}" for reason, count in sorted(self.skipped.items())]
        return ", ".join(parts + ([f"{format_count(bad)} that cannot be packed"] if bad else []))


def outline(source: Source, *, shard_size: int, samples_per_shard: int | None = None, fit: Callable[[Plan], int] | None = None) -> Outline:
    """List ``source`` and plan its shards. A pure function of the listing and the options: no payload is read, nothing is written.

    ``fit`` says, from a plan for ``shard_size``, at which size of tars to cut instead: for files that are no tars and have another size.

    Raises ``SourceError``, ``DuplicateKey`` and ``KeyNotAllowed`` for what cannot be packed.
    """
    with _no_collection():
        listing = source.listing()
        made = plan(listing.samples, shard_size=shard_size, samples_per_shard=samples_per_shard)
        if fit is not None:
            made = plan(listing.samples, shard_size=fit(made), samples_per_shard=samples_per_shard)
    return Outline(
        plan=made,
        fields=dict(made.fields),
        skipped=dict(listing.skipped),
        bad=tuple(listing.bad),
        classes=listing.classes,
        notes=(*listing.notes, *_notes(made, sum(totals.samples for totals in made.fields.values()), shard_size)),
        source_notes=tuple(listing.notes),
        samples=listing.samples,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Millions of values are made, none of them in a circle: looking for circles among them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _notes(made: Plan, files: int, shard_size: int) -> Iterable[str]:
    yield from overhead_notes(made.payload_bytes, made.bytes, files)
    yield from oversized_notes(oversized_keys(made), shard_size)
    yield from near_duplicate_notes(made.near_duplicates)


def overhead_notes(payload: int, total: int, files: int) -> Iterable[str]:
    """A sentence when tars of ``total`` bytes spend more than a fifth of their payload, which lies in ``files`` fields."""
    if total - payload > _NOTED_OVERHEAD * payload:
        yield (
            f"tar headers and padding add {format_size(total - payload)} to {format_size(payload)} of payload, since a field has "
            f"{format_size(payload / files)} on average and tar spends 512 bytes and padding on each; put the small fields of a sample "
            "into one (a .json, an .npz) to avoid that"
        )


def oversized_notes(keys: Sequence[str], shard_size: int) -> Iterable[str]:
    """A sentence when there are samples, those of ``keys``, that are larger than a shard should be."""
    if keys:
        one = len(keys) == 1
        yield (
            f"{format_count(len(keys))} sample{'' if one else 's'} larger than the shard size of {format_size(shard_size)}, "
            f"{'in a larger shard of its own' if one else 'each in a larger shard of its own'}: {', '.join(keys[:_SHOWN])}"
            f"{' …' if len(keys) > _SHOWN else ''}"
        )


def oversized_keys(made: Plan) -> list[str]:
    """The keys of the samples that are larger than a shard should be."""
    return [made.shards[number].samples[0].key for number in made.oversized]


def near_duplicate_notes(found: Sequence[tuple[str, ...]]) -> Iterable[str]:
    """A sentence when keys are easily mixed up: ``found`` has the groups."""
    if found:
        groups = ["; ".join(map(ascii, keys)) for keys in found[:_SHOWN]]
        yield (
            f"keys that differ only in case or Unicode normalisation stay apart; make sure that is meant "
            f"({format_count(len(found))} groups): {' | '.join(groups)}{' …' if len(found) > _SHOWN else ''}"
        )


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
