"""``bench``: what limits training on this data set, from this machine, found out in seconds."""

from __future__ import annotations

import itertools
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .advice import stream_or_copy
from .config import StoreConfig
from .dataset import Dataset
from .errors import UsageError
from .parallel import cores, each
from .progress import Message, Subscriber, ignore
from .shards.index import block_digest
from .store import Where
from .store.base import Data
from .store.usage import Usage, price_text, usages
from .transfer.fetch import Fetcher
from .units import check_whole, format_count, format_duration, format_rate, format_size

Bottleneck = Literal["link", "decode", "step"]

_KEPT = 4  # blocks that are decoded again and again


@dataclass(frozen=True)
class BenchReport:
    """What was measured, and what follows from it. Rates are per second; ``step_samples`` is ``None`` when no step was given.

    ``link_bytes`` is what parallel ranged reads bring in, ``cpu_samples`` what checking, unpacking and decoding make of bytes that are
    there, ``loader_samples`` what ``StreamLoader`` gives with all of it at once. ``first_batch_s`` is the time from making a loader to its
    first batch, shuffled. ``whole_s`` is the time from making it to the end of the epoch, where that came before the time to measure was
    over: rates are rough then, and ``loader_samples`` is over all of it, since most was decoded before the first batch was asked for.
    ``epochs`` are those to come, where that was told, and ``free_bytes`` is the space in the current directory. ``usage`` is what the
    measurement asked of the store, and ``price_per_gb`` what a gigabyte costs that leaves it.
    """

    url: str
    samples: int
    bytes: int
    batch_size: int
    first_batch_s: float
    link_bytes: float
    cpu_samples: float
    loader_samples: float
    step_samples: float | None = None
    epochs: int | None = None
    free_bytes: int | None = None
    usage: Usage = field(default_factory=Usage)
    price_per_gb: float | None = None
    whole_s: float | None = None

    @property
    def link_samples(self) -> float:
        """Samples a second that the link could bring."""
        return self.link_bytes * self.samples / self.bytes

    @property
    def bottleneck(self) -> Bottleneck:
        """What is slowest: an epoch takes as long as this one alone."""
        rates: list[tuple[float, Bottleneck]] = [(self.link_samples, "link"), (self.cpu_samples, "decode")]
        if self.step_samples is not None:
            rates.append((self.step_samples, "step"))
        return min(rates, key=lambda one: one[0])[1]

    @property
    def stream_s(self) -> float:
        """Seconds of an epoch that is streamed."""
        return max(self.samples / self.link_samples, self.local_s)

    @property
    def local_s(self) -> float:
        """Seconds of an epoch whose data is on this machine: decoding, or the training step, whichever takes longer."""
        return self.samples / min(self.cpu_samples, self.step_samples or math.inf)

    @property
    def copy_s(self) -> float:
        """Seconds to copy the data set here."""
        return self.bytes / self.link_bytes

    @property
    def advice(self) -> str:
        """Stream or copy, in a sentence with its numbers."""
        if self.bottleneck == "link":
            return stream_or_copy(
                size_bytes=self.bytes,
                link_bytes_per_s=self.link_bytes,
                local_s=self.local_s,
                epochs=self.epochs,
                free_bytes=self.free_bytes,
            ).text
        what = "decoding" if self.bottleneck == "decode" else "the training step"
        more = self.link_samples * self.local_s / self.samples
        advice = f"stream: the link brings {more:.1f} times what {what} takes, so a copy of the data would gain nothing"
        if self.bottleneck == "decode":
            return f"{advice}. More CPU cores, smaller images or workers= would"
        return advice

    @property
    def lines(self) -> list[str]:
        """For people."""
        words = {"link": "the link", "decode": "decoding on this machine's CPU", "step": "the training step"}
        step = [] if self.step_samples is None else [f"training step    {self.step_samples:,.0f} samples/s"]
        return [
            f"{self.url}: {format_count(self.samples)} samples, {format_size(self.bytes)}",
            f"link             {format_rate(self.link_bytes)}, which is {self.link_samples:,.0f} samples/s",
            f"decoding         {self.cpu_samples:,.0f} samples/s",
            *step,
            f"StreamLoader     {self.loader_samples:,.0f} samples/s",
            f"first batch      after {format_duration(self.first_batch_s)}",
            *self._doubts(),
            f"bottleneck       {words[self.bottleneck]}: an epoch takes {format_duration(self.stream_s)}",
            f"advice           {self.advice}",
            *self._traffic_lines(),
        ]

    def _doubts(self) -> list[str]:
        if self.whole_s is None:
            return []
        return [
            f"too small        StreamLoader had all of it after {format_duration(self.whole_s)}, start included: too short to measure by, "
            "so these rates are rough"
        ]

    def _traffic_lines(self) -> list[str]:
        lines = [f"this bench       {self.usage}{price_text(self.usage, self.price_per_gb)}"] if self.usage else []
        if self.price_per_gb is not None:
            cost = Usage(received_bytes=self.bytes).cost(self.price_per_gb)
            lines.append(f"an epoch costs   {cost:,.2f} streamed, {format_size(self.bytes)} at {self.price_per_gb:g} a GB")
        return lines

    @property
    def record(self) -> dict[str, Any]:
        """For programs."""
        return {
            "url": self.url,
            "samples": self.samples,
            "bytes": self.bytes,
            "batch_size": self.batch_size,
            "first_batch_s": self.first_batch_s,
            "link_bytes_per_s": self.link_bytes,
            "link_samples_per_s": self.link_samples,
            "decode_samples_per_s": self.cpu_samples,
            "step_samples_per_s": self.step_samples,
            "loader_samples_per_s": self.loader_samples,
            "whole_s": self.whole_s,
            "bottleneck": self.bottleneck,
            "epoch_s": self.stream_s,
            "epoch_with_local_data_s": self.local_s,
            "copy_s": self.copy_s,
            "advice": self.advice,
            "usage": asdict(self.usage),
            "epoch_cost": None if self.price_per_gb is None else Usage(received_bytes=self.bytes).cost(self.price_per_gb),
        }


def bench(
    url: Where,
    *,
    batch_size: int = 64,
    step_ms: float | None = None,
    seconds: float = 10.0,
    decode: bool = True,
    threads: int = 4,
    connections: int = 16,
    epochs: int | None = None,
    price_per_gb: float | None = None,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchReport:
    """Measure what limits training on the data set at ``url`` from here, in about ``seconds``, and read no more than that takes.

    Nothing is written. Digests are checked as in training. A data set that is read in less time is read once by each of the measurements,
    and the report says that it is too small.

    :param step_ms: milliseconds that a training step takes on one batch, to compare with; the training itself is not run
    :param epochs: how many are to come, to tell whether a copy of the data would pay
    :param price_per_gb: what a gigabyte costs that leaves the store, to tell what an epoch costs
    :param decode: decode fields by their extension, as ``StreamLoader`` does; else hand out bytes
    """
    if batch_size < 1:
        raise UsageError(f"batch_size: {batch_size} is below 1")
    if step_ms is not None and step_ms <= 0:
        raise UsageError(f"step_ms: {step_ms} is not above 0")
    if epochs is not None:
        check_whole(epochs, name="epochs", minimum=1)
    if seconds <= 0:
        raise UsageError(f"seconds: {seconds} is not above 0")
    from .torch.loader import StreamLoader

    before = sum(usages().values(), Usage())
    dataset = Dataset(url, store=store, on_event=on_event)
    on_event(Message("measuring the loader"))
    began = clock()
    loader = StreamLoader(
        dataset,
        batch_size,
        decode="auto" if decode else None,
        threads=threads,
        connections=connections,
        drop_last=False,
        on_event=on_event,
    )
    first_batch_s, loader_samples, whole_s = _loader_rate(iter(loader), began, 0.4 * seconds, clock)
    on_event(Message("measuring the link"))
    link_bytes, kept = _link_rate(dataset, 0.35 * seconds, connections, clock)
    on_event(Message("measuring the decoding"))
    cpu_samples = _cpu_rate(dataset, kept, loader._plan.make, 0.2 * seconds, threads, clock)
    return BenchReport(
        url=str(dataset.location),
        samples=len(dataset),
        bytes=dataset.nbytes,
        batch_size=batch_size,
        first_batch_s=first_batch_s,
        link_bytes=link_bytes,
        cpu_samples=cpu_samples,
        loader_samples=loader_samples,
        step_samples=None if step_ms is None else 1000 * batch_size / step_ms,
        epochs=epochs,
        free_bytes=None if epochs is None else shutil.disk_usage(".").free,
        usage=sum(usages().values(), Usage()) - before,
        price_per_gb=price_per_gb,
        whole_s=whole_s,
    )


def _loader_rate(batches: Iterator[Any], began: float, seconds: float, clock: Callable[[], float]) -> tuple[float, float, float | None]:
    """Seconds to the first batch since ``began``, samples a second after it, over ``seconds``, and ``None``; or, when the epoch ends before
    that, samples a second since ``began``, and how long it took."""
    first = sum(bool(key) for key in next(batches)["__key__"])
    start = now = clock()
    taken = 0
    for batch in batches:
        taken += sum(bool(key) for key in batch["__key__"])
        now = clock()
        if now - start >= seconds:
            break
    else:
        whole_s = max(now - began, 1e-9)
        return start - began, (first + taken) / whole_s, whole_s
    close = getattr(batches, "close", None)
    if close is not None:
        close()
    return start - began, taken / max(now - start, 1e-9), None


def _link_rate(dataset: Dataset, seconds: float, connections: int, clock: Callable[[], float]) -> tuple[float, list[tuple[int, Data]]]:
    """Bytes a second of parallel ranged reads, and the first few blocks. The last blocks come first: the loader did not begin there."""
    blocks = range(len(dataset.block_samples) - 1, -1, -1)
    chosen = list(itertools.islice(blocks, 16 * connections + 2000))
    dataset.load_tables({dataset.place(block)[0] for block in chosen[: 4 * connections]}, threads=connections)
    kept: list[tuple[int, Data]] = []
    largest = dataset.manifest.largest_block
    start = now = clock()
    with Fetcher(
        dataset.store,
        map(dataset.block_range, chosen),
        threads=min(connections, len(chosen)),
        budget_bytes=2 * connections * largest,
    ) as fetcher:
        for block, data in zip(chosen, fetcher, strict=False):
            if len(kept) < _KEPT:
                kept.append((block, data))
            now = clock()
            if now - start >= seconds:
                break
        fetched = fetcher.bytes_fetched
    return fetched / max(now - start, 1e-9), kept


def _cpu_rate(
    dataset: Dataset, kept: list[tuple[int, Data]], make: Callable[[Any], Any], seconds: float, threads: int, clock: Callable[[], float]
) -> float:
    """Samples a second from bytes that are there: checked, unpacked, decoded, in as many threads as the loader has and cores help."""
    lock = threading.Lock()
    start = clock()
    times: list[float] = []

    def work(entry: tuple[int, Data]) -> int:
        block, data = entry
        block_digest(data)
        count = 0
        samples = dataset.parse(block, data)
        for first in range(0, len(samples), 16):
            count += len(make(samples[first : first + 16]).samples)
            with lock:
                times.append(clock())
            if times[-1] - start >= seconds:
                break
        return count

    def again() -> Iterator[tuple[int, Data]]:
        for entry in itertools.cycle(kept):
            yield entry
            if times and times[-1] - start >= seconds:
                return

    done = sum(each(work, again(), threads=max(1, min(threads, cores()))))
    return max(done, 1) / max(max(times) - start, 1e-9)
