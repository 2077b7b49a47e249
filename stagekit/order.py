"""The reading order: which sample comes when, on which rank, and what is left after a stop.

Everything here is a pure function of its arguments; nothing reads a clock, a store or the number of threads.

An epoch is one sequence *S* of all samples. Shuffled, it is the blocks in a seeded permutation, cut into *windows* of a fixed number of
blocks, with the samples permuted inside each window. Unshuffled, it is source order. *S* depends on the data set's digest, the seed, the
epoch, ``shuffle`` and ``window``, and on nothing else.

What is left of *S* is a list of intervals of positions. It is cut into as many equal, contiguous *shares* as there are ranks (or virtual
ranks). Every share gives the same number of batches. After a stop, what each share had not given yet is what is left, and it is cut
again, for any number of ranks. Cutting for the same number of ranks gives every rank the rest of its own share, so that a stopped and
resumed run reads exactly what an undisturbed one does.

The permutation is our own and is specified in ``docs/format.md`` with test vectors: numpy's generators promise no stable streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import StateMismatch, UsageError

VERSION = 1
"""Of the permutation and of the state. Another permutation is another version; a state of an unknown one is refused."""

_MOST_SHARES = 2**20
_LARGEST_BATCH = 2**20  # samples of one share

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]
Numbers = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def permutation(count: int, *, digest: str, seed: int, epoch: int, purpose: str, number: int = 0) -> Numbers:
    """The numbers ``0 … count-1`` in an order fixed by the other arguments: equal on every machine, numpy and Python.

    Each number gets a 64-bit score by integer arithmetic that is a bijection, so that no two are equal; the numbers are sorted by it.
    """
    text = f"stagekit-order/{VERSION}\n{digest}\n{seed}\n{epoch}\n{purpose}\n{number}\n"
    first, second = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype="<u8").astype(np.uint64)
    score = np.arange(count, dtype=np.uint64) * _GOLDEN + first
    score = _mix(_mix(score) ^ second)
    return np.argsort(score, kind="stable").astype(np.int64, copy=False)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every input bit reaches every output bit, and the function is a bijection."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of one window that one share reads, in reading order.

    ``blocks`` are the blocks to fetch (numbers over the whole data set). Sample ``i`` of the stretch is number ``samples[i]`` inside block
    ``blocks[slots[i]]``. ``offset`` counts the samples of the share that come before this stretch.
    """

    window: int
    offset: int
    blocks: Numbers
    slots: Numbers
    samples: Numbers

    def __len__(self) -> int:
        return len(self.slots)


class Epoch:
    """*S* for one epoch. Costs O(blocks) when made; windows are worked out when they are read.

    ``block_samples`` holds the number of samples of every block of the data set, in source order.
    """

    def __init__(self, block_samples: Sequence[int] | Numbers, number: int, *, digest: str, seed: int, shuffle: bool, window: int) -> None:
        if window < 1:
            raise UsageError(f"window: {window} is below 1 block")
        if number < 0:
            raise UsageError(f"epoch: {number} is below 0")
        counts = np.asarray(block_samples, dtype=np.int64)
        if counts.size and counts.min() < 1:
            raise UsageError("block_samples: every block holds at least one sample")
        self.number = number
        self._digest, self._seed, self._shuffle = digest, seed, shuffle
        # Unshuffled, a window is one block: nothing is gained by holding more of them.
        self._window = window if shuffle else 1
        self._blocks: Numbers = (
            permutation(len(counts), digest=digest, seed=seed, epoch=number, purpose="blocks")
            if shuffle
            else np.arange(len(counts), dtype=np.int64)
        )
        self._counts: Numbers = counts[self._blocks]
        ends = np.cumsum(self._counts)
        self.samples = int(ends[-1]) if counts.size else 0
        # Where each window starts in S, and where the last one ends.
        self._starts: Numbers = np.concatenate((np.zeros(1, np.int64), ends[self._window - 1 :: self._window]))
        if self._starts[-1] != self.samples:
            self._starts = np.append(self._starts, self.samples)

    @property
    def windows(self) -> int:
        """How many windows *S* has."""
        return len(self._starts) - 1

    def stretches(self, intervals: Intervals) -> Iterator[Stretch]:
        """What to read for the positions in ``intervals``, window by window. Only blocks that hold one of these samples are named."""
        offset = 0
        for window, pieces in self._by_window(intervals):
            first = window * self._window
            blocks = self._blocks[first : first + self._window]
            counts = self._counts[first : first + self._window]
            ends = np.cumsum(counts)
            start, total = int(self._starts[window]), int(ends[-1])
            chosen: Numbers
            if self._shuffle:
                order = permutation(total, digest=self._digest, seed=self._seed, epoch=self.number, purpose="window", number=window)
                chosen = np.concatenate([order[a - start : b - start] for a, b in pieces])
            else:
                chosen = np.concatenate([np.arange(a - start, b - start, dtype=np.int64) for a, b in pieces])
            if len(blocks) == 1:
                slots = np.zeros(len(chosen), np.int64)
            else:
                slots = np.searchsorted(ends, chosen, side="right").astype(np.int64, copy=False)
            samples = chosen - (ends - counts)[slots]
            if len(chosen) < total:
                used, slots = np.unique(slots, return_inverse=True)
                blocks = blocks[used]
            yield Stretch(window, offset, blocks, slots.astype(np.int64, copy=False), samples)
            offset += len(chosen)

    def _by_window(self, intervals: Intervals) -> Iterator[tuple[int, list[Interval]]]:
        """``intervals`` cut at window borders; neighbours in one window are put together, so that it is fetched once."""
        current, pieces = -1, list[Interval]()
        for begin, end in intervals:
            while begin < end:
                window = int(np.searchsorted(self._starts, begin, side="right")) - 1
                stop = min(end, int(self._starts[window + 1]))
                if window != current:
                    if pieces:
                        yield current, pieces
                    current, pieces = window, []
                pieces.append((begin, stop))
                begin = stop
        if pieces:
            yield current, pieces


def size(intervals: Intervals) -> int:
    """How many positions ``intervals`` hold."""
    return sum(end - begin for begin, end in intervals)


def share(intervals: Intervals, number: int, shares: int, *, skip: int = 0, limit: int | None = None) -> Intervals:
    """Share ``number`` of ``shares``: equal, contiguous parts of ``intervals``; the first ones hold one more when it does not divide.

    ``skip`` leaves out that many positions at the share's start, ``limit`` ends it after that many more.
    """
    each, rest = divmod(size(intervals), shares)
    begin = number * each + min(number, rest)
    end = begin + each + (number < rest)
    begin = min(begin + skip, end)
    return _cut(intervals, begin, end if limit is None else min(begin + limit, end))


def _cut(intervals: Intervals, begin: int, end: int) -> Intervals:
    """Positions number ``begin … end-1`` of those in ``intervals``."""
    found, passed = list[Interval](), 0
    for first, last in intervals:
        a, b = max(begin - passed, 0) + first, min(end - passed, last - first) + first
        if a < b:
            found.append((a, b))
        passed += last - first
        if passed >= end:
            break
    return tuple(found)


def left_after(intervals: Intervals, shares: int, taken: int) -> Intervals:
    """What is left when each of ``shares`` shares of ``intervals`` has given its first ``taken`` samples. Touching intervals are joined."""
    left = list[Interval]()
    for number in range(shares):
        for begin, end in share(intervals, number, shares, skip=taken):
            if left and left[-1][1] == begin:
                left[-1] = (left[-1][0], end)
            else:
                left.append((begin, end))
    return tuple(left)


def batches(samples: int, shares: int, per_share: int, *, drop_last: bool) -> int:
    """How many batches each of ``shares`` shares gives from ``samples`` samples, ``per_share`` at a time: the same for all of them.

    With ``drop_last`` only whole ones; else the last ones are filled up with pads where a share has fewer samples.
    """
    each, rest = divmod(samples, shares)
    if drop_last:
        return each // per_share
    return -(-(each + (rest > 0)) // per_share)


class Blend:
    """One sequence out of several: the position's source is fixed, and every beginning of it holds each source in proportion.

    ``counts`` are how many samples of each source the sequence has. What comes where is worked out for any position without those before
    it: of the first *n* positions, the last source has ``n - m`` and the others ``m = n * (sum of the others) // (sum of all)``, which are
    divided among them in the same way.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        if not counts or min(counts) < 1:
            raise UsageError("a mix needs at least one sample of each source in an epoch")
        self.counts = tuple(counts)
        self._sums = tuple(int(end) for end in np.cumsum(self.counts))
        self.samples = self._sums[-1]
        if self.samples >= 3_037_000_499:  # its square must fit into 63 bits
            raise UsageError(f"an epoch of {self.samples} samples is too long for a mix, which has at most three billion")

    def before(self, position: int) -> tuple[int, ...]:
        """How many of the first ``position`` samples come from each source."""
        return tuple(int(count[0]) for count in self._counts(np.array([position], np.int64)))

    def sources(self, begin: int, end: int) -> Numbers:
        """The number of the source of each of the positions ``begin … end-1``."""
        found = np.zeros(end - begin, np.int64)
        for source, counts in enumerate(self._counts(np.arange(begin, end + 1, dtype=np.int64))):
            found[np.diff(counts) == 1] = source
        return found

    def _counts(self, positions: Numbers) -> list[Numbers]:
        held: list[Numbers] = []
        for source in range(len(self._sums) - 1, 0, -1):
            others = positions * self._sums[source - 1] // self._sums[source]
            held.append(positions - others)
            positions = others
        held.append(positions)
        return held[::-1]


@dataclass(frozen=True, slots=True)
class Position:
    """How far an epoch has come: the same value on every rank, of a few numbers whatever the number of ranks.

    ``cuts`` tells what was taken, as pairs (shares, samples taken from each of them), each cutting what the one before left over. A pair
    is added only when the number of shares changes. ``batches`` counts what each rank's trainer took since the epoch began.
    """

    epoch: int = 0
    cuts: tuple[tuple[int, int], ...] = ()
    batches: int = 0

    def left(self, samples: int) -> Intervals:
        """The intervals of *S* (of ``samples`` samples) that nobody has taken."""
        intervals: Intervals = ((0, samples),) if samples else ()
        for shares, taken in self.cuts:
            intervals = left_after(intervals, shares, taken)
        return intervals

    def is_possible(self, samples: int) -> bool:
        """Whether an epoch of ``samples`` samples can have come so far: no batch began with nothing, and none was absurdly large.

        A last batch that was filled up takes more than there was. How large batches were is not known: they may have changed.
        """
        for number, (shares, taken) in enumerate(self.cuts):
            each = -(-size(replace(self, cuts=self.cuts[:number]).left(samples)) // shares)
            filled_up = _LARGEST_BATCH if self.batches else 0  # without batches, samples were counted one by one
            if not each or taken > each + filled_up or (len(self.cuts) == 1 and self.batches > each):
                return False
        return True

    def advanced(self, shares: int, per_share: int, count: int = 1) -> Position:
        """The position after ``count`` more batches, each ``per_share`` samples from each of ``shares`` shares."""
        if not count:
            return self
        taken = per_share * count
        if self.cuts and self.cuts[-1][0] == shares:
            # Cutting what is left for the same number of shares gives the rests of the same shares, so the two steps are one.
            cuts = (*self.cuts[:-1], (shares, self.cuts[-1][1] + taken))
        else:
            cuts = (*self.cuts, (shares, taken))
        return replace(self, cuts=cuts, batches=self.batches + count)


@dataclass(frozen=True, slots=True)
class State:
    """A position together with the order it belongs to, as it is saved.

    It names the data by its digest and holds no paths, so it can be loaded wherever the same data lies. ``to_dict()`` is JSON-able and
    below 1 KB (up to some 40 changes of the number of ranks inside one epoch).
    """

    digest: str
    seed: int
    shuffle: bool
    window: int
    virtual_ranks: int | None
    position: Position

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "version": VERSION,
            "digest": self.digest,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "window": self.window,
            "virtual_ranks": self.virtual_ranks,
            "epoch": self.position.epoch,
            "batches": self.position.batches,
            "cuts": [list(cut) for cut in self.position.cuts],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> State:
        """The state that ``to_dict()`` wrote. Raises ``StateMismatch`` for an unknown version or anything that is no such state."""
        if not isinstance(values, Mapping) or "version" not in values:
            raise StateMismatch("this is no loader state: it holds no 'version'; pass what state_dict() returned")
        if values["version"] != VERSION:
            raise StateMismatch(
                f"the loader state has version {values['version']!r} and this Stagekit reads version {VERSION}; "
                "resume with the Stagekit that wrote it, or start at an epoch's beginning"
            )
        try:
            virtual = values["virtual_ranks"]
            state = cls(
                digest=_typed(values, "digest", str),
                seed=_typed(values, "seed", int),
                shuffle=_typed(values, "shuffle", bool),
                window=_typed(values, "window", int),
                virtual_ranks=None if virtual is None else _typed(values, "virtual_ranks", int),
                position=Position(
                    epoch=_typed(values, "epoch", int),
                    cuts=tuple((_natural(shares), _natural(taken)) for shares, taken in values["cuts"]),
                    batches=_typed(values, "batches", int),
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch(f"the loader state is damaged ({error!s}); pass what state_dict() returned") from error
        position = state.position
        below = state.window < 1 or position.epoch < 0 or position.batches < 0
        if below or any(shares < 1 or taken < 1 for shares, taken in position.cuts):
            raise StateMismatch("the loader state is damaged (a number in it is below what it can be); pass what state_dict() returned")
        if any(shares > _MOST_SHARES for shares, _ in position.cuts):
            raise StateMismatch(
                "the loader state is damaged (it was cut for more ranks than there can be); pass what state_dict() returned"
            )
        return state

    def check(self, *, digest: str, seed: int, shuffle: bool, source: str, samples: int | None = None) -> None:
        """Raise ``StateMismatch``, saying both, when the state belongs to other data, another seed, or another ``shuffle``; and when it
        says that more was taken than the data's ``samples`` (``None``: unknown)."""
        if self.digest != digest:
            raise StateMismatch(
                f"the loader state belongs to the data set {self.digest[:16]}… and {source} is {digest[:16]}…; "
                "open the data that the state was saved with, or start without the state"
            )
        for name, saved, asked in (("seed", self.seed, seed), ("shuffle", self.shuffle, shuffle)):
            if saved != asked:
                raise StateMismatch(
                    f"the loader state was saved with {name}={saved} and this loader has {name}={asked}, which is another order; "
                    f"make the loader with {name}={saved}, or start without the state"
                )
        if samples is not None and not self.position.is_possible(samples):
            taken = ", ".join(f"{taken:,} from each of {shares}" for shares, taken in self.position.cuts)
            raise StateMismatch(
                f"the loader state is damaged (it says that {taken} shares was taken from {source}, which has {samples:,} samples); "
                "pass what state_dict() returned"
            )


def _typed(values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = values[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} is {value!r}")
    return value


def _natural(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"a cut holds {value!r}")
    return value
