"""A ``Trainer`` that gets its batches from a ``StreamLoader``: where a resumed training goes on in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import transformers.trainer

_TRAINER: Any = transformers.trainer  # whose name for it is not said to be public


def go_on_in(loader: Any, *, global_step: int, accumulation: int) -> None:
    """Let ``loader`` be in the epoch that a training resumed at ``global_step`` is in, and able to pass over batches.

    The ``Trainer`` passes over the batches of an interrupted epoch with Accelerate's ``skip_first_batches``, which takes PyTorch's own
    loaders apart and reads what it passes over. A loader that has ``skip_batches()`` is asked to do it itself; all others are Accelerate's
    as before. Loaders without that method are left alone.
    """
    if not _passes_over(loader):
        return
    if global_step:
        loader.set_epoch(global_step // max(1, math.ceil(len(loader) / accumulation)))
    if not hasattr(_TRAINER.skip_first_batches, "_stagekit"):
        _TRAINER.skip_first_batches = _skipping(_TRAINER.skip_first_batches)


def _passes_over(loader: Any) -> bool:
    """Whether ``loader`` can pass over batches by itself. Accelerate's own have a number of the same name."""
    return callable(getattr(loader, "skip_batches", None))


def _skipping(others: Callable[..., Any]) -> Callable[..., Any]:
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if not _passes_over(dataloader):
            return others(dataloader, num_batches)
        dataloader.skip_batches(num_batches)
        return dataloader

    skip_first_batches._stagekit = True  # type: ignore[attr-defined]
    return skip_first_batches
