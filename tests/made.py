"""Data sets and runs with known contents, written straight into a store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from stagekit.runs.layout import RUN_JSON, CheckpointManifest, CheckpointName, FileRecord, RunRecord
from stagekit.shards.manifest import WIDS, Manifest, wids_json
from stagekit.store.base import Store

from .stream.build import build, numbered


def make_dataset(store: Store, count: int = 24, *, shards: tuple[int, ...] = (10, 10, 4), size: int = 100) -> Manifest:
    """A complete data set: blocks of three samples, side files, manifest."""
    manifest = build(store, numbered(count, size=size), shards=shards)
    store.put(WIDS, wids_json(manifest))
    return manifest


def make_run(store: Store) -> None:
    """A run without checkpoints."""
    store.put(RUN_JSON, RunRecord(1_700_000_000.0, "0.1.0").to_bytes())


def make_checkpoint(
    store: Store,
    step: int,
    files: Mapping[str, bytes],
    *,
    counter: int | None = None,
    generation: int = 1,
    shared: Mapping[str, str] = {},
    epoch: int | None = None,
    metrics: Mapping[str, float] = {},
    best: tuple[str, str] | None = None,
    identity: Mapping[str, str | int] = {},
    commit: bool = True,
) -> CheckpointName:
    """One attempt, committed or not. ``shared`` names files whose bytes lie at another key of the run."""
    name = CheckpointName(generation, step, step if counter is None else counter, "1a2b3c4d")
    records = []
    for path, data in sorted(files.items()):
        if path not in shared:
            store.put(name.file_key(path), data)
        records.append(FileRecord(path, len(data), hashlib.sha256(data).hexdigest(), shared.get(path)))
    if commit:
        manifest = CheckpointManifest(
            name, tuple(records), epoch=epoch, metrics=metrics, identity=identity, best=best, saved_s=1_700_000_100.0 + step
        )
        store.put(name.manifest_key, manifest.to_bytes())
    return name
