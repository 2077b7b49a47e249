"""A run and a data set to look at, with moments, damage and hostile contents that are known."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

from PIL import Image

from stagekit.runs.layout import CheckpointManifest, CheckpointName, FileRecord
from stagekit.runs.traffic import to_bytes
from stagekit.store.directory import DirectoryStore
from stagekit.store.usage import Usage

from ..made import make_checkpoint, make_run
from ..stream.build import build

BEGAN_S = 1_790_000_000.0
SCRIPT = "<script>document.title='taken'</script>"


def a_run(folder: Path, steps: int = 6) -> str:
    """Every 100 steps and ten minutes a checkpoint of 300 kB, of which 100 kB were sent by the first. Files take 4 s and the commit 1 s
    more; the fourth takes three times as long."""
    store = DirectoryStore(str(folder))
    make_run(store)
    first = CheckpointName(1, 100, 1, "1a2b3c4d")
    for number in range(1, steps + 1):
        name = CheckpointName(1, 100 * number, number, "1a2b3c4d")
        data = bytes([number]) * 200_000
        store.put(name.file_key("model.safetensors"), data)
        records = [FileRecord("model.safetensors", len(data), hashlib.sha256(data).hexdigest())]
        frozen = b"f" * 100_000
        if number == 1:
            store.put(name.file_key("frozen.safetensors"), frozen)
        place = None if number == 1 else first.file_key("frozen.safetensors")
        records.append(FileRecord("frozen.safetensors", len(frozen), hashlib.sha256(frozen).hexdigest(), place))
        saved_s = BEGAN_S + 600 * number
        metrics = {"loss": 1 / number, f"{SCRIPT}<b>": 2.0}
        manifest = CheckpointManifest(name, tuple(records), epoch=number, metrics=metrics, saved_s=saved_s)
        store.put(name.manifest_key, manifest.to_bytes())
        slow = 3 if number == 4 else 1
        for file in (folder / name.folder / "files").iterdir():
            os.utime(file, (saved_s + 4 * slow,) * 2)
        os.utime(folder / name.manifest_key, (saved_s + 5 * slow,) * 2)
    make_checkpoint(store, 100 * steps + 50, {"model.safetensors": b"x"}, commit=False)
    damaged = make_checkpoint(store, 100 * steps + 60, {"model.safetensors": b"x"})
    store.put(damaged.manifest_key, b"{")
    spent = {"s3://my-bucket/runs/first": Usage(412, 1_300_000, 12_000), "s3://my-bucket/digits": Usage(1333, 0, 8_200_000_000)}
    store.put("owners/000001-1a2b3c4d.closed", to_bytes(spent))
    return str(folder)


def picture(side: int, kind: str = "PNG") -> bytes:
    """A square of one colour."""
    out = io.BytesIO()
    Image.new("RGB", (side, side), (200, 80, 40)).save(out, kind)
    return out.getvalue()


def a_dataset(folder: Path) -> str:
    """Six samples: a picture, a tiny one, a broken one; texts that would like to be more; bytes."""
    hostile = f'{SCRIPT}"><img src=http://elsewhere.example/x onerror="document.title=\'taken\'"> ende \u202egnp.exe'
    samples = [
        ("plain", {"jpg": picture(500, "JPEG"), "txt": b"a short text"}),
        ("tiny", {"jpg": picture(8), "txt": "ü".encode() * 300}),
        ("broken", {"jpg": picture(300)[:200], "txt": hostile.encode()}),
        ("bytes", {"jpg": b"\xff\xfe\x00\x01" * 20, "txt": b"with a \x07 bell"}),
        ("svg", {"txt": b"<svg xmlns='http://www.w3.org/2000/svg' onload=\"document.title='taken'\"/>"}),
        ("empty", {"txt": b""}),
    ]
    build(DirectoryStore(str(folder)), samples)
    return str(folder)
