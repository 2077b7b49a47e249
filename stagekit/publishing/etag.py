"""The etag that a store with MD5 etags gives, taken while the bytes pass by: it tells what lies there without reading it back."""

from __future__ import annotations

import hashlib
import re

from ..store.base import Data, ObjectInfo
from ..transfer.put import part_size_for

_MD5_ETAG = re.compile(r'"?([0-9a-f]{32})(-[0-9]+)?"?')


class Etag:
    """The etag that a store with MD5 etags gives to the bytes passed through."""

    def __init__(self, part_size: int | None) -> None:
        self._part_size = part_size
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._filled = 0
        self._parts: list[bytes] = []

    @classmethod
    def like(cls, info: ObjectInfo) -> Etag | None:
        """Ready for an object with the etag of ``info``; ``None`` when that is no MD5."""
        match = _MD5_ETAG.fullmatch(info.etag or "")
        return None if match is None else cls(part_size_for(None) if match.group(2) else None)

    def update(self, data: Data) -> None:
        if self._part_size is None:
            self._md5.update(data)
            return
        view = memoryview(data)
        while len(view):
            taken = view[: self._part_size - self._filled]
            self._md5.update(taken)
            self._filled += len(taken)
            view = view[len(taken) :]
            if self._filled == self._part_size:
                self._next_part()

    def _next_part(self) -> None:
        self._parts.append(self._md5.digest())
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._filled = 0

    def matches(self, info: ObjectInfo) -> bool:
        if self._part_size is None:
            expected = self._md5.hexdigest()
        else:
            if self._filled:
                self._next_part()
            expected = f"{hashlib.md5(b''.join(self._parts), usedforsecurity=False).hexdigest()}-{len(self._parts)}"
        return (info.etag or "").strip('"') == expected
