"""Run in an interpreter of its own, with years-old packages in front of its path: one path through everything that needs no PyTorch.

Arguments: a folder to work in, and JSON with a URL and the settings of its store for each server. Prints what it found as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import botocore
import s3fs

import stagekit
from stagekit.errors import Conflict, Fenced, UploadFailed
from stagekit.store import open_store
from stagekit.store.s3 import S3Store
from stagekit.store.s3_probe import S3Probe


def data_set(raw: Path, url: str, config: stagekit.StoreConfig) -> dict[str, Any]:
    stagekit.shard(raw, url, store=config, shard_size="256KiB")
    samples = {sample["__key__"]: sample["bin"] for sample in stagekit.Dataset(url, store=config)}
    return {
        "told": stagekit.info(url, store=config).samples,
        "the same": samples == {path.stem: path.read_bytes() for path in raw.glob("*.bin")},
    }


def run(work: Path, url: str, config: stagekit.StoreConfig) -> dict[str, Any]:
    def on(machine: str) -> stagekit.Run:
        return stagekit.Run(url, store=config, spool_dir=work / machine, on_event=lambda event: None)

    (work / "out").mkdir()
    (work / "out" / "model.bin").write_bytes(bytes(range(256)) * 33_000)  # two parts
    first = on("one")
    for step in (1, 2):
        first.submit(work / "out", step=step)
        first.drain()
    second = on("two")
    found = second.restore(work / "restored")
    second.submit(work / "out", step=3)
    second.close()
    late = first.submit(work / "out", step=4)
    try:
        first.close()
    except UploadFailed:
        refused = isinstance(late.error, Fenced)
    else:
        refused = False
    stagekit.prune(url, keep_last=1, store=config)
    return {
        "restored": found and found.step,
        "the same": (work / "restored" / "model.bin").read_bytes() == (work / "out" / "model.bin").read_bytes(),
        "late writer refused": refused,
        "left": [one.step for one in on("three").checkpoints()],
    }


def copies(work: Path, url: str, config: stagekit.StoreConfig) -> bool:
    stagekit.push(work / "out", url, store=config)
    stagekit.pull(url, work / "pulled", store=config)
    return (work / "pulled" / "model.bin").read_bytes() == (work / "out" / "model.bin").read_bytes()


def conditions(url: str, config: stagekit.StoreConfig) -> dict[str, Any]:
    store = S3Store(url, config)
    created = ""
    if store.conditional_create():
        store.put("claim", b"first", if_absent=True)
        try:
            store.put("claim", b"second", if_absent=True)
        except Conflict:
            created = bytes(store.get("claim")).decode()
    kept = next(fact for fact in S3Probe(store).facts() if fact.name == "conditions").values["conditions"]
    return {"created": created, "kept": kept}


def through_s3fs(url: str, config: stagekit.StoreConfig) -> bool:
    system = s3fs.S3FileSystem(**config.fsspec_options())
    path = url.removeprefix("s3://") + "/file"
    system.pipe_file(path, b"x" * 1000)
    store = open_store(url, replace(config, engine="fsspec"))
    store.put("other", b"y")
    return bool(system.cat_file(path) == b"x" * 1000 and bytes(store.get("file", 0, 3)) == b"xxx" and len(system.ls(path[:-5])) == 2)


def main(work: Path, places: dict[str, dict[str, Any]]) -> None:
    raw = work / "raw"
    raw.mkdir()
    for number in range(40):
        (raw / f"sämple {number:02}.bin").write_bytes(bytes([number]) * (1 + 977 * number))
    found: dict[str, Any] = {}
    for name, place in places.items():
        url, config = place["url"], stagekit.StoreConfig(**place["store"])
        (work / name).mkdir()
        found[name] = {
            "data set": data_set(raw, f"{url}/data", config),
            "run": run(work / name, f"{url}/run", config),
            "pushed and pulled": copies(work / name, f"{url}/copy", config),
            "conditions": conditions(f"{url}/probed", config),
            "s3fs": through_s3fs(f"{url}/s3fs", config),
        }
    versions = {
        "botocore": botocore.__version__,
        **{package: version(package) for package in ("aiobotocore", "boto3", "fsspec", "s3fs", "s3transfer")},
    }
    print(json.dumps({"versions": versions, "torch": "torch" in sys.modules, "places": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
