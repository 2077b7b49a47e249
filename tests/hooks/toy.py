"""A training small enough to run whole in a test: noise everywhere that must come back, and a loader that can go on in the middle.

python toy.py RUN OUT EPOCHS [--every S] [--stop-at STEP] …
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from stagekit.hooks.loop import Run


class ToyLoader:
    """Batches of numbers in an order of the epoch; its state is the epoch and how many batches were taken."""

    def __init__(self, batches: int = 5) -> None:
        self.batches = batches
        self.epoch = 0
        self.taken = 0
        self.before_batch: Callable[[], None] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = random.Random(self.epoch).sample(range(100), self.batches)
        while self.taken < self.batches:
            if self.before_batch is not None:
                self.before_batch()
            self.taken += 1
            yield torch.full((4, 8), float(order[self.taken - 1])) / 100
        self.epoch, self.taken = self.epoch + 1, 0


class Training:
    """Model, optimizer, scheduler and loader, seeded with what must *not* matter after a restore."""

    def __init__(self, seed: int = 0) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10)
        self.loader = ToyLoader()
        self.seen: list[tuple[int, float]] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "loader": self.loader}

    def batch(self, epoch: int, batch: torch.Tensor) -> float:
        self.seen.append((epoch, float(batch[0, 0])))
        noise = torch.randn(4, 8) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        loss = (self.model(batch + noise) - 1).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def weights(self) -> bytes:
        return b"".join(value.numpy().tobytes() for value in self.model.state_dict().values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("out")
    parser.add_argument("epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every")
    parser.add_argument("--tell-steps", action="store_true")
    parser.add_argument("--workers", type=int, help="read through a DataLoader with so many forked workers instead")
    parser.add_argument("--stop-at", type=int, help="end by os._exit at this batch")
    parser.add_argument("--term-at", type=int, help="send this process SIGTERM at this batch")
    options = parser.parse_args()
    training = Training(options.seed)
    state, loader = training.state, training.loader
    if options.workers is not None:
        del state["loader"]
        values = [torch.full((8,), float(number)) / 100 for number in range(20)]
        loader = DataLoader(values, batch_size=4, shuffle=True, num_workers=options.workers, multiprocessing_context="fork")
    run = Run(options.run)
    batches = 0
    for epoch in run.epochs(options.epochs, state=state, every=options.every):
        training.model.train()
        for batch in loader:
            loss = training.batch(epoch, batch)
            batches += 1
            if batches == options.stop_at:
                run.drain()
                os._exit(9)
            if batches == options.term_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if options.tell_steps:
                run.step(loss=loss)
            epoch.metrics["loss"] = loss
        training.scheduler.step()
    Path(options.out).write_bytes(training.weights())
    sys.stdout.write(f"{[epoch for epoch, _ in training.seen]}\n")


if __name__ == "__main__":
    main()
