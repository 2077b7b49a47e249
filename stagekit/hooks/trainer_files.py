"""What the saves of a live ``Trainer`` hold, by its own arguments. The rules themselves are in ``stagekit.saves.trainer``."""

from __future__ import annotations

from typing import Any

from ..saves.trainer import Expected, Sharding


def expected_by(args: Any) -> Expected:
    """What the live ``TrainingArguments`` say."""
    world_size = int(args.world_size)
    ranks = tuple(range(world_size))
    if args.save_on_each_node:  # each node has a directory of its own, with its own ranks' states
        first = int(args.process_index) - int(args.local_process_index)
        here = _ranks_on_this_node(world_size)
        ranks = tuple(range(first, min(first + here, world_size)))
    sharding, zero_stage = _sharding(args)
    return Expected(ranks, world_size, bool(args.save_only_model), sharding, zero_stage)


def _sharding(args: Any) -> tuple[Sharding, int]:
    """How the live training shards its state: what accelerate was set up with, whoever set it up (arguments, ``accelerate launch``)."""
    from accelerate.state import AcceleratorState

    if args.distributed_state is None or not AcceleratorState._shared_state:
        return "none", 0
    state = AcceleratorState()
    kind = state.distributed_type.value
    if kind == "DEEPSPEED":
        return "deepspeed", int(state.deepspeed_plugin.zero_stage)
    return ("fsdp", 0) if kind == "FSDP" else ("none", 0)


def _ranks_on_this_node(world_size: int) -> int:
    from accelerate.utils import get_int_from_env

    return int(get_int_from_env(["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"], world_size))
