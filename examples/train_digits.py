"""Train a small CNN on handwritten digits that stream from a bucket; checkpoints go back to the bucket while it trains.

    python train_digits.py DATA RUN        for example: train_digits.py s3://my-bucket/digits s3://my-bucket/runs/first

Kill it whenever you like and start it again with the same line, on this machine or another: it goes on at the next sample.
"""

import sys
import time

import torch
from torch import nn

import stagekit
from stagekit.torch import StreamLoader

data, run_url = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Dropout(0.5), nn.Linear(64 * 4 * 4, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

loader = StreamLoader(f"{data}/train", batch_size=32, seed=0)
[held_out] = StreamLoader(f"{data}/held-out", batch_size=357, shuffle=False)
run = stagekit.Run(run_url, keep_last=3)
for epoch in run.epochs(12, state={**state, "loader": loader}, every="0.2s"):  # for a training of hours: "10min"
    model.train()
    started, losses = time.perf_counter(), []
    for batch in loader:
        pixels = torch.roll(batch["png"] / 255, tuple(torch.randint(-1, 2, (2,)).tolist()), dims=(2, 3))  # moved by a pixel at random
        loss = nn.functional.cross_entropy(model(pixels), batch["cls"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    scheduler.step()
    rate = len(losses) * 32 / (time.perf_counter() - started)
    model.eval()
    with torch.no_grad():
        right = model(held_out["png"] / 255).argmax(1) == held_out["cls"]
    mean = sum(losses) / max(len(losses), 1)
    print(f"epoch {epoch + 1:2}  loss {mean:.4f}  accuracy {right.double().mean():.4f}  {rate:5.0f} samples/s", flush=True)
