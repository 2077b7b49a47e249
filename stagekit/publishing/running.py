"""Jobs on their way: which executor runs them, how many processes are worth starting, and what comes back as they finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from ..errors import StagekitError, UsageError
from ..location import Location
from ..parallel import cores
from ..progress import Subscriber
from ..units import parse_rate
from .engines import open_executor
from .rate import Rate
from .workers import WorkerProcesses

# What one process does, roughly, and how much it should have to do, on a disk and over a link: one takes a third of a second to start.
_BYTES_PER_S = 1e9
_FIELD_S = 20e-6
_WORTH_S = 1.0
_WORTH_BYTES = 64 * 2**20
_IN_FLIGHT = 64  # jobs handed to a foreign executor at once; a job holds the plan of its shard

_J = TypeVar("_J")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Who is to run the jobs: ``workers`` processes (``None``: as many as are useful), or an executor that somebody has; and the rate in
    bytes a second that all workers together may send."""

    workers: int | None = None
    executor: Executor | str | None = None
    bytes_per_s: float | None = None

    @classmethod
    def of(cls, workers: int | None, executor: Executor | str | None, limit_rate: str | float | None) -> Wanted:
        """Checked: raises ``UsageError`` for what cannot be meant."""
        if workers is not None and workers < 1:
            raise UsageError(f"workers: {workers} is below 1")
        if workers is not None and executor is not None:
            raise UsageError("workers and executor: give one of them; an executor has its own number of workers")
        bytes_per_s = None if limit_rate is None else parse_rate(limit_rate, name="limit_rate")
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise UsageError(f"limit_rate: {limit_rate!r} is not above 0")
        if bytes_per_s is not None and executor is not None:
            raise UsageError(
                "limit_rate and executor: the rate is shared among the workers of this machine, and nobody knows how many an executor has"
            )
        return cls(workers, executor, bytes_per_s)


@dataclass(frozen=True, slots=True)
class Work:
    """How much there is to do: jobs, and the bytes and fields of all of them."""

    jobs: int
    bytes: int
    fields: int


@dataclass(frozen=True, slots=True)
class Engine:
    """What runs the jobs, how many to hand out at once, and the rate that whoever runs them keeps."""

    pool: Executor
    in_flight: int
    rate: Rate | None = None

    def each(self, function: Callable[[_J], _R], jobs: Sequence[_J]) -> Iterator[tuple[int, _R]]:
        """What ``function`` gives for each of ``jobs``, with the job's number, as they finish. The first failure cancels what has not
        begun and is raised."""
        waiting: dict[Future[_R], int] = {}
        remaining = iter(enumerate(jobs))
        try:
            for number, job in islice(remaining, self.in_flight):
                waiting[self.pool.submit(function, job)] = number
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield waiting.pop(future), future.result()
                for number, job in islice(remaining, len(done)):
                    waiting[self.pool.submit(function, job)] = number
        except BrokenExecutor as error:
            raise StagekitError(
                f"the executor that ran the shards broke ({error}); nothing was published. "
                "Run the same command again: finished shards are kept"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def open_engine(wanted: Wanted, work: Work, destination: Location, on_event: Subscriber) -> Iterator[Engine]:
    """The engine for ``work`` that ends at ``destination``; what its workers report arrives at ``on_event``."""
    if wanted.executor is not None:
        with open_executor(wanted.executor) as pool:
            yield Engine(pool, _IN_FLIGHT)
        return
    count = worker_count(wanted.workers, work, destination)
    rate = None if wanted.bytes_per_s is None else Rate(wanted.bytes_per_s, count)
    if count == 1:
        yield Engine(_Inline(on_event), 1, rate)
        return
    with WorkerProcesses(count, on_event) as pool:
        yield Engine(pool, 2 * count, rate)


def worker_count(wanted: int | None, work: Work, destination: Location) -> int:
    """One process per core, and no more than there is work for. A store in this process's memory cannot be reached from another one.

    A process by itself reads, hashes and sends in several threads, so into a directory a second one pays only when there is much to
    do. Over a link it pays soon: while one process asks for what its last shard became, the others send.
    """
    if destination.scheme == "memory":
        return 1
    if destination.is_directory:
        useful = int((work.bytes / _BYTES_PER_S + work.fields * _FIELD_S) / _WORTH_S)
    else:
        useful = work.bytes // _WORTH_BYTES
    return max(1, min(work.jobs, wanted if wanted is not None else min(cores(), max(1, useful))))


class _Inline(Executor):
    """Runs each job at once, in this thread."""

    def __init__(self, on_event: Subscriber) -> None:
        self._on_event = on_event

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs, on_event=self._on_event))
        except Exception as error:
            future.set_exception(error)
        return future
