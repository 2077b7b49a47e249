"""The loop with the loader that people use: shuffled samples stream from a store, and a training that is interrupted anywhere goes on at
the very next sample, to the last bit."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stagekit.hooks.loop import Run
from stagekit.runs import catalog
from stagekit.store.memory import MemoryStore
from stagekit.torch import StreamLoader

from ..made import make_dataset

SAMPLES, BATCH, EPOCHS = 24, 5, 3
BATCHES = 5  # the last one of an epoch is short


class Stop(Exception):
    """The machine is gone."""


@pytest.fixture(scope="module")
def data() -> MemoryStore:
    store = MemoryStore(f"memory://{uuid.uuid4().hex}/data")
    make_dataset(store, SAMPLES)
    return store


class Training:
    """A model that sees which samples come and in which order, with noise that must come back too."""

    def __init__(self, data: MemoryStore, seed: int, **loader: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = StreamLoader(data, BATCH, seed=3, decode=None, drop_last=False, window=2, **loader)
        self.keys: list[str] = []

    def train(self, run: Run, *, every: str | None = None, stop_at: int | None = None) -> None:
        trained = 0
        state = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        for epoch in run.epochs(EPOCHS, state=state, every=every):
            for batch in self.loader:
                real = [key for key in batch["__key__"] if key]
                self.keys += [f"{int(epoch)}:{key}" for key in real]
                values = torch.tensor([[float(sum(key.encode()) % 97) / 97] for key in real])
                loss = (self.model(values + torch.randn_like(values) * 0.1) - 1).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                trained += 1
                if trained == stop_at:
                    raise Stop

    def weights(self) -> bytes:
        return b"".join(value.numpy().tobytes() for value in self.model.state_dict().values())


def on_a_new_machine(where: MemoryStore, tmp_path: Path) -> Run:
    return Run(where, spool_dir=tmp_path / uuid.uuid4().hex, on_event=lambda _: None, drain_s=20)


@pytest.fixture(scope="module")
def straight(data: MemoryStore, tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(data, seed=0)
    run = on_a_new_machine(MemoryStore(f"memory://{uuid.uuid4().hex}/run"), tmp_path_factory.mktemp("straight"))
    training.train(run)
    run.close()
    assert len(set(training.keys)) == SAMPLES * EPOCHS
    return training


@pytest.mark.parametrize(
    ("stop_at", "workers"), [(1, 0), (3, 0), (BATCHES, 0), (BATCHES + 1, 0), (2 * BATCHES + 4, 0), (2 * BATCHES - 1, 1)]
)
def test_interrupted_anywhere_it_goes_on_at_the_very_next_sample(
    data: MemoryStore, straight: Training, tmp_path: Path, stop_at: int, workers: int
) -> None:
    where = MemoryStore(f"memory://{uuid.uuid4().hex}/run")
    first = Training(data, seed=0)
    run = on_a_new_machine(where, tmp_path)
    with pytest.raises(Stop):
        first.train(run, every="0s", stop_at=stop_at)
    run.drain()
    saved = run.status().verified or 0
    run.close()
    assert saved >= stop_at - 1, "the boundary before the batch at which it stopped"
    second = Training(data, seed=99, workers=workers)
    again = on_a_new_machine(where, tmp_path)
    second.train(again)
    again.close()
    epochs, batches = divmod(saved, BATCHES)
    assert second.keys == straight.keys[epochs * SAMPLES + batches * BATCH :]
    if saved:
        assert second.weights() == straight.weights()
    assert catalog.read_all(where).checkpoints[0].epoch == EPOCHS
