"""From samples to a batch, padded and masked where that was asked for. The same in threads and in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UsageError
from ..stream.window import Rows
from .collate import collate as default_collate
from .plan import Made

Collate = Callable[[Sequence[Any]], Any]
NO_BATCH = object()
"""What a batch is of which every sample was dropped or skipped, where batches are not filled."""


@dataclass(frozen=True)
class Assembly:
    """How batches are put together."""

    collate: Collate
    batch_size: int
    drop_last: bool

    def __call__(self, samples: Sequence[Any], filler: Callable[[], Any]) -> Any:
        """A batch of ``samples``. ``filler`` gives one to pad with when there are none."""
        real = len(samples)
        if not self.drop_last and real < self.batch_size:
            pad = samples[-1] if real else filler()
            if not isinstance(pad, dict):
                raise UsageError(
                    f"drop_last=False needs samples that are dicts, and transform returned {type(pad).__name__}: pads are told "
                    "by their key. Return a dict, or use drop_last=True"
                )
            samples = [*samples, *[{**pad, "__key__": ""}] * (self.batch_size - real)]
        if not samples:
            return NO_BATCH
        if isinstance(samples, Rows) and self.collate is not default_collate:
            samples = list(samples)
        batch = self.collate(samples)
        if not self.drop_last and isinstance(batch, dict):
            batch["__mask__"] = torch.arange(self.batch_size) < real
        return batch


def together(parts: Sequence[Made]) -> Made:
    """The parts of one batch as one."""
    if len(parts) == 1:
        return parts[0]
    made = Made()
    for part in parts:
        made.add(part)
    return made
