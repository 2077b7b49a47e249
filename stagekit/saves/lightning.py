"""What a Lightning checkpoint tells of itself, read without running anything of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import pickles


@dataclass(frozen=True, slots=True)
class Told:
    """Step, epochs finished and monitored metrics of a ``.ckpt`` file; ``None`` and nothing where it does not say."""

    step: int | None = None
    epoch: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def told_by(path: Path) -> Told:
    """What the file at ``path`` says. One that is no checkpoint of Lightning, or cannot be read, says nothing."""
    try:
        values = pickles.read_saved(path)
    except (OSError, ValueError):
        return Told()
    if not isinstance(values, dict):
        return Told()
    step = values.get("global_step", values.get("step"))
    return Told(step if isinstance(step, int) else None, epochs_of(values), metrics_of(values))


def epochs_of(checkpoint: dict[str, Any]) -> int | None:
    """Epochs finished: what the loop counts as processed, since the save comes before it counts the epoch as completed."""
    try:
        return int(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])
    except (KeyError, TypeError):
        epoch = checkpoint.get("epoch")
        return epoch if isinstance(epoch, int) else None


def metrics_of(checkpoint: dict[str, Any]) -> dict[str, float]:
    """What each ``ModelCheckpoint`` monitors. Scores that are tensors lie elsewhere in the file when it was read without torch."""
    metrics: dict[str, float] = {}
    callbacks = checkpoint.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if not isinstance(state, dict) or not state.get("monitor"):
            continue
        score = state.get("current_score")
        if score is not None and not isinstance(score, pickles.Stand):
            metrics[str(state["monitor"])] = float(score)
    return metrics
