"""Stagekit: stream training data from S3-compatible storage, sync checkpoints back, throw the server away.

The names below are loaded on first use, so that ``import stagekit`` costs nothing: no torch, no S3 client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import StoreConfig as StoreConfig
    from .location import Location as Location

__version__ = "0.1.0"

_HOMES = {
    "Location": "location",
    "StoreConfig": "config",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
