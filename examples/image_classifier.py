"""Train an image classifier on JPEG and PNG files that stream from a bucket, decoded and augmented in threads beside the training.

Once, with one folder a class below photos/train and photos/held-out:

    stagekit shard photos/train s3://my-bucket/photos/train --labels dir
    stagekit shard photos/held-out s3://my-bucket/photos/held-out --labels dir

Then here, and the same line again on the next machine, which goes on where this one was lost:

    python image_classifier.py
"""

import io
import os
import random

import numpy as np
import torch
from PIL import Image
from torch import nn

import stagekit
from stagekit.torch import StreamLoader

BUCKET = os.environ.get("BUCKET", "s3://my-bucket")
DATA = os.environ.get("DATA", f"{BUCKET}/photos")
RUN = os.environ.get("RUN", f"{BUCKET}/runs/photos")
CLASSES, SIDE, WIDTH, BATCH, EPOCHS, THREADS = (
    int(os.environ.get(name, default))
    for name, default in {"CLASSES": 1000, "SIDE": 224, "WIDTH": 64, "BATCH": 256, "EPOCHS": 90, "THREADS": 16}.items()
)


def picture(sample, augment):
    """A square of SIDE pixels with its class: of any part of the picture, mirrored or not; without ``augment`` of its middle."""
    image = Image.open(io.BytesIO(sample["jpg"] if "jpg" in sample else sample["png"])).convert("RGB")
    chance = random.Random(f"{sample['__key__']} {loader.epoch}")  # threads have no order, and a resumed epoch shows the same pictures
    side = min(image.size) * (chance.uniform(0.5, 1) if augment else 0.9)
    left, top = ((length - side) * (chance.random() if augment else 0.5) for length in image.size)
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    if augment and chance.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return {"x": torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255, "y": int(sample["cls"])}


def stage(narrow, wide):
    return nn.Sequential(
        nn.Conv2d(narrow, wide, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(),
        nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(),
    )  # fmt: skip


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(  # any model of pictures to classes, such as torchvision.models.resnet50(num_classes=CLASSES)
    stage(3, WIDTH), stage(WIDTH, 2 * WIDTH), stage(2 * WIDTH, 4 * WIDTH), stage(4 * WIDTH, 8 * WIDTH),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * WIDTH, CLASSES),
).to(device)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
how = {"batch_size": BATCH, "threads": THREADS, "decode": None, "pin_memory": True}
loader = StreamLoader(f"{DATA}/train", transform=lambda sample: picture(sample, True), **how)
held_out = StreamLoader(f"{DATA}/held-out", transform=lambda sample: picture(sample, False), shuffle=False, drop_last=False, **how)

run = stagekit.Run(RUN, keep_last=2, keep_best=("accuracy", "max", 1))
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
for epoch in run.epochs(EPOCHS, state=state, every="10min"):
    model.train()
    for batch in loader:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = nn.functional.cross_entropy(model(batch["x"].to(device, non_blocking=True)), batch["y"].to(device))
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        right = [(model(batch["x"].to(device)).argmax(1).cpu() == batch["y"])[batch["__mask__"]] for batch in held_out]
    epoch.metrics["accuracy"] = torch.cat(right).double().mean().item()
    print(f"epoch {epoch + 1}  loss {loss.item():.4f}  accuracy {epoch.metrics['accuracy']:.4f}  {loader.receipt}", flush=True)
