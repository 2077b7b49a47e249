"""A Lightning training that knows nothing of Stagekit: ``python lit.py OUT [--die-at EPOCH]``."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return (self.layer(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Say(Callback):
    def __init__(self, die_at: int | None) -> None:
        self.die_at = die_at

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        print("from step", trainer.global_step, flush=True)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--die-at", type=int)
    options = parser.parse_args()
    saver = ModelCheckpoint(dirpath=options.out, filename="{epoch}-{step}", save_last=True)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=3, accelerator="cpu", callbacks=[saver, Say(options.die_at)], **quiet)
    trainer.fit(Regression(), torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4), ckpt_path="last")


if __name__ == "__main__":
    main()
