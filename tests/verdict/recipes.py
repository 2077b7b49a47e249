"""The trainers' recipes, tiny, as a user starts them in a checkout: ``python -m tests.verdict.recipes KIND RUN DATA``."""

from __future__ import annotations

import sys
from pathlib import Path

from stagekit.hooks.loop import Run

OUT = Path("out")


def loop(run: str, data: str) -> None:
    import torch

    from stagekit.torch import StreamLoader

    loader = StreamLoader(data, batch_size=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in Run(run).epochs(2, state={"model": model, "optimizer": optimizer, "loader": loader}):
        for batch in loader:
            loss = model(batch["cls"].float()[:, None]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch.metrics["loss"] = float(loss.item())


def transformers(run: str, _: str) -> None:
    from transformers import Trainer

    from stagekit.hooks.transformers import StagekitCallback

    from ..hooks.hf import Lines, arguments, tiny

    callback = StagekitCallback(run)
    trainer = Trainer(tiny(), arguments(OUT, save_total_limit=1, num_train_epochs=2), train_dataset=Lines(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume_dir())


def lightning(run: str, _: str) -> None:
    from ..hooks.toolkit import lightning as train

    train(Run(run), OUT, seed=1)


def accelerate(run: str, _: str) -> None:
    from ..hooks.toolkit import accelerate as train

    with Run(run) as opened:
        train(opened, OUT, seed=1)


KINDS = {one.__name__: one for one in (loop, transformers, lightning, accelerate)}

if __name__ == "__main__":
    kind, *places = sys.argv[1:]
    KINDS[kind](*places)
