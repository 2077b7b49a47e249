"""Which rank this process is, found out when it is needed and not before."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed

from ..config import has_launcher, process_rank
from ..errors import UsageError
from ..units import check_whole


@dataclass(frozen=True, slots=True)
class World:
    """The rank and world size that somebody was given, or neither: then they are looked for on every call, so that a loader may be built
    before ``init_process_group``.

    Raises ``UsageError`` for a rank without a world size, the other way round, one outside the other, or no whole number.
    """

    rank: int | None
    world_size: int | None

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise UsageError("rank and world_size belong together: give both, or neither to take those of the process group")
        for name, value in (("rank", self.rank), ("world_size", self.world_size)):
            if value is not None:
                check_whole(value, name=name, minimum=0)
        if self.rank is not None and self.world_size is not None and not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank: {self.rank} is not in a world of {self.world_size} (0 to {self.world_size - 1})")

    def find(self) -> tuple[int, int]:
        """Rank and world size: the given ones, else the process group's, else those in ``RANK`` and ``WORLD_SIZE``, else 0 of 1."""
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        if _in_group():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return process_rank()

    @property
    def is_known(self) -> bool:
        """Whether ``find`` has anything to go by: before ``init_process_group`` it may not."""
        return self.rank is not None or _in_group() or has_launcher()


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
