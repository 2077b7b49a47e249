"""``StreamLoader``: batches straight from storage, in an exact and resumable order, with no ``DataLoader`` around it."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol

import torch

from ..config import StoreConfig
from ..dataset import Dataset, Sample
from ..errors import UsageError
from ..order import Intervals, Position, State, batches, share, size
from ..progress import Subscriber, ignore
from ..stream.mix import Mix, MixReader
from ..stream.reader import OnBad, Reader
from ..stream.tars import TarReader, Tars
from ..units import check_whole, format_count
from .batches import NO_BATCH, Assembly, Collate, together
from .collate import collate as default_collate
from .decode import Decode
from .pipeline import Ahead, Pipeline
from .plan import AnyReader, Made, Plan, Receipt, Source, Transform, receipt_of
from .ranks import World
from .workers import Workers

_AHEAD = 8  # batches that only have to be put together


class _Work(Protocol):
    """Batches in the making, with what went into each, in order."""

    waited_s: float

    def __iter__(self) -> Iterator[tuple[Any, Made]]: ...

    def close(self) -> None: ...


class StreamLoader:
    """Batches of the data set at ``source``, each sample once an epoch, every rank the same number of batches.

    Iterating runs one epoch and moves on to the next (``epoch``). The order depends on the data set's digest, ``seed``, the epoch,
    ``shuffle`` and ``window`` alone: not on threads, memory, timing, or where the data lies. An iteration that was left early is broken
    off: the next one starts that epoch anew. To go on behind the last batch that was taken, here or on another machine, save
    ``state_dict()`` and load it.

    A batch is a dict: ``__key__`` (list of str) and field → values put together by ``collate``. With ``drop_last=False`` it also has
    ``__mask__`` (bool, true for real samples), and the last batches are filled up with repeated samples whose key is ``""``. With
    ``drop_last=True`` what does not fill a batch on every rank is left out. A sample that ``transform`` drops (by returning ``None``) or
    that ``on_bad="skip"`` leaves out makes its batch short, or masked; it is counted in ``receipt``.

    Damaged data raises ``CorruptShard`` naming shard, block and offset; an epoch never just ends early.

    Plain WebDataset tars without a manifest are read, too, named as in ``"s3://bucket/shard-{000000..000099}.tar"``. What cannot be
    promised of them is told by a warning: see ``stream.tars``.

    :param source: URL, directory, open store, ``Dataset``, ``Mix``, or the names of plain tars
    :param batch_size: samples in a batch of this rank
    :param shuffle: permute blocks, and samples inside windows of ``window`` blocks (about 8 MiB each); else source order
    :param decode: ``"auto"`` by extension, ``None`` for bytes, or a mapping from field to a function of the bytes
    :param transform: called with each decoded sample, in a thread; returns the sample to use, or ``None`` to drop it
    :param collate: called with a batch's list of samples
    :param threads: that decode, transform and collate; 0 does it in the calling thread
    :param workers: processes that do it instead, for a transform in which Python itself is busy (most of PIL, numpy and torch lets threads
        run, and threads start at once). ``transform``, ``decode`` and ``collate`` are sent to them, so they must be picklable. ``random``,
        ``numpy.random`` and torch are seeded there for each batch. They are started with an iteration, and end with it
    :param rank, world_size: default: the process group's when iteration begins, else ``RANK`` and ``WORLD_SIZE``, else 0 of 1
    :param virtual_ranks: cut the data for this many ranks, of which each real one reads an equal number; the global batches are then the
        same for every world size that divides it, as long as ``batch_size`` times world size is
    :param connections: ranged GETs at the same time
    :param memory: for raw bytes: one window a virtual rank of this process, and what is fetched ahead; refused when it cannot fit
    :param cache_dir, cache_limit: keep up to that many bytes of blocks on this machine's disk, for the next epochs, jobs and other ranks
    :param on_bad: ``"skip"`` leaves out damaged blocks and samples that cannot be decoded, counts and reports them
    :param stall_timeout_s: raise ``StallTimeout`` after waiting that long for bytes; ``None`` waits for ever
    :param pin_memory: pin the tensors of a batch where CUDA is there, so that ``.to("cuda", non_blocking=True)`` does not wait; nothing
        elsewhere
    :param allow_mount: read from an object store behind FUSE after all
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        decode: Decode = "auto",
        transform: Transform | None = None,
        collate: Collate = default_collate,
        threads: int = 4,
        workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        virtual_ranks: int | None = None,
        window: int = 16,
        drop_last: bool = True,
        connections: int = 16,
        memory: str | int = "1GiB",
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: str | int | None = None,
        on_bad: OnBad = "raise",
        stall_timeout_s: float | None = 120.0,
        pin_memory: bool = False,
        allow_mount: bool = False,
        store: StoreConfig | None = None,
        on_event: Subscriber = ignore,
    ) -> None:
        check_whole(batch_size, name="batch_size", minimum=1)
        check_whole(threads, name="threads", minimum=0)
        check_whole(workers, name="workers", minimum=0)
        if virtual_ranks is not None:
            check_whole(virtual_ranks, name="virtual_ranks", minimum=1)
        if not callable(collate):
            raise UsageError(f"collate: {collate!r} is no function of a list of samples")
        self._world = World(rank, world_size)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.virtual_ranks = virtual_ranks
        self.receipt: Receipt | None = None
        self.before_batch: Callable[[], None] | None = None
        """Called when the trainer asks for another batch, so that all it took before is trained; ``Run.epochs`` may save here."""
        self._plan = Plan(
            source,
            shuffle=shuffle,
            seed=seed,
            window=window,
            decode=decode,
            transform=transform,
            connections=connections,
            memory=memory,
            cache_dir=cache_dir,
            cache_limit=cache_limit,
            on_bad=on_bad,
            stall_timeout_s=stall_timeout_s,
            allow_mount=allow_mount,
            store=store,
            on_event=on_event,
        )
        self._assembly = Assembly(collate, batch_size, drop_last)
        self._threads, self._workers = threads, workers
        self._pin = pin_memory and torch.cuda.is_available()
        self._position = Position()
        self._resumed = False
        self._iteration: object = None
        self._warned = False
        # Before the process group is there, the world is not known yet, and what depends on it is checked when iteration begins.
        self._plan.budgets(self._cut()[2] if self._world.is_known else 1)
        if isinstance(self.dataset, Tars):
            if virtual_ranks is not None:
                raise UsageError("virtual_ranks: plain tars are divided whole; index them first (`stagekit index`)")
            self._plan.warn_of_tars()
        else:
            self._warn_if_empty(self.dataset)

    @property
    def dataset(self) -> Dataset | Mix | Tars:
        """The data set that is read."""
        return self._plan.dataset

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or that the next iteration will read."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration read ``epoch`` from its beginning. Where the position is inside that epoch already, it stays.

        Nobody needs to call this: epochs follow each other. Lightning and the ``Trainer`` of transformers do, since they count epochs
        themselves, and go on with the right one although they restore no loader between two epochs.
        """
        check_whole(epoch, name="epoch", minimum=0)
        if epoch != self._position.epoch:
            self._position = Position(epoch)
            self._resumed = True
            self._iteration = None

    def skip_batches(self, batches: int) -> None:
        """Go on behind so many further batches of the current epoch, as if they had been taken. Nothing is read for it.

        Raises ``UsageError`` for more than are left.
        """
        if not 0 <= batches <= self.batches_left:
            raise UsageError(f"batches: {batches} cannot be skipped; {self.batches_left} are left in epoch {self.epoch}")
        shares, per_share, _ = self._cut()
        self._position = self._position.advanced(shares, per_share, batches)
        self._resumed = True
        self._iteration = None

    @property
    def sampler(self) -> StreamLoader:
        """Where Lightning looks for ``set_epoch``."""
        return self

    def __len__(self) -> int:
        """Batches of the current epoch, from its beginning: those that were taken before a resume and those that are left.

        ``TypeError`` for plain tars, whose samples nobody has counted.
        """
        return self._position.batches + self.batches_left

    @property
    def batches_left(self) -> int:
        """Batches that this rank has not taken yet in the current epoch."""
        shares, per_share, _ = self._cut()
        left = size(self._position.left(len(self.dataset)))
        return batches(left, shares, per_share, drop_last=self.drop_last)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch that was taken, whatever was fetched ahead: plain values, below 1 KB, equal on every rank."""
        return self._plan.state(self._position, self.virtual_ranks).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at ``state``: the next iteration gives the samples that were still due in its epoch, once each.

        World size, batch size, threads and the data's place may differ from when it was saved. ``window`` is taken from the state, and so
        is ``virtual_ranks`` unless this loader was given its own. Raises ``StateMismatch`` for other data, another seed or ``shuffle``.
        """
        loaded = State.from_dict(state)
        self._plan.adopt(loaded)
        if self.virtual_ranks is None:
            self.virtual_ranks = loaded.virtual_ranks
        self._position = loaded.position
        self._resumed = True
        self._iteration = None

    def __getitem__(self, index: object) -> Any:
        return self.dataset[index]

    def _cut(self) -> tuple[int, int, int]:
        """Into how many shares the data is cut, how many samples of each go into a batch, and how many of them this rank reads."""
        _, world = self._world.find()
        shares = self.virtual_ranks or world
        if shares % world:
            raise UsageError(
                f"virtual_ranks: {shares} virtual ranks cannot be divided among {world} ranks; use a world size that divides {shares}, or "
                f"pass virtual_ranks={world} to cut what is left of the epoch anew"
            )
        lanes = shares // world
        if self.batch_size % lanes:
            raise UsageError(
                f"batch_size: {self.batch_size} cannot be divided among the {lanes} virtual ranks that each of {world} ranks reads; "
                f"use a multiple of {lanes}"
            )
        return shares, self.batch_size // lanes, lanes

    def _warn_if_empty(self, dataset: Dataset | Mix) -> None:
        _, world = self._world.find()
        total = format_count(len(dataset))
        if self._warned or not self.drop_last or self._position.cuts or len(dataset) // world >= self.batch_size:
            return
        self._warned = True
        ranks = f" on each of {world} ranks" if world > 1 else ""
        warnings.warn(
            f"{dataset.location} has {total} samples, too few for a batch of {self.batch_size}{ranks}: with drop_last=True an epoch "
            "has 0 batches. Use a smaller batch_size, or drop_last=False to get them in a masked batch",
            UserWarning,
            stacklevel=3,
        )

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing changes before its first batch is asked for, so a loaded state is not lost by an iter() that nobody uses.
        position = self._position
        if not self._resumed:
            # Frameworks that know the length never ask behind the last batch; then the epoch is over all the same.
            over = position.batches and not isinstance(self.dataset, Tars) and not self.batches_left
            position = Position(position.epoch + 1 if over else position.epoch)
        self._position, self._resumed = position, False
        self._iteration = token = object()
        plan = self._plan
        before = plan.usage()
        shares, per_share, _ = self._cut()
        source = self._open(position)
        reader = source.reader
        ended = False
        total, taken, passed_over, delivered, waited_s, began = Made(), 0, 0, 0, 0.0, time.monotonic()
        leaving = sys.is_finalizing  # by then modules have lost their names, and nobody reads a receipt
        work = self._work(source, reader, position)
        made = iter(work) if work is not None else (self._assemble([plan.make(group)], source) for group in source)
        try:
            for batch, counts in made:
                if work is None:
                    waited_s += time.monotonic() - began
                if self._iteration is not token:
                    raise UsageError(
                        "this iteration of the loader is over: another one was started, or a state was loaded, since its last batch. "
                        "Make two loaders to read the data twice at the same time"
                    )
                if batch is NO_BATCH and self._world.find()[1] > 1:
                    raise UsageError(
                        f"every sample of a batch of {self.batch_size} was dropped or skipped, and the other ranks wait for this one at "
                        "theirs; use drop_last=False to get such a batch masked, or drop less"
                    )
                if self.before_batch is not None and batch is not NO_BATCH:
                    self.before_batch()
                delivered += len(counts.samples)
                counts.samples = []
                total.add(counts)
                taken += 1
                position = position.advanced(shares, per_share)
                self._position = position
                if batch is NO_BATCH:
                    passed_over += 1
                    continue
                yield _pinned(batch) if self._pin and self._workers else batch
                began = time.monotonic()
            ended = True
            if passed_over and passed_over == taken:
                raise UsageError(
                    f"every sample of {self.dataset.location} was dropped or skipped, so that there was no batch in epoch {position.epoch}"
                    f"{''.join(f'; {reason}' for reason in total.reasons[:1])}"
                )
        finally:
            if work is None:
                reader.close()
            else:
                work.close()
                waited_s = work.waited_s
            if not leaving():
                complete = ended if source.count is None else taken == source.count
                receipt = receipt_of(
                    plan,
                    reader,
                    total,
                    epoch=position.epoch,
                    batches=taken,
                    expected=source.expected,
                    delivered=delivered,
                    waited_s=waited_s,
                    complete=complete,
                    before=before,
                )
                if self._iteration in (token, None):
                    self.receipt = receipt
                if complete:
                    if self._iteration is token:
                        self._position = Position(position.epoch + 1)
                    plan.report(receipt)

    def _open(self, position: Position) -> _Batches | _TarBatches:
        """What is left of an epoch for this rank."""
        plan, dataset = self._plan, self.dataset
        rank, world = self._world.find()
        shares, per_share, lanes = self._cut()
        if isinstance(dataset, Tars):
            tar_reader = plan.tar_reader(
                dataset, rank, world, self.batch_size, epoch=position.epoch, skip=plan.tar_samples_taken(position, world)
            )
            return _TarBatches(tar_reader, self.batch_size, drop_last=self.drop_last, source=dataset.location)
        self._warn_if_empty(dataset)
        left = position.left(len(dataset))
        count = batches(size(left), shares, per_share, drop_last=self.drop_last)
        own = [share(left, number, shares, limit=count * per_share) for number in range(rank * lanes, (rank + 1) * lanes)]
        reader = plan.reader(position.epoch, own, per_share)
        return _Batches(plan, reader, own, per_share, count, epoch=position.epoch)

    def _work(self, source: _Batches | _TarBatches, reader: AnyReader, position: Position) -> _Work | None:
        """What makes batches of ``source`` ahead of the trainer; ``None`` when it is to wait for each."""
        make = self._plan.make
        if self._workers:
            rank, _ = self._world.find()
            text = f"{self._plan.seed} {position.epoch} {rank}"
            return Workers(
                source,
                make,
                self._assembly,
                count=self._workers,
                seed=lambda number: int.from_bytes(sha256(f"{text} {position.batches + number}".encode()).digest()[:8], "little"),
                filler=source.filler,
                stop_groups=reader.close,
            )
        if not self._threads:
            return None
        if make.plain and self._assembly.collate is default_collate:
            return Ahead((self._assemble([make(group)], source) for group in source), ahead=_AHEAD, stop=reader.close)
        return Pipeline(
            source,
            make,
            lambda parts: self._assemble(parts, source),
            threads=self._threads,
            cut=not make.plain,
            stop_groups=reader.close,
        )

    def _assemble(self, parts: Sequence[Made], source: _Batches | _TarBatches) -> tuple[Any, Made]:
        """One batch, and the counts of what went into it."""
        made = together(parts)
        batch = self._assembly(made.samples, source.filler)
        made.samples = [None] * len(made.samples)  # which are in the batch, and only counted from here on
        return (_pinned(batch) if self._pin else batch), made


class _Batches:
    """The raw samples of each batch, ``count`` of them, with a place for every position: a short one is an error, never a short epoch."""

    def __init__(
        self, plan: Plan, reader: Reader | MixReader, lanes: Sequence[Intervals], per_lane: int, count: int, *, epoch: int
    ) -> None:
        self.reader, self.count = reader, count
        self._plan, self._epoch = plan, epoch
        self._sizes = [size(lane) for lane in lanes]
        self._per_lane = per_lane

    @property
    def expected(self) -> int:
        """How many samples are due."""
        return sum(self._sizes)

    def __iter__(self) -> Iterator[Sequence[Sample | None]]:
        groups = iter(self.reader)
        for number in range(self.count):
            first = number * self._per_lane
            due = sum(min(max(held - first, 0), self._per_lane) for held in self._sizes)
            group = next(groups, []) if due else []
            if len(group) != due:
                raise RuntimeError(f"batch {number} holds {len(group)} samples instead of {due}; this is a bug in Stagekit")
            yield group

    def filler(self) -> Any:
        """A sample to fill a batch with that has none of its own: the first of the epoch that can be used, the same on every rank and
        after every resume."""
        dataset = self._plan.dataset
        assert not isinstance(dataset, Tars)
        whole = ((0, len(dataset)),)
        reader = self._plan.reader(self._epoch, [whole], 1)
        try:
            for group in reader:
                made = self._plan.make(group)
                if made.samples:
                    return made.samples[0]
        finally:
            reader.close()
        raise UsageError(f"every sample of {dataset.location} was dropped or skipped, so there is none to fill a batch with")


class _TarBatches:
    """The raw samples of each batch out of plain tars, until they end. ``expected`` are those that were read so far."""

    count = None

    def __init__(self, reader: TarReader, batch_size: int, *, drop_last: bool, source: str) -> None:
        self.reader = reader
        self.expected = 0
        self._batch_size, self._drop_last, self._source = batch_size, drop_last, source

    def __iter__(self) -> Iterator[Sequence[Sample | None]]:
        for group in self.reader:
            if len(group) < self._batch_size and self._drop_last:
                return
            self.expected += len(group)
            yield group

    def filler(self) -> Any:
        """Nothing: what else there is would have to be read for it."""
        raise UsageError(f"every sample of a batch of {self._source} was dropped, so there is none to fill it with; drop less")


def _pinned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if isinstance(value, dict):
        return {name: _pinned(item) for name, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor | dict | list | tuple) for item in value):
        items = [_pinned(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple takes them one by one
    return value
