"""A shard's tar on its way into the store, in the parts that suit the store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from ..shards.index import ShardBuilder
from ..store.base import Store
from ..transfer.put import ObjectWriter, object_writer

THREADS = 4  # parts on their way at once


def tar_writer(
    store: Store, name: str, builder: ShardBuilder, *, check: Callable[[], None] | None = None
) -> AbstractContextManager[ObjectWriter]:
    """``object_writer`` for what ``builder`` makes, which must be finished before the block ends. It takes the sha-256 of it."""
    # A disk takes parts of any size at the same cost, and one at a time: those of the builder go as they are, without a copy.
    on_disk = store.location.is_directory
    return object_writer(
        store,
        name,
        threads=1 if on_disk else THREADS,
        part_size=ShardBuilder.PIECE if on_disk else None,
        check=check,
        digest=lambda: builder.result.sha256,
    )
