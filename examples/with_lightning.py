"""Lightning: the data streams from a bucket, and what ModelCheckpoint saves goes there.

    stagekit shard photos/train s3://my-bucket/photos/train --labels dir
    python with_lightning.py

The same line on the next machine goes on after the newest epoch.
"""

import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from stagekit.hooks.lightning import StagekitCheckpointIO
from stagekit.torch import StreamLoader

BUCKET = os.environ.get("BUCKET", "s3://my-bucket")
DATA = os.environ.get("DATA", f"{BUCKET}/photos")
RUN = os.environ.get("RUN", f"{BUCKET}/runs/lightning")
CLASSES, SIDE, WIDTH, BATCH, EPOCHS = (
    int(os.environ.get(name, default)) for name, default in {"CLASSES": 1000, "SIDE": 64, "WIDTH": 64, "BATCH": 256, "EPOCHS": 30}.items()
)


def small(sample):
    """Any picture at SIDE times SIDE pixels, in colour."""
    pixels = (sample["jpg"] if "jpg" in sample else sample["png"])[None, :3] / 255
    return {"x": nn.functional.adaptive_avg_pool2d(pixels, SIDE)[0].expand(3, -1, -1), "y": sample["cls"]}


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, stride=2), nn.BatchNorm2d(WIDTH), nn.ReLU(),
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2), nn.BatchNorm2d(2 * WIDTH), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * WIDTH, CLASSES),
        )  # fmt: skip

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.layers(batch["x"]), batch["y"])
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=BATCH)
        return loss

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch + 1}  loss {self.trainer.callback_metrics['loss']:.4f}", flush=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


seed_everything(0)
loader = StreamLoader(f"{DATA}/train", BATCH, transform=small)
io = StagekitCheckpointIO(RUN, keep_last=2)
saver = ModelCheckpoint(dirpath="out", save_top_k=1, save_on_train_epoch_end=True)
trainer = Trainer(max_epochs=EPOCHS, plugins=[io], callbacks=[saver], logger=False, enable_progress_bar=False)
trainer.fit(Classifier(), loader, ckpt_path=io.resume_path())
