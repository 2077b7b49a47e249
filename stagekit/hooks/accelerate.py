"""Accelerate's ``save_state`` and ``load_state``, into a run and back from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, MissingExtra
from ..runs.layout import Checkpoint, Selector
from ..runs.run import Run
from ..saves.whole import files, is_whole
from .exchange import restored, saved
from .ranks import Ranks

try:
    from accelerate import Accelerator
except ImportError as missing:
    raise MissingExtra.of("accelerate", "accelerate", "stagekit.hooks.accelerate") from missing


def save_state(
    accelerator: Accelerator,
    run: Run,
    *,
    step: int,
    epoch: int | None = None,
    metrics: Mapping[str, float] | None = None,
    final: bool = False,
    **save_options: Any,
) -> None:
    """``accelerator.save_state`` into ``run``: models, optimizers, schedulers, loaders, every rank's random states and what was registered.

    Every rank calls it, with the same ``step``. Each writes its files into a directory of its own, so the nodes need not share a disk; the
    checkpoint is there once every rank's files are. Returns when they are written and pinned; they are sent in the background, and
    ``run.close()`` waits for that. What went wrong with earlier saves and will not heal by itself is raised here, after this save was
    pinned. When one rank cannot save, all raise, and nothing of this step is committed. ``save_options`` go to ``accelerator.save_state``.

    Example::

        run = stagekit.Run("s3://my-bucket/runs/first")
        found = load_state(accelerator, run)
        for epoch in range(found.epoch if found else 0, 3):
            ...
            save_state(accelerator, run, step=step, epoch=epoch + 1)
        run.close()
    """
    with saved(run, _ranks(accelerator), step, epoch, metrics, final=final) as directory:
        accelerator.save_state(str(directory), **save_options)
        if broken := [path.name for path in files(directory) if path.stat().st_size and not is_whole(path)]:
            raise CheckpointError(f"step {step}: {', '.join(broken)} was not written to its end")


def load_state(
    accelerator: Accelerator, run: Run, *, step: Selector | None = None, allow_fresh: bool = False, **load_options: Any
) -> Checkpoint | None:
    """``accelerator.load_state`` from the newest whole checkpoint of ``run``, or from ``step``; ``None`` on a new run.

    Every rank calls it, after ``accelerator.prepare``, and all load the same one. Each node fetches it once; every hash is checked. Saves
    that a killed process left pinned on this disk are sent first. Raises when it cannot be told what the run has, unless ``allow_fresh``.
    ``load_options`` go to ``accelerator.load_state``.
    """
    ranks = _ranks(accelerator)
    with restored(run, ranks, accelerator.local_process_index, step, allow_fresh=allow_fresh) as found:
        if found is None:
            return None
        directory, checkpoint = found
        accelerator.load_state(str(directory), **load_options)
        return checkpoint


def _ranks(accelerator: Accelerator) -> Ranks:
    return Ranks(accelerator.process_index, accelerator.num_processes)
