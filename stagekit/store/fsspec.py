"""Any file system that fsspec opens (``gs://``, ``az://``, ``hf://``, ``sftp://``, …), and S3 through s3fs for those who ask for it.

Universal and therefore weaker than the S3 store: nothing is created exclusively, no digest is checked on the far side, and a condition
on a read is checked after it. What holds everywhere: an object is there whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

from ..config import StoreConfig, hub_endpoint
from ..errors import (
    BucketNotFound,
    Conflict,
    Denied,
    InvalidReply,
    LocationError,
    MissingExtra,
    NotFound,
    OutOfSpace,
    StagekitError,
    StoreError,
    Unreachable,
    UsageError,
)
from ..location import Location
from .base import Children, Data, ObjectInfo, OpenUpload, check_key, check_part, check_parts, check_prefix, check_range

_STAGED = ".stagekit-staging-"
_ID_LENGTH = 32

# An upload to these shows nothing before it is complete. Elsewhere a hidden name and a rename do that.
_OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "oci", "ocilake", "oss", "tos"))


def _forget_loop() -> None:
    """In a forked child: older releases of fsspec leave it its parent's event loop, which nothing drives there, and calls would hang."""
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is not None:
        asyn.reset_lock()


os.register_at_fork(after_in_child=_forget_loop)


class FsspecStore:
    """The file system and folder that ``location`` names. It holds location and settings; the file system belongs to the process."""

    def __init__(self, location: str | Location, config: StoreConfig | None = None) -> None:
        self._location = Location.parse(location)
        self._config = config or StoreConfig()
        self._staging = self._location.scheme not in _OBJECT_STORES
        self._is_s3 = self._location.scheme in ("s3", "s3a")
        self._system: tuple[int, Any] | None = None
        _implementation(self._location.scheme)

    def __reduce__(self) -> tuple[type[FsspecStore], tuple[Location, StoreConfig]]:
        return type(self), (self._location, self._config)

    @property
    def location(self) -> Location:
        return self._location

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        path = self._path(key)
        if if_absent:
            raise UsageError(f"creating {self._name(key)}: nothing can be created exclusively through fsspec")
        with self._errors("writing", key):
            system = self._open()
            target = self._staged(path)
            try:
                if self._staging:
                    system.makedirs(system._parent(path), exist_ok=True)
                system.pipe_file(target, bytes(data))
                if target != path:
                    _move(system, target, path)
            except BaseException:
                self._discard(target, path)
                raise
        return self.head(key)

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[_FsspecMultipart]:
        path = self._path(key)
        target = self._staged(path)
        with self._errors("starting the upload of", key):
            system = self._open()
            if self._staging:
                system.makedirs(system._parent(path), exist_ok=True)
            # Without autocommit, closing the file ends the upload and does not yet show the object.
            file = system.open(target, "wb", block_size=max(part_size, 5 << 20), autocommit=self._staging)
        upload = _FsspecMultipart(self, file, key, target, path, part_size)
        try:
            yield upload
            upload.complete()
        except BaseException:
            upload.abandon()
            self._discard(target, path)
            raise

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        check_range(start, length)
        path = self._path(key)
        end = None if length is None else start + length
        data: bytes = b""
        failure: StoreError | None = None
        if length != 0:
            try:
                with self._errors("reading", key):
                    data = self._open().cat_file(path, start=start or None, end=end)
            except StoreError as error:
                failure = error
        if failure is None and if_match is None and length and len(data) == length:
            return data
        if failure is not None and (isinstance(failure, NotFound | BucketNotFound | Denied) or failure.transient):
            raise failure
        info = self.head(key)
        if if_match is not None and info.etag != if_match:
            raise Conflict(f"reading {self._name(key)}: the object was replaced, its etag is no longer {if_match}")
        stop = info.size if end is None else end
        if max(start, stop) > info.size:
            raise InvalidReply(
                f"reading {self._name(key)}: bytes up to {max(start, stop)} reach beyond its end at {info.size}", transient=False
            )
        if start == stop:
            return b""
        if failure is not None:
            raise failure
        if len(data) == info.size > stop - start:  # the range was ignored
            return data[start:stop]
        if len(data) != stop - start:
            raise Unreachable(
                f"reading {self._name(key)}: got {len(data)} of {stop - start} bytes", received=data[: stop - start], etag=info.etag
            )
        return data

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._errors("looking up", key):
            found = self._open().info(path)
        if found.get("type") == "directory":
            raise NotFound(f"looking up {self._name(key)}: there is no such object")
        return self._info(key, found)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        below = self._folder(check_prefix(prefix))
        found = self._listed(prefix, lambda: self._open().find(below, detail=True).items(), ())
        base = self._folder("")
        infos = (self._entry(path, info, base) for path, info in found)
        yield from sorted((info for info in infos if info is not None and info.key.startswith(prefix)), key=lambda info: info.key)

    def children(self, prefix: str = "") -> Children:
        below = self._folder(check_prefix(prefix))
        base = self._folder("")
        objects: list[ObjectInfo] = []
        folders: set[str] = set()
        entries: list[dict[str, Any]] = self._listed(prefix, lambda: self._open().ls(below, detail=True), [])
        for entry in entries:
            path = entry["name"]
            if entry.get("type") == "directory":
                folder = self._relative(path, base).rstrip("/") + "/"
                # File systems have empty folders, object stores have none.
                if folder.startswith(prefix) and folder != prefix and (not self._staging or next(self.list(folder), None)):
                    folders.add(folder)
            elif (info := self._entry(path, entry, base)) is not None and info.key.startswith(prefix):
                objects.append(info)
        return Children(tuple(sorted(objects, key=lambda info: info.key)), tuple(sorted(folders)))

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            with self._errors("deleting", key):
                self._open().rm_file(path)
        except NotFound:
            return

    def conditional_create(self) -> bool:
        return False

    def checks_digest(self) -> bool:
        return False

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        check_prefix(prefix)
        if self._is_s3:
            yield from self._s3_uploads(prefix)
        elif self._staging:
            below, base = self._folder(""), self._folder("")
            for path, info in self._listed(prefix, lambda: self._open().find(below, detail=True).items(), ()):
                folder, _, name = self._relative(path, base).rpartition("/")
                if name.startswith(_STAGED):
                    key = f"{folder}/" * bool(folder) + name[len(_STAGED) + _ID_LENGTH + 1 :]
                    if key.startswith(prefix):
                        yield OpenUpload(key, name, _modified(info))

    def abort_upload(self, upload: OpenUpload) -> None:
        path = self._path(upload.key)
        if self._is_s3:
            try:
                with self._errors("aborting the upload of", upload.key):
                    bucket, key, _ = self._open().split_path(path)
                    self._open().call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.upload_id)
            except StoreError as error:
                if not _causes_with_code(error, "NoSuchUpload"):
                    raise
        elif self._staging:
            name = upload.upload_id
            if not name.startswith(_STAGED) or "/" in name:
                raise UsageError(f"aborting the upload of {self._name(upload.key)}: {name!r} is no upload of this store")
            with self._errors("aborting the upload of", upload.key), suppress(FileNotFoundError):
                self._open().rm_file(f"{path.rpartition('/')[0]}/{name}")

    # ------------------------------------------------------------------------------------------------------------ names and errors

    def _open(self) -> Any:
        """This process's file system: its event loop and connections do not survive a fork."""
        if self._system is None or self._system[0] != os.getpid():
            self._system = (os.getpid(), self._make())
        return self._system[1]

    def _make(self) -> Any:
        options: dict[str, Any] = {}
        if self._is_s3:
            from .s3_client import endpoint_of

            settings = replace(
                self._config,
                endpoint_url=endpoint_of(self._location, self._config),
                profile=self._location.profile or self._config.profile,
            )
            options = settings.fsspec_options()
        with self._errors("connecting to", ""):
            return _implementation(self._location.scheme)(
                **options, **self._url_options(), use_listings_cache=False, skip_instance_cache=True
            )

    def _url_options(self) -> dict[str, Any]:
        """What the URL itself tells, such as the host of ``sftp://host/path``."""
        if self._is_s3:
            return {}
        found: dict[str, Any] = _implementation(self._location.scheme)._get_kwargs_from_urls(str(self._location))
        if self._location.scheme == "hf" and (hub := hub_endpoint()):
            found["endpoint"] = hub  # its package would ask the environment once, when it is imported
        return found

    def _root(self) -> str:
        if self._is_s3:
            return f"{self._location.bucket}/{self._location.path}".rstrip("/")
        return str(_implementation(self._location.scheme)._strip_protocol(str(self._location))).rstrip("/")

    def _path(self, key: str) -> str:
        check_key(key)
        if key.rpartition("/")[2].startswith(_STAGED):
            raise UsageError(f"{key!r} is no object key here: {_STAGED}… names objects on their way in")
        return f"{self._root()}/{key}"

    def _folder(self, prefix: str) -> str:
        return f"{self._root()}/{prefix}".rstrip("/")

    def _staged(self, path: str) -> str:
        if not self._staging:
            return path
        folder, _, name = path.rpartition("/")
        return f"{folder}/{_STAGED}{uuid.uuid4().hex}-{name}"

    def _discard(self, target: str, path: str) -> None:
        if target != path:
            with suppress(Exception):  # whatever it is, the error that brought us here is the one to report
                self._open().rm_file(target)

    def _relative(self, path: str, base: str) -> str:
        return path[len(base) :].lstrip("/") if path.startswith(base) else path.lstrip("/")[len(base.lstrip("/")) :].lstrip("/")

    def _name(self, key: str) -> str:
        return str(self._location / key)

    def _entry(self, path: str, found: dict[str, Any], base: str) -> ObjectInfo | None:
        key = self._relative(path, base)
        if found.get("type") == "directory" or key.rpartition("/")[2].startswith(_STAGED):
            return None
        try:
            check_key(key)
        except UsageError:
            return None
        return self._info(key, found)

    def _info(self, key: str, found: dict[str, Any]) -> ObjectInfo:
        size = found.get("size", found.get("Size"))
        if not isinstance(size, int):
            raise InvalidReply(f"looking up {self._name(key)}: the file system does not tell its size", transient=False)
        return ObjectInfo(key, size, _etag(found, size), _modified(found), _sha256(found))

    def _listed(self, prefix: str, call: Callable[[], Any], nothing: Any) -> Any:
        try:
            with self._errors("listing", prefix):
                found = list(call())
        except NotFound:
            return nothing
        if not found:
            self._require_bucket("listing", prefix)
        return found

    def _require_bucket(self, doing: str, key: str) -> None:
        """An empty answer and a missing bucket look alike to fsspec, and must not to anyone else."""
        if self._staging:
            return
        what, name = "bucket", self._location.bucket
        if self._location.scheme == "hf":  # org/name, or datasets/org/name
            parts = [name, *self._location.path.split("/")]
            what, name = "repository", "/".join(parts[: 3 if name in ("datasets", "spaces") else 2])
        if not self._open().exists(name):
            raise BucketNotFound(
                f"{doing} {self._name(key)}: there is no {what} {name!r}; check the name, the endpoint, or create it first"
            )

    @contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        """The one place where a file system's exceptions become ours."""
        try:
            yield
        except StagekitError:
            raise
        except Exception as error:  # implementations raise what they like
            self._raise(error, doing, key)

    def _raise(self, error: Exception, doing: str, key: str) -> NoReturn:
        name = self._name(key)
        if self._is_s3:
            self._raise_s3(error, doing, key)
        if isinstance(error, FileNotFoundError):
            self._require_bucket(doing, key)
            raise NotFound(f"{doing} {name}: there is no such object") from error
        kind = type(error).__name__
        if isinstance(error, PermissionError):
            raise Denied(f"{doing} {name}: access denied; check the credentials of the {self._location.scheme} file system") from error
        from .s3_errors import chain

        behind = list(chain(error))  # clients of http wrap what the network said in errors of their own
        if any(isinstance(one, socket.gaierror) for one in behind):
            raise Unreachable(
                f"{doing} {name}: the name of its host is not known; check how it is written, this machine's network and DNS"
            ) from error
        if any(isinstance(one, TimeoutError | ConnectionError) for one in behind):
            raise Unreachable(
                f"{doing} {name}: the {self._location.scheme} file system does not answer ({kind}); check host and network"
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"{doing} {name}: no space is left there") from error
        # Not its text, which may quote an address with a token in it.
        raise StoreError(
            f"{doing} {name}: the {self._location.scheme} file system raised {kind}; check the URL, and how to log in there"
        ) from error

    def _raise_s3(self, error: Exception, doing: str, key: str) -> None:
        from .s3_client import address_of
        from .s3_errors import VENDOR_ERRORS, bare, chain, translate

        cause = next((item for item in chain(error) if isinstance(item, VENDOR_ERRORS)), None)
        if cause is None and not isinstance(error, FileNotFoundError | PermissionError):
            return
        at = address_of(self._location, self._config)
        if cause is None or bare(cause):
            # A HEAD has no body, so the reason has to be asked for. What is looked up is one byte of the object, or of any.
            bucket, path = self._location.bucket, f"{self._location.path}/{key}".strip("/")
            try:
                self._open().call_s3("get_object", Bucket=bucket, Key=path or "-", Range="bytes=0-0")
            except Exception as answer:  # translated below like the first one
                cause = next((item for item in chain(answer) if isinstance(item, VENDOR_ERRORS)), cause)
        if cause is not None:
            raise translate(cause, doing, self._name(key), at) from error

    def _s3_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        bucket, _, base = self._folder("").partition("/")
        base = f"{base}/" if base else ""
        position: dict[str, str] = {}
        while True:
            try:
                with self._errors("listing the uploads of", prefix):
                    page = self._open().call_s3("list_multipart_uploads", Bucket=bucket, Prefix=base + prefix, **position)
            except StoreError as error:
                if _causes_with_code(error, "NoSuchUpload"):  # rclone's word for none
                    return
                raise
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(base + prefix):
                    yield OpenUpload(item["Key"][len(base) :], item["UploadId"], _modified(item))
            following = {"KeyMarker": page.get("NextKeyMarker", ""), "UploadIdMarker": page.get("NextUploadIdMarker", "")}
            if not page.get("IsTruncated") or following == position:
                return
            position = following

    def __repr__(self) -> str:
        return f"FsspecStore({str(self._location)!r}, {self._config!r})"


class _FsspecMultipart:
    """Parts are written in order; one that comes early waits in memory, so at most one part for each sending thread is held."""

    def __init__(self, store: FsspecStore, file: Any, key: str, target: str, path: str, part_size: int) -> None:
        self._store = store
        self._file = file
        self._key = key
        self._target = target
        self._path = path
        self._part_size = part_size
        self._sizes: dict[int, int] = {}
        self._early: dict[int, bytes] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._broken = False
        self._info: ObjectInfo | None = None

    @property
    def part_size(self) -> int:
        return self._part_size

    def put_part(self, number: int, data: Data) -> None:
        name = self._store._name(self._key)
        check_part(number, len(data), self._part_size, name)
        with self._lock:
            if self._broken:
                raise StoreError(f"writing {name}: the upload broke off and cannot be continued; send the object again")
            if number < self._next:
                raise UsageError(f"writing {name}: part {number} was sent already, and fsspec cannot replace it")
            self._sizes[number] = len(data)
            self._early[number] = bytes(data)
            while self._next in self._early:
                self._broken = True
                with self._store._errors(f"writing part {self._next} of", self._key):
                    self._file.write(self._early[self._next])
                self._broken = False
                del self._early[self._next]
                self._next += 1

    def complete(self) -> ObjectInfo:
        if self._info is None:
            with self._lock:
                size = check_parts(self._sizes, self._part_size, self._store._name(self._key))
                with self._store._errors("finishing the upload of", self._key):
                    system = self._store._open()
                    self._file.close()
                    if self._target != self._path:
                        _move(system, self._target, self._path)
                    else:
                        self._file.commit()
                self._info = ObjectInfo(self._key, size)
        return self._info

    def abandon(self) -> None:
        """Drop the upload. The file must not be closed by the garbage collector later: that would finish it."""
        with suppress(Exception):
            if self._target == self._path:
                self._file.discard()
            else:
                self._file.close()
        with suppress(AttributeError):
            self._file.closed = True

    @property
    def info(self) -> ObjectInfo:
        if self._info is None:
            raise StoreError(f"writing {self._store._name(self._key)}: the upload is not finished")
        return self._info


def _implementation(scheme: str) -> Any:
    import fsspec
    from fsspec.registry import known_implementations

    try:
        return fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        raise LocationError(
            f"{scheme}:// is no kind of URL that Stagekit or fsspec knows; s3://, a path, gs://, az:// and hf:// are"
        ) from error
    except ImportError as error:
        if scheme in ("s3", "s3a"):
            raise MissingExtra.of("s3fs", "s3fs", "S3 through fsspec") from error
        known = known_implementations.get(scheme, {})
        package = str(known.get("class", scheme)).partition(".")[0]
        if package == "fsspec":  # it is there, of course; only fsspec knows what its class needs besides
            package = (getattr(error.__cause__, "name", None) or "").partition(".")[0]
            install = f". Install it with: pip install {package}" if package else ""
            raise MissingExtra(f"{scheme}:// needs a package that is not installed: {known.get('err', error)}{install}") from error
        raise MissingExtra(f"{scheme}:// needs a package that is not installed. Install it with: pip install {package}") from error


def _move(system: Any, source: str, target: str) -> None:
    from fsspec.spec import AbstractFileSystem

    if type(system).mv is AbstractFileSystem.mv:  # the general one takes "?" and "*" in a name for patterns
        system.cp_file(source, target)
        system.rm_file(source)
    else:
        system.mv(source, target)


def _etag(found: dict[str, Any], size: int) -> str | None:
    for name in ("ETag", "etag", "md5Hash", "content_md5", "blob_id"):
        if found.get(name):
            return str(found[name]).strip('"')
    changed = _modified(found) or found.get("updated") or found.get("last_commit")
    return None if changed is None else hashlib.sha256(f"{size} {changed}".encode()).hexdigest()[:32]


def _sha256(found: dict[str, Any]) -> str | None:
    """The digest that the Hugging Face Hub knows of large files."""
    large = found.get("lfs")
    return large.get("sha256") if isinstance(large, dict) else getattr(large, "sha256", None)


def _modified(found: dict[str, Any]) -> float | None:
    for name in ("mtime", "LastModified", "last_modified", "Initiated", "created"):
        moment = found.get(name)
        if isinstance(moment, datetime):
            return moment.timestamp()
        if isinstance(moment, int | float):
            return float(moment)
    return None


def _causes_with_code(error: BaseException, code: str) -> bool:
    from .s3_errors import chain, error_code

    return any(isinstance(item, Exception) and error_code(item) == code for item in chain(error))
