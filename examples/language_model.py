"""Pre-train a small GPT on documents that stream from a bucket, as bytes, on any number of GPUs.

Once, from a folder of text files, or of JSON lines with a field "text":

    stagekit shard corpus s3://my-bucket/corpus --source-format text

Then here. When this machine is lost, go on with more or fewer GPUs: what was left of the epoch is divided anew, and every document that was
still due comes once. BATCH is that of all GPUs together.

    torchrun --nproc-per-node 8 language_model.py
    torchrun --nproc-per-node 2 language_model.py
"""

import os
import random

import torch
import torch.distributed as dist
from torch import nn

import stagekit
from stagekit.torch import StreamLoader

BUCKET = os.environ.get("BUCKET", "s3://my-bucket")
DATA = os.environ.get("DATA", f"{BUCKET}/corpus")
RUN = os.environ.get("RUN", f"{BUCKET}/runs/gpt")
LAYERS, HEADS, WIDTH, CONTEXT, BATCH, EPOCHS, TELL = (
    int(os.environ.get(name, default))
    for name, default in {"LAYERS": 12, "HEADS": 12, "WIDTH": 768, "CONTEXT": 1024, "BATCH": 128, "EPOCHS": 1, "TELL": 100}.items()
)

rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
if torch.cuda.is_available():
    torch.cuda.set_device(device)
if ranks > 1:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def window(sample):
    """CONTEXT bytes of a document and the one that follows each; another part of it every epoch. -100 is not learned."""
    text = sample["txt"].encode() + b"\0"  # where a document ends
    begin = random.Random(f"{sample['__key__']} {loader.epoch}").randint(0, max(0, len(text) - CONTEXT - 1))
    tokens = torch.frombuffer(bytearray(text[begin : begin + CONTEXT + 1]), dtype=torch.uint8).long()
    padding = (0, CONTEXT + 1 - len(tokens))
    return {"x": nn.functional.pad(tokens, padding)[:-1], "y": nn.functional.pad(tokens, padding, value=-100)[1:]}


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.token.weight, std=0.02)  # it is the output layer as well
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, x):
        ahead = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.layers(self.token(x) + self.place.weight[: x.shape[1]], mask=ahead, is_causal=True)
        return hidden @ self.token.weight.T


torch.manual_seed(0)
model = GPT().to(device)
model = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
loader = StreamLoader(DATA, BATCH // ranks, transform=window, pin_memory=True)

run = stagekit.Run(RUN, keep_last=2)
for epoch in run.epochs(EPOCHS, state={"model": model, "optimizer": optimizer, "loader": loader}, every="10min"):
    for batch in loader:
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device != "cpu"):
            logits = model(batch["x"].to(device, non_blocking=True))
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["y"].flatten().to(device))
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        if rank == 0 and loader.batches_left % TELL == 0:
            print(f"epoch {epoch + 1}  {loader.batches_left} batches left  loss {loss.item():.4f}", flush=True)
if ranks > 1:
    dist.destroy_process_group()
