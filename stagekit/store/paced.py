"""A store whose bytes, in and out, stay below a rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..pace import Pace
from .base import Data, Multipart, ObjectInfo, Store, WrappedStore
from .extras import list_strictly


class PacedStore(WrappedStore):
    """``inner``, whose objects are read and written no faster than ``pace`` lets through, over all threads and stores that share it.

    A request waits before it is sent, so what one of them carries goes at the link's speed; the average is what is kept. What is asked
    *about* objects is not slowed down.
    """

    def __init__(self, inner: Store, pace: Pace) -> None:
        super().__init__(inner)
        self._pace = pace

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        self._pace.wait(len(data))
        return self.inner.put(key, data, if_absent=if_absent)

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[Multipart]:
        with self.inner.multipart(key, part_size=part_size) as upload:
            yield _PacedMultipart(upload, self._pace)

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        if length is not None:
            self._pace.wait(length)
            return self.inner.get(key, start, length, if_match=if_match)
        data = self.inner.get(key, start, length, if_match=if_match)
        self._pace.wait(len(data))  # how much it would be was not known before
        return data

    def list_strictly(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return list_strictly(self.inner, prefix)


class _PacedMultipart:
    def __init__(self, upload: Multipart, pace: Pace) -> None:
        self._upload, self._pace = upload, pace

    @property
    def part_size(self) -> int:
        return self._upload.part_size

    def put_part(self, number: int, data: Data) -> None:
        self._pace.wait(len(data))
        self._upload.put_part(number, data)

    def complete(self) -> ObjectInfo:
        return self._upload.complete()

    @property
    def info(self) -> ObjectInfo:
        return self._upload.info
