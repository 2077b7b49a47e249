"""A fine-tuning with transformers' Trainer, small enough to run whole in a test: ``python -m tests.hooks.hf RUN OUT LOSSES [options]``.

Dropout is on and the data is shuffled, so that every random state has to come back for the losses to.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from stagekit.hooks.transformers import StagekitCallback

EPOCHS = 3


class Stop(Exception):
    """The machine is gone."""


class StopAt(TrainerCallback):
    """Loses the machine at a step: by an exception, or by the process's end."""

    def __init__(self, step: int | None, *, hard: bool = False, drain: Any = None) -> None:
        self.step, self.hard, self.drain = step, hard, drain

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step:
            return
        if self.drain is not None:
            self.drain()
        if self.hard:
            os._exit(9)
        raise Stop


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sixteen lines of eight tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * (index + 3)) % 32
        return {"input_ids": tokens, "labels": tokens}


def tiny(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def with_adapter(base: str | Path, seed: int = 0) -> Any:
    """The model in ``base`` with LoRA adapters of r=16 and alpha=32 on its attention."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(base)
    return get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def arguments(out: str | Path, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(out),
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "epoch",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**(given | more))


def losses(trainer: Trainer) -> dict[int, float]:
    return {logged["step"]: logged["loss"] for logged in trainer.state.log_history if "loss" in logged}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("out")
    parser.add_argument("losses")
    parser.add_argument("--stop-at", type=int)
    parser.add_argument("--straight", action="store_true", help="train another run whole before")
    parser.add_argument("--base")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.straight:
        undisturbed = Trainer(tiny(options.seed), arguments(options.out + "-straight", save_strategy="no"), train_dataset=Lines())
        undisturbed.train()
        if undisturbed.is_world_process_zero():
            Path(options.losses + ".straight").write_text(json.dumps(losses(undisturbed)))
        shutil.rmtree(options.out + "-straight", ignore_errors=True)
    callback = StagekitCallback(options.run, drain_s=60)
    stop = StopAt(options.stop_at, hard=True, drain=lambda: callback.run.drain() if callback.run.rank == 0 else None)
    model = with_adapter(options.base, options.seed) if options.base else tiny(options.seed)
    trainer = Trainer(model, arguments(options.out, save_total_limit=1), train_dataset=Lines(), callbacks=[callback, stop])
    trainer.train(resume_from_checkpoint=callback.resume_dir())
    if trainer.is_world_process_zero():
        Path(options.losses).write_text(json.dumps(losses(trainer)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
