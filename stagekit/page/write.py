"""From what ``info`` found to a file: what only the page shows is read here."""

from __future__ import annotations

from pathlib import Path

from ..config import StoreConfig
from ..dataset import Dataset
from ..report.values import DatasetInfo, RunInfo
from ..store import Where
from ..store.base import Store
from ..verdict.last import last_verdict
from . import file, history
from .dataset import dataset_page
from .run import run_page
from .samples import shown

SAMPLES = 12
"""That are shown where nobody said how many, none included."""


def write_run_page(target: Path, info: RunInfo, store: Store, now_s: float) -> None:
    """The page of the run ``info``, which lies at ``store``. Raises the store's errors, and ``UsageError`` or ``OutOfSpace``
    where ``target`` cannot be written."""
    file.write(target, run_page(info, history.passages(store, info.checkpoints), last_verdict(info.url), now_s))


def write_dataset_page(
    target: Path, info: DatasetInfo, where: Where, samples: int | None, config: StoreConfig | None, now_s: float
) -> None:
    """The page of the data set ``info`` at ``where``, with its first ``samples``: ``SAMPLES`` where that is ``None``, and with 0 nothing of
    the contents of any. Each byte that is shown was compared with its digest.

    Raises the store's errors, ``CorruptShard`` for samples that are not what the manifest says, and ``UsageError`` or ``OutOfSpace``
    where ``target`` cannot be written.
    """
    number = SAMPLES if samples is None else samples
    read = shown(Dataset(where, store=config).head(number)) if number else []
    file.write(target, dataset_page(info, read, now_s))
