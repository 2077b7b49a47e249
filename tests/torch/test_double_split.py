"""Frameworks that split data a second time: with two real gloo ranks, either the union is exact or the first batch is refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stagekit.store.directory import DirectoryStore

from ..stream.build import build, numbered

_BEGIN = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.INFO)
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
from stagekit.errors import DoubleSplit
from stagekit.torch import StreamDataset, StreamLoader

data, scratch = sys.argv[1:]
results = {}

def gather(got):
    everyone = [None] * 2
    dist.all_gather_object(everyone, got)
    return everyone

def transform(sample):
    return {"number": torch.tensor(sample["cls"]), "x": torch.tensor([float(sample["cls"])])}

def columns(samples):
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "number")}
"""

_END = """
if dist.get_rank() == 0:
    print("RESULTS " + json.dumps(results))
dist.destroy_process_group()
"""

_ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

def read(loader):
    epochs = []
    for _ in range(2):
        got = []
        try:
            for batch in loader:
                got += batch["number"].tolist()
        except DoubleSplit as error:
            return {"refused": str(error), "before": len(got)}
        epochs.append(gather(got))
    return epochs

for name, dispatch in (("default", None), ("dispatch_batches=False", False)):
    prepare = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)).prepare
    for workers, method in ((0, None), (1, "fork"), (1, "spawn")):
        made = StreamDataset(data, transform=transform)
        made = DataLoader(made, batch_size=4, num_workers=workers, multiprocessing_context=method, collate_fn=columns)
        results[f"{name}, {workers} {method}"] = read(prepare(made))
    whole = StreamDataset(data, transform=transform, rank=0, world_size=1)
    results[f"{name}, whole"] = read(prepare(DataLoader(whole, batch_size=4, collate_fn=columns)))
    results[f"{name}, StreamLoader"] = read(prepare(StreamLoader(data, 4, transform=transform, collate=columns)))
"""

_TRAINER = """
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.got = []

    def forward(self, x, number):
        self.got.append(number.tolist())
        return {"loss": self.layer(x).square().mean()}

class Streaming(Trainer):
    def get_train_dataloader(self):
        return StreamLoader(data, 4, transform=transform, collate=columns)

def train(kind, dataset, **options):
    model = Model()
    arguments = TrainingArguments(
        output_dir=scratch, use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=4, num_train_epochs=2, report_to=[],
        save_strategy="no", disable_tqdm=True, remove_unused_columns=False, **options,
    )
    try:
        kind(model=model, args=arguments, train_dataset=dataset, data_collator=columns).train()
    except DoubleSplit as error:
        return {"refused": str(error), "before": len(model.got)}
    halves = [sum(model.got[:8], []), sum(model.got[8:], [])]
    return [gather(half) for half in halves]

results["Trainer"] = train(Trainer, StreamDataset(data, transform=transform))
results["Trainer, whole"] = train(Trainer, StreamDataset(data, transform=transform, rank=0, world_size=1))
results["Trainer, StreamLoader"] = train(Streaming, None)
"""

_LIGHTNING = """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.got = []

    def training_step(self, batch, _):
        self.got.append(batch["number"].tolist())
        return self.layer(batch["x"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

def train(loader):
    model = Model()
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=scratch,
    ).fit(model, loader)
    halves = [sum(model.got[:8], []), sum(model.got[8:], [])]
    return [gather(half) for half in halves]

results["StreamDataset"] = train(DataLoader(StreamDataset(data, transform=transform), batch_size=4, collate_fn=columns))
workers = StreamDataset(data, batch_size=4, transform=transform)
workers = DataLoader(workers, batch_size=4, num_workers=1, multiprocessing_context="fork", persistent_workers=True, collate_fn=columns)
results["StreamDataset, a worker"] = train(workers)
results["StreamLoader"] = train(StreamLoader(data, 4, transform=transform, collate=columns))
"""


def on_two_ranks(script: str, tmp_path: Path) -> dict[str, Any]:
    """What rank 0 of a real group of two collects, started as ``torchrun`` starts it."""
    data = tmp_path / "data"
    build(DirectoryStore(data), numbered(64, field="cls"), shards=[30, 34])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _BEGIN + script + _END, str(data), str(tmp_path / "scratch")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
        )
        for rank in range(2)
    ]
    found: dict[str, Any] = {}
    try:
        for process in ranks:
            out, err = process.communicate(timeout=170)
            assert process.returncode == 0, err.decode()
            for line in out.decode().splitlines():
                if line.startswith("RESULTS "):
                    found = json.loads(line.removeprefix("RESULTS "))
    finally:
        for process in ranks:
            process.kill()
    return found


def check_exact(epochs: Any) -> None:
    """Two epochs, each every sample once over both ranks, 32 a rank, the second in another order."""
    assert [sorted(number for rank in ranks for number in rank) for ranks in epochs] == [list(range(64))] * 2
    assert [[len(rank) for rank in ranks] for ranks in epochs] == [[32, 32]] * 2
    assert epochs[0] != epochs[1]


def check_refused(result: Any, splitter: str) -> None:
    assert result["before"] == 0
    assert splitter in result["refused"]
    assert "only one in 2 would be trained on. Use stagekit.torch.StreamLoader instead" in result["refused"]
    assert "get_train_dataloader" in result["refused"]
    assert "rank=0, world_size=1" in result["refused"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_accelerate(tmp_path: Path) -> None:
    found = on_two_ranks(_ACCELERATE, tmp_path)
    for name, splitter in (("default", "DataLoaderDispatcher"), ("dispatch_batches=False", "IterableDatasetShard")):
        for workers in ("0 None", "1 fork", "1 spawn"):
            check_refused(found.pop(f"{name}, {workers}"), splitter)
        check_exact(found.pop(f"{name}, whole"))
        check_exact(found.pop(f"{name}, StreamLoader"))
    assert found == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    found = on_two_ranks(_TRAINER, tmp_path)
    check_refused(found["Trainer"], "DataLoaderDispatcher")
    check_exact(found["Trainer, whole"])
    check_exact(found["Trainer, StreamLoader"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lightning_leaves_the_data_alone(tmp_path: Path) -> None:
    found = on_two_ranks(_LIGHTNING, tmp_path)
    for result in found.values():
        check_exact(result)
    assert list(found) == ["StreamDataset", "StreamDataset, a worker", "StreamLoader"]
