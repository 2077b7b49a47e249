"""Objects in this process's memory, under a name: a store for tests and examples that passes the same contract as the real ones."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import Conflict, InvalidReply, NotFound, StoreError
from ..location import Location
from .base import Children, Data, ObjectInfo, OpenUpload, check_key, check_part, check_parts, check_prefix, check_range


@dataclass(slots=True)
class _Object:
    data: bytes
    etag: str
    modified_s: float


@dataclass(slots=True)
class _Upload:
    path: str
    started_s: float
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Bucket:
    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[str, _Upload] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_buckets: dict[str, _Bucket] = {}
_buckets_lock = threading.Lock()


def _renew_locks() -> None:
    """A lock that another thread held at the moment of a fork would stay locked in the child for ever."""
    global _buckets_lock
    _buckets_lock = threading.Lock()
    for bucket in _buckets.values():
        bucket.lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _bucket(name: str) -> _Bucket:
    with _buckets_lock:
        return _buckets.setdefault(name, _Bucket())


class MemoryStore:
    """``memory://name/prefix``. Every store of one name in a process sees the same objects; nothing outlives the process.

    Etags are what S3 makes them: the MD5 of the bytes, or the MD5 of the parts' MD5s and their number.
    """

    def __init__(self, location: str | Location) -> None:
        self._location = Location.parse(location)

    @property
    def location(self) -> Location:
        return self._location

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        path = self._path(check_key(key))
        copy = bytes(data)
        made = _Object(copy, hashlib.md5(copy, usedforsecurity=False).hexdigest(), time.time())
        bucket = _bucket(self._location.bucket)
        with bucket.lock:
            if if_absent and path in bucket.objects:
                raise Conflict(f"creating {self._name(key)}: the object exists already")
            bucket.objects[path] = made
        return ObjectInfo(key, len(copy), made.etag, made.modified_s)

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[_MemoryMultipart]:
        upload_id = uuid.uuid4().hex
        bucket = _bucket(self._location.bucket)
        with bucket.lock:
            bucket.uploads[upload_id] = _Upload(self._path(check_key(key)), time.time())
        try:
            upload = _MemoryMultipart(bucket, upload_id, key, self._name(key), part_size)
            yield upload
            upload.complete()
        finally:
            with bucket.lock:
                bucket.uploads.pop(upload_id, None)

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        check_range(start, length)
        found = self._find("reading", key)
        if if_match is not None and found.etag != if_match:
            raise Conflict(f"reading {self._name(key)}: the object was replaced, its etag is no longer {if_match}")
        end = len(found.data) if length is None else start + length
        if max(start, end) > len(found.data):
            raise InvalidReply(
                f"reading {self._name(key)}: bytes [{start}, {max(start, end)}) reach beyond its end at {len(found.data)}", transient=False
            )
        return found.data[start:end]

    def head(self, key: str) -> ObjectInfo:
        found = self._find("looking up", key)
        return ObjectInfo(key, len(found.data), found.etag, found.modified_s)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        base = self._path("")
        below = base + check_prefix(prefix)
        bucket = _bucket(self._location.bucket)
        with bucket.lock:
            found = sorted((path, item) for path, item in bucket.objects.items() if path.startswith(below))
        return (ObjectInfo(path[len(base) :], len(item.data), item.etag, item.modified_s) for path, item in found)

    def children(self, prefix: str = "") -> Children:
        objects: list[ObjectInfo] = []
        folders: dict[str, None] = {}
        for info in self.list(prefix):
            name, slash, _ = info.key[len(prefix) :].partition("/")
            if slash:
                folders[f"{prefix}{name}/"] = None
            else:
                objects.append(info)
        return Children(tuple(objects), tuple(folders))

    def delete(self, key: str) -> None:
        path = self._path(check_key(key))
        bucket = _bucket(self._location.bucket)
        with bucket.lock:
            bucket.objects.pop(path, None)

    def conditional_create(self) -> bool:
        return True

    def checks_digest(self) -> bool:
        return True

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        base = self._path("")
        below = base + check_prefix(prefix)
        bucket = _bucket(self._location.bucket)
        with bucket.lock:
            found = sorted((item.path, item.started_s, upload_id) for upload_id, item in bucket.uploads.items())
        return (OpenUpload(path[len(base) :], upload_id, started) for path, started, upload_id in found if path.startswith(below))

    def abort_upload(self, upload: OpenUpload) -> None:
        bucket = _bucket(self._location.bucket)
        with bucket.lock:
            bucket.uploads.pop(upload.upload_id, None)

    def _path(self, key: str) -> str:
        return f"{self._location.path}/{key}" if self._location.path else key

    def _name(self, key: str) -> str:
        return str(self._location / key)

    def _find(self, doing: str, key: str) -> _Object:
        path = self._path(check_key(key))
        bucket = _bucket(self._location.bucket)
        with bucket.lock:
            found = bucket.objects.get(path)
        if found is None:
            raise NotFound(f"{doing} {self._name(key)}: there is no such object")
        return found

    def __repr__(self) -> str:
        return f"MemoryStore({str(self._location)!r})"


class _MemoryMultipart:
    def __init__(self, bucket: _Bucket, upload_id: str, key: str, name: str, part_size: int) -> None:
        self._bucket = bucket
        self._upload_id = upload_id
        self._key = key
        self._name = name
        self._part_size = part_size
        self._info: ObjectInfo | None = None

    @property
    def part_size(self) -> int:
        return self._part_size

    def put_part(self, number: int, data: Data) -> None:
        check_part(number, len(data), self._part_size, self._name)
        copy = bytes(data)
        with self._bucket.lock:
            self._upload().parts[number] = copy

    def complete(self) -> ObjectInfo:
        if self._info is not None:
            return self._info
        with self._bucket.lock:
            upload = self._upload()
            size = check_parts({number: len(data) for number, data in upload.parts.items()}, self._part_size, self._name)
            parts = [upload.parts[number] for number in range(len(upload.parts))]
            digests = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in parts)
            made = _Object(b"".join(parts), f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}", time.time())
            self._bucket.objects[upload.path] = made
            del self._bucket.uploads[self._upload_id]
        self._info = ObjectInfo(self._key, size, made.etag, made.modified_s)
        return self._info

    @property
    def info(self) -> ObjectInfo:
        if self._info is None:
            raise StoreError(f"writing {self._name}: the upload is not finished")
        return self._info

    def _upload(self) -> _Upload:
        found = self._bucket.uploads.get(self._upload_id)
        if found is None:
            raise StoreError(f"writing {self._name}: the upload was aborted by somebody else; send the object again")
        return found
