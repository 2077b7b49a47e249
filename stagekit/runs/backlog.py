"""Which saves give way when they come faster than the network takes them. Pure: nothing here sends, drops or waits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .layout import SAVED_IN
from .retention import Policy
from .spool import Entry

BACKLOG = 4
"""So many saves may be pending before one gives way."""


def is_over(pending: Sequence[Entry], disk_bytes: int | None, *, bound: int | None = BACKLOG) -> bool:
    """Whether there are more than ``bound`` saves (``None``: any number), or they hold more than ``disk_bytes``."""
    return (bound is not None and len(pending) > bound) or (
        disk_bytes is not None and sum(entry.size_bytes for entry in pending) > disk_bytes
    )


def giving_way(
    pending: Sequence[Entry], sending: Entry | None, policy: Policy, disk_bytes: int | None, *, bound: int | None = BACKLOG
) -> list[Entry]:
    """Those of ``pending``, oldest first, that are to be dropped until it is not over any more, or only what must be kept is left.

    Never the newest (of each directory, where several save into one run), the one that is being sent, final, best or keep-every ones.
    Those from the middle of an epoch go first; one from its end goes only when none of them is left. ``bound=None`` is for saves that no
    network is going to take soon: then only the disk counts.

    Several ranks each decide by themselves, and what is committed is what all of them kept. So they let go of the same ones first, however
    much each has pending: those whose step can be halved least often.
    """
    left, dropped = list(pending), list[Entry]()
    while is_over(left, disk_bytes, bound=bound):
        droppable = [entry for entry in left[:-1] if entry is not sending and not _is_precious(entry, left, policy)]
        entry = min(droppable, key=lambda one: (not one.passing, _halvings(one)), default=None)  # the oldest of these
        if entry is None:
            break
        if not entry.passing and left[-1].passing and not is_over(left, disk_bytes, bound=bound and bound + 1):
            break  # the newest can give way as soon as it is not the newest any more
        left = [one for one in left if one is not entry]
        dropped.append(entry)
    return dropped


def _halvings(entry: Entry) -> int:
    """How often a step of several ranks can be halved; 0 for the saves of one, of which simply the oldest goes."""
    if entry.world_size == 1 or entry.step == 0:
        return 0
    return (entry.step & -entry.step).bit_length() - 1


def _is_precious(entry: Entry, pending: Sequence[Entry], policy: Policy) -> bool:
    directory = entry.identity.get(SAVED_IN)
    if next(one for one in reversed(pending) if one.identity.get(SAVED_IN) == directory) is entry:
        return True
    if entry.final or (policy.keep_every is not None and entry.step % policy.keep_every == 0):
        return True
    if policy.keep_best is None:
        return False
    metric, mode, count = policy.keep_best
    sign = 1 if mode == "min" else -1
    ranked = sorted(
        (sign * one.metrics[metric], index)
        for index, one in enumerate(pending)
        if math.isfinite(one.metrics.get(metric, math.nan))  # others are never best
    )
    return any(pending[index] is entry for _, index in ranked[:count])
