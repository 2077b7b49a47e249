"""Stagekit: stream training data from S3-compatible storage, sync checkpoints back, throw the server away.

The names below are loaded on first use, so that ``import stagekit`` costs nothing: no torch, no S3 client.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import StoreConfig as StoreConfig
    from .copies.copy import copy as copy
    from .copies.pull import pull as pull
    from .copies.push import push as push
    from .dataset import Dataset as Dataset
    from .diagnosis import doctor as doctor
    from .fitting import fit as fit
    from .hooks.loop import Run as Run
    from .indexing import index as index
    from .location import Location as Location
    from .mds import shard_mds as shard_mds
    from .pruning import prune as prune
    from .publishing import ShardWriter as ShardWriter
    from .publishing import shard as shard
    from .report import info as info
    from .report import ls as ls
    from .stream.mix import Mix as Mix
    from .verdict import teardown as teardown
    from .verification import verify as verify

__version__ = "0.1.0"

_HOMES = {
    "Dataset": "dataset",
    "Location": "location",
    "Mix": "stream.mix",
    "Run": "hooks.loop",
    "ShardWriter": "publishing",
    "StoreConfig": "config",
    "copy": "copies.copy",
    "doctor": "diagnosis",
    "fit": "fitting",
    "index": "indexing",
    "info": "report",
    "ls": "report",
    "prune": "pruning",
    "pull": "copies.pull",
    "push": "copies.push",
    "shard": "publishing",
    "shard_mds": "mds",
    "teardown": "verdict",
    "verify": "verification",
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


def _find_namesake() -> str | None:
    """Where PyPI's unrelated distribution "stagekit" is installed, if it is: a workflow tool whose files go into this same folder."""
    # By listing: importlib.metadata would say the same, and takes longer to load than the rest of this package.
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            stem, kind = os.path.splitext(name)
            if kind in (".dist-info", ".egg-info") and stem.partition("-")[0].lower() == "stagekit":
                return os.path.join(folder, name)
    return None


if _namesake := _find_namesake():
    warnings.warn(
        f"The unrelated distribution 'stagekit' is installed too ({_namesake}) and writes into the same folder as stagekit-ml. "
        "Remove both with: pip uninstall stagekit stagekit-ml, then install Stagekit again, from its clone or git URL.",
        stacklevel=2,
    )
