"""Tables and text in a bucket, read by ranges: the next ones are on their way while one is parsed, and nothing is copied to this disk."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO, cast

from ..config import StoreConfig
from ..errors import Conflict, NotFound, SourceError
from ..location import Location
from ..shards.plan import PlannedField, PlannedSample
from ..store import open_store
from ..store.base import Data, Store
from ..transfer.fetch import Fetcher, Range
from .files import FileRules
from .prefix import PrefixSource
from .shelf import Stamp, not_there

_FIRST = 256 * 1024  # fetched alone at a new position: often that is all, as for the header of a CSV
_PIECE = 4 * 2**20
_AHEAD = 4
_READERS = 16
_FOLDERS = 4  # whose listings are remembered while the files that rows name are looked up


@dataclass(frozen=True)
class Bucket:
    """The objects below ``where``. The path of one is its URL."""

    where: Location
    config: StoreConfig | None = None

    @property
    def readers(self) -> int:
        return _READERS

    def _store(self) -> Store:
        return open_store(self.where, self.config)

    def _key(self, path: str) -> str:
        return path.removeprefix(str(self.where)).lstrip("/")

    def is_folder(self, path: str) -> bool:
        key = self._key(path)
        return not key or next(iter(self._store().list(f"{key}/")), None) is not None

    def names(self, path: str, hidden: Callable[[str], bool]) -> Iterator[str]:
        key = self._key(path)
        known: dict[str, bool] = {}

        def left_out(name: str) -> bool:
            """Whether a folder on the way to ``name``, or itself, is hidden; each is asked for once."""
            above, _, last = name.rpartition("/")
            if above:
                if above not in known:
                    known[above] = left_out(above)
                if known[above]:
                    return True
            return hidden(last)

        for info in self._store().list(f"{key}/" if key else ""):
            name = info.key.removeprefix(f"{key}/") if key else info.key
            if not name.endswith("/") and not left_out(name):
                yield name

    def stamp(self, path: str) -> Stamp:
        info = self._store().head(self._key(path))
        return Stamp(info.size, info.etag)

    def open(self, path: str, *, straight: bool = True, mark: int | str | None = None, size: int | None = None) -> BinaryIO:
        key = self._key(path)
        store = self._store()
        size = store.head(key).size if size is None else size
        file = RangedFile(store, key, size, straight=straight, etag=mark if isinstance(mark, str) else None)
        return cast("BinaryIO", io.BufferedReader(file, _FIRST) if straight else file)

    def files(self, path: str, rules: FileRules) -> PrefixSource:
        key = self._key(path)
        return PrefixSource(self.where / key if key else self.where, rules, self.config)

    def sizes(self) -> Callable[[str], int]:
        store = self._store()

        @lru_cache(_FOLDERS)
        def listed(folder: str) -> dict[str, int]:
            return {info.key: info.size for info in store.children(folder).objects}

        def size(path: str) -> int:
            key = self._key(path)
            found = listed(key[: key.rfind("/") + 1]).get(key)
            if found is None:
                raise not_there(path)
            return found

        return size

    def content(self, path: str, size: int, *, whole: bool) -> Iterable[Data]:
        key = self._key(path)
        sample = PlannedSample(key, (PlannedField("", size, key),))
        ((_, _, pieces),) = PrefixSource(self.where, config=self.config).read(sample)
        return tuple(pieces) if whole else pieces


class RangedFile(io.RawIOBase):
    """An object of ``size`` bytes as a file for reading, from any position, by ranges.

    ``straight``: behind the first range at a position, the next ones are fetched ahead, in 20 MiB of memory; otherwise each read is one
    request. An object that was replaced since it had ``etag`` raises ``SourceError``.
    """

    def __init__(self, store: Store, key: str, size: int, *, straight: bool, etag: str | None = None) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._size = size
        self._straight = straight
        self._etag = etag
        self._at = 0
        self._began = -1  # where reading straight on began
        self._held = memoryview(b"")
        self._ahead: Fetcher | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        at = max(0, start + offset)
        if at != self._at:
            self._stop()
            self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes. What is one request is handed on as it came."""
        if self._straight or size < 0:
            return super().read(size)
        size = min(size, self._size - self._at)
        data = bytes(self._next(size)) if size > 0 else b""
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")
        wanted = wanted[: max(0, self._size - self._at)]
        done = 0
        while done < len(wanted):
            if not len(self._held):
                self._held = memoryview(self._next(len(wanted) - done))
            taken = self._held[: len(wanted) - done]
            wanted[done : done + len(taken)] = taken
            self._held = self._held[len(taken) :]
            done += len(taken)
            self._at += len(taken)
        return done

    def _next(self, size: int) -> Data:
        """The bytes from here on; at least one."""
        try:
            return self._fetched(size)
        except Conflict as error:
            raise SourceError(
                f"reading {self._store.location / self._key}: it was replaced after the source was listed, so its content may be another; "
                "run again once it stands still"
            ) from error
        except NotFound as error:
            raise SourceError(
                f"reading {self._store.location / self._key}: it was there when the source was listed and is gone; run again"
            ) from error

    def _fetched(self, size: int) -> Data:
        left = self._size - self._at
        if not self._straight:
            return self._store.get(self._key, self._at, min(size, left), if_match=self._etag)
        if self._began < 0:
            self._began = self._at
            return self._store.get(self._key, self._at, min(max(size, _FIRST), left), if_match=self._etag)
        if self._ahead is None:
            ranges = (Range(self._key, at, min(_PIECE, self._size - at), if_match=self._etag) for at in range(self._at, self._size, _PIECE))
            self._ahead = Fetcher(self._store, ranges, threads=min(_AHEAD, -(-left // _PIECE)), budget_bytes=_AHEAD * _PIECE)
        return next(self._ahead)

    def _stop(self) -> None:
        self._held = memoryview(b"")
        self._began = -1
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def close(self) -> None:
        with suppress(AttributeError):  # a file that was never made
            self._stop()
        super().close()
