"""Several data sets read as one, in fixed proportions. Torch-free."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn

from ..config import StoreConfig
from ..dataset import Dataset, Sample
from ..errors import RandomAccessRefused, UsageError
from ..order import Blend, Epoch, Interval, Intervals
from ..progress import Subscriber, ignore
from ..shards.index import FieldTotals
from ..store import Where
from ..units import format_count
from .reader import Bad, Budget, OnBad, Reader, plan_memory

EpochOf = Callable[[int, int], Epoch]
"""From the number of a source and of a pass over it to the order of that pass."""


class Mix:
    """Several data sets as one, ``weights`` saying how many samples of each there are in any stretch of it.

    An epoch has ``samples`` samples (all sources' together unless given), divided by ``weights``; without weights each source comes once
    an epoch. Every source is read in an order of its own, pass after pass: all of its samples come once before any comes again, however
    the passes lie in the epochs. Samples get a ``__source__`` with their source's name.

    The order depends on the sources' names, digests, the weights and the loader's seed, and on nothing else, so a ``StreamLoader`` over a
    mix is split among ranks and resumed like one over a single data set. A state of other sources or weights is refused.

    :param sources: name → URL, directory, open store or ``Dataset``
    :param weights: name → a number above 0, or such numbers in the order of ``sources``; they need not add up to 1
    :param cache_dir, cache_limit: as for ``Dataset``, one limit for all sources together

    Example::

        mix = stagekit.Mix({"web": "s3://bucket/web", "code": "s3://bucket/code"}, weights={"web": 3, "code": 1})
        for batch in stagekit.torch.StreamLoader(mix, 32):
            print(batch["__source__"])
    """

    def __init__(
        self,
        sources: Mapping[str, Where | Dataset],
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        samples: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: str | int | None = None,
        store: StoreConfig | None = None,
        allow_mount: bool = False,
        on_event: Subscriber = ignore,
    ) -> None:
        if not sources:
            raise UsageError("a mix needs at least one source")
        if not isinstance(sources, Mapping):
            raise UsageError(f"a mix takes a mapping from names to data sets, such as {{'web': 's3://bucket/web'}}, not {sources!r}")
        if samples is not None and samples < 1:
            raise UsageError(f"samples: an epoch of {samples} samples is none")
        shares = _weights(sources, weights)
        self.sources: dict[str, Dataset] = {}
        for name in sorted(sources):  # so that the order in which they were named means nothing
            where = sources[name]
            if not isinstance(where, Dataset):
                where = Dataset(
                    where, cache_dir=cache_dir, cache_limit=cache_limit, store=store, allow_mount=allow_mount, on_event=on_event
                )
            self.sources[name] = where
        self.datasets = tuple(self.sources.values())
        for dataset in self.datasets:
            if dataset.cache is not None:
                dataset.cache.share_with(other.digest for other in self.datasets)
        sizes = [len(dataset) for dataset in self.datasets]
        total = sum(sizes) if samples is None else samples
        parts = [Fraction(size) for size in sizes] if shares is None else [shares[name] for name in self.sources]
        counts = _divide(total, parts)
        for name, count in zip(self.sources, counts, strict=True):
            if not count:
                raise UsageError(
                    f"weights: of an epoch of {format_count(total)} samples, {name!r} would get none; give it more weight, or the epoch "
                    "more samples="
                )
        self.blend = Blend(counts)
        self.digest = _digest(self.sources, counts)

    @property
    def counts(self) -> dict[str, int]:
        """How many samples of each source an epoch has."""
        return dict(zip(self.sources, self.blend.counts, strict=True))

    @property
    def location(self) -> str:
        """What messages call the mix."""
        return "the mix of " + ", ".join(f"{name} ({dataset.location})" for name, dataset in self.sources.items())

    @property
    def fields(self) -> dict[str, FieldTotals]:
        """The fields of all sources, with the samples and bytes that they have together."""
        found: dict[str, FieldTotals] = {}
        for dataset in self.datasets:
            for field, totals in dataset.fields.items():
                have = found.get(field, FieldTotals(0, 0))
                found[field] = FieldTotals(have.samples + totals.samples, have.bytes + totals.bytes)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all shards of all sources."""
        return sum(dataset.nbytes for dataset in self.datasets)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self.blend.samples

    def __repr__(self) -> str:
        parts = ", ".join(f"{format_count(count)} of {name}" for name, count in self.counts.items())
        return f"<Mix of {format_count(len(self))} samples an epoch: {parts}>"

    def __getitem__(self, index: object) -> NoReturn:
        raise RandomAccessRefused(f"reading sample {index!r} of {self.location} by number is refused; stagekit.torch.StreamLoader reads it")

    def windows(self, window: int) -> list[int]:
        """How ``window`` blocks are divided among the sources, each at least one: the mix shuffles as well as one data set does."""
        return [max(1, math.ceil(window * count / len(self))) for count in self.blend.counts]

    def passes(self, source: int, epoch: int, positions: Intervals) -> list[tuple[int, Intervals]]:
        """What of ``source`` comes at ``positions`` of ``epoch``: for each pass over the source, in order, the intervals of its order."""
        size, count = len(self.datasets[source]), self.blend.counts[source]
        found: list[tuple[int, list[Interval]]] = []
        for begin, end in positions:
            first, last = (epoch * count + self.blend.before(position)[source] for position in (begin, end))
            while first < last:
                number, offset = divmod(first, size)
                stop = min(size, offset + last - first)
                if not found or found[-1][0] != number:
                    found.append((number, []))
                intervals = found[-1][1]
                if intervals and intervals[-1][1] == offset:
                    intervals[-1] = (intervals[-1][0], stop)
                else:
                    intervals.append((offset, stop))
                first += stop - offset
        return [(number, tuple(intervals)) for number, intervals in found]


def plan_mix_memory(mix: Mix, memory: int, *, lanes: int, windows: Sequence[int], connections: int) -> list[Budget]:
    """Divide ``memory`` among the sources, by what each needs. Raises ``UsageError`` with both numbers when one's windows do not fit."""
    needs = []
    for dataset, window in zip(mix.datasets, windows, strict=True):
        largest = dataset.manifest.largest_block
        needs.append(lanes * min(window * largest, dataset.nbytes) + 2 * largest)
    return [
        plan_memory(dataset, memory * need // sum(needs), lanes=lanes, window=window, connections=connections)
        for dataset, window, need in zip(mix.datasets, windows, needs, strict=True)
    ]


class MixReader:
    """Samples of one epoch of a mix, as ``Reader`` gives those of one data set: same promises, same arguments.

    ``epoch_of`` gives the order of a pass over a source. Each source of each lane has a reader of its own; the connections are divided.
    """

    def __init__(
        self,
        mix: Mix,
        epoch: int,
        lanes: Sequence[Intervals],
        per_lane: int,
        *,
        epoch_of: EpochOf,
        budgets: Sequence[Budget],
        connections: int = 16,
        on_bad: OnBad = "raise",
        stall_timeout_s: float | None = 120.0,
    ) -> None:
        self._closed = False
        self._per_lane = per_lane
        each = max(1, connections // (len(lanes) * len(mix.datasets)))
        self._tracks: list[list[_Track]] = []
        for intervals in lanes:
            tracks = []
            for source, (name, dataset) in enumerate(mix.sources.items()):

                def reader(
                    number: int, own: Intervals, source: int = source, dataset: Dataset = dataset, budget: Budget = budgets[source]
                ) -> Reader:
                    return Reader(
                        dataset,
                        epoch_of(source, number),
                        [own],
                        max(1, math.ceil(per_lane * mix.blend.counts[source] / len(mix))),
                        budget=Budget(budget.window_bytes // len(lanes), max(1, budget.ahead_bytes // len(lanes))),
                        connections=each,
                        on_bad=on_bad,
                        stall_timeout_s=stall_timeout_s,
                    )

                tracks.append(_Track(name, mix.passes(source, epoch, intervals), reader))
            self._tracks.append(tracks)
        self._lanes = [_Turns(mix.blend, intervals) for intervals in lanes]

    @property
    def _all(self) -> list[_Track]:
        return [track for tracks in self._tracks for track in tracks]

    @property
    def bad(self) -> Bad:
        """What was skipped, of all sources."""
        found = Bad()
        for track in self._all:
            for reader in track.readers:
                found.samples += reader.bad.samples
                found.reasons += reader.bad.reasons
        return found

    @property
    def bytes_fetched(self) -> int:
        """Bytes of blocks fetched so far, without those that a cache had."""
        return sum(reader.bytes_fetched for track in self._all for reader in track.readers)

    @property
    def bytes_cached(self) -> int:
        """Bytes of blocks that came from a cache."""
        return sum(reader.bytes_cached for track in self._all for reader in track.readers)

    @property
    def waited_s(self) -> float:
        """Seconds in which a sample was wanted and its block was still on its way."""
        return sum(reader.waited_s for track in self._all for reader in track.readers)

    def close(self) -> None:
        """End the iteration and stop the fetch threads. May be called twice, and from another thread."""
        self._closed = True
        for track in self._all:
            track.close()

    def __iter__(self) -> Iterator[list[Sample | None]]:
        try:
            for track in self._all:
                track.start()
            while True:
                group: list[Sample | None] = []
                for turns, tracks in zip(self._lanes, self._tracks, strict=True):
                    wanted = turns.take(self._per_lane)
                    parts = [iter(track.take(wanted.count(source))) for source, track in enumerate(tracks)]
                    if self._closed:
                        return
                    group += [next(parts[source]) for source in wanted]
                if not group:
                    return
                yield group
        finally:
            self.close()


class _Turns:
    """Whose turn it is, along the positions of one lane."""

    def __init__(self, blend: Blend, intervals: Intervals) -> None:
        self._blend = blend
        self._left = list(intervals)

    def take(self, count: int) -> list[int]:
        found: list[int] = []
        while self._left and len(found) < count:
            begin, end = self._left[0]
            stop = min(end, begin + count - len(found))
            found += self._blend.sources(begin, stop).tolist()
            if stop == end:
                del self._left[0]
            else:
                self._left[0] = (stop, end)
        return found


class _Track:
    """One source in one lane: its passes, one reader after the other."""

    def __init__(self, name: str, passes: list[tuple[int, Intervals]], reader: Callable[[int, Intervals], Reader]) -> None:
        self.readers: list[Reader] = []
        self._name = name
        self._passes = passes[::-1]
        self._reader = reader
        self._groups: Iterator[Sequence[Sample | None]] = iter(())
        self._waiting: list[Sample | None] = []
        self._closed = False

    def start(self) -> bool:
        """Begin the next pass. False when there is none."""
        if not self._passes or self._closed:
            return False
        reader = self._reader(*self._passes.pop())
        self.readers.append(reader)
        reader.start()
        self._groups = iter(reader)
        if self._closed:  # meanwhile, by another thread
            reader.close()
        return True

    def take(self, count: int) -> list[Sample | None]:
        """The next ``count`` samples; fewer only when closed."""
        while len(self._waiting) < count:
            group = next(self._groups, None)
            if group is not None:
                for sample in group:
                    if sample is not None:
                        sample["__source__"] = self._name
                    self._waiting.append(sample)
            elif not self.start():
                break
        taken = self._waiting[:count]
        del self._waiting[:count]
        return taken

    def close(self) -> None:
        self._closed = True
        for reader in self.readers:
            reader.close()


def _weights(sources: Mapping[str, Any], weights: Mapping[str, float] | Sequence[float] | None) -> dict[str, Fraction] | None:
    if weights is None:
        return None
    if isinstance(weights, Mapping):
        if weights.keys() != sources.keys():
            odd = sorted(weights.keys() ^ sources.keys())
            raise UsageError(f"weights: they must name the sources, and {', '.join(map(repr, odd))} is in one of the two only")
        named = dict(weights)
    else:
        if len(weights) != len(sources):
            raise UsageError(f"weights: there are {len(weights)} for {len(sources)} sources")
        named = dict(zip(sources, weights, strict=True))
    for name, weight in named.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
            raise UsageError(f"weights: {weight!r} for {name!r} is not above 0")
    return {name: Fraction(weight) for name, weight in named.items()}


def _divide(total: int, parts: Sequence[Fraction]) -> list[int]:
    """``total`` in proportion to ``parts``, rounded so that it adds up; the largest remainders are rounded up."""
    exact = [total * part / sum(parts) for part in parts]
    found = [math.floor(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda number: (found[number] - exact[number], number))
    for number in order[: total - sum(found)]:
        found[number] += 1
    return found


def _digest(sources: Mapping[str, Dataset], counts: Sequence[int]) -> str:
    lines = [f"{dataset.digest} {count} {name!r}\n" for (name, dataset), count in zip(sources.items(), counts, strict=True)]
    return hashlib.sha256("".join(["stagekit-mix/1\n", *lines]).encode()).hexdigest()
