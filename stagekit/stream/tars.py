"""WebDataset tars that nobody has indexed, read as they are: in sequence, whole tars to each rank, with all the checks a tar allows.

Torch-free. What needs an index (counts, exact resume, digests, a shuffle over the whole data set) is not there, and ``WARNING`` says so.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from ..config import StoreConfig
from ..dataset import DAMAGE, Sample
from ..errors import CorruptShard, DuplicateKey, KeyNotAllowed, RandomAccessRefused, ShardError, SourceError, UsageError
from ..location import Location
from ..mounts import refuse_mount
from ..order import permutation
from ..parallel import each
from ..progress import Message, Subscriber, ignore
from ..shards.archive import ArchiveReader
from ..shards.braces import expand
from ..shards.sample import is_meta, split_name
from ..store import open_store
from ..store.base import Data, ObjectInfo, Store
from ..store.routed import RoutedStore
from ..transfer.fetch import PIECE, Fetcher, Range
from ..units import format_count
from .reader import Bad, OnBad

_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.lz4")


def names_tars(source: object) -> bool:
    """Whether ``source`` means tars: a text or path (or several) that ends in ``.tar``, braces included, or in ``.tar.gz`` and the like."""
    if isinstance(source, list | tuple):
        return bool(source) and all(names_tars(one) for one in source)
    return isinstance(source, str | os.PathLike) and os.fspath(source).lower().endswith((".tar", *_COMPRESSED))


class Tars:
    """The tars that ``patterns`` name (``"s3://bucket/shard-{000000..000099}.tar"``), each looked up at once: a missing one raises here.

    There is no manifest, so nothing is known but names and sizes.
    """

    def __init__(
        self,
        patterns: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        connections: int = 16,
        store: StoreConfig | None = None,
        allow_mount: bool = False,
        on_event: Subscriber = ignore,
    ) -> None:
        texts = [patterns] if isinstance(patterns, str | os.PathLike) else patterns
        other = next((one for one in texts if not isinstance(one, str | os.PathLike)), None)
        if other is not None:
            raise UsageError(f"reading tars: {other!r} is no name of a tar; give names such as s3://bucket/shard-{{000000..000099}}.tar")
        self.locations = [_location(text) for one in texts for text in expand(os.fspath(one))]
        if not self.locations:
            raise UsageError("reading tars: the list names none; check what it was made from, such as the pattern of a glob")
        self.store = self._open(store, allow_mount, on_event)
        self.infos = list(each(self._look, range(len(self.locations)), threads=min(connections, len(self.locations))))
        lines = "".join(f"{location}\n" for location in self.locations)
        self.digest = hashlib.sha256(f"stagekit-tars/1\n{lines}".encode()).hexdigest()
        """Of the names alone: it tells other tars apart, not other bytes in them."""

    def _open(self, config: StoreConfig | None, allow_mount: bool, on_event: Subscriber) -> Store:
        for location in {one.parent for one in self.locations}:
            if location.is_directory:
                judged = refuse_mount(location.local_path, "reading tars from", allow_mount=allow_mount)
                if judged.warning:
                    on_event(Message(judged.warning, "warning"))
        routes = {str(number): location for number, location in enumerate(self.locations)}
        return RoutedStore(open_store(self.locations[0].parent, config, on_event=on_event), routes, config, on_event=on_event)

    def _look(self, number: int) -> ObjectInfo:
        try:
            return self.store.head(str(number))
        except FileNotFoundError as error:
            raise SourceError(f"reading {self.locations[number]}: it is not there; check the pattern") from error

    @property
    def location(self) -> str:
        """What messages call them."""
        first, more = self.locations[0], len(self.locations) - 1
        return str(first) if not more else f"{first} and {format_count(more)} more"

    @property
    def warning(self) -> str:
        """What cannot be promised, and the way out. Said once, when reading begins."""
        where = self.locations[0].parent
        return (
            f"{self.location}: these tars have no manifest. They are checked as far as a tar can be, but a flipped bit in a file goes "
            "unseen; ranks get whole tars, so their numbers of batches may differ and len() is unknown; samples are shuffled among "
            "neighbours only; resuming works on as many ranks and reads again what was read. Reading them once changes all of that: "
            f"stagekit index '{where}/….tar' {where}"
        )

    @property
    def fields(self) -> None:
        """Not known before they are read."""
        return

    @property
    def nbytes(self) -> int:
        """Bytes of all tars."""
        return sum(info.size for info in self.infos)

    def __len__(self) -> NoReturn:
        # A TypeError is what objects without a length raise, and what frameworks expect of them.
        raise TypeError(f"how many samples {self.location} have is not known; `stagekit index` counts them")

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: object) -> NoReturn:
        raise RandomAccessRefused(f"reading sample {index!r} of {self.location} by number is refused: tars are read in sequence")

    def share(self, rank: int, world: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
        """The numbers of the tars that ``rank`` reads in ``epoch``, in order. Raises ``UsageError`` when there are fewer than ranks."""
        count = len(self.locations)
        if count < world:
            raise UsageError(
                f"{self.location}: {format_count(count)} tars cannot be divided among {world} ranks. Index them (`stagekit index`), and "
                "samples are divided instead"
            )
        order = range(count) if not shuffle else permutation(count, digest=self.digest, seed=seed, epoch=epoch, purpose="tars").tolist()
        return [int(number) for number in order[rank::world]]


def _location(text: str) -> Location:
    location = Location.parse(text)
    if location.path.lower().endswith(_COMPRESSED):
        raise UsageError(f"reading {text}: a compressed tar cannot be read by ranges; decompress it first")
    if not location.path.lower().endswith(".tar"):
        raise UsageError(f"reading {text}: it does not end in .tar")
    if "*" in text:
        raise UsageError(f"reading {text}: '*' is no brace notation; write {{000000..000099}}, or list the names")
    return location


class TarReader:
    """Samples of ``numbers`` of the tars, in order, ``per_group`` at a time; the last group is shorter.

    Each tar is fetched in ranges of 8 MiB, ``connections`` at a time and ahead into the next tars, within ``ahead_bytes``. With
    ``shuffle`` a number in it, samples are permuted among neighbours that hold about ``shuffle`` bytes together. The first ``skip``
    samples are read and left out. A tar that is cut, damaged, replaced while it is read or no tar raises ``CorruptShard`` in its place;
    with ``on_bad="skip"`` the rest of that tar is left out and told.
    """

    def __init__(
        self,
        tars: Tars,
        numbers: Sequence[int],
        per_group: int,
        *,
        seed: int,
        epoch: int,
        shuffle: int | None,
        skip: int = 0,
        ahead_bytes: int,
        connections: int = 16,
        on_bad: OnBad = "raise",
        stall_timeout_s: float | None = 120.0,
    ) -> None:
        self.bad = Bad()
        self._tars, self._numbers, self._per_group = tars, list(numbers), per_group
        self._seed, self._epoch, self._shuffle, self._skip = seed, epoch, shuffle, skip
        self._ahead_bytes, self._connections = ahead_bytes, connections
        self._on_bad, self._stall_timeout_s = on_bad, stall_timeout_s
        self._fetcher: Fetcher | None = None
        self._earlier_bytes, self._earlier_waited_s = 0, 0.0
        self._closed = False
        self.bytes_cached = 0

    @property
    def bytes_fetched(self) -> int:
        """Bytes of tars fetched so far."""
        return self._earlier_bytes + (self._fetcher.bytes_fetched if self._fetcher else 0)

    @property
    def waited_s(self) -> float:
        """Seconds in which bytes were wanted and still on their way."""
        return self._earlier_waited_s + (self._fetcher.waited_s if self._fetcher else 0.0)

    def close(self) -> None:
        """End the iteration and stop the fetch threads. May be called twice, and from another thread."""
        if not self._closed:
            self._closed = True
            if self._fetcher is not None:
                self._fetcher.close()

    def __iter__(self) -> Iterator[list[Sample | None]]:
        group: list[Sample | None] = []
        left_out = 0
        try:
            for sample in self._mixed():
                if self._closed:
                    return
                if left_out < self._skip:
                    left_out += 1
                    continue
                group.append(sample)
                if len(group) == self._per_group:
                    yield group
                    group = []
            if group and not self._closed:
                yield group
        finally:
            self.close()

    def _mixed(self) -> Iterator[Sample]:
        if self._shuffle is None:
            yield from self._samples()
            return
        held: list[Sample] = []
        size = window = 0
        for sample in self._samples():
            held.append(sample)
            size += sum(len(value) for value in sample.values())
            if size >= self._shuffle:
                yield from self._permuted(held, window)
                held, size, window = [], 0, window + 1
        yield from self._permuted(held, window)

    def _permuted(self, held: list[Sample], window: int) -> Iterator[Sample]:
        # The tars of a rank have an order of their own, so the first one tells ranks apart.
        purpose = f"tars of {self._numbers[0]}" if self._numbers else "tars"
        order = permutation(len(held), digest=self._tars.digest, seed=self._seed, epoch=self._epoch, purpose=purpose, number=window)
        return (held[number] for number in order.tolist())

    def _samples(self) -> Iterator[Sample]:
        self._start(self._numbers)
        for place, number in enumerate(self._numbers):
            chunks = self._chunks(number)
            try:
                yield from _samples(chunks, str(self._tars.locations[number]))
                continue
            except (*DAMAGE, ShardError) as error:
                if self._closed:
                    return
                told = error if isinstance(error, ShardError) else CorruptShard(f"{self._tars.locations[number]} cannot be read: {error}")
                if self._on_bad == "raise":
                    raise told from (None if told is error else error)
                self.bad.add(0, f"the rest of a tar was left out: {told}")
            self._start(self._numbers[place + 1 :])

    def _start(self, numbers: Sequence[int]) -> None:
        if self._fetcher is not None:
            self._fetcher.close()
            self._earlier_bytes += self._fetcher.bytes_fetched
            self._earlier_waited_s += self._fetcher.waited_s
        self._fetcher = Fetcher(
            self._tars.store,
            (wanted for number in numbers for wanted in self._ranges(number)),
            threads=self._connections,
            budget_bytes=self._ahead_bytes,
            stall_timeout_s=self._stall_timeout_s,
        )
        if self._closed:
            self._fetcher.close()

    def _ranges(self, number: int) -> Iterator[Range]:
        info = self._tars.infos[number]
        url = str(self._tars.locations[number])
        for start in range(0, info.size, PIECE):
            yield Range(str(number), start, min(PIECE, info.size - start), if_match=info.etag, url=url)

    def _chunks(self, number: int) -> Iterator[Data]:
        assert self._fetcher is not None
        for _ in self._ranges(number):
            chunk = next(self._fetcher, None)
            if chunk is None:
                return  # closed
            yield chunk


def _samples(chunks: Iterable[Data], source: str) -> Iterator[Sample]:
    """Members with one key that lie together are a sample. The archive is checked to its end."""
    sample: Sample = {}
    for member, payload in ArchiveReader(chunks, source=source):
        named = split_name(member.name)
        if named is None or is_meta(member.name):
            continue
        key, field = named
        if field.startswith("__"):
            raise KeyNotAllowed(f"{source} holds {member.name!r} at offset {member.offset}: {field!r} is a name of the sample itself")
        if sample.get("__key__") != key:
            if sample:
                yield sample
            sample = {"__key__": key}
        elif field in sample:
            raise DuplicateKey(f"{source} holds the field {field!r} of the sample {key!r} twice, the second time at offset {member.offset}")
        sample[field] = b"".join(payload)
    if sample:
        yield sample
