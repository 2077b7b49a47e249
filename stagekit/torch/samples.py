"""``StreamDataset``: single samples for people's own ``DataLoader``."""

from __future__ import annotations

import multiprocessing.context
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..config import StoreConfig
from ..dataset import Dataset
from ..errors import StateMismatch, UsageError
from ..interrupts import keep_over_forks
from ..order import Intervals, Position, State, batches, share, size
from ..progress import Subscriber, ignore
from ..stream.mix import Mix
from ..stream.reader import OnBad
from ..stream.tars import Tars
from ..units import check_whole
from .decode import Decode
from .doubled import refuse_double_split
from .plan import AnyReader, Made, Plan, Receipt, Source, Transform, receipt_of
from .ranks import World
from .turns import Turns

_GROUP = 64


class StreamDataset(IterableDataset[Any]):
    """The samples of the data set at ``source``, for a ``torch.utils.data.DataLoader`` of your own.

    Each rank reads its share, and each worker its part of that: no sample comes twice, none is left out, and the order is fixed for a given
    number of workers. Every iteration is the next epoch, in workers as well, whether they are started anew or persist, and also after an
    iteration that was left early; ``set_epoch`` chooses another one. With ``drop_last=True`` all ranks give the same number of samples, and
    up to world size - 1 are left out; with ``False`` none are, and ranks may differ by one.

    ``StreamLoader`` does more: batches that do not depend on the number of workers, and a state that can be taken at any moment. Here, with
    workers, ``state_dict()`` can only be asked inside them, which ``torchdata``'s ``StatefulDataLoader`` does.

    Plain tars without a manifest are divided whole: each worker of each rank reads some of them, and a worker that gets none has nothing to
    do. ``StreamLoader`` tells what else cannot be promised of them.

    Damaged data raises ``CorruptShard``; an epoch never just ends early. Parameters are those of ``StreamLoader``, and

    :param batch_size: the ``DataLoader``'s, so that the data is cut between workers at whole batches and ``len(DataLoader)`` is exact
    :param memory: divided among the workers
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        decode: Decode = "auto",
        transform: Transform | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        window: int = 16,
        drop_last: bool = True,
        connections: int = 16,
        memory: str | int = "1GiB",
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: str | int | None = None,
        on_bad: OnBad = "raise",
        stall_timeout_s: float | None = 120.0,
        allow_mount: bool = False,
        store: StoreConfig | None = None,
        on_event: Subscriber = ignore,
    ) -> None:
        check_whole(batch_size, name="batch_size", minimum=1)
        keep_over_forks()  # a DataLoader is about to fork
        self._world = World(rank, world_size)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.receipt: Receipt | None = None
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
        self._turns = Turns()
        self._worker_turns = 0
        self._own: dict[str, Any] | None = None
        self._now: Callable[[], dict[str, Any]] | None = None
        self._plan.budgets(1)
        self._plan.warn_of_tars()

    @property
    def dataset(self) -> Dataset | Mix | Tars:
        """The data set that is read."""
        return self._plan.dataset

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will read."""
        return self._turns.next.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration read ``epoch`` from its beginning, also in workers that live already."""
        check_whole(epoch, name="epoch", minimum=0)
        self._refuse_double_split()  # Accelerate calls this on every rank, also where workers do the reading
        self._turns.set_next(epoch)

    def __len__(self) -> int:
        """Samples that this rank gives in a whole epoch. ``TypeError`` for plain tars, whose samples nobody has counted."""
        rank, world = self._world.find()
        return size(self._share(Position(), rank, world))

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_now": None}
        if multiprocessing.context.get_spawning_popen() is not None:
            # For a worker that is started anew. It knows neither the process group nor who started it.
            self._refuse_double_split()
            state["_world"] = World(*self._world.find())
        return state

    def __getitem__(self, index: object) -> Any:
        return self.dataset[index]

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last sample that was handed out in this process.

        In the process that started ``DataLoader`` workers it raises ``UsageError``: only they know how far they are.
        """
        if self._now is not None:
            return self._now()
        turn = self._turns.next
        if turn.start is not None:
            return turn.start
        if get_worker_info() is None and self._turns.workers_seen:
            raise UsageError(
                "state_dict() of a StreamDataset says nothing here, since DataLoader workers read it and only they know how far they are: "
                "use torchdata's StatefulDataLoader, whose state_dict() asks them, or stagekit.torch.StreamLoader, which needs no workers"
            )
        return self._plan.state(Position(turn.epoch), None).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at ``state`` with the next iteration. It may be a ``StreamLoader``'s, and from another world size.

        The state of a worker fits a worker of the same number among as many. Raises ``StateMismatch`` for anything else.
        """
        loaded = State.from_dict(state)
        self._plan.adopt(loaded)
        self._now = None
        if get_worker_info() is not None:
            self._own = dict(state)
        else:
            self._turns.set_next(loaded.position.epoch, dict(state))

    def _refuse_double_split(self) -> None:
        _, world = self._world.find()
        refuse_double_split(world, str(self.dataset.location))

    def _share(self, position: Position, rank: int, world: int) -> Intervals:
        left = position.left(len(self.dataset))
        limit = batches(size(left), world, 1, drop_last=self.drop_last)
        return share(left, rank, world, limit=limit)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: the turn is taken when the iteration is made, which every worker does exactly once an epoch.
        info = get_worker_info()
        self._refuse_double_split()
        own, self._own, self._now = self._own, None, None
        if info is None:
            turn, worker, workers = self._turns.take(), 0, 1
            start = turn.start
        else:
            worker, workers = info.id, info.num_workers
            iteration = (info.seed - info.id, self._worker_turns)
            self._worker_turns += 1
            turn = self._turns.take_as_worker(iteration, None if own is None else own["epoch"])
            start = own or turn.start
        begun = start or self._plan.state(Position(turn.epoch), None).to_dict()
        self._now = lambda: begun
        return self._run(turn.epoch, start, worker, workers)

    def _run(self, epoch: int, start: dict[str, Any] | None, worker: int, workers: int) -> Iterator[Any]:
        plan = self._plan
        position = Position(epoch)
        skip = 0
        if start is not None:
            loaded = State.from_dict(start)
            plan.adopt(loaded)
            position = loaded.position
            if "worker" in start:
                saved_worker, saved_workers, skip = start["worker"]
                if (saved_worker, saved_workers) != (worker, workers):
                    raise StateMismatch(
                        f"the state was saved by worker {saved_worker} of {saved_workers} and is loaded by worker {worker} of {workers}; "
                        f"use num_workers={saved_workers} again, or stagekit.torch.StreamLoader, whose state does not depend on workers"
                    )
        rank, world = self._world.find()
        before = plan.usage()
        reader, due = self._open(position, skip, rank, world, worker, workers)
        made, taken, delivered, waited_s = Made(), 0, 0, 0.0
        leaving = sys.is_finalizing  # by then modules have lost their names, and nobody reads a receipt
        in_worker = get_worker_info() is not None

        def state() -> dict[str, Any]:
            if in_worker:
                return {**plan.state(position, None).to_dict(), "worker": [worker, workers, skip + taken]}
            here = replace(position.advanced(world, 1, taken), batches=position.batches)
            return plan.state(here, None).to_dict()

        self._now = state
        groups = iter(reader)
        try:
            ended = False
            while taken != due:
                began = time.monotonic()
                group = next(groups, [])
                waited_s += time.monotonic() - began
                if not group and due is None:
                    ended = True
                    break
                if not group:
                    raise RuntimeError(f"the reader ended after {taken} of {due} samples; this is a bug in Stagekit")
                for raw in group:
                    one = plan.make([raw])
                    taken += 1
                    values, one.samples = one.samples, []
                    made.add(one)
                    if values:
                        delivered += 1
                        yield values[0]
        finally:
            reader.close()
            if not leaving():
                self.receipt = receipt_of(
                    plan,
                    reader,
                    made,
                    epoch=position.epoch,
                    batches=0,
                    expected=taken if due is None else due,
                    delivered=delivered,
                    waited_s=waited_s,
                    complete=ended or taken == due,
                    before=before,
                )
        if not in_worker:
            self._now = None  # the epoch is over, and the state is the next one's
        if self.receipt is not None:
            plan.report(self.receipt)

    def _open(self, position: Position, skip: int, rank: int, world: int, worker: int, workers: int) -> tuple[AnyReader, int | None]:
        """What reads a worker's part behind its first ``skip`` samples, and how many those are; ``None`` where nobody knows."""
        plan, dataset = self._plan, self.dataset
        if isinstance(dataset, Tars):
            taken = plan.tar_samples_taken(position, world)
            if taken and workers > 1:
                raise StateMismatch(
                    f"the state was saved without workers and is loaded by {workers}, which read other tars each; plain tars without an "
                    "index go on as they began. `stagekit index` makes them a data set, which goes on with any number of workers"
                )
            reader = plan.tar_reader(dataset, rank, world, _GROUP, epoch=position.epoch, skip=taken + skip, worker=worker, workers=workers)
            return reader, None
        intervals = self._share(position, rank, world)
        begin, end = self._part(size(intervals), worker, workers)
        own = share(intervals, 0, 1, skip=begin + skip, limit=max(0, end - begin - skip))
        return plan.reader(position.epoch, [own], _GROUP, readers=workers), size(own)

    def _part(self, total: int, worker: int, workers: int) -> tuple[int, int]:
        """Where the part of a worker begins and ends in a share of ``total`` samples: cut at whole batches."""
        each, rest = divmod(-(-total // self.batch_size), workers)
        first = worker * each + min(worker, rest)
        last = first + each + (worker < rest)
        return min(first * self.batch_size, total), min(last * self.batch_size, total)
