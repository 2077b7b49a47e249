"""The directory on this machine that a pull fills: complete or not at all, or file by file beside what is there.

::

    .NAME.pull/files/       verified files under their names; they become NAME, by one rename where NAME is new or empty
    .NAME.pull/incoming/    on their way; nothing is promised of them
    .NAME.pull/journal      one line for each file whose digest no manifest knows: what was verified

It lies beside the target, or inside it, as ``.stagekit-pull``, where the target is a mount point or the folder above cannot be written. A
killed pull leaves it, and the same pull goes on from it: a file is taken as it is when its content still has the digest that was verified
and the object is still the one it was.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import OutOfSpace, UsageError
from ..locks import hold
from ..parallel import each
from ..transfer.bulk.base import Item
from ..transfer.bulk.builtin import Trust, file_checksum
from ..transfer.checksum import Checksum
from ..transfer.names import check_names, folds_case
from ..units import format_size

INSIDE = ".stagekit-pull"


class Landing:
    """The target directory, ours alone within the ``with`` block. The kernel drops the lock with the process.

    Raises ``UsageError`` when another pull to the same target is running. What was begun stays for the next try, unless it is empty.
    """

    def __init__(self, target: Path, name: str) -> None:
        self.target = target
        self._name = name
        inside = target.is_dir() and (os.path.ismount(target) or not os.access(target.parent, os.W_OK))
        self._home = target / INSIDE if inside else target.parent / f".{target.name}.pull"
        self.files = self._home / "files"
        self.incoming = self._home / "incoming"
        self._journal = self._home / "journal"
        self._lock = threading.Lock()
        self._handle = -1
        self._folders: set[Path] = set()
        self._filled: set[str] = set()

    # ------------------------------------------------------------------------------------------------------------------ the lock

    def __enter__(self) -> Self:
        while True:
            self._make_home()
            try:
                self._handle = hold(self._home, os.O_DIRECTORY | os.O_NOFOLLOW)
                break
            except FileNotFoundError:
                continue  # somebody else has finished meanwhile, and removed it
            except NotADirectoryError:
                raise UsageError(f"pulling to {self.target}: {self._home} is in the way, a file or link; remove it") from None
            except BlockingIOError:
                raise UsageError(f"another pull to {self.target} is running; wait for it, or give another directory") from None
        self.files.mkdir(exist_ok=True)
        return self

    def _make_home(self) -> None:
        try:
            self._home.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self._home.mkdir()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UsageError(
                f"pulling to {self.target}: {self._home} cannot be made ({error.strerror}); give a directory where this user may write"
            ) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self.incoming, ignore_errors=True)
        _remove_empty_folders(self.files)
        if not self.files.exists():
            self._journal.unlink(missing_ok=True)
            with suppress(OSError):
                self._home.rmdir()
        os.close(self._handle)

    # ------------------------------------------------------------------------------------------------------- what is there already

    def missing(self, items: Sequence[Item], *, also: Iterable[str] = (), threads: int = 2) -> list[Item]:
        """Those of ``items`` that no earlier try brought whole. All else that lies in this directory of ours is removed, but ``also``."""
        check_names([*(item.path for item in items), *also], self._name, folds_case=folds_case(self._home))
        wanted = {item.path for item in items}
        there: set[str] = set()
        for path in self.files.rglob("*"):
            if path.is_symlink() or not path.is_dir():
                name = path.relative_to(self.files).as_posix()
                if name in wanted:
                    there.add(name)
                else:
                    path.unlink()
        known = self._verified()

        def holds(item: Item) -> bool:
            path = self.files / item.path
            try:
                if path.is_symlink() or not path.is_file() or path.stat().st_size != item.size:
                    return False
            except OSError:
                return False
            if item.sha256 is not None:
                return file_checksum(path, item.expected, Trust()).finding == "proven"
            entry = known.get(item.path)
            if entry is None or entry[0] != (item.etag or ""):
                return False
            return file_checksum(path, item.expected, Trust()).digest == entry[1]

        found = [item for item in items if item.path in there]
        whole = {item.path for item, held in zip(found, each(holds, found, threads=threads), strict=True) if held}
        return [item for item in items if item.path not in whole]

    def require(self, size: int, *, what: str) -> None:
        """Nothing when ``size`` more bytes fit. Raises ``OutOfSpace`` with both numbers."""
        free = shutil.disk_usage(self._home).free
        if size > free:
            raise OutOfSpace(
                f"pulling {what} to {self.target} needs {format_size(size)} and {format_size(free)} are free; "
                "make space or choose another disk"
            )

    @property
    def held_bytes(self) -> int:
        """What earlier tries have brought, which stays until the target is there."""
        return sum((self.files / path).lstat().st_size for path in local_files(self.files))

    def _verified(self) -> dict[str, tuple[str, str]]:
        """path → etag and digest. A line that a killed process left half is no line."""
        found: dict[str, tuple[str, str]] = {}
        with suppress(FileNotFoundError):
            for line in self._journal.read_bytes().split(b"\n"):
                with suppress(ValueError):
                    path, etag, digest = json.loads(line)
                    found[path] = etag, digest
        return found

    # ------------------------------------------------------------------------------------------------------------------ arriving

    def accept(self, item: Item, path: Path, checksum: Checksum) -> None:
        """Take the verified file at ``path`` in. Threads may call this at the same time."""
        path.rename(self._final(item.path))
        if item.sha256 is None:
            line = json.dumps([item.path, item.etag or "", checksum.digest]).encode() + b"\n"
            with self._lock:
                with self._journal.open("ab", buffering=0) as journal:
                    journal.write(line)

    def write(self, path: str, data: bytes) -> None:
        """A file whose content is known."""
        Path(self._final(path)).write_bytes(data)

    def _final(self, path: str) -> str:
        """Where the file ``path`` belongs, in a folder that is there. A text: a path made for each of many small files costs what its
        digest does."""
        if (folder := path.rpartition("/")[0]) not in self._filled:
            (self.files / folder).mkdir(parents=True, exist_ok=True)
            self._filled.add(folder)
        return f"{self.files}/{path}"

    def clear(self) -> None:
        """Forget what has arrived: it is of no use for another try, or its space is needed."""
        for path in self.incoming.rglob("*"):
            with suppress(OSError):
                os.truncate(path, 0)  # what a thread has open would keep its space
        for folder in (self.incoming, self.files):
            shutil.rmtree(folder, ignore_errors=True)
        self._filled.clear()

    # ----------------------------------------------------------------------------------------------------------------- revealing

    def reveal(self) -> None:
        """Make everything visible as the target, which is new or empty: by one rename, or, at a mount point, entry by entry."""
        self._journal.unlink(missing_ok=True)
        if self._home.parent != self.target:
            try:
                self.files.rename(self.target)  # over an empty directory too
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise UsageError(
                        f"pulling {self._name} to {self.target}: something was written there meanwhile; the files are in {self.files}"
                    ) from error
                raise
            return
        for path in sorted(self.files.iterdir()):
            path.rename(self.target / path.name)

    def merge(self, paths: Iterable[str]) -> None:
        """Move the files ``paths`` to their places beside what is there, each by a rename."""
        for path in paths:
            folder = self.target
            for part in path.split("/")[:-1]:
                folder = folder / part
                if folder.is_symlink():
                    raise UsageError(f"pulling {self._name} to {self.target}: {folder} is a symbolic link and not followed; remove it")
                if folder not in self._folders:
                    folder.mkdir(exist_ok=True)
                    self._folders.add(folder)
            final = self.target / path
            if final.is_dir() and not final.is_symlink():
                with suppress(OSError):
                    final.rmdir()  # an empty folder is nothing
            (self.files / path).rename(final)
        self._journal.unlink(missing_ok=True)


def local_files(directory: Path) -> Iterator[str]:
    """Every file and link below ``directory`` by its name relative to it; what a pull is bringing there is left out."""
    for folder, folders, names in os.walk(directory, onerror=_raise):
        here = Path(folder)
        relative = here.relative_to(directory).as_posix()
        before = "" if relative == "." else f"{relative}/"
        if not before and INSIDE in folders:
            folders.remove(INSIDE)
        yield from (before + name for name in folders if (here / name).is_symlink())
        yield from (before + name for name in names)


def is_filled(target: Path) -> bool:
    """Whether something is in ``target``. Raises ``UsageError`` when it is no directory."""
    if target.is_dir():
        return any(path.name != INSIDE for path in target.iterdir())
    if os.path.lexists(target):
        raise UsageError(f"pulling to {target}: that is no directory; give a new or empty one")
    return False


def remove_file(target: Path, path: str) -> None:
    """Remove one file or link of ``target``, and the folders that are empty then."""
    (target / path).unlink()
    folder = (target / path).parent
    with suppress(OSError):
        while folder != target:
            folder.rmdir()
            folder = folder.parent


def _remove_empty_folders(directory: Path) -> None:
    for folder, _folders, _names in os.walk(directory, topdown=False):
        with suppress(OSError):
            Path(folder).rmdir()


def _raise(error: OSError) -> None:
    raise error
