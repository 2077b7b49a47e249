"""The contract of an object store. ``tests/store/contract.py`` holds one test per sentence, run on every implementation.

A store speaks object storage and nothing else: whole objects, byte ranges, listings, deletion. There is no file handle, no seek
and no open-for-update. A store is opened *at a location*, and every key is relative to it: ``shards/000000.tar`` below
``s3://bucket/imagenet``. Each call tries once and reports well; ``store.retry`` repeats, other wrappers count or limit.

A store holds a location and settings only. It can be pickled, used from many threads, and used after ``fork``: connections are
made lazily, one client per process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..errors import Denied, NotFound, StoreError, UsageError
from ..location import Location

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as the store reports it.

    ``etag`` is opaque and changes when the object's bytes are replaced; ``None`` where the store did not tell it (a finished multipart
    upload, some file systems). ``modified_s`` is the store's clock in seconds since the epoch and is never used to decide what is newest.
    ``sha256`` is what the store knows the bytes' digest to be, where it knows one and tells it unasked (model hubs).
    """

    key: str
    size: int
    etag: str | None = None
    modified_s: float | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Children:
    """What lies directly below a prefix: objects, and folders (each a prefix that ends in ``/``). Both sorted by name."""

    objects: tuple[ObjectInfo, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload that was started and neither completed nor aborted: billed, and in no listing of objects."""

    key: str
    upload_id: str
    started_s: float | None = None


class Multipart(Protocol):
    """An object on its way in, part by part. Nothing is visible under its key until the ``with`` block ends without an exception.

    Leaving the block normally completes it; leaving by an exception aborts it and removes what was sent. A killed process leaves an
    ``OpenUpload`` at most, never an object.
    """

    @property
    def part_size(self) -> int:
        """Bytes of every part but the last."""

    def put_part(self, number: int, data: Data) -> None:
        """Send part ``number`` (from 0). Parts may come from several threads and in any order, each once or, after an error, again.

        All parts but the last have exactly ``part_size`` bytes. The store checks each part against its MD5 where it can.
        """

    def complete(self) -> ObjectInfo:
        """Make the object visible, whole, and return what is there now; the end of the ``with`` block calls it.

        After a transient error it may be called again. Once it has succeeded, calling it again does nothing. It raises ``UsageError``
        when a part is missing or has a size that it must not have.
        """

    @property
    def info(self) -> ObjectInfo:
        """The finished object. Available after ``complete()``, so after the ``with`` block ended normally."""


@runtime_checkable
class Store(Protocol):
    """An object store at one location. Errors are those of ``stagekit.errors``; messages name the operation and the full location."""

    @property
    def location(self) -> Location:
        """Where keys are relative to."""

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        """Store ``data`` whole or not at all, replacing what was there.

        With ``if_absent`` it raises ``Conflict`` when the key exists; only one of two concurrent callers succeeds. That is refused
        with ``UsageError`` by a store whose ``conditional_create()`` is false. The server checks an MD5 of the bytes where it can.
        """

    def multipart(self, key: str, *, part_size: int) -> AbstractContextManager[Multipart]:
        """Start an object of unknown length, sent in parts. See ``Multipart``. The abort is registered where the upload starts."""

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        """The bytes ``[start, start + length)``, or to the object's end when ``length`` is ``None``: exactly those bytes, or an error.

        A range that reaches beyond the end raises ``InvalidReply`` (not transient). ``if_match`` raises ``Conflict`` when the object's
        etag is another one now. A server that answers a range with the whole object is tolerated. A cut body raises ``Unreachable``
        whose ``received`` holds what came before the cut.
        """

    def head(self, key: str) -> ObjectInfo:
        """Size and etag. ``NotFound`` only when the object is provably absent; a missing bucket is ``BucketNotFound``."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object below ``prefix``, which is empty or ends in ``/``, in ascending order of key (by UTF-8 bytes), all pages.

        ``run-1/`` never yields ``run-10/``. A prefix with nothing below it yields nothing; a missing bucket raises ``BucketNotFound``.
        """

    def children(self, prefix: str = "") -> Children:
        """Objects and folders directly below ``prefix``, which is empty or ends in ``/``."""

    def delete(self, key: str) -> None:
        """Remove the object. Deleting what is not there succeeds."""

    def conditional_create(self) -> bool:
        """Whether ``put(if_absent=True)`` really is exclusive here. Found out by a self-proving call when first asked, then remembered."""

    def checks_digest(self) -> bool:
        """Whether a ``put`` or ``put_part`` that returned was checked against the digest of its bytes on the far side.

        True for memory and local files, which hand the bytes to this machine's kernel. Elsewhere found out by a self-proving call (a
        put with a wrong ``Content-MD5`` on a scratch key must be refused) when first asked, then remembered. Where it is false, a
        verified upload has to compare etags or read back.
        """

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        """Multipart uploads below ``prefix`` that nobody finished."""

    def abort_upload(self, upload: OpenUpload) -> None:
        """Drop an unfinished upload. One that is already gone is no error."""


def check_key(key: str) -> str:
    """``key`` itself when it can be stored everywhere: relative, no empty, ``.`` or ``..`` component, no NUL, at most 1,024 bytes of UTF-8.

    Raises ``UsageError``. Every store calls it before it touches anything, so that no key can leave the store's location.
    """
    parts = key.split("/")
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{key!r} is no object key: it is not valid Unicode") from None
    if not key or "\0" in key or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"{key!r} is no object key: it must be relative, without empty, '.' or '..' components")
    if len(encoded) > 1024:
        raise UsageError(f"{key[:60]!r}… is no object key: {len(encoded)} bytes, and S3 allows 1,024")
    return key


def check_prefix(prefix: str) -> str:
    """``prefix`` itself when it is empty or a key followed by ``/``. Raises ``UsageError``."""
    if prefix:
        if not prefix.endswith("/"):
            raise UsageError(f"{prefix!r} is no prefix: it must be empty or end in '/', so that run-1/ never means run-10/")
        check_key(prefix[:-1])
    return prefix


def check_range(start: int, length: int | None) -> None:
    """Raises ``UsageError`` for a range that cannot be meant."""
    if start < 0 or (length is not None and length < 0):
        raise UsageError(f"bytes [{start}, +{length}) are no range: start and length must not be negative")


def check_part(number: int, size: int, part_size: int, upload: str) -> None:
    """Raises ``UsageError`` for a part that no complete object can hold. ``upload`` names the object in the message."""
    if number < 0:
        raise UsageError(f"writing {upload}: part {number} does not exist, numbers start at 0")
    if size > part_size:
        raise UsageError(f"writing {upload}: part {number} has {size} bytes, more than the {part_size} of a part")


def check_parts(sizes: Mapping[int, int], part_size: int, upload: str) -> int:
    """The object's size when ``sizes`` (part number → bytes) make a whole object. Raises ``UsageError`` when one is missing or short."""
    for number in range(len(sizes)):
        if number not in sizes:
            raise UsageError(f"writing {upload}: part {number} was never sent; the object would have a hole")
        if number < len(sizes) - 1 and sizes[number] != part_size:
            raise UsageError(
                f"writing {upload}: part {number} has {sizes[number]} bytes instead of {part_size}; only the last may be shorter"
            )
    return sum(sizes.values())


def exists(store: Store, key: str) -> bool:
    """Whether the object is there. Raises what ``head`` raises when that cannot be told."""
    try:
        store.head(key)
    except NotFound:
        return False
    return True


def uploads_if_told(store: Store, prefix: str = "") -> tuple[OpenUpload, ...] | None:
    """The unfinished uploads below ``prefix``: ``None`` where these keys may not list them, none where the server has no call for it.

    Raises ``StoreError`` for what is passing.
    """
    try:
        return tuple(store.open_uploads(prefix))
    except Denied:
        return None
    except StoreError as error:
        if error.transient:
            raise
        return ()


class WrappedStore:
    """Every call handed on to ``inner``. Stores that count, limit, retry or fail on purpose derive from it and change what they need."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def location(self) -> Location:
        return self.inner.location

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        return self.inner.put(key, data, if_absent=if_absent)

    def multipart(self, key: str, *, part_size: int) -> AbstractContextManager[Multipart]:
        return self.inner.multipart(key, part_size=part_size)

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        return self.inner.get(key, start, length, if_match=if_match)

    def head(self, key: str) -> ObjectInfo:
        return self.inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def children(self, prefix: str = "") -> Children:
        return self.inner.children(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def conditional_create(self) -> bool:
        return self.inner.conditional_create()

    def checks_digest(self) -> bool:
        return self.inner.checks_digest()

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        return self.inner.open_uploads(prefix)

    def abort_upload(self, upload: OpenUpload) -> None:
        self.inner.abort_upload(upload)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"
