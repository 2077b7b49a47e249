"""From raw data to a published data set: planned, claimed, sent shard by shard, committed by its manifest."""

from __future__ import annotations

from .destination import refuse_overlap
from .outline import Outline, outline
from .publication import Publication, publish, shard, source_of
from .writer import ShardWriter

__all__ = ["Outline", "Publication", "ShardWriter", "outline", "publish", "refuse_overlap", "shard", "source_of"]
