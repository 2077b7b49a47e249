"""A fine-tuning that knows nothing of Stagekit, as the examples of transformers do it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from tests.hooks.hf import Lines, arguments, losses, tiny


class Die(TrainerCallback):
    """The power cut."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(out: str, *callbacks: TrainerCallback) -> dict[int, float]:
    trainer = Trainer(tiny(), arguments(out, save_total_limit=1), train_dataset=Lines(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out) is not None)
    return losses(trainer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("losses", type=Path)
    parser.add_argument("--straight", type=Path, help="train once without interruption before, and write these losses")
    parser.add_argument("--die-at", type=int)
    options = parser.parse_args()
    Path(options.out).mkdir(exist_ok=True)
    if options.straight is not None:
        elsewhere = Path(f"{options.out}-straight")
        elsewhere.mkdir()
        options.straight.write_text(json.dumps(train(str(elsewhere))))
        shutil.rmtree(elsewhere)
    options.losses.write_text(json.dumps(train(options.out, Die(options.die_at))))


if __name__ == "__main__":
    main()
