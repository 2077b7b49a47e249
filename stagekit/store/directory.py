"""Objects as files below one directory, with the promises of an object store.

An object is written under a hidden staging folder beside the objects, made durable, and renamed to its name, so a killed process
leaves nothing that looks like an object. Names are looked up component by component without following symbolic links: a link below
the root is no object, and no key can leave the root through one.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import (
    BucketNotFound,
    Conflict,
    Denied,
    InvalidReply,
    NotFound,
    OutOfSpace,
    StagekitError,
    StoreError,
    Unreachable,
    UsageError,
)
from ..location import Location
from .base import Children, Data, ObjectInfo, OpenUpload, check_key, check_part, check_parts, check_prefix, check_range

STAGING = ".stagekit-staging"
"""The folder of objects on their way in. It is never listed, at any depth, and no key may have it as a component."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a FIFO must not wait for a writer
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_BYTES = 64 << 20
_RACES = 100


class DirectoryStore:
    """A directory on this machine. Unless ``create`` is false it is made at the first write and counts as empty until then.

    With ``create=False`` a directory that is missing raises ``BucketNotFound`` from every call.
    """

    def __init__(self, location: str | os.PathLike[str] | Location, create: bool = True) -> None:
        self._location = Location.parse(location)
        self._root = str(self._location.local_path)
        self._create = create
        self._exclusive: bool | None = None

    @property
    def location(self) -> Location:
        return self._location

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        if if_absent and not self.conditional_create():
            raise UsageError(f"creating {self._name(key)}: this file system has no hard links, so nothing can be created exclusively here")
        with self._staged(key) as staged:
            with self._errors("writing", key):
                staged.write(data, 0)
            return staged.publish(if_absent=if_absent)

    @contextmanager
    def multipart(self, key: str, *, part_size: int) -> Iterator[_DirectoryMultipart]:
        with self._staged(key) as staged:
            upload = _DirectoryMultipart(self, staged, key, part_size)
            yield upload
            upload.complete()

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        check_range(start, length)
        with self._errors("reading", key):
            file, found = self._open_object("reading", key)
            try:
                if if_match is not None and _etag(found) != if_match:
                    raise Conflict(f"reading {self._name(key)}: the object was replaced, its etag is no longer {if_match}")
                end = found.st_size if length is None else start + length
                if max(start, end) > found.st_size:
                    raise InvalidReply(
                        f"reading {self._name(key)}: bytes [{start}, {max(start, end)}) reach beyond its end at {found.st_size}",
                        transient=False,
                    )
                pieces: list[bytes] = []
                while start < end:
                    piece = os.pread(file, end - start, start)
                    if not piece:
                        raise InvalidReply(f"reading {self._name(key)}: the file was cut short while it was read")
                    pieces.append(piece)
                    start += len(piece)
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            finally:
                os.close(file)

    def head(self, key: str) -> ObjectInfo:
        with self._errors("looking up", key):
            file, found = self._open_object("looking up", key)
            os.close(file)
            return _info(key, found)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._errors("listing", prefix):
            directory = self._open_folder(_components(prefix))
            if directory is not None:
                try:
                    yield from _objects(directory, prefix)
                finally:
                    os.close(directory)

    def children(self, prefix: str = "") -> Children:
        objects: list[ObjectInfo] = []
        folders: list[str] = []
        with self._errors("listing", prefix):
            directory = self._open_folder(_components(check_prefix(prefix)))
            if directory is None:
                return Children((), ())
            try:
                for name, found in _entries(directory):
                    if found is None:
                        if name != STAGING and next(self.list(f"{prefix}{name}/"), None) is not None:
                            folders.append(f"{prefix}{name}/")
                    else:
                        objects.append(_info(prefix + name, found))
            finally:
                os.close(directory)
        return Children(tuple(objects), tuple(sorted(folders)))

    def delete(self, key: str) -> None:
        parts = self._parts(key)
        with self._errors("deleting", key):
            directory = self._open_folder(parts[:-1])
            if directory is None:
                return
            try:
                with suppress(FileNotFoundError):
                    if not stat.S_ISDIR(os.stat(parts[-1], dir_fd=directory, follow_symlinks=False).st_mode):
                        os.unlink(parts[-1], dir_fd=directory)
                        _sync_directory(directory)
            finally:
                os.close(directory)
            self._remove_empty(parts[:-1])

    def conditional_create(self) -> bool:
        """Whether this file system has hard links: only a link takes a free name and shows all its bytes at once."""
        if self._exclusive is None:
            with self._staged("probe") as staged:
                self._exclusive = staged.can_link()
        return self._exclusive

    def checks_digest(self) -> bool:
        """True: the kernel takes the bytes themselves, there is no link in between that could change them."""
        return True

    def open_uploads(self, prefix: str = "") -> Iterator[OpenUpload]:
        check_prefix(prefix)
        with self._errors("listing the uploads of", prefix):
            root = self._open_folder(())
            if root is not None:
                try:
                    # An upload for PREFIX may be staged further up, at the root of the store that sends it.
                    yield from (upload for upload in _uploads(root, "") if upload.key.startswith(prefix))
                finally:
                    os.close(root)

    def abort_upload(self, upload: OpenUpload) -> None:
        parts = upload.upload_id.split("/")
        if len(parts) < 2 or parts[-2] != STAGING or any(part in ("", ".", "..") for part in parts):
            raise UsageError(f"aborting the upload of {self._name(upload.key)}: {upload.upload_id!r} is no upload of this store")
        with self._errors("aborting the upload of", upload.key):
            directory = self._open_folder(parts[:-1])
            if directory is None:
                return
            try:
                with suppress(FileNotFoundError):
                    shutil.rmtree(parts[-1], dir_fd=directory)
            finally:
                os.close(directory)
            self._remove_empty(parts[:-1])

    def _name(self, key: str) -> str:
        return str(self._location / key)

    def _parts(self, key: str) -> tuple[str, ...]:
        parts = _components(check_key(key))
        if STAGING in parts:
            raise UsageError(f"{key!r} is no object key here: {STAGING} holds objects on their way in")
        return parts

    @contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        """The one place where this store's ``OSError`` becomes a ``StoreError``."""
        try:
            yield
        except StagekitError:
            raise
        except OSError as error:
            name, why = self._name(key), os.strerror(error.errno) if error.errno else str(error)
            match error.errno:
                case errno.ENOENT:
                    raise NotFound(f"{doing} {name}: there is no such object") from error
                case errno.EACCES | errno.EPERM:
                    raise Denied(f"{doing} {name}: this user may not do that ({why}); look at the owner and mode there") from error
                case errno.EROFS:
                    raise Denied(f"{doing} {name}: the file system is mounted read-only") from error
                case errno.ENOSPC:
                    raise OutOfSpace(f"{doing} {name}: the disk is full; free some space, nothing of this object was kept") from error
                case errno.EDQUOT:
                    raise OutOfSpace(f"{doing} {name}: the quota is used up; free some space, nothing of this object was kept") from error
                case errno.EFBIG:
                    raise OutOfSpace(
                        f"{doing} {name}: the file is larger than the file system or the limit of this process allows"
                    ) from error
                case errno.ENOTDIR | errno.EISDIR | errno.EEXIST | errno.ENOTEMPTY:
                    raise UsageError(
                        f"{doing} {name}: a directory cannot hold an object and, below its name, further objects; choose another key"
                    ) from error
                case errno.ENAMETOOLONG | errno.EINVAL | errno.EILSEQ:
                    raise UsageError(f"{doing} {name}: the file system cannot hold this name ({why})") from error
                case errno.EIO | errno.ESTALE | errno.ETIMEDOUT | errno.EHOSTDOWN | errno.ENOTCONN | errno.EREMOTEIO:
                    raise Unreachable(f"{doing} {name}: the disk or network volume does not answer properly ({why})") from error
                case _:
                    raise StoreError(f"{doing} {name}: {why}") from error

    def _open_root(self, make: bool) -> int | None:
        """The root's descriptor; symbolic links on the way to the root itself are the user's choice and are followed."""
        for attempt in range(2):
            try:
                return os.open(self._root, _DIRECTORY & ~os.O_NOFOLLOW)
            except FileNotFoundError:
                if not self._create:
                    raise BucketNotFound(f"directory {self._root} does not exist; check the path and that its disk is mounted") from None
                if not make or attempt:
                    return None
                self._make_root()
            except NotADirectoryError:
                raise UsageError(f"{self._root} is not a directory, so it cannot hold objects") from None
        return None

    def _make_root(self) -> None:
        try:
            Path(self._root).mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # /proc and its kind, and a parent that somebody removes meanwhile
            raise UsageError(f"the directory {self._root} cannot be made there; choose another place") from error

    def _open_folder(self, parts: Sequence[str]) -> int | None:
        """A descriptor of the folder ``parts`` below the root, or ``None`` when it is not there."""
        directory = self._open_root(make=False)
        for part in parts:
            if directory is None:
                break
            parent, directory = directory, None
            try:
                directory = os.open(part, _DIRECTORY, dir_fd=parent)
            except FileNotFoundError:
                pass
            except NotADirectoryError:
                self._refuse_link(part, parent)
            finally:
                os.close(parent)
        return directory

    def _make_folder(self, parts: Sequence[str]) -> int:
        """A descriptor of the folder ``parts`` below the root, made where missing. ``FileNotFoundError`` when one was removed meanwhile."""
        directory = self._open_root(make=True)
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._root)
        for part in parts:
            parent = directory
            try:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=parent)
                    _sync_directory(parent)
                directory = os.open(part, _DIRECTORY, dir_fd=parent)
            except NotADirectoryError:
                self._refuse_link(part, parent)
                raise
            finally:
                os.close(parent)
        return directory

    def _refuse_link(self, name: str, directory: int) -> None:
        with suppress(FileNotFoundError):
            if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise Denied(
                    f"{name!r} below {self._root} is a symbolic link, and objects are not reached through links; "
                    "open the directory it points to, or put the files there"
                )

    def _open_object(self, doing: str, key: str) -> tuple[int, os.stat_result]:
        parts = self._parts(key)
        directory = self._open_folder(parts[:-1])
        if directory is None:
            raise NotFound(f"{doing} {self._name(key)}: there is no such object")
        try:
            try:
                file = os.open(parts[-1], _READ, dir_fd=directory)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    self._refuse_link(parts[-1], directory)
                if error.errno == errno.ENXIO:  # a socket, or a FIFO without a writer
                    raise NotFound(f"{doing} {self._name(key)}: this is no regular file") from error
                raise
        finally:
            os.close(directory)
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            os.close(file)
            what = "there is no such object, but a folder" if stat.S_ISDIR(found.st_mode) else "this is no regular file"
            raise NotFound(f"{doing} {self._name(key)}: {what}")
        return file, found

    @contextmanager
    def _staged(self, key: str) -> Iterator[_Staged]:
        """A new file that is not an object yet. Whatever happens in the block, nothing is left in the staging folder after it."""
        parts = self._parts(key)
        upload_id = uuid.uuid4().hex
        folders = (STAGING, upload_id, *parts[:-1])
        with self._errors("writing", key):
            for attempt in range(_RACES):
                try:
                    directory = self._make_folder(folders)
                    break
                except FileNotFoundError:  # the last upload to finish removes the staging folder
                    if attempt == _RACES - 1:
                        raise
        try:
            with self._errors("writing", key):
                file = os.open(parts[-1], _CREATE, 0o666, dir_fd=directory)
            try:
                yield _Staged(self, key, parts, directory, file)
            finally:
                os.close(file)
                with suppress(OSError):
                    os.unlink(parts[-1], dir_fd=directory)
        finally:
            os.close(directory)
            self._remove_empty(folders)

    def _remove_empty(self, parts: Sequence[str]) -> None:
        """Remove the folder ``parts`` and those above it, up to the root, as far as they are empty."""
        for depth in range(len(parts) - 1, -1, -1):
            try:
                directory = self._open_folder(parts[:depth])
                if directory is None:
                    return
                try:
                    os.rmdir(parts[depth], dir_fd=directory)
                finally:
                    os.close(directory)
            except OSError:
                return

    def __repr__(self) -> str:
        return f"DirectoryStore({self._root!r})"


class _Staged:
    """A file in the staging folder, open for writing."""

    def __init__(self, store: DirectoryStore, key: str, parts: Sequence[str], directory: int, file: int) -> None:
        self._store = store
        self._key = key
        self._parts = parts
        self._directory = directory
        self._file = file

    def write(self, data: Data, offset: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._file, view[:_WRITE_BYTES], offset)
            view, offset = view[written:], offset + written

    def can_link(self) -> bool:
        """Whether a hard link takes a free name here, and refuses one that is taken."""
        name, link = self._parts[-1], self._parts[-1] + ".link"
        try:
            os.link(name, link, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            try:
                os.link(name, link, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            except FileExistsError:
                return True
            return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                return False
            raise
        finally:
            with suppress(FileNotFoundError):
                os.unlink(link, dir_fd=self._directory)

    def publish(self, *, if_absent: bool = False) -> ObjectInfo:
        """Make the file durable, then visible under its key."""
        with self._store._errors("writing", self._key):
            os.fsync(self._file)
            name = self._parts[-1]
            for attempt in range(_RACES):
                try:
                    target = self._store._make_folder(self._parts[:-1])
                except FileNotFoundError:  # a delete took the empty folder away between two steps
                    if attempt == _RACES - 1:
                        raise
                    continue
                try:
                    if if_absent:
                        os.link(name, name, src_dir_fd=self._directory, dst_dir_fd=target, follow_symlinks=False)
                    else:
                        os.rename(name, name, src_dir_fd=self._directory, dst_dir_fd=target)
                    _sync_directory(target)
                    break
                except FileExistsError as error:
                    raise Conflict(f"creating {self._store._name(self._key)}: the object exists already") from error
                except FileNotFoundError:
                    if attempt == _RACES - 1:
                        raise
                finally:
                    os.close(target)
            return _info(self._key, os.fstat(self._file))


class _DirectoryMultipart:
    def __init__(self, store: DirectoryStore, staged: _Staged, key: str, part_size: int) -> None:
        self._store = store
        self._staged = staged
        self._key = key
        self._part_size = part_size
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._info: ObjectInfo | None = None

    @property
    def part_size(self) -> int:
        return self._part_size

    def put_part(self, number: int, data: Data) -> None:
        check_part(number, len(data), self._part_size, self._store._name(self._key))
        with self._store._errors("writing", self._key):
            self._staged.write(data, number * self._part_size)
        with self._lock:
            self._sizes[number] = len(data)

    def complete(self) -> ObjectInfo:
        if self._info is None:
            with self._lock:
                check_parts(self._sizes, self._part_size, self._store._name(self._key))
            self._info = self._staged.publish()
        return self._info

    @property
    def info(self) -> ObjectInfo:
        if self._info is None:
            raise StoreError(f"writing {self._store._name(self._key)}: the upload is not finished")
        return self._info


def _components(key: str) -> tuple[str, ...]:
    return tuple(part for part in key.split("/") if part)


def _etag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, _etag(found), found.st_mtime)


def _sync_directory(directory: int) -> None:
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some network file systems cannot, and say so
            raise


def _entries(directory: int) -> list[tuple[str, os.stat_result | None]]:
    """Names in ``directory`` in the order of the keys below them; ``None`` marks a folder. Links and special files are left out."""
    found: list[tuple[str, os.stat_result | None]] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                entry.name.encode()
            except UnicodeEncodeError:  # a name that is not UTF-8 is no key
                continue
            if entry.is_dir(follow_symlinks=False):
                found.append((entry.name, None))
            elif entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
    # A folder sorts as "name/", so that "a.txt" comes before "a/b". Code points sort as UTF-8 bytes do.
    return sorted(found, key=lambda item: item[0] + "/" if item[1] is None else item[0])


def _open_child(directory: int, name: str) -> int | None:
    try:
        return os.open(name, _DIRECTORY, dir_fd=directory)
    except (FileNotFoundError, NotADirectoryError):  # removed or replaced since it was listed
        return None


def _objects(directory: int, prefix: str) -> Iterator[ObjectInfo]:
    for name, found in _entries(directory):
        if found is not None:
            yield _info(prefix + name, found)
        elif name != STAGING and (child := _open_child(directory, name)) is not None:
            try:
                yield from _objects(child, f"{prefix}{name}/")
            finally:
                os.close(child)


def _uploads(directory: int, prefix: str) -> Iterator[OpenUpload]:
    for name, found in _entries(directory):
        if found is not None or (child := _open_child(directory, name)) is None:
            continue
        try:
            if name != STAGING:
                yield from _uploads(child, f"{prefix}{name}/")
                continue
            for upload_id, found in _entries(child):
                if found is None and (upload := _open_child(child, upload_id)) is not None:
                    try:
                        for info in _objects(upload, prefix):
                            yield OpenUpload(info.key, f"{prefix}{STAGING}/{upload_id}", info.modified_s)
                    finally:
                        os.close(upload)
        finally:
            os.close(child)
