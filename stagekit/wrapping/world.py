"""How many ranks a command will start, and which saved checkpoints only the same number of ranks can load."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..errors import CheckpointError

_DEEPSPEED = re.compile(r"(?:^|/)(?P<layout>global_step[0-9]+|checkpoint)/(?:bf16_)?zero_pp_rank_(?P<rank>[0-9]+)_.*optim_states\.pt$")
_BY_RANK = re.compile(r"(?:^|[/_.-])rank[_-]?(?P<rank>[0-9]+)(?=[/_.-]|$)[^/]*$")
_PER_NODE = ("--nproc_per_node", "--nproc-per-node")
_NODES = ("--nnodes",)
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def world_size_of(command: Sequence[str], environ: Mapping[str, str], stated: int | None = None) -> int | None:
    """The number of ranks: as ``stated``, else as the launcher in ``command`` is told, else ``WORLD_SIZE``; ``None`` when nothing says it.

    Known launchers are torchrun, ``accelerate launch``, deepspeed, mpirun and srun, also inside of ``bash -c``.
    """
    if stated is not None:
        return stated
    words = list(command)
    for number, word in enumerate(words):
        if word in ("-c", "-lc", "-ec") and number + 1 < len(words) and number and "sh" in PurePath(words[number - 1]).name:
            try:
                words = shlex.split(words[number + 1])
            except ValueError:
                break
            break
    for number, word in enumerate(words):
        name, rest = PurePath(word).name, words[number + 1 :]
        if name == "torchrun" or (word in _MODULES[:2] and words[number - 1] == "-m"):
            return _product(_number(rest, _PER_NODE, "1"), _number(rest, _NODES, "1"))
        if (name == "accelerate" and rest[:1] == ["launch"]) or (word == _MODULES[2] and words[number - 1] == "-m"):
            return _number(rest, ("--num_processes", "--num-processes"))
        if name == "deepspeed":
            return _product(_number(rest, ("--num_gpus",)), _number(rest, ("--num_nodes",), "1"))
        if name in ("mpirun", "mpiexec", "srun"):
            return _number(rest, ("-n", "-np", "--np", "--ntasks"))
    value = environ.get("WORLD_SIZE", "")
    return int(value) if value.isascii() and value.isdecimal() and int(value) > 0 else None


@dataclass(frozen=True, slots=True)
class Fixed:
    """A layout that only ``ranks`` ranks can load, and one of its names."""

    ranks: int
    layout: str


def fixed_by(paths: Iterable[str]) -> Fixed | None:
    """What binds a checkpoint with these files to a number of ranks; ``None`` when any number can load it, or it does not show."""
    zero: dict[str, int] = {}
    parts: dict[str, set[int]] = {}
    for path in paths:
        if match := _DEEPSPEED.search(path):
            zero[match["layout"]] = max(zero.get(match["layout"], 0), int(match["rank"]) + 1)
        elif match := _BY_RANK.search(path):
            parts.setdefault(path[: match.start("rank")] + "*" + path[match.end("rank") :], set()).add(int(match["rank"]))
    if zero:
        layout, ranks = max(zero.items())
        return Fixed(ranks, f"DeepSpeed's {layout}/, one part for each rank")
    for template, ranks_seen in sorted(parts.items()):
        if len(ranks_seen) > 1 and ranks_seen == set(range(len(ranks_seen))):
            return Fixed(len(ranks_seen), f"{template}, one file for each rank")
    return None


def refuse_other_world(name: str, paths: Iterable[str], saved: int | None, now: int | None) -> str | None:
    """Raise ``CheckpointError`` when the checkpoint called ``name`` cannot be loaded by ``now`` ranks. ``saved``: as its manifest says.

    Returns a warning when the layout is bound to a number of ranks and nobody knows how many there will be.
    """
    fixed = fixed_by(paths)
    if fixed is None:
        return None
    ranks = saved if saved is not None and saved > fixed.ranks else fixed.ranks  # parts of other nodes lie elsewhere
    if now is None:
        return (
            f"{name} can be loaded by {ranks} ranks only ({fixed.layout}), and nothing says how many this command starts; "
            "--world-size N says it, so that a wrong number is refused before anything is fetched"
        )
    if now != ranks:
        raise CheckpointError(
            f"{name} was saved by {ranks} ranks in a layout that no other number can load ({fixed.layout}), and this command starts {now}; "
            f"nothing was fetched. Start {ranks} ranks, or convert the checkpoint where it can be loaded (DeepSpeed: zero_to_fp32.py), or "
            "begin anew with --resume never and another run"
        )
    return None


def _number(words: Sequence[str], names: Sequence[str], default: str | None = None) -> int | None:
    value = default
    for number, word in enumerate(words):
        name, equals, rest = word.partition("=")
        if name in names:
            value = rest if equals else words[number + 1] if number + 1 < len(words) else None
    return int(value) if value is not None and value.isascii() and value.isdecimal() else None


def _product(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other
