"""Which base model an adapter continues: its name and revision, the same on every machine.

An adapter's checkpoint is worthless on another base. A model of the Hub is told by its commit, a local directory by what is in it, since
it may lie elsewhere on the next machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PIECES, _PIECE = 17, 4096
_KEPT = ("*.safetensors", "*.bin", "config.json")


def base_model_of(model: Any) -> str | None:
    """``NAME@REVISION`` of the base model under a PEFT ``model``; ``None`` when there is no adapter, or its base has no name."""
    configs = getattr(_inner(model), "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return None
    adapter = next(iter(configs.values()))
    name = getattr(adapter, "base_model_name_or_path", None)
    if not name:
        return None
    if Path(name).is_dir():
        return f"{Path(name).resolve().name}@content-{content_revision(Path(name))}"
    commit = getattr(getattr(_inner(model), "config", None), "_commit_hash", None)
    return f"{name}@{commit or getattr(adapter, 'revision', None) or 'main'}"


def content_revision(directory: Path) -> str:
    """A digest of the weights and the configuration in ``directory``: sizes, and 17 pieces of 4 KiB spread over each file.

    Two models that differ in a few numbers between the pieces have the same one. That is the price of not reading 140 GB at each start.
    """
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _KEPT for path in directory.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        for piece in _pieces(path, size):
            digest.update(piece)
    return digest.hexdigest()[:16]


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for piece in range(_PIECES):
            file.seek(min(size * piece // (_PIECES - 1), max(0, size - _PIECE)))
            yield file.read(_PIECE)


def _inner(model: Any) -> Any:
    while type(model).__name__ in ("DistributedDataParallel", "OptimizedModule", "DataParallel", "FullyShardedDataParallel"):
        model = model._orig_mod if type(model).__name__ == "OptimizedModule" else model.module
    return model
