"""The ranks of a training, agreeing on what to restore: in its process group, or before there is one.

Trainers ask for the checkpoint to go on with before they make their process group. All ranks must get the same answer, also when one of
them fails, since ranks that start at different steps train nonsense or wait for each other for ever. Uploads never touch any of this.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..config import process_rank
from ..errors import CheckpointError, UsageError

T = TypeVar("T")

_stores: dict[int, Any] = {}  # by process: rank 0's holds the server that the other ranks ask
_turn = 0


class Ranks:
    """This process's rank and how many there are, and exchanging small values with the others. Every rank makes the same calls."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.several = world_size > 1

    @classmethod
    def find(cls) -> Ranks:
        """Those of the process group, else those a launcher such as ``torchrun`` tells."""
        return cls(dist.get_rank(), dist.get_world_size()) if _grouped() else cls(*process_rank())

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value``, on every rank."""
        return self.gather(value)[0] if self.several else value

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
        store = self._store()
        store.set(f"stagekit-{_turn}-{self.rank}", pickle.dumps(value))
        return [pickle.loads(store.get(f"stagekit-{_turn}-{rank}")) for rank in range(self.world_size)]

    def decide(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and give its answer to all; what it raises is raised on every rank."""
        answer: Any = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
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
        texts = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(f"rank {rank} {what}: {text}")

    def _store(self) -> Any:
        pid = os.getpid()
        if pid not in _stores:
            if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
                raise UsageError(
                    f"rank {self.rank} of {self.world_size} cannot agree with the others on what to restore: there is no process group "
                    "yet, and MASTER_ADDR and MASTER_PORT are not set. Start with torchrun, or make the process group first"
                )
            # What init_process_group does with them too; the two do not get in each other's way.
            _stores[pid], _, _ = next(iter(rendezvous("env://", rank=self.rank, world_size=self.world_size)))
        return _stores[pid]


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()
