"""From raw data to a published data set: planned, claimed, sent shard by shard, committed by its manifest."""

from __future__ import annotations

from .outline import Outline, outline
from .publication import Publication, publish, shard, source_of

__all__ = ["Outline", "Publication", "outline", "publish", "shard", "source_of"]
