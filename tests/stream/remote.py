"""Data that lies elsewhere, as far as anybody can tell from its location: in memory, or on disk for other processes to read."""

from __future__ import annotations

from pathlib import Path

from stagekit.location import Location
from stagekit.store.base import Store, WrappedStore
from stagekit.store.directory import DirectoryStore


class Remote(WrappedStore):
    """``inner`` under the address ``s3://bucket/data``."""

    @property
    def location(self) -> Location:
        return Location("s3", "bucket", "data")


def remote(path: Path) -> Store:
    """What lies in ``path``, under the address ``s3://bucket/data``."""
    return Remote(DirectoryStore(path))
