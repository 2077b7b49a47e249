"""MosaicML's format: the same sources, plan and publish order as for tars, written by MosaicML's own ``MDSWriter``."""

from __future__ import annotations

from .outline import MdsOutline, mds_outline
from .publication import MdsPublication, publish_mds, shard_mds

__all__ = ["MdsOutline", "MdsPublication", "mds_outline", "publish_mds", "shard_mds"]
