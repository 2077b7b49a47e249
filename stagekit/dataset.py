"""A published data set: its manifest, its block tables, and its samples as raw bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .config import StoreConfig, cache_directory
from .errors import BadDigest, Conflict, CorruptShard, InvalidReply, ManifestError, NotFound, RandomAccessRefused, UsageError
from .location import Location
from .mounts import refuse_mount
from .parallel import each
from .progress import Message, Subscriber, ignore
from .shards.archive import END
from .shards.archive import samples as parse_samples
from .shards.grid import BlockSamples, grid_samples
from .shards.index import Block, BlockTable, FieldTotals
from .shards.manifest import MANIFEST, Manifest, ShardRecord, blocks_name
from .store import Where, open_store
from .store.base import Data, Store
from .store.routed import RoutedStore
from .stream.cache import ON_THIS_MACHINE, Cache, CachedFetch
from .transfer.fetch import Fetcher, Range, fetch, fetch_object
from .units import format_count, parse_size

Sample = dict[str, Any]
"""``__key__`` and field → value."""

_READ_AHEAD = 128 * 2**20
_SMALL = 16 << 10  # bytes of a sample up to which looking at all headers of a block together pays

DAMAGE = (CorruptShard, BadDigest, InvalidReply, NotFound, Conflict)
"""What fetching or parsing a block raises when the block is not what the manifest says. Everything else ("cannot tell") is passed on."""


class Dataset:
    """The data set at ``where``. Its manifest is read and checked at once; block tables and shards are read when they are needed.

    Iterating gives every sample once, in source order, as ``{"__key__": key, field: bytes, …}``. Every byte was compared with its
    block's digest first: damage raises ``CorruptShard`` naming shard, block and offset, and the iteration never just ends early.

    ``where`` is a URL, a directory, or an open store. A directory on an object store behind FUSE is refused (``MountRefused``) unless
    ``allow_mount``. Raises ``ManifestError`` when there is no manifest; a bucket that is missing, forbidden or unreachable raises the
    store's own error, since that says nothing about the data. A ``Dataset`` can be pickled; it then carries its manifest along.

    Shards that were indexed where they lie (``stagekit index``) are read there, with the same ``store`` settings.

    With ``cache_limit`` (``"80GiB"``), blocks that were fetched are kept in ``cache_dir`` (``~/.cache/stagekit``) for the next epoch, job
    or rank on this machine, and are compared with their digest each time. Data that lies here already is not cached.

    Example::

        for sample in stagekit.Dataset("s3://bucket/digits"):
            print(sample["__key__"], len(sample["png"]))
    """

    def __init__(
        self,
        where: Where,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: str | int | None = None,
        store: StoreConfig | None = None,
        allow_mount: bool = False,
        on_event: Subscriber = ignore,
    ) -> None:
        if cache_dir is not None and cache_limit is None:
            raise UsageError(f"cache_dir: say how much {os.fspath(cache_dir)} may hold with cache_limit=, such as cache_limit='80GiB'")
        limit = None if cache_limit is None else parse_size(cache_limit, name="cache_limit")
        self.store: Store = open_store(where, store, on_event=on_event)
        if self.location.is_directory:
            refuse_mount(self.location.local_path, "reading a data set from", allow_mount=allow_mount)
        self.manifest: Manifest = _read_manifest(self.store)
        self.store = with_shards(self.store, self.manifest, store, allow_mount=allow_mount, on_event=on_event)
        self.cache = None if limit is None else self._open_cache(cache_dir, limit, allow_mount, on_event)
        self._tables: dict[int, BlockTable] = {}
        self._lock = threading.Lock()

    def _open_cache(self, directory: str | os.PathLike[str] | None, limit: int, allow_mount: bool, on_event: Subscriber) -> Cache | None:
        elsewhere = (Location.parse(shard.url).scheme for shard in self.manifest.shards if shard.url is not None)
        if ON_THIS_MACHINE.issuperset((self.location.scheme, *elsewhere)):
            on_event(Message(f"{self.location} is on this machine already, so nothing of it is cached"))
            return None
        return Cache(
            cache_directory() if directory is None else directory,
            limit,
            dataset=self.digest,
            largest_block=self.manifest.largest_block,
            allow_mount=allow_mount,
            on_event=on_event,
        )

    @property
    def location(self) -> Location:
        """Where the data set lies."""
        return self.store.location

    @property
    def digest(self) -> str:
        """The data set's identity: the same wherever a copy of it lies."""
        return self.manifest.digest

    @property
    def fields(self) -> dict[str, FieldTotals]:
        """For each field, how many samples have it and how many bytes they are."""
        return dict(self.manifest.fields)

    @property
    def shards(self) -> tuple[ShardRecord, ...]:
        """The shards, in source order."""
        return tuple(self.manifest.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return self.manifest.bytes

    def __len__(self) -> int:
        return self.manifest.samples

    def __repr__(self) -> str:
        return f"<Dataset {self.location}: {format_count(len(self))} samples in {format_count(len(self.shards))} shards>"

    def __getitem__(self, index: object) -> NoReturn:
        raise RandomAccessRefused(
            f"reading sample {index!r} of {self.location} by number is refused: each small read of a bucket is a round trip. "
            "Read in sequence with stagekit.torch.StreamLoader (it shuffles), or copy the data to a local disk with `stagekit pull`"
        )

    def __iter__(self) -> Iterator[Sample]:
        return self._samples(range(len(self.block_samples)))

    def head(self, count: int) -> Iterator[Sample]:
        """The first ``count`` samples, as iterating gives them. No block is fetched that holds none of them."""
        blocks = int(np.searchsorted(np.cumsum(self.block_samples), count)) + 1 if count > 0 else 0
        return islice(self._samples(range(min(blocks, len(self.block_samples)))), count)

    def _samples(self, blocks: range) -> Iterator[Sample]:
        budget = max(_READ_AHEAD, self.manifest.largest_block)
        get = fetch if self.cache is None else CachedFetch(self.cache)
        with Fetcher(self.store, map(self.block_range, blocks), threads=8, budget_bytes=budget, get=get) as fetcher:
            for block in blocks:
                try:
                    data = next(fetcher)
                except DAMAGE as error:
                    raise self.damaged(block, error) from error
                yield from self.parse(block, data)

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "manifest": self.manifest, "cache": self.cache}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tables = {}
        self._lock = threading.Lock()

    # Blocks, numbered over the whole data set in source order.

    @cached_property
    def block_samples(self) -> NDArray[np.int64]:
        """How many samples each block holds."""
        return np.fromiter((count for shard in self.manifest.shards for count in shard.block_samples), np.int64)

    @cached_property
    def _first_blocks(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(shard.block_samples) for shard in self.manifest.shards)])

    def place(self, block: int) -> tuple[int, int]:
        """The number of the shard that holds ``block``, and the block's number inside it."""
        shard = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
        return shard, block - int(self._first_blocks[shard])

    def shard_url(self, shard: int) -> str:
        """Where the tar of a shard lies."""
        record = self.manifest.shards[shard]
        return record.url or str(self.location / record.name)

    def table(self, shard: int) -> BlockTable:
        """The block table of a shard, fetched once and compared with the manifest. Raises ``CorruptShard`` when it is damaged."""
        found = self._tables.get(shard)
        if found is None:
            found = _read_table(self.store, self.manifest.shards[shard], self.manifest.largest_block)
            with self._lock:
                self._tables[shard] = found
        return found

    def load_tables(self, shards: Iterable[int], *, threads: int = 8) -> None:
        """Fetch the block tables of ``shards`` that are not there yet, in parallel."""
        missing = [shard for shard in dict.fromkeys(shards) if shard not in self._tables]
        if len(missing) == 1:
            self.table(missing[0])
        elif missing:
            for _ in each(self.table, missing, threads=threads):
                pass

    def block(self, block: int) -> Block:
        """Offset, size, samples and digest of a block."""
        shard, number = self.place(block)
        return self.table(shard).blocks[number]

    def block_range(self, block: int) -> Range:
        """The byte range to fetch for a block, with the digest it must have."""
        shard, number = self.place(block)
        entry = self.table(shard).blocks[number]
        record = self.manifest.shards[shard]
        return Range(record.name, entry.offset, entry.size, entry.digest, url=record.url)

    def parse(self, block: int, data: Data) -> BlockSamples:
        """The samples in a block's bytes, to be taken once each.

        Raises ``CorruptShard`` when they are not those that the block table promises.
        """
        shard, number = self.place(block)
        entry = self.table(shard).blocks[number]
        name = self.shard_url(shard)
        try:
            found = grid_samples(data) if entry.size < entry.samples * _SMALL else None
            if found is None:
                samples = list(parse_samples(data, source=name, base=entry.offset))
                found = BlockSamples(len(samples), samples.__getitem__)
        except CorruptShard as error:
            raise self.damaged(block, error) from error
        if len(found) != entry.samples:
            raise self.damaged(block, CorruptShard(f"expected {entry.samples} samples, found {len(found)}"))
        return found

    def damaged(self, block: int, error: Exception) -> CorruptShard:
        """The error to raise for ``block``, which ``error`` says is not what the manifest promises."""
        shard, number = self.place(block)
        record = self.manifest.shards[shard]
        first = sum(record.block_samples[:number])
        where = f"block {number} of {len(record.block_samples)} of {self.shard_url(shard)}"
        held = f"samples {first} to {first + record.block_samples[number] - 1} of the shard"
        table = self._tables.get(shard)
        if table is not None:
            entry = table.blocks[number]
            held += f", {entry.size} bytes at offset {entry.offset}"
        return CorruptShard(f"{where} ({held}) cannot be read: {error}")


def with_shards(
    store: Store, manifest: Manifest, config: StoreConfig | None = None, *, allow_mount: bool = False, on_event: Subscriber = ignore
) -> Store:
    """``store``, or one in which the shards that lie elsewhere can be read under their names as well, opened with ``config``.

    Raises ``ManifestError`` where a data set in a bucket names a path on the machine that made it, which means something else on every
    other one, and ``MountRefused`` like ``Dataset``.
    """
    elsewhere = {record.name: Location.parse(record.url) for record in manifest.shards if record.url is not None}
    if not elsewhere:
        return store
    for name, location in elsewhere.items():
        if location.scheme in ON_THIS_MACHINE and store.location.scheme not in ON_THIS_MACHINE:
            raise ManifestError(
                f"the manifest of {store.location} says that {name} lies at {location}, a path on some machine; "
                "copy the tars to a bucket and index them there with `stagekit index`"
            )
    for folder in sorted({str(location.parent) for location in elsewhere.values() if location.is_directory}):
        refuse_mount(folder, "reading shards from", allow_mount=allow_mount)
    return RoutedStore(store, elsewhere, config, on_event=on_event)


def _read_manifest(store: Store) -> Manifest:
    name = store.location / MANIFEST
    try:
        data = store.get(MANIFEST)
    except NotFound as error:
        raise ManifestError(
            f"{store.location} holds no data set: there is no {name}. Check the URL with `stagekit ls {store.location.parent}`, or publish "
            f"the data with `stagekit shard SOURCE {store.location}` (the manifest is written last, so an unfinished run has none)"
        ) from error
    return Manifest.from_bytes(bytes(data), source=str(name))


def _read_table(store: Store, shard: ShardRecord, largest_block: int) -> BlockTable:
    key = blocks_name(shard.name)
    name = str(store.location / key)
    try:
        data = fetch_object(store, key, sha256=shard.blocks_sha256)
        table = BlockTable.from_bytes(bytes(data), source=name)
    except DAMAGE as error:
        raise CorruptShard(f"the block table of {store.location / shard.name} cannot be used: {error}") from error
    if table.block_samples != shard.block_samples:
        raise CorruptShard(f"{name}: expected the samples per block that the manifest lists for {shard.name}, found others")
    if table.end > shard.bytes - len(END):
        raise CorruptShard(f"{name}: expected the last block to end in a shard of {shard.bytes} bytes, found that it ends at {table.end}")
    if table.largest > largest_block:
        raise CorruptShard(f"{name}: expected no block above {largest_block} bytes, found one of {table.largest}")
    return table
