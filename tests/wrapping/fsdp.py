"""One rank of a sharded fine-tuning that knows nothing of Stagekit: ``torchrun --nproc-per-node 2 fsdp.py OUT LOSSES [--die-at STEP]``.

Accelerate offers FSDP on accelerators only. Here it is told that it has one, and the device stays the CPU: model, collectives (gloo), and
what is written are FSDP2's own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as distributed
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from tests.hooks.hf import Lines, arguments, losses, tiny


class Die(TrainerCallback):
    """The power cut, on every rank at once."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os._exit(9)


def train(out: str, *callbacks: TrainerCallback) -> dict[int, float] | None:
    sharded = {"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    args = arguments(
        out,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        per_device_train_batch_size=2,
        fsdp=True,
        fsdp_config=sharded,
        ddp_backend="gloo",
    )
    assert args.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    trainer = Trainer(tiny(), args, train_dataset=Lines(), callbacks=list(callbacks))
    assert trainer.accelerator.distributed_type == DistributedType.FSDP
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out) is not None)
    return losses(trainer) if trainer.is_world_process_zero() else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("losses", type=Path)
    parser.add_argument("--straight", type=Path, help="train once without interruption before, and write these losses")
    parser.add_argument("--die-at", type=int)
    options = parser.parse_args()
    if options.straight is not None:
        elsewhere = f"{options.out}-straight"
        Path(elsewhere).mkdir(exist_ok=True)
        told = train(elsewhere)
        if told is not None:
            options.straight.write_text(json.dumps(told))
            shutil.rmtree(elsewhere)
    told = train(options.out, Die(options.die_at))
    if told is not None:
        options.losses.write_text(json.dumps(told))
    distributed.barrier()  # a rank whose peers are gone while gloo still works aborts
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
