"""Streaming into PyTorch. The only part of Stagekit, beside the hooks, that imports torch."""

from __future__ import annotations

from ..errors import MissingExtra

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingExtra.of("torch", "torch", "stagekit.torch") from error

from .collate import collate
from .loader import StreamLoader
from .plan import Receipt
from .samples import StreamDataset

__all__ = ["Receipt", "StreamDataset", "StreamLoader", "collate"]
