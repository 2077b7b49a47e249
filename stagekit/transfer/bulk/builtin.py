"""The built-in engine: one object to one file, or one file to one object, in parallel ranges, compared with all that is known of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ...errors import BadDigest, Conflict, OutOfSpace, SourceError
from ...store.base import Data, Store
from ..checksum import Checksum, Expected
from ..fetch import PIECE, fetch_pieces
from .base import Item

_READ = 4 * 2**20


class Space(Protocol):
    """Where files go, when others need some of it too."""

    def taking(self, size: int, /) -> AbstractContextManager[None]:
        """``size`` bytes more are written within the block, which begins when they may. Raises ``OutOfSpace`` when that will not be."""

    def give_back(self, size: int, /) -> None:
        """``size`` bytes that were taken are there no more."""


_AT_ONCE = nullcontext()


class _Unbounded:
    def taking(self, _size: int, /) -> AbstractContextManager[None]:
        return _AT_ONCE

    def give_back(self, _size: int, /) -> None:
        pass


UNBOUNDED: Space = _Unbounded()


class Trust:
    """Whether a store's etags, where they look like MD5s, are MD5s. They are believed to be until one was seen that is not."""

    def __init__(self) -> None:
        self.etags = True


def pieces_of(store: Store, item: Item, threads: int) -> Iterator[Data]:
    """The object's bytes in order. A small one takes one request. Raises ``Conflict`` when it is no longer the one that was listed."""
    if item.size > PIECE:
        yield from fetch_pieces(store, item.key, size=item.size, etag=item.etag, threads=threads)
    elif item.size:
        yield store.get(item.key, 0, item.size, if_match=item.etag)


def checked_twice(attempt: Callable[[Expected], Checksum], item: Item, trust: Trust, name: str) -> Checksum:
    """What ``attempt`` gives for what is expected, made again when it differs; then with the sha-256, where there was a block table.

    Where the same bytes came twice and only an etag says otherwise, that etag is no MD5, and none of this store is from then on. Other
    bytes than a sha-256 says raise ``BadDigest``.
    """
    first = attempt(item.expected)
    if first.finding != "differs":
        return first
    second = attempt(replace(item.expected, blocks=None))
    if second.finding != "differs":
        return second
    if item.sha256 is None and first.digest == second.digest:
        trust.etags = False
        return second
    expected = f"sha-256 {item.sha256}" if item.sha256 else f"etag {item.etag}"
    raise BadDigest(
        f"reading {name}: expected {expected}, found {first.digest} and then {second.digest}; the object is damaged or was replaced",
        transient=False,
    )


def fetch_item(
    store: Store,
    item: Item,
    path: Path,
    trust: Trust,
    *,
    threads: int = 4,
    space: Space = UNBOUNDED,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Checksum:
    """Write ``item`` to the new file ``path``, compared. A full disk or quota raises ``OutOfSpace``, and the file is removed then."""

    taken = 0

    def attempt(expected: Expected) -> Checksum:
        nonlocal taken
        checksum = Checksum(expected, trust_etag=trust.etags)
        arrived = 0
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            space.give_back(taken)  # by an attempt before this one
            taken = 0
            try:
                for data in pieces_of(store, item, threads):
                    checksum.update(data)
                    with space.taking(len(data)):
                        taken += len(data)
                        _write(file, data)
                    arrived += len(data)
                    on_bytes(len(data))
            finally:
                os.close(file)
        except BaseException as error:
            on_bytes(-arrived)
            path.unlink(missing_ok=True)
            space.give_back(taken)
            taken = 0
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(
                    f"writing {item.path}: the disk or quota is full ({item.size} bytes were needed); free space and repeat, "
                    "what was verified is kept"
                ) from error
            raise
        if checksum.finding == "differs":
            on_bytes(-arrived)
        return checksum

    try:
        return checked_twice(attempt, item, trust, str(store.location / item.key))
    except Conflict as error:
        raise Conflict(f"reading {store.location / item.key}: it was replaced while it was copied; repeat the command") from error


def file_checksum(path: Path, expected: Expected, trust: Trust) -> Checksum:
    """The same of a file that is there. Its pages are warm when it was just written."""
    checksum = Checksum(expected, trust_etag=trust.etags)
    for data in file_pieces(path):
        checksum.update(data)
    if checksum.finding == "differs" and expected.blocks is not None:  # a table need not cover all of a shard
        return file_checksum(path, replace(expected, blocks=None), trust)
    return checksum


def same_bytes(store: Store, item: Item, path: Path, trust: Trust) -> bool:
    """Whether the local file, whose size is the object's, has its bytes: by a checksum where that tells, else by reading the object."""
    checksum = file_checksum(path, item.expected, trust)
    if checksum.finding == "proven" or item.sha256 is not None:
        return checksum.finding == "proven"
    plain = Expected(item.size)
    theirs = Checksum(plain)
    for data in pieces_of(store, item, threads=2):
        theirs.update(data)
    return file_checksum(path, plain, trust).digest == theirs.digest


def file_pieces(path: Path) -> Iterator[bytes]:
    """A local file's bytes. A symbolic link at its place is refused."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SourceError(f"reading {path}: it is a symbolic link; remove it and repeat") from error
        raise
    try:
        at_once = min(_READ, os.fstat(file).st_size + 1)  # a buffer of pages for a small file costs more than reading it
        while data := os.read(file, at_once):
            yield data
    finally:
        os.close(file)


def _write(file: int, data: Data) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(file, view) :]
