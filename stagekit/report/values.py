"""What a data set, a run or a checkpoint holds: values, each with lines for people and a record for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..histogram import Bucket, drawn
from ..runs.layout import metrics_to_json
from ..store.usage import Usage, price_text
from ..units import counted, format_count, format_duration, format_rate, format_size


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a data set: how many samples have it, and its bytes in all."""

    name: str
    samples: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What a data set holds. ``peek`` has the first samples: key and, per field, size and the beginning of what is text. ``elsewhere`` has
    the URLs of shards that were indexed where they lie. ``sizes`` counts samples by what they take in a tar, headers included, over
    ``sized_shards`` shards that are spread over the data set. ``price_per_gb`` is what a gigabyte costs that leaves the store. ``urls`` are
    those of all shards, in source order, when they were asked for.
    """

    url: str
    digest: str
    samples: int
    bytes: int
    shards: int
    largest_block: int
    fields: tuple[FieldInfo, ...]
    peek: tuple[Mapping[str, str], ...] = ()
    elsewhere: tuple[str, ...] = ()
    sizes: tuple[Bucket, ...] = ()
    sized_shards: int = 0
    price_per_gb: float | None = None
    urls: tuple[str, ...] = ()
    kind: Literal["dataset"] = field(default="dataset", init=False)

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        average = self.bytes / self.shards if self.shards else 0
        lines = [
            f"data set   {self.url}",
            f"samples    {format_count(self.samples)}",
            f"size       {format_size(self.bytes)} in {counted(self.shards, 'shard')} of about {format_size(average)}",
            f"digest     {self.digest}",
        ]
        if self.price_per_gb is not None:
            cost = Usage(received_bytes=self.bytes).cost(self.price_per_gb)
            lines.append(f"price      {cost:,.2f} for each time it is read ({format_size(self.bytes)} at {self.price_per_gb:g} a GB)")
        if self.elsewhere:
            shown = f"{format_count(len(self.elsewhere))} of {counted(self.shards, 'shard')}, the first at {self.elsewhere[0]}"
            lines.append(f"elsewhere  {shown}")
        lines.extend(self._field_lines())
        lines.extend(self._size_lines())
        for sample in self.peek:
            values = [f"{name} {value}" for name, value in sample.items() if name != "__key__"]
            lines.append(f"sample     {sample['__key__']}: {', '.join(values)}")
        return lines

    def _field_lines(self) -> Iterator[str]:
        rows = [("field", "samples", "size", "a sample", "missing in")]
        for one in self.fields:
            mean = format_size(one.bytes / one.samples) if one.samples else "0 B"
            missing = "" if one.samples == self.samples else format_count(self.samples - one.samples)
            rows.append((one.name, format_count(one.samples), format_size(one.bytes), mean, missing))
        if not any(row[4] for row in rows[1:]):
            rows = [(*row[:4], "") for row in rows]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for row in rows:
            numbers = "  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            yield f"{row[0].ljust(max(10, widths[0]))} {numbers}".rstrip()

    def _size_lines(self) -> Iterator[str]:
        if self.sizes:
            of = "" if self.sized_shards == self.shards else f", in {format_count(self.sized_shards)} of {counted(self.shards, 'shard')}"
            yield f"sizes      of samples in the tar, headers included{of}"
            for line in drawn(self.sizes):
                yield f"           {line}"

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a checkpoint. ``shared`` when an earlier checkpoint sent its bytes; ``pickle`` when loading it runs code."""

    path: str
    bytes: int
    sha256: str
    shared: bool
    pickle: bool


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What one checkpoint holds."""

    url: str
    name: str
    step: int
    epoch: int | None
    metrics: Mapping[str, float]
    identity: Mapping[str, str | int]
    saved_s: float | None
    bytes: int
    files: tuple[FileInfo, ...]
    kind: Literal["checkpoint"] = field(default="checkpoint", init=False)

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        lines = [
            f"checkpoint {self.url}",
            f"step       {format_count(self.step)}" + ("" if self.epoch is None else f", epoch {self.epoch}"),
            f"size       {format_size(self.bytes)} in {counted(len(self.files), 'file')}",
        ]
        lines.extend(f"metric     {name} {value:.6g}" for name, value in sorted(self.metrics.items()))
        lines.extend(f"made with  {name}: {value}" for name, value in sorted(self.identity.items()))
        for one in self.files:
            marks = [
                mark
                for mark, holds in (("sent by an earlier checkpoint", one.shared), ("a pickle: loading it runs code", one.pickle))
                if holds
            ]
            lines.append(f"file       {one.path}: {format_size(one.bytes)}" + (f" ({'; '.join(marks)})" if marks else ""))
        return lines

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values; numbers that JSON lacks are text."""
        values = asdict(self)
        values["metrics"] = metrics_to_json(self.metrics)
        return values


@dataclass(frozen=True, slots=True)
class PendingInfo:
    """A save that this machine holds and that is not in the bucket yet; ``error`` tells why, when that is known."""

    step: int
    rank: int
    world_size: int
    bytes: int
    sender_lives: bool
    error: str | None

    @property
    def line(self) -> str:
        """The same for people."""
        of = f" of rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        state = "its process lives" if self.sender_lives else "its process ended; the next start here, or stagekit teardown, sends it"
        return f"step {self.step}{of}, {format_size(self.bytes)}, {state}" + (f": {self.error}" if self.error else "")


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """An attempt without a commit: on its way, or given up. ``ranks`` are those other than 0 that have delivered. One that is ``lending``
    was committed and removed, and checkpoints refer to files of it."""

    step: int
    generation: int
    ranks: tuple[int, ...]
    lending: bool = False

    @property
    def line(self) -> str:
        """The same for people."""
        if self.lending:
            return f"step {self.step} (generation {self.generation}): removed, but for files that other checkpoints refer to"
        delivered = f", delivered by rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"step {self.step} (generation {self.generation}{delivered}): no commit, so it is on its way or its writer died"


@dataclass(frozen=True, slots=True)
class ArrivalInfo:
    """How a checkpoint reached the bucket: committed ``age_s`` ago, ``lag_s`` after it was saved; ``bytes`` were sent for it.

    Both durations compare two machines' clocks. ``None`` where the store does not tell when an object was written.
    """

    age_s: float | None
    lag_s: float | None
    bytes: int

    @property
    def line(self) -> str:
        """The same for people; nothing when nothing is known."""
        if self.age_s is None:
            return ""
        text = f"verified {format_duration(self.age_s)} ago"
        if self.lag_s is not None:
            rate = f", {format_rate(self.bytes / self.lag_s)}" if self.lag_s >= 1 else ""
            text += f", {format_duration(self.lag_s)} after it was saved{rate}"
        return text


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run holds.

    ``unfinished`` are attempts that were never committed, ``damaged`` those whose manifest is unusable. ``pending`` is what this machine,
    and no other, has not sent yet. ``arrival`` is that of the newest checkpoint. ``traffic`` is what ``trainings`` that have finished
    asked of each store, by URL; ``price_per_gb`` turns what they received into money.
    """

    url: str
    created_s: float | None
    checkpoints: tuple[CheckpointInfo, ...]
    bytes: int
    unfinished: tuple[AttemptInfo, ...]
    damaged: tuple[str, ...]
    pending: tuple[PendingInfo, ...] = ()
    traffic: Mapping[str, Usage] = field(default_factory=dict)
    trainings: int = 0
    price_per_gb: float | None = None
    arrival: ArrivalInfo | None = None
    kind: Literal["run"] = field(default="run", init=False)

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        lines = [f"run        {self.url}", f"size       {format_size(self.bytes)} in {counted(len(self.checkpoints), 'checkpoint')}"]
        if self.checkpoints:
            newest = self.checkpoints[-1]
            lines.append(f"newest     step {format_count(newest.step)}" + ("" if newest.epoch is None else f", epoch {newest.epoch}"))
        if self.arrival is not None and self.arrival.line:
            lines.append(f"arrived    {self.arrival.line}")
        for one in self.checkpoints:
            metrics = "".join(f", {name} {value:.6g}" for name, value in sorted(one.metrics.items()))
            lines.append(
                f"checkpoint {one.url.removeprefix(self.url)}: {format_size(one.bytes)}, {counted(len(one.files), 'file')}{metrics}"
            )
        lines.extend(f"pending    {one.line}" for one in self.pending)
        lines.extend(f"{'rest' if one.lending else 'unfinished':<10} {one.line}" for one in self.unfinished)
        lines.extend(f"damaged    {problem}" for problem in self.damaged)
        lines.extend(f"traffic    {line}" for line in self._traffic_lines())
        pickles = sorted({file.path for one in self.checkpoints for file in one.files if file.pickle})
        if pickles:
            lines.append(f"pickles    {', '.join(pickles[:8])}{' …' if len(pickles) > 8 else ''} (loading them runs code)")
        return lines

    def _traffic_lines(self) -> Iterator[str]:
        for place, usage in self.traffic.items():
            yield f"{place}: {usage}{price_text(usage, self.price_per_gb)}"
        if len(self.traffic) > 1:
            total = sum(self.traffic.values(), Usage())
            yield f"together, of {counted(self.trainings, 'training')} that finished: {total}{price_text(total, self.price_per_gb)}"
        if self.traffic:
            yield "is at least that: not counted are programs that a training starts, and trainings killed with their machine"

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values; checkpoints without their files."""
        checkpoints = [{key: value for key, value in one.record.items() if key != "files"} for one in self.checkpoints]
        values = {name: getattr(self, name) for name in ("url", "kind", "created_s", "bytes")}
        values |= {"trainings": self.trainings, "traffic": {place: asdict(usage) for place, usage in self.traffic.items()}}
        if self.price_per_gb is not None:
            values["cost"] = sum(self.traffic.values(), Usage()).cost(self.price_per_gb)
        values |= {"unfinished": [asdict(one) for one in self.unfinished], "pending": [asdict(one) for one in self.pending]}
        values |= {"arrival": asdict(self.arrival) if self.arrival is not None else None}
        return {**values, "damaged": list(self.damaged), "checkpoints": checkpoints}
