"""Which rank this process is, found out when it is needed and not before."""

from __future__ import annotations

import torch.distributed

from ..config import has_launcher, process_rank
from ..errors import UsageError
from ..units import check_whole


def check_ranks(rank: int | None, world_size: int | None) -> None:
    """Raise ``UsageError`` for a rank without a world size, the other way round, one outside the other, or no whole number."""
    if (rank is None) != (world_size is None):
        raise UsageError("rank and world_size belong together: give both, or neither to take those of the process group")
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is not None:
            check_whole(value, name=name, minimum=0)
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise UsageError(f"rank: {rank} is not in a world of {world_size} (0 to {world_size - 1})")


def find_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: the given ones, else the process group's, else those in ``RANK`` and ``WORLD_SIZE``, else 0 of 1.

    The process group is looked at on every call, so that a loader may be built before ``init_process_group``.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    if _in_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return process_rank()


def ranks_known(rank: int | None) -> bool:
    """Whether ``find_ranks`` has anything to go by: before ``init_process_group`` it may not."""
    return rank is not None or _in_group() or has_launcher()


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
