"""What the loader and the dataset for people's own ``DataLoader`` have in common: the data, its order, and how a sample is made."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import StoreConfig
from ..dataset import Dataset, Sample
from ..errors import ShardError, StateMismatch, UsageError
from ..location import Location
from ..order import Epoch, Intervals, Position, State
from ..progress import Message, Subscriber
from ..store import Where
from ..store.usage import Usage, usages
from ..stream.mix import Mix, MixReader, plan_mix_memory
from ..stream.reader import Bad, Budget, OnBad, Reader, plan_memory
from ..stream.tars import TarReader, Tars, names_tars
from ..stream.window import Rows
from ..transfer.fetch import PIECE
from ..units import check_whole, format_count, format_duration, format_size, parse_size
from .decode import Decode, Decoder

Transform = Callable[[Sample], Any]
Source = Where | Dataset | Mix | Sequence[str | os.PathLike[str]]
"""A data set, a mix of several, or the names of plain tars."""
AnyReader = Reader | MixReader | TarReader

_log = logging.getLogger("stagekit.torch")


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one epoch delivered on this rank, since it began or was resumed. ``str()`` makes one line of it.

    ``expected`` samples were due: the rank's share, without a tail that ``drop_last`` left out. ``delivered`` came once each; ``dropped``
    were left out by the transform (``None``), ``skipped`` because they were damaged (``on_bad="skip"``), with the first ten ``reasons``.
    ``bytes_fetched`` counts blocks, ``bytes_cached`` those that a cache had, ``data_bytes`` is the whole data set. ``waited_s`` is how long
    the trainer waited for data.
    ``complete`` is false when the iteration was left early. ``requests`` and ``received_bytes`` are what this process asked of the places
    where the data lies, repetitions and tables included, as far as those are S3.
    """

    epoch: int
    batches: int
    expected: int
    delivered: int
    dropped: int
    skipped: int
    reasons: tuple[str, ...]
    bytes_fetched: int
    bytes_cached: int
    data_bytes: int
    waited_s: float
    complete: bool
    requests: int = 0
    received_bytes: int = 0

    def __str__(self) -> str:
        parts = [f"{format_count(self.delivered)} of {format_count(self.expected)} samples in {format_count(self.batches)} batches"]
        if self.dropped:
            parts.append(f"{format_count(self.dropped)} dropped by the transform")
        if self.skipped:
            parts.append(f"{format_count(self.skipped)} skipped as damaged")
        share = f" ({self.bytes_fetched / self.data_bytes:.2f} of the data set)" if self.data_bytes else ""
        parts.append(f"{format_size(self.bytes_fetched)} fetched{share}")
        if self.requests:
            parts[-1] += f" in {format_count(self.requests)} request{'' if self.requests == 1 else 's'}"
        if self.bytes_cached:
            parts.append(f"{format_size(self.bytes_cached)} from the cache")
        parts.append(f"waited {format_duration(self.waited_s)} for data")
        return f"epoch {self.epoch}{'' if self.complete else ', left early'}: {', '.join(parts)}"


@dataclass(slots=True)
class Made:
    """Samples after decoding and transform, and what became of those that are missing."""

    samples: Sequence[Any] = ()
    dropped: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, other: Made) -> None:
        """Put ``other`` behind this."""
        self.samples = [*self.samples, *other.samples]
        self.dropped += other.dropped
        self.skipped += other.skipped
        self.reasons += other.reasons


@dataclass(frozen=True)
class Maker:
    """Decodes and transforms raw samples, in any thread and in worker processes. ``source`` is what messages call the data."""

    decoder: Decoder
    transform: Transform | None
    on_bad: OnBad
    source: str

    @property
    def plain(self) -> bool:
        """Whether samples are handed out as they were read."""
        return self.transform is None and not self.decoder.active

    def __call__(self, samples: Sequence[Sample | None]) -> Made:
        """Decode and transform. ``None`` stands for a sample that the reader skipped (and counted)."""
        made = Made()
        if self.plain:
            made.samples = samples if isinstance(samples, Rows) else [sample for sample in samples if sample is not None]
            return made
        decoder, transform = self.decoder, self.transform
        kept: list[Any] = []
        for sample in samples:
            if sample is None:
                continue
            key = sample["__key__"]
            try:
                value: Any = decoder(sample)
            except ShardError as error:
                if self.on_bad == "raise":
                    raise
                made.skipped += 1
                made.reasons.append(str(error))
                continue
            if transform is not None:
                try:
                    value = transform(value)
                except Exception as error:
                    error.add_note(f"raised by transform for the sample {key!r} of {self.source}")
                    raise
                if value is None:
                    made.dropped += 1
                    continue
                if isinstance(value, dict):
                    value.setdefault("__key__", key)
            kept.append(value)
        made.samples = kept
        return made


class Plan:
    """A data set, the settings of its order, and the way from raw bytes to a sample.

    Everything is checked here, before the first batch: the manifest is read, fields that cannot be decoded are refused, and the windows
    must fit into ``memory``. Can be pickled when ``transform`` and ``decode`` can.
    """

    def __init__(
        self,
        source: Source,
        *,
        shuffle: bool,
        seed: int,
        window: int,
        decode: Decode,
        transform: Transform | None,
        connections: int,
        memory: str | int,
        cache_dir: str | os.PathLike[str] | None,
        cache_limit: str | int | None,
        on_bad: OnBad,
        stall_timeout_s: float | None,
        allow_mount: bool,
        store: StoreConfig | None,
        on_event: Subscriber,
    ) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise UsageError(f"seed: {seed!r} is no whole number")
        check_whole(window, name="window", minimum=1, unit=" block")
        check_whole(connections, name="connections", minimum=1)
        if transform is not None and not callable(transform):
            raise UsageError(f"transform: {transform!r} is no function of a sample")
        if on_bad not in ("raise", "skip"):
            raise UsageError(f"on_bad: {on_bad!r} is neither 'raise' nor 'skip'")
        if stall_timeout_s is not None and (isinstance(stall_timeout_s, bool) or not isinstance(stall_timeout_s, int | float)):
            raise UsageError(f"stall_timeout_s: {stall_timeout_s!r} is no number of seconds; None waits for ever")
        if stall_timeout_s is not None and stall_timeout_s <= 0:
            raise UsageError(f"stall_timeout_s: {stall_timeout_s} is not above 0; None waits for ever")
        self._places: frozenset[Location] | None = None
        config = store or StoreConfig()
        # The connections asked for here are of no use if the store keeps fewer.
        config = replace(config, connections=max(config.connections, connections))
        cached = cache_dir is not None or cache_limit is not None
        self.dataset: Dataset | Mix | Tars
        if isinstance(source, Dataset | Mix):
            if cached:
                kind = type(source).__name__
                raise UsageError(f"cache_dir and cache_limit belong to the {kind} here: give them to it, as in {kind}(…, cache_limit=…)")
            self.dataset = source
        elif isinstance(source, list | tuple) or names_tars(source):
            if cached:
                raise UsageError(f"cache_limit: {source} has no digests to cache by; index the tars first (`stagekit index`)")
            names: Any = source  # texts, or the constructor refuses them
            self.dataset = Tars(names, connections=connections, store=config, allow_mount=allow_mount, on_event=on_event)
        else:
            where: Where = source  # type: ignore[assignment]  # what is a sequence was taken above
            self.dataset = Dataset(
                where, cache_dir=cache_dir, cache_limit=cache_limit, store=config, allow_mount=allow_mount, on_event=on_event
            )
        self.shuffle, self.seed, self.window = bool(shuffle), seed, window
        decoder = Decoder(decode, self.dataset.fields)
        self.make = Maker(decoder, transform, on_bad, str(self.dataset.location))
        if decoder.unused:
            fields = ", ".join(sorted(self.dataset.fields or ()))
            text = (
                f"decode: {self.dataset.location} has no field {' and no field '.join(map(repr, decoder.unused))}; its fields are {fields}"
            )
            on_event(Message(text, "warning"))
            warnings.warn(text, UserWarning, stacklevel=3)
        self.connections = connections
        self.memory = parse_size(memory, name="memory")
        self.on_bad: OnBad = on_bad
        self.stall_timeout_s = stall_timeout_s
        self.on_event = on_event
        self._epochs: dict[int, Epoch] = {}

    def epoch(self, number: int, source: int = 0) -> Epoch:
        """The order of an epoch, or of a pass over one source of a mix. The last one of each is kept, since it takes a moment to make when
        there are millions of blocks."""
        found = self._epochs.get(source)
        if found is None or found.number != number:
            assert not isinstance(self.dataset, Tars)
            dataset = self.dataset.datasets[source] if isinstance(self.dataset, Mix) else self.dataset
            # In a mix, each source has an order of its own, even where two are the same data.
            digest = f"{self.dataset.digest}-{source}" if isinstance(self.dataset, Mix) else dataset.digest
            found = Epoch(
                dataset.block_samples, number, digest=digest, seed=self.seed, shuffle=self.shuffle, window=self._windows()[source]
            )
            self._epochs[source] = found
        return found

    def _windows(self) -> list[int]:
        """Blocks in a window of each source."""
        window = self.window if self.shuffle else 1
        return self.dataset.windows(window) if isinstance(self.dataset, Mix) else [window]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": {}}  # made anew in less time than it takes to send them

    def budgets(self, lanes: int, *, readers: int = 1) -> list[Budget]:
        """How one of ``readers`` readers spends its part of the memory, for each source. Raises ``UsageError`` when windows do not fit."""
        memory, connections = self.memory // readers, self.connections
        if isinstance(self.dataset, Mix):
            return plan_mix_memory(self.dataset, memory, lanes=lanes, windows=self._windows(), connections=connections)
        if isinstance(self.dataset, Tars):
            held = self.window * PIECE if self.shuffle else 0
            if held + 2 * PIECE > memory:
                raise UsageError(
                    f"memory: reading {self.dataset.location} needs {format_size(held + 2 * PIECE)} (a window of {self.window} times 8 "
                    f"MiB, and two pieces on their way) and memory={format_size(memory)} is allowed; raise memory=, or lower window="
                )
            return [Budget(held, min(memory - held - PIECE, held + 2 * connections * PIECE))]
        return [plan_memory(self.dataset, memory, lanes=lanes, window=self._windows()[0], connections=connections)]

    def reader(self, epoch: int, lanes: Sequence[Intervals], per_lane: int, *, readers: int = 1) -> Reader | MixReader:
        """A reader of ``lanes`` in epoch ``epoch``."""
        budgets = self.budgets(len(lanes), readers=readers)
        connections, on_bad, stall_timeout_s = self.connections, self.on_bad, self.stall_timeout_s
        if isinstance(self.dataset, Mix):
            return MixReader(
                self.dataset,
                epoch,
                lanes,
                per_lane,
                epoch_of=lambda source, number: self.epoch(number, source),
                budgets=budgets,
                connections=connections,
                on_bad=on_bad,
                stall_timeout_s=stall_timeout_s,
            )
        assert isinstance(self.dataset, Dataset)
        return Reader(
            self.dataset,
            self.epoch(epoch),
            lanes,
            per_lane,
            budget=budgets[0],
            connections=connections,
            on_bad=on_bad,
            stall_timeout_s=stall_timeout_s,
        )

    def tar_samples_taken(self, position: Position, world: int) -> int:
        """How many samples each of ``world`` ranks took of its plain tars. Raises ``StateMismatch`` when it was another number of ranks."""
        taken = position.cuts[0] if position.cuts else (world, 0)
        if len(position.cuts) > 1 or taken[0] != world:
            raise StateMismatch(
                f"the loader state was saved on {taken[0]} ranks and is loaded on {world}; plain tars without an index go on with as "
                "many ranks only. `stagekit index` makes them a data set, which any number of ranks can go on with"
            )
        return taken[1]

    def tar_reader(
        self, tars: Tars, rank: int, world: int, per_group: int, *, epoch: int, skip: int, worker: int = 0, workers: int = 1
    ) -> TarReader:
        """A reader of the tars of ``rank``, or of one of its workers, in ``epoch``, behind the first ``skip`` samples."""
        [budget] = self.budgets(1, readers=workers)
        return TarReader(
            tars,
            tars.share(rank, world, seed=self.seed, epoch=epoch, shuffle=self.shuffle)[worker::workers],
            per_group,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.window * PIECE if self.shuffle else None,
            skip=skip,
            ahead_bytes=budget.ahead_bytes,
            connections=self.connections,
            on_bad=self.on_bad,
            stall_timeout_s=self.stall_timeout_s,
        )

    def state(self, position: Position, virtual_ranks: int | None) -> State:
        """What to save for ``position``."""
        return State(self.dataset.digest, self.seed, self.shuffle, self.window, virtual_ranks, position)

    def adopt(self, state: State) -> None:
        """Take over the order settings of ``state``. Raises ``StateMismatch`` when it belongs to other data or another order."""
        samples = None if isinstance(self.dataset, Tars) else len(self.dataset)
        where = str(self.dataset.location)
        state.check(digest=self.dataset.digest, seed=self.seed, shuffle=self.shuffle, source=where, samples=samples)
        if state.window != self.window:
            self.window = state.window
            self._epochs = {}

    def warn_of_tars(self) -> None:
        """Say what cannot be promised where plain tars are read."""
        if isinstance(self.dataset, Tars):
            self.on_event(Message(self.dataset.warning, "warning"))
            warnings.warn(self.dataset.warning, UserWarning, stacklevel=3)

    def usage(self) -> Usage:
        """What this process has asked of the places where the data lies."""
        counted = usages()
        if not counted:  # nothing is S3
            return Usage()
        if self._places is None:
            self._places = _places_of(self.dataset)
        return sum((usage for place, usage in counted.items() if place in self._places), Usage())

    def report(self, receipt: Receipt) -> None:
        """Tell what an epoch delivered: to ``on_event``, and as a warning when samples were skipped."""
        bad = bool(receipt.skipped or receipt.reasons)
        self.on_event(Message(str(receipt), "warning" if bad else "info"))
        _log.info("%s, %s", self.dataset.location, receipt)
        if bad:
            reasons = "".join(f"\n- {reason}" for reason in receipt.reasons)
            warnings.warn(f"{self.dataset.location}, {receipt}{reasons}", RuntimeWarning, stacklevel=4)


def _places_of(dataset: Dataset | Mix | Tars) -> frozenset[Location]:
    """The folders in which the data lies."""
    if isinstance(dataset, Tars):
        return frozenset(one.parent for one in dataset.locations)
    sources = dataset.sources.values() if isinstance(dataset, Mix) else [dataset]
    elsewhere = {shard.url for one in sources for shard in one.manifest.shards if shard.url is not None}
    return frozenset({one.location for one in sources} | {Location.parse(url).parent for url in elsewhere})


def receipt_of(
    plan: Plan,
    reader: AnyReader,
    made: Made,
    *,
    epoch: int,
    batches: int,
    expected: int,
    delivered: int,
    waited_s: float,
    complete: bool,
    before: Usage,
) -> Receipt:
    """The receipt for what ``reader`` read and ``made`` counts. ``before`` is ``plan.usage()`` when the epoch began."""
    bad: Bad = reader.bad
    usage = plan.usage() - before
    return Receipt(
        epoch=epoch,
        batches=batches,
        expected=expected,
        delivered=delivered,
        dropped=made.dropped,
        skipped=made.skipped + bad.samples,
        reasons=tuple([*bad.reasons, *made.reasons][:10]),
        bytes_fetched=reader.bytes_fetched,
        bytes_cached=reader.bytes_cached,
        data_bytes=plan.dataset.nbytes,
        waited_s=waited_s,
        complete=complete,
        requests=usage.requests,
        received_bytes=usage.received_bytes,
    )
