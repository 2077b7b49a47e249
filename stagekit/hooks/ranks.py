"""The ranks of a training, agreeing on what to restore: in its process group, or before there is one.

Trainers ask for the checkpoint to go on with before they make their process group. All ranks must get the same answer, also when one of
them fails, since ranks that start at different steps train nonsense or wait for each other for ever. Uploads never touch any of this.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from ..config import process_rank
from ..errors import CheckpointError, UsageError

T = TypeVar("T")

_stores: dict[int, Any] = {}  # by process: rank 0's holds the server that the other ranks ask
_turn = 0
_meetings = 0
_BEAT_S = 5.0
_BEAT = "stagekit-busy"
_SILENT_S = 300.0  # of all that are waited for; then they count as dead
_PAUSES_S = (0.01, 1.0)  # the first and the longest one between two looks


class Ranks:
    """This process's rank and how many there are, and exchanging small values with the others. Every rank makes the same calls.

    A collective fails when one rank comes later than the group's timeout (ten minutes with NCCL), and fetching a checkpoint, or sending
    what a killed process left, may take longer. So the ranks meet in the group's key-value store first, where somebody who is at work
    (``busy``) is waited for as long as that takes.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.several = world_size > 1
        self._monotonic = monotonic
        self._sleep = sleep

    @classmethod
    def find(cls) -> Ranks:
        """Those of the process group, else those a launcher such as ``torchrun`` tells."""
        return cls(dist.get_rank(), dist.get_world_size()) if _grouped() else cls(*process_rank())

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value``, on every rank."""
        self._meet()
        return self.gather(value)[0]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While the block lasts, the others wait for this rank."""
        if not self.several:
            yield
            return
        over, store = threading.Event(), self._shared()

        def beat() -> None:
            with suppress(RuntimeError):  # the rank that holds the store is gone, and with it this training
                while not over.is_set():
                    store.add(_BEAT, 1)
                    over.wait(_BEAT_S)

        threading.Thread(target=beat, name="stagekit-busy", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _meet(self) -> None:
        """Return when all ranks have come here, or none gives a sign of life: the collective that follows says so in its own words."""
        if not self.several:
            return
        global _meetings
        _meetings += 1
        place, (pause_s, longest_s) = f"stagekit-met-{_meetings}", _PAUSES_S
        with suppress(RuntimeError):  # the rank that holds the store is gone
            store = self._shared()
            beat, beat_s = -1, self._monotonic()
            store.add(place, 1)
            while store.add(place, 0) < self.world_size:
                if (found := store.add(_BEAT, 0)) != beat:
                    beat, beat_s = found, self._monotonic()
                elif self._monotonic() - beat_s > _SILENT_S:
                    return
                self._sleep(pause_s)
                pause_s = min(longest_s, 1.5 * pause_s)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank. Raises ``UsageError`` when the ranks have no way to talk to each other."""
        if not self.several:
            return [value]
        if _grouped():
            values: list[Any] = [None] * self.world_size
            dist.all_gather_object(values, value)
            return values
        global _turn
        _turn += 1
        store = self._shared()
        store.set(f"stagekit-{_turn}-{self.rank}", pickle.dumps(value))
        return [pickle.loads(store.get(f"stagekit-{_turn}-{rank}")) for rank in range(self.world_size)]

    def decide(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and give its answer to all; what it raises is raised on every rank."""
        answer: Any = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                with self.busy():
                    answer = work()
            except Exception as error:
                failure = error
        if not self.several:
            if failure is not None:
                raise failure
            return answer  # type: ignore[no-any-return]  # what work() gave
        answer, text = self.broadcast((answer, None if failure is None else f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        if text is not None:
            raise CheckpointError(f"rank 0 could not restore: {text}")
        return answer  # type: ignore[no-any-return]  # what work() gave on rank 0

    def agree(self, failure: Exception | None, what: str = "could not restore") -> None:
        """Raise on every rank when one of them failed, so that none goes on alone."""
        self._meet()
        texts = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(f"rank {rank} {what}: {text}")

    def _shared(self) -> Any:
        """The key-value store of the process group, or one of our own where there is no group yet."""
        if _grouped():
            return dist.distributed_c10d._get_default_store()
        pid = os.getpid()
        if pid not in _stores:
            if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
                raise UsageError(
                    f"rank {self.rank} of {self.world_size} cannot agree with the others on what to restore: there is no process group "
                    "yet, and MASTER_ADDR and MASTER_PORT are not set. Start with torchrun, or make the process group first"
                )
            from torch.distributed.rendezvous import rendezvous  # not in every build of torch

            # What init_process_group does with them too; the two do not get in each other's way.
            _stores[pid], _, _ = next(iter(rendezvous("env://", rank=self.rank, world_size=self.world_size)))
        return _stores[pid]


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()
