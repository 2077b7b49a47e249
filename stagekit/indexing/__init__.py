"""Tars that exist already become a data set where they lie: read once, never rewritten, the manifest last."""

from __future__ import annotations

from .run import Indexed, index, index_shards

__all__ = ["Indexed", "index", "index_shards"]
