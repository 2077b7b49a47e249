"""Object storage: one contract (``base.Store``), several implementations, opened by URL."""

from __future__ import annotations

import os

from ..config import StoreConfig
from ..errors import LocationError
from ..location import Location
from ..progress import Subscriber, ignore
from .base import Store

Where = str | os.PathLike[str] | Location | Store
"""Whatever names a place in storage: a URL, a path, a parsed location, or a store that is open already."""


def open_store(where: Where, config: StoreConfig | None = None, *, retry_s: float | None = None, on_event: Subscriber = ignore) -> Store:
    """The store at ``where``. Opening does no I/O and finds no mistakes in credentials or bucket; the first call does.

    A directory is made at the first write. Anything that is reached over a network is wrapped in a ``RetryStore`` with a budget of
    ``retry_s`` seconds (``config.retry_s`` unless given), which tells ``on_event`` what it repeats. A ``Store`` is returned as it is.

    Raises ``LocationError`` for what is no location, ``MissingExtra`` when the package for a URL is not installed.
    """
    if not isinstance(where, str | os.PathLike | Location):
        if not isinstance(getattr(where, "location", None), Location):
            raise LocationError(f"{where!r} is no location; give a directory or a URL such as s3://bucket/prefix")
        return where
    location = Location.parse(where)
    settings = config or StoreConfig()
    budget_s = settings.retry_s if retry_s is None else retry_s
    if location.scheme == "file":
        from .directory import DirectoryStore

        return DirectoryStore(location)
    if location.scheme == "memory":
        from .memory import MemoryStore

        return MemoryStore(location)
    from .retry import RetryStore

    inner: Store
    if location.scheme == "s3" and settings.engine != "fsspec":
        from .s3 import S3Store

        inner = S3Store(location, settings)
    elif location.scheme == "rclone":
        from .rclone import RcloneStore

        inner = RcloneStore(location, settings)
    else:
        from .fsspec import FsspecStore

        inner = FsspecStore(location, settings)
    return RetryStore(inner, budget_s, on_event=on_event)
