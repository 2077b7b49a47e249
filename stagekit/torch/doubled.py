"""Frameworks that split data a second time: noticed when they ask for the first sample, before half of the data is lost in silence."""

from __future__ import annotations

import sys
from types import FrameType

from ..errors import DoubleSplit

# Accelerate, and through it the Trainer of transformers, either reads on one rank and hands parts of each batch to the others, or reads on
# every rank and keeps a part. Both are right for data that is whole on every rank, and train on a part of ours.
_SPLITTERS = {
    "DataLoaderDispatcher": "reads on rank 0 only and gives each rank a part of every batch",
    "IterableDatasetShard": "reads on every rank and keeps a part of what each one reads",
}


def refuse_double_split(world: int, data: str) -> None:
    """Raise ``DoubleSplit`` when the data set ``data``, which is split among ``world`` ranks, is read for one who splits it again.

    It looks at who is calling, since such frameworks tell a data set nothing. Workers that are forked still see their parent's callers.
    """
    if world < 2:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            for kind in type(frame.f_locals.get("self")).__mro__:
                what = _SPLITTERS.get(kind.__name__)
                if what is not None and kind.__module__.partition(".")[0] in ("accelerate", "transformers"):
                    raise DoubleSplit(
                        f"reading {data}: {kind.__module__}.{kind.__name__} {what}, and this data set already gives each of {world} ranks "
                        f"its own samples, so only one in {world} would be trained on. Use stagekit.torch.StreamLoader instead, which "
                        "frameworks leave alone (for the Trainer, return it from get_train_dataloader), or pass rank=0, world_size=1 to "
                        "StreamDataset, so that the framework alone splits"
                    )
        frame = frame.f_back
