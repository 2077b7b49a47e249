"""``fit``: the estimate put together, beside what is published, and compared with a server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import StoreConfig
from ..diagnosis.disks import look_at_disk
from ..diagnosis.machine import Gpu, look_at_gpus, ram_bytes
from ..errors import UsageError
from ..facts import Fact, State
from ..progress import Message, Subscriber, ignore
from ..report import DatasetInfo, RunInfo, info
from ..units import format_duration, format_rate, format_size, parse_rate, parse_size
from . import needs
from .model import Model
from .needs import Data
from .plan import PRECISIONS, Kind, Plan
from .published import Published, published
from .reading import read_model
from .server import Server, compare, one_gpu, shared
from .span import Item, Span, total
from .vram import Vram, vram

Verdict = Literal["fits", "does not fit", "cannot tell"]

_TELLS_A_RATE = 64 * 2**20
_LEAST_MEMORY = 10**9
_SEVERAL = re.compile(r"(\d+)\s*[x×*]\s*(.+)", re.IGNORECASE)
_EIGHTY = 80_000_000_000
_MARKS = {"ok": "ok", "note": "note", "bad": "NO", "unknown": "?"}


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast checkpoints leave, and how that is known."""

    bytes_per_s: float
    known_by: str


@dataclass(frozen=True, slots=True)
class Fit:
    """The estimate. Sums are spans in bytes, ``upload_s`` in seconds. ``checkpoint``, ``upload_s`` and ``save_interval_s`` are ``None``
    where nothing is saved, the latter two where no rate is known, too. ``facts`` compare it with a server, one for each of its parts."""

    model: Model
    plan: Plan
    vram: Vram
    ram_items: tuple[Item, ...]
    disk_items: tuple[Item, ...]
    checkpoint: Item | None
    rate: Rate | None
    data: Data | None
    published: Published | None
    facts: tuple[Fact, ...]

    @property
    def ram(self) -> Span:
        """RAM in all."""
        return total(self.ram_items)

    @property
    def disk(self) -> Span:
        """The local disk's working set."""
        return total(self.disk_items)

    @property
    def upload_s(self) -> Span | None:
        """Seconds that one checkpoint takes to the bucket."""
        return needs.upload(self.checkpoint, self.rate.bytes_per_s if self.rate is not None else None)

    @property
    def save_interval_s(self) -> float | None:
        """The smallest interval between saves that makes sense, in seconds."""
        return needs.save_interval(self.upload_s)

    @property
    def verdict(self) -> Verdict:
        """Whether the server will do: one part that does not fit is enough for no, and what was not compared is never a yes."""
        states = {fact.state for fact in self.facts}
        if "bad" in states:
            return "does not fit"
        return "cannot tell" if "unknown" in states else "fits"

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        lines = [
            f"model      {self.model.said}: {self.model.parameters:,} parameters; {self.model.known_by}",
            f"plan       {self.plan.line}",
        ]
        lines += _sum("VRAM", self.vram.total, self.vram.lines)
        lines += _sum("RAM", self.ram, self.ram_items)
        lines += _sum("disk", self.disk, self.disk_items)
        if self.checkpoint is not None:
            lines.append(f"checkpoint {self.checkpoint.bytes.size} = {self.checkpoint.arithmetic} [{self.checkpoint.source}]")
            lines += self._saving()
        if self.published is not None:
            lines.append(f"published  {self.published.text}")
        lines.append(f"one GPU    {one_gpu(self.vram.total)}, judged on {format_size(self.vram.total.high)}{self._eighty()}")
        if self.plan.needs_bf16:
            lines.append("bf16       needs Ampere or newer (compute capability 8.0)")
        width = max(len(fact.name) for fact in self.facts)
        lines += [f"{_MARKS[fact.state]:<4}  {fact.name:<{width}}  {fact.text}{_advice(fact)}" for fact in self.facts]
        return [*lines, self._verdict_line()]

    def _saving(self) -> list[str]:
        upload, interval = self.upload_s, self.save_interval_s
        if self.rate is None or upload is None or interval is None:
            return ["upload     cannot be told without a rate: --rate 100MB/s, or --run RUN for what one of your runs measured"]
        low, high = format_duration(upload.low), format_duration(upload.high)
        took = low if low == high else f"{low} to {high}"
        return [
            f"upload     {took} a checkpoint at {format_rate(self.rate.bytes_per_s)} ({self.rate.known_by})",
            f"save       no more often than every {format_duration(interval)}, so that one upload ends before the next save",
        ]

    def _eighty(self) -> str:
        if self.vram.total.high <= _EIGHTY:
            return ""
        return f"; {shared(self.vram, _EIGHTY)}"

    def _verdict_line(self) -> str:
        if self.verdict == "fits":
            return "YES: it fits, by the high end of every estimate"
        if self.verdict == "cannot tell":
            return f"CANNOT TELL: {self._reasons('unknown')}"
        return f"NO: {self._reasons('bad')}"

    def _reasons(self, state: State) -> str:
        return "; ".join(f"{fact.name}: {fact.text}" for fact in self.facts if fact.state == state)

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        upload = self.upload_s
        return {
            "verdict": self.verdict,
            "model": self.model.record,
            "plan": self.plan.record,
            "vram": {**self.vram.total.record, "items": [one.record for one in self.vram.lines]},
            "ram": {**self.ram.record, "items": [one.record for one in self.ram_items]},
            "disk": {**self.disk.record, "items": [one.record for one in self.disk_items]},
            "checkpoint": self.checkpoint.record if self.checkpoint is not None else None,
            "rate_bytes_per_s": self.rate.bytes_per_s if self.rate is not None else None,
            "upload_s": {"low": upload.low, "high": upload.high} if upload is not None else None,
            "save_interval_s": self.save_interval_s,
            "published_gb": self.published.gigabytes if self.published is not None else None,
            "published": self.published.text if self.published is not None else None,
            "facts": [fact.record for fact in self.facts],
        }


def fit(
    model: str | os.PathLike[str],
    plan: Kind = "lora",
    *,
    precision: str | None = None,
    optimizer: str = "adamw",
    batch: int = 1,
    seq: int = 2048,
    checkpointing: bool = True,
    rank: int = 16,
    data: str | None = None,
    rate: str | float | None = None,
    run: str | None = None,
    gpu: str = "auto",
    ram: str | int | None = None,
    disk: str | int | None = None,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
    gpus: Callable[[], tuple[Gpu, ...]] = look_at_gpus,
) -> Fit:
    """What ``plan`` needs with ``model``, as low and high, and whether a server has it. Nothing is loaded, and no weights are read.

    ``model`` is a parameter count (``"7B"``), a ``config.json``, a safetensors file, or a directory of them. With ``gpu="auto"`` the
    server is this machine, its RAM and its disk included; else ``"24GB"`` or ``"8x80GB"``, and ``ram`` and ``disk`` where they count as
    well. ``data`` is a data set's URL. Uploads are timed at ``rate``, or at what the newest checkpoint of ``run`` measured.

    Raises ``UsageError`` for what does not go together and for a model that cannot be told, a file of it that cannot be read included; and
    what ``info`` raises for ``data`` and ``run``.

    Example: ``stagekit.fit("7B", "qlora", gpu="24GB").verdict``.

    :param precision: of the weights; by default fp16 for inference, int4 for qlora, else bf16 (mixed)
    :param batch: sequences that are computed at once on one GPU, of ``seq`` tokens each
    """
    if plan not in PRECISIONS:
        raise UsageError(f"plan: {plan!r} is none of {', '.join(PRECISIONS)}")
    planned = Plan(plan, precision or PRECISIONS[plan][0], optimizer, batch, seq, checkpointing, rank)
    if rate is not None and run is not None:
        raise UsageError("rate, run: give one of them; a run is there to tell the rate")
    shaped = read_model(model)
    held = _data(data, store, on_event)
    measured = _rate(rate, run, store, on_event)
    memory = vram(shaped, planned)
    one = needs.checkpoint(shaped, planned)
    ram_items, disk_items = needs.ram(memory.total, held), needs.disk(shaped, one, held)
    server = _server(gpu, ram, disk, gpus)
    facts = compare(memory, total(ram_items), total(disk_items), planned, server)
    return Fit(shaped, planned, memory, ram_items, disk_items, one, measured, held, published(shaped, planned), tuple(facts))


def _server(gpu: str, ram: str | int | None, disk: str | int | None, look: Callable[[], tuple[Gpu, ...]]) -> Server:
    ram_size = _memory(ram, "ram") if ram is not None else None
    disk_size = parse_size(disk, name="disk") if disk is not None else None
    if gpu != "auto":
        several = _SEVERAL.fullmatch(gpu.strip())
        number, size = (int(several[1]), several[2]) if several else (1, gpu)
        if not 1 <= number <= 1024:
            raise UsageError(f"gpu: {gpu!r} is {number} GPUs; 1 to 1,024 are meant")
        return Server((Gpu("GPU", None, _memory(size, "gpu")),) * number, ram_size, disk_size)
    found = look()
    if not found:  # no server for training, so its RAM and disk are nothing to judge by
        return Server((), ram_size, disk_size)
    here = look_at_disk(Path.cwd()).free_bytes
    return Server(found, ram_size if ram_size is not None else ram_bytes(), disk_size if disk_size is not None else here)


def _memory(text: str | int, name: str) -> int:
    """A mistyped unit must not become a verdict."""
    size = parse_size(text, name=name)
    if size < _LEAST_MEMORY:
        raise UsageError(f"{name}: {text!r} is {format_size(size)}; a server's has at least 1 GB, such as {name}=24GB")
    return size


def _data(url: str | None, store: StoreConfig | None, on_event: Subscriber) -> Data | None:
    if url is None:
        return None
    found = info(url, store=store, on_event=on_event)
    if not isinstance(found, DatasetInfo):
        raise UsageError(f"data: {url} is a {found.kind}, and no data set")
    return Data(found.url, found.samples, found.bytes, found.largest_block)


def _rate(rate: str | float | None, run: str | None, store: StoreConfig | None, on_event: Subscriber) -> Rate | None:
    if rate is not None:
        given = parse_rate(rate, name="rate")
        if not given > 0:
            raise UsageError(f"rate: {rate} is not above 0")
        return Rate(given, "as given")
    if run is None:
        return None
    found = info(run, store=store, on_event=on_event)
    if not isinstance(found, RunInfo):
        raise UsageError(f"run: {run} is a {found.kind}, and no run")
    arrival = found.arrival
    if arrival is None or not arrival.lag_s or not arrival.bytes:
        on_event(Message(f"{found.url} does not tell how fast its newest checkpoint was sent: give --rate", "warning"))
        return None
    said = f"measured with the newest checkpoint of {found.url}"
    if arrival.bytes < _TELLS_A_RATE:
        said += f", which has {format_size(arrival.bytes)}: larger ones are faster, so give --rate if you know it"
    return Rate(arrival.bytes / arrival.lag_s, said)


def _sum(name: str, whole: Span, items: tuple[Item, ...]) -> list[str]:
    names, sizes = max(len(one.name) for one in items), max(len(one.bytes.size) for one in items)
    lines = [f"{name:<10} {whole.size}"]
    return lines + [f"  {one.name:<{names}}  {one.bytes.size:>{sizes}} = {one.arithmetic} [{one.source}]" for one in items]


def _advice(fact: Fact) -> str:
    return f"; {fact.advice}" if fact.advice else ""
