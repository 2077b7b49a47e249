"""Stores that fail on purpose, around any other store: for tests of what is left when a call fails, or when the process dies in it."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from ..store.base import Children, Data, Multipart, ObjectInfo, OpenUpload, Store, WrappedStore

Operation = Literal["put", "multipart", "put_part", "complete", "get", "head", "list", "children", "delete", "open_uploads", "abort_upload"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reached a ``FaultStore``: ``key`` is the prefix of a listing, ``start`` a range's start or a part's number."""

    operation: Operation
    key: str
    start: int | None = None
    length: int | None = None


@dataclass(slots=True)
class _Rule:
    operation: str
    key: str
    skip: int
    times: int | None
    after: bool
    action: Callable[[Call], object]

    def takes(self, call: Call, after: bool) -> bool:
        if self.after != after or self.operation not in ("*", call.operation) or not fnmatchcase(call.key, self.key):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            if not self.times:
                return False
            self.times -= 1
        return True


@dataclass(frozen=True, slots=True)
class _Raise:
    # A class and no closure, so that the store can be pickled into worker processes.
    error: Exception

    def __call__(self, _call: Call) -> None:
        raise self.error


def _pass(_call: Call) -> None:
    """The action of a rule that only counts."""


class FaultStore(WrappedStore):
    """``inner``, with failures that a test scripts, and a record of every call in ``calls``.

    ``fail`` makes calls raise, ``corrupt`` spoils what ``get`` returns, ``hide`` keeps keys out of listings while everything else still
    finds them. Rules count calls from all threads together; a pickled copy counts for itself.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: builtins.list[Call] = []
        self._rules: builtins.list[_Rule] = []
        self._flips: builtins.list[tuple[str, int, _Rule]] = []
        self._hidden: builtins.list[str] = []
        self._lock = threading.Lock()

    def fail(
        self,
        operation: Operation | Literal["*"],
        error: Exception,
        key: str = "*",
        *,
        skip: int = 0,
        times: int | None = 1,
        after: bool = False,
    ) -> None:
        """Raise ``error`` from ``times`` calls (``None``: from all) of ``operation`` on keys that match the pattern ``key``, after the
        first ``skip`` of them. With ``after`` the call is carried out first, as when the answer to a request gets lost."""
        self.act(operation, _Raise(error), key, skip=skip, times=times, after=after)

    def act(
        self,
        operation: Operation | Literal["*"],
        action: Callable[[Call], object],
        key: str = "*",
        *,
        skip: int = 0,
        times: int | None = 1,
        after: bool = False,
    ) -> None:
        """Like ``fail``, with anything that can happen at a call."""
        self._rules.append(_Rule(operation, key, skip, times, after, action))

    def corrupt(self, key: str = "*", *, offset: int = 0, skip: int = 0, times: int | None = 1) -> None:
        """Flip the lowest bit of the object's byte ``offset`` in what ``get`` returns, in calls whose range covers it."""
        self._flips.append((key, offset, _Rule("get", key, skip, times, True, _pass)))

    def hide(self, key: str) -> None:
        """Keep keys that match the pattern out of ``list`` and ``children``, as a store does whose listings lag behind."""
        self._hidden.append(key)

    def clear(self) -> None:
        """Forget all rules and calls: the store is well from now on."""
        with self._lock:
            self.calls.clear()
            self._rules.clear()
            self._flips.clear()
            self._hidden.clear()

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        return self._through(Call("put", key, length=len(data)), lambda: self.inner.put(key, data, if_absent=if_absent))

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[Multipart]:
        with self._through(Call("multipart", key), lambda: self.inner.multipart(key, part_size=part_size)) as upload:
            watched = _WatchedMultipart(self, key, upload)
            yield watched
            watched.complete()

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        call = Call("get", key, start, length)
        data = self._through(call, lambda: self.inner.get(key, start, length, if_match=if_match))
        for pattern, offset, rule in self._flips:
            if fnmatchcase(key, pattern) and start <= offset < start + len(data):
                with self._lock:
                    spoil = rule.takes(call, after=True)
                if spoil:
                    data = bytearray(data)
                    data[offset - start] ^= 1
        return data

    def head(self, key: str) -> ObjectInfo:
        return self._through(Call("head", key), lambda: self.inner.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        listed = self._through(Call("list", prefix), lambda: builtins.list(self.inner.list(prefix)))
        yield from (one for one in listed if not self._hides(one.key))

    def children(self, prefix: str = "") -> Children:
        found = self._through(Call("children", prefix), lambda: self.inner.children(prefix))
        if not self._hidden:
            return found
        # A folder is there because of the objects below it.
        folders = tuple(one for one in found.folders if any(not self._hides(below.key) for below in self.inner.list(one)))
        return Children(tuple(one for one in found.objects if not self._hides(one.key)), folders)

    def delete(self, key: str) -> None:
        self._through(Call("delete", key), lambda: self.inner.delete(key))

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        yield from self._through(Call("open_uploads", prefix), lambda: builtins.list(self.inner.open_uploads(prefix)))

    def abort_upload(self, upload: OpenUpload) -> None:
        self._through(Call("abort_upload", upload.key), lambda: self.inner.abort_upload(upload))

    def _hides(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self._hidden)

    def _through(self, call: Call, carry_out: Callable[[], T]) -> T:
        with self._lock:
            self.calls.append(call)
        self._apply(call, after=False)
        result = carry_out()
        self._apply(call, after=True)
        return result

    def _apply(self, call: Call, *, after: bool) -> None:
        with self._lock:
            taken = [rule for rule in self._rules if rule.takes(call, after)]
        for rule in taken:
            rule.action(call)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


class _WatchedMultipart:
    def __init__(self, store: FaultStore, key: str, inner: Multipart) -> None:
        self._store = store
        self._key = key
        self._inner = inner
        self._completed = False

    @property
    def part_size(self) -> int:
        return self._inner.part_size

    def put_part(self, number: int, data: Data) -> None:
        self._store._through(Call("put_part", self._key, number, len(data)), lambda: self._inner.put_part(number, data))

    def complete(self) -> ObjectInfo:
        if self._completed:
            return self._inner.info
        info = self._store._through(Call("complete", self._key), self._inner.complete)
        self._completed = True
        return info

    @property
    def info(self) -> ObjectInfo:
        return self._inner.info
