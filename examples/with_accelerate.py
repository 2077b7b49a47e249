"""Accelerate: the data streams from a bucket, and what save_state writes goes there, the loader's place and random states included.

    stagekit shard photos/train s3://my-bucket/photos/train --labels dir
    accelerate launch with_accelerate.py

The same line on the next machine goes on after the newest epoch.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

import stagekit
from stagekit.hooks.accelerate import load_state, save_state
from stagekit.torch import StreamLoader

BUCKET = os.environ.get("BUCKET", "s3://my-bucket")
DATA = os.environ.get("DATA", f"{BUCKET}/photos")
RUN = os.environ.get("RUN", f"{BUCKET}/runs/accelerate")
CLASSES, SIDE, WIDTH, BATCH, EPOCHS = (
    int(os.environ.get(name, default)) for name, default in {"CLASSES": 1000, "SIDE": 64, "WIDTH": 64, "BATCH": 256, "EPOCHS": 30}.items()
)


def small(sample):
    """Any picture at SIDE times SIDE pixels, in colour."""
    pixels = (sample["jpg"] if "jpg" in sample else sample["png"])[None, :3] / 255
    return {"x": nn.functional.adaptive_avg_pool2d(pixels, SIDE)[0].expand(3, -1, -1), "y": sample["cls"]}


accelerator = Accelerator()
set_seed(0, device_specific=True)
model = nn.Sequential(
    nn.Conv2d(3, WIDTH, 3, stride=2), nn.BatchNorm2d(WIDTH), nn.ReLU(),
    nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2), nn.BatchNorm2d(2 * WIDTH), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, CLASSES),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
loader = StreamLoader(f"{DATA}/train", BATCH // accelerator.num_processes, transform=small)  # it divides the data itself
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.register_for_checkpointing(loader, scheduler)  # what prepare() was not given and has to come back

run = stagekit.Run(RUN, keep_last=2)
found = load_state(accelerator, run)
step = found.step if found else 0
for epoch in range(found.epoch if found else 0, EPOCHS):
    for batch in loader:
        loss = nn.functional.cross_entropy(model(batch["x"].to(accelerator.device)), batch["y"].to(accelerator.device))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    scheduler.step()
    accelerator.print(f"epoch {epoch + 1}  loss {loss.item():.4f}", flush=True)
    save_state(accelerator, run, step=step, epoch=epoch + 1, metrics={"loss": loss.item()})
run.close()
