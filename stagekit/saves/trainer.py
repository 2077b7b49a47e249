"""What a ``checkpoint-<step>`` directory of transformers' ``Trainer`` must hold before it is complete.

Rank 0 does not wait for the other ranks, which may still be writing their random states or shards when it goes on. So completeness is
decided from outside: by what the live arguments say will be there, or, where nobody knows them, by what is there (``Expected.seen_in``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import pickles
from .dcp import missing_dcp
from .whole import is_whole

STATE = "trainer_state.json"
UNFINISHED = "checkpoint-is-incomplete.txt"  # what the Trainer's own SIGTERM save puts there while it saves

_FOLDER = re.compile(r"checkpoint-([0-9]{1,12})")
_WEIGHTS = re.compile(r"(model|adapter_model|pytorch_model)(-[0-9]+-of-[0-9]+)?\.(safetensors|bin)")
_RANDOM_STATE = re.compile(r"rng_state_([0-9]+)\.pth")
_DEEPSPEED = re.compile(r"global_step[0-9]+")
_ZERO = re.compile(r"zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_(optim|model)_states\.pt$")
_INDEX = re.compile(r"(model|pytorch_model)\.(safetensors|bin)\.index\.json")

Sharding = Literal["none", "fsdp", "deepspeed"]


@dataclass(frozen=True, slots=True)
class Expected:
    """What every save of one training holds. ``ranks`` are those whose random states lie in the same directory."""

    ranks: tuple[int, ...] = (0,)
    world_size: int = 1
    weights_only: bool = False
    sharding: Sharding = "none"
    zero_stage: int = 0

    @classmethod
    def seen_in(cls, directory: Path, world_size: int | None = None) -> Expected:
        """What the save in ``directory`` will hold once it is complete, as far as the files that are there already tell.

        Rank 0 writes ``trainer_state.json`` last, so that with this file everything of rank 0 is there. The number of ranks is
        ``world_size``, else what their random states show so far, which may be too few.
        """
        names = set(os.listdir(directory)) if directory.is_dir() else set()
        states = [int(match[1]) for name in names if (match := _RANDOM_STATE.fullmatch(name))]
        ranks = max(world_size or 2, max(states) + 1) if states else world_size or 1
        if "rng_state.pth" in names:
            ranks = 1
        sharding: Sharding = "none"
        if "latest" in names or any(_DEEPSPEED.fullmatch(name) for name in names):
            sharding = "deepspeed"
        elif names & {"pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "optimizer_0", "optimizer.bin"}:
            sharding = "fsdp"
        whole_state = names & {"optimizer.pt", "scheduler.pt", "rng_state.pth"} or states or sharding != "none"
        parted = any(directory.glob("global_step*/*optim_states.pt"))
        return cls(tuple(range(ranks)), ranks, not whole_state, sharding, int(parted))

    def missing(self, directory: Path, step: int, is_new: Callable[[Path], bool] = lambda _: True) -> list[str]:
        """What ``directory`` lacks to be the complete save of ``step``; nothing when it is. ``is_new``: not left by an earlier training."""
        return list(self._missing(directory, step, is_new))

    def _missing(self, directory: Path, step: int, is_new: Callable[[Path], bool]) -> Iterator[str]:
        if not directory.is_dir():
            yield "the directory itself"
            return
        if (directory / UNFINISHED).exists():
            yield f"the end of the save ({UNFINISHED} is there)"
        wanted = [STATE]
        if not self.weights_only:
            wanted += ["rng_state.pth"] if self.world_size == 1 else [f"rng_state_{rank}.pth" for rank in self.ranks]
            if self.sharding == "none":
                wanted.append("optimizer.pt")
            if self.sharding != "deepspeed":
                wanted.append("scheduler.pt")
        for name in wanted:
            path = directory / name
            if not is_whole(path) or not is_new(path):
                yield name
        if is_whole(directory / STATE) and (found := saved_step(directory)) != step:
            yield f"{STATE} of step {step} (it is of step {found})"
        alone = self.weights_only or self.sharding == "none"
        yield from _missing_weights(directory, is_new, needed=alone)  # beside a sharded state some are written as well
        if not alone:
            yield from self._missing_fsdp(directory) if self.sharding == "fsdp" else self._missing_deepspeed(directory, step)

    def _missing_fsdp(self, directory: Path) -> Iterator[str]:
        for single, sharded in (("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"), ("optimizer.bin", "optimizer_0")):
            if (directory / sharded).is_dir():
                yield from missing_dcp(directory / sharded)
            elif not is_whole(directory / single):
                yield f"{single} or {sharded}/"

    def _missing_deepspeed(self, directory: Path, step: int) -> Iterator[str]:
        """``latest`` names the folder; in it the model's states, with ZeRO each rank's part of the optimizer, and with ZeRO-3 each rank's
        part of the model."""
        folder = directory / f"global_step{step}"
        try:
            if (directory / "latest").read_text().strip() != folder.name:
                yield f"latest naming {folder.name}"
        except OSError:
            yield "latest"
        names = {path.name for path in folder.glob("*.pt") if is_whole(path)} if folder.is_dir() else set()
        models = sorted(name for name in names if name.endswith("model_states.pt"))
        if not models:
            yield f"{folder.name}/*model_states.pt"
        data_ranks, model_ranks = _ranks_told_by(folder / models[0]) if models else (None, 1)
        if data_ranks is None or len(self.ranks) < self.world_size:  # each node has a directory of its own
            ranks: Iterable[int] = self.ranks
        else:
            ranks = range(data_ranks)
        parts = {match.groups() for name in names if (match := _ZERO.search(name))}
        wanted = ["model"] if any(kind == "model" for _, _, kind in parts) else []
        wanted += ["optim"] if self.zero_stage else []
        for rank in ranks:
            for kind in wanted:
                if len([part for part in parts if part[0] == str(rank) and part[2] == kind]) < model_ranks:
                    yield f"{folder.name}/*zero_pp_rank_{rank}_*{kind}_states.pt"


def _ranks_told_by(states: Path) -> tuple[int | None, int]:
    """How many ranks share the data and how many the model, as a file of DeepSpeed's says; ``None`` and 1 when it does not."""
    try:
        values = pickles.read_saved(states)
    except (OSError, ValueError):
        return None, 1
    data, model = (values.get(f"{kind}_world_size") if isinstance(values, dict) else None for kind in ("dp", "mp"))
    return data if isinstance(data, int) else None, model if isinstance(model, int) else 1


def step_of(directory: Path) -> int | None:
    """The step in the name of a checkpoint directory; ``None`` when it is none."""
    match = _FOLDER.fullmatch(directory.name)
    return int(match[1]) if match else None


def is_weights(path: Path) -> bool:
    """Whether a file holds a model's or an adapter's weights, by its name."""
    return _WEIGHTS.fullmatch(path.name) is not None


def saved_step(directory: Path) -> int | None:
    """The step that ``trainer_state.json`` tells."""
    step = read_state(directory).get("global_step")
    return step if isinstance(step, int) else None


def read_state(directory: Path) -> dict[str, Any]:
    """``trainer_state.json``; empty when it is not there or not finished."""
    try:
        values = json.loads((directory / STATE).read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def metrics_of(state: dict[str, Any]) -> dict[str, float]:
    """What was logged last under each name: losses, learning rate, and what an evaluation found."""
    metrics: dict[str, float] = {}
    for logged in state.get("log_history") or ():
        metrics.update(
            {
                name: float(value)
                for name, value in logged.items()
                if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "epoch")
            }
        )
    return metrics


def epochs_of(state: dict[str, Any]) -> int | None:
    """Epochs finished, from the Trainer's fraction of epochs."""
    epoch = state.get("epoch")
    return int(epoch + 1e-6) if isinstance(epoch, int | float) else None


def _missing_weights(directory: Path, is_new: Callable[[Path], bool], *, needed: bool) -> Iterator[str]:
    folders = [directory, *(path for path in directory.iterdir() if path.is_dir())]  # adapters with names have folders of their own
    for index in (path for folder in folders for path in folder.iterdir() if _INDEX.fullmatch(path.name)):
        try:
            parts = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            yield index.name
            return
        lacking = sorted(part for part in parts if not is_whole(index.parent / part) or not is_new(index.parent / part))
        yield from lacking
        return
    found = [path for folder in folders for path in sorted(folder.iterdir()) if is_weights(path)]
    if not found and needed:
        yield "the weights (model.safetensors or adapter_model.safetensors)"
    yield from (path.name for path in found if not is_whole(path) or not is_new(path))
