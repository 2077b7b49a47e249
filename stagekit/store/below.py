"""A folder of a store as a store of its own: for what walks over many data sets and runs below one URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

from ..location import Location
from .base import Children, Data, Multipart, ObjectInfo, OpenUpload, Store, WrappedStore, check_prefix


class Below(WrappedStore):
    """What ``inner`` holds below ``folder``, which ends in a slash."""

    def __init__(self, inner: Store, folder: str) -> None:
        super().__init__(inner)
        self._folder = check_prefix(folder)

    @property
    def location(self) -> Location:
        return self.inner.location / self._folder

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        return self._own(self.inner.put(self._folder + key, data, if_absent=if_absent))

    def multipart(self, key: str, *, part_size: int) -> AbstractContextManager[Multipart]:
        return self.inner.multipart(self._folder + key, part_size=part_size)

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        return self.inner.get(self._folder + key, start, length, if_match=if_match)

    def head(self, key: str) -> ObjectInfo:
        return self._own(self.inner.head(self._folder + key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return map(self._own, self.inner.list(self._folder + prefix))

    def children(self, prefix: str = "") -> Children:
        below = self.inner.children(self._folder + prefix)
        return Children(tuple(map(self._own, below.objects)), tuple(folder.removeprefix(self._folder) for folder in below.folders))

    def delete(self, key: str) -> None:
        self.inner.delete(self._folder + key)

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        for upload in self.inner.open_uploads(self._folder + prefix):
            yield replace(upload, key=upload.key.removeprefix(self._folder))

    def abort_upload(self, upload: OpenUpload) -> None:
        self.inner.abort_upload(replace(upload, key=self._folder + upload.key))

    def _own(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self._folder))
