"""From intervals of the reading order to samples: blocks fetched ahead in parallel, checked, parsed, and handed out in order."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import numpy as np

from ..dataset import DAMAGE, Dataset, Sample
from ..errors import CorruptShard, ShardError, StagekitError, UsageError
from ..order import Epoch, Intervals, Stretch
from ..shards.grid import BlockSamples
from ..store.base import Data
from ..transfer.fetch import Errand, Fetcher, Range, fetch
from ..units import format_size
from .cache import CachedFetch
from .window import NOTHING, Window

_JOINED = 2  # neighbouring blocks in a request, of 8 MiB each: more take more memory, and gain little on lines of 30 ms
OnBad = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class Budget:
    """How the memory of one reader is spent: ``window_bytes`` held while they are handed out, ``ahead_bytes`` fetched or on their way."""

    window_bytes: int
    ahead_bytes: int


def plan_memory(dataset: Dataset, memory: int, *, lanes: int, window: int, connections: int) -> Budget:
    """Divide ``memory`` bytes between ``lanes`` windows of ``window`` blocks each and what is fetched ahead.

    Raises ``UsageError`` with both numbers when the windows, one block being taken apart, and one being fetched do not fit. The block
    sizes come from the manifest; where its largest block is an outlier, the block tables are read to be exact.
    """
    largest = dataset.manifest.largest_block
    blocks = min(window, len(dataset.block_samples))
    window_bytes = min(blocks * largest, dataset.nbytes)
    if lanes * window_bytes + 2 * largest > memory:
        dataset.load_tables(range(len(dataset.shards)), threads=connections)
        sizes = np.sort([block.size for shard in range(len(dataset.shards)) for block in dataset.table(shard).blocks])
        window_bytes = int(sizes[-blocks:].sum()) if blocks else 0
    needed = lanes * window_bytes + 2 * largest
    if needed > memory:
        what = f"{lanes} windows" if lanes > 1 else "a window"
        raise UsageError(
            f"memory: reading {dataset.location} needs {format_size(needed)} ({what} of {blocks} blocks with up to "
            f"{format_size(window_bytes)}, and two blocks of up to {format_size(largest)} on their way) and memory={format_size(memory)} "
            "is allowed; raise memory=, or lower window= (which shuffles less)"
        )
    # In source order, neighbouring blocks are asked for together, and there is some room beside what is on its way.
    each = largest * _JOINED * 5 // 4 if window == 1 else 2 * largest
    ahead = min(memory - lanes * window_bytes - largest, lanes * window_bytes + connections * each)
    return Budget(lanes * window_bytes, max(ahead, largest))


@dataclass(slots=True)
class Bad:
    """What was skipped: how many samples, and the first few reasons."""

    samples: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, samples: int, reason: str) -> None:
        """Count ``samples`` more. The first ten reasons are kept."""
        self.samples += samples
        if len(self.reasons) < 10:
            self.reasons.append(reason)


class _Lane:
    """One share on its way out, with the window that is being handed out."""

    def __init__(self, stretches: Iterator[Stretch]) -> None:
        self.stretches = stretches
        self.opened = 0
        self.window = NOTHING


class _Tables:
    """The block tables of ``shards``, fetched when it is called. ``wait`` is for whoever needs one."""

    def __init__(self, dataset: Dataset, shards: Iterable[int], threads: int) -> None:
        self._dataset, self._shards, self._threads = dataset, shards, threads
        self._done = threading.Event()
        self._error: StagekitError | None = None

    def __call__(self) -> None:
        try:
            self._dataset.load_tables(self._shards, threads=self._threads)
        except StagekitError as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        """Wait until they are there. A damaged one is reported by whoever needs it, in the place of its first block."""
        self._done.wait()
        if self._error is not None and not isinstance(self._error, DAMAGE):
            raise self._error


class Reader:
    """Samples of one epoch, for the shares (*lanes*) in ``lanes``, ``per_lane`` of each at a time.

    Iterating yields groups, each a sequence to be gone through once: the next ``per_lane`` positions of the first lane, of the second, …;
    shorter at the end of a lane, and the iteration ends when all lanes have. A position whose block was skipped (``on_bad="skip"``) is
    ``None``, so that a group always tells how many positions it stands for. With ``on_bad="raise"`` a damaged block raises
    ``CorruptShard`` in its place.

    Each lane holds one window; what comes next is fetched meanwhile, by ``connections`` daemon threads, within ``budget.ahead_bytes``.
    Before the first group is there, only what it needs is fetched: one window a lane where a window holds that many samples.
    ``close()``, from any thread, ends the iteration and the threads. A reader is iterated once.
    """

    def __init__(
        self,
        dataset: Dataset,
        epoch: Epoch,
        lanes: Sequence[Intervals],
        per_lane: int,
        *,
        budget: Budget,
        connections: int = 16,
        on_bad: OnBad = "raise",
        stall_timeout_s: float | None = 120.0,
    ) -> None:
        self.bad = Bad()
        self._dataset = dataset
        self._epoch = epoch
        self._intervals = tuple(lanes)
        self._per_lane = per_lane
        self._budget = budget
        self._connections = connections
        self._on_bad = on_bad
        self._stall_timeout_s = stall_timeout_s
        self._lanes = [_Lane(epoch.stretches(intervals)) for intervals in self._intervals]
        self._damaged_tables: set[int] = set()
        self._fetcher: Fetcher | None = None
        self._earlier_bytes, self._earlier_waited_s = 0, 0.0
        self._cached = None if dataset.cache is None else CachedFetch(dataset.cache)
        self._threads = min(connections, len(dataset.block_samples))
        each = budget.ahead_bytes * 4 // (5 * max(1, self._threads))
        self._most_joined = 1 if self._cached else min(_JOINED, max(1, each // dataset.manifest.largest_block))
        self._closed = False
        # What the first group does not need is not fetched before it is there: it would take a share of the link from it.
        self._begun = threading.Event()

    @property
    def bytes_fetched(self) -> int:
        """Bytes of blocks fetched so far, without those that a cache had."""
        return self._earlier_bytes + (self._fetcher.bytes_fetched if self._fetcher else 0) - self.bytes_cached

    @property
    def bytes_cached(self) -> int:
        """Bytes of blocks that came from the cache."""
        return 0 if self._cached is None else self._cached.cached_bytes

    @property
    def waited_s(self) -> float:
        """Seconds in which a sample was wanted and its block was still on its way."""
        return self._earlier_waited_s + (self._fetcher.waited_s if self._fetcher else 0.0)

    def close(self) -> None:
        """End the iteration and stop the fetch threads. May be called twice, and from another thread than the one that iterates."""
        if self._closed:
            return  # closing a fetcher waits for its threads a while, which is enough once
        self._closed = True
        self._begun.set()
        fetcher = self._fetcher
        if fetcher is not None:
            fetcher.close()

    def start(self) -> None:
        """Begin to fetch. Iterating does it, too; whoever reads from several readers in turn starts them together."""
        if self._fetcher is None and any(self._intervals):
            self._start(())

    def __iter__(self) -> Iterator[Sequence[Sample | None]]:
        if not any(self._intervals):
            return
        try:
            self.start()
            while True:
                group: Sequence[Sample | None] = ()
                for lane in self._lanes:
                    needed = self._per_lane
                    while needed and (lane.window.left or self._open(lane)):
                        taken = lane.window.take(needed)
                        group = [*group, *taken] if group else taken
                        needed -= len(taken)
                if not group or self._closed:
                    return
                self._begun.set()
                yield group
        finally:
            self.close()

    def _open(self, lane: _Lane) -> bool:
        """Take the next window of ``lane`` from the fetcher and lay it out in reading order. False at the lane's end, or when closed."""
        stretch = next(lane.stretches, None)
        if stretch is None:
            return False
        lane.opened = stretch.offset + len(stretch)
        lane.window = NOTHING  # what is left of the last one goes before the next one comes
        blocks: list[BlockSamples | None] = []
        for number, block in enumerate(stretch.blocks.tolist()):
            samples = self._take(block, stretch.blocks[number + 1 :].tolist())
            if self._closed:
                return False
            blocks.append(samples)
        lane.window = Window(blocks, stretch.slots, stretch.samples)
        self.bad.samples += lane.window.skipped
        return True

    def _take(self, block: int, following: list[int]) -> BlockSamples | None:
        """The samples of ``block``, which is the next one in the schedule; ``None`` when it was skipped or the reader was closed."""
        if self._dataset.place(block)[0] in self._damaged_tables:
            return None
        fetcher = self._fetcher
        assert fetcher is not None
        try:
            data: Data = next(fetcher)
        except StopIteration:
            if self._closed:
                return None
            raise RuntimeError(f"the fetcher of {self._dataset.location} ended before block {block}; this is a bug in Stagekit") from None
        except DAMAGE as error:
            if self._closed:
                return None
            damaged = self._dataset.damaged(block, error)
            if self._on_bad == "raise":
                raise damaged from error
            self._skip(block, damaged)
            # A fetcher is over after an error, so another one goes on behind the block.
            self._start(following)
            return None
        try:
            return self._dataset.parse(block, data)
        except ShardError as error:
            if self._on_bad == "raise":
                raise
            self._skip(block, error)
            return None

    def _skip(self, block: int, error: ShardError) -> None:
        self.bad.add(0, str(error))
        shard = self._dataset.place(block)[0]
        try:
            self._dataset.table(shard)
        except CorruptShard:
            self._damaged_tables.add(shard)

    def _start(self, first: Sequence[int]) -> None:
        """Begin to fetch: the blocks ``first``, then every stretch that no lane has opened yet."""
        if self._fetcher is not None:
            self._fetcher.close()
            self._earlier_bytes += self._fetcher.bytes_fetched
            self._earlier_waited_s += self._fetcher.waited_s
        offsets = [lane.opened for lane in self._lanes]
        self._fetcher = Fetcher(
            self._dataset.store,
            self._ranges(list(first), offsets, frozenset(self._damaged_tables)),
            threads=self._threads,
            budget_bytes=self._budget.ahead_bytes,
            least_bytes=self._budget.window_bytes + 4 * self._most_joined * self._dataset.manifest.largest_block,
            stall_timeout_s=self._stall_timeout_s,
            get=self._cached or fetch,
        )
        if self._closed:
            self._fetcher.close()

    def _ranges(self, first: list[int], offsets: list[int], without: frozenset[int]) -> Iterator[Range | Errand]:
        """The byte ranges in the order in which ``_open`` takes them: the blocks ``first``, then what the lanes need from ``offsets`` on.

        While fewer blocks are wanted than there are connections, those share them.
        """
        yield from self._urgent(first, 1, without)
        lanes = [self._needed(number, offset) for number, offset in enumerate(offsets)]
        needed = heapq.merge(*lanes, key=lambda entry: entry[:3])
        urgent: list[list[int]] = []
        later: list[list[int]] = []
        for group, _, _, stretch in needed:
            if group:
                later.append(stretch.blocks.tolist())
                break
            urgent.append(stretch.blocks.tolist())
        parts = max(1, self._connections // max(1, sum(map(len, urgent))))
        for blocks in urgent:
            yield from self._urgent(blocks, parts, without)
        if later:
            self._begun.wait()
            yield from self._later(chain(later, (entry[3].blocks.tolist() for entry in needed)), without)

    def _urgent(self, blocks: list[int], parts: int, without: frozenset[int]) -> Iterator[Range]:
        shards = [shard for block in blocks if (shard := self._dataset.place(block)[0]) not in without]
        # A damaged table is reported below, in the place of the first block that needs it.
        with suppress(*DAMAGE):
            self._dataset.load_tables(shards, threads=self._connections)
        for block in blocks:
            if self._dataset.place(block)[0] not in without:
                yield replace(self._dataset.block_range(block), parts=parts)

    def _later(self, stretches: Iterator[list[int]], without: frozenset[int]) -> Iterator[Range | Errand]:
        """Block tables are fetched beside the blocks before them. Neighbours are asked for together, fewer at a time towards the end, so
        that all connections are done at about the same time."""
        most = self._most_joined
        upcoming: deque[int] = deque()
        tables: dict[int, _Tables] = {}
        while True:
            while len(upcoming) < self._connections * most and (blocks := next(stretches, None)) is not None:
                places = [(block, self._dataset.place(block)[0]) for block in blocks]
                upcoming += [block for block, shard in places if shard not in without]
                missing = {shard for _, shard in places} - without - tables.keys()
                if missing:
                    errand = _Tables(self._dataset, missing, self._connections)
                    tables |= dict.fromkeys(missing, errand)
                    yield errand
            if not upcoming:
                return
            block = upcoming.popleft()
            shard, number = self._dataset.place(block)
            tables[shard].wait()
            joined = [self._dataset.block_range(block)]
            last = min(len(self._dataset.table(shard).blocks) - number, most, max(1, (len(upcoming) + 1) // self._connections))
            while len(joined) < last and upcoming and upcoming[0] == block + len(joined):
                joined.append(self._dataset.block_range(upcoming.popleft()))
            yield replace(joined[0], following=tuple(joined[1:])) if len(joined) > 1 else joined[0]

    def _needed(self, lane: int, opened: int) -> Iterator[tuple[int, int, int, Stretch]]:
        """The stretches of a lane from position ``opened`` on, each with the number of the list that needs it first."""
        for stretch in self._epoch.stretches(self._intervals[lane]):
            if stretch.offset >= opened:
                yield stretch.offset // self._per_lane, lane, stretch.offset, stretch
