"""Which base model a live PEFT model continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..saves.adapter import base_in


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
        return base_in(Path(name))
    commit = getattr(getattr(_inner(model), "config", None), "_commit_hash", None)
    return f"{name}@{commit or getattr(adapter, 'revision', None) or 'main'}"


def _inner(model: Any) -> Any:
    while type(model).__name__ in ("DistributedDataParallel", "OptimizedModule", "DataParallel", "FullyShardedDataParallel"):
        model = model._orig_mod if type(model).__name__ == "OptimizedModule" else model.module
    return model
