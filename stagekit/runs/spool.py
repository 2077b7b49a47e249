"""Local copies that are pinned until the bucket has them, with a durable record of what is to be sent where.

::

    SPOOL/sessions/<id>.lock        one per writing process, locked while it lives
    SPOOL/incoming/<id>-<n>/        being pinned, or being written by a trainer; nothing is promised yet
    SPOOL/entries/<id>-<n>/         one pending save: record.json and files/…
    SPOOL/trash/<id>-<n>/           being removed
    SPOOL/generations/<run>         the newest generation of a run that was saved to from here

A directory enters ``entries`` by a rename, with its record inside, and leaves it by one. A process killed at any point therefore leaves
whole entries, which another process can list and finish, and rubbish that the next one removes. Nothing leaves ``entries`` but what
was verified in the bucket, what policy dropped, and what is known to have changed since it was handed over.

Whether a session's process still lives is told by a POSIX record lock, which the kernel drops with the process and does not hand on to
forked children. It also tells across containers that share the directory, where process numbers say nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..budget import pinning
from ..config import StoreConfig, home_directory
from ..errors import CheckpointError, ManifestError, OutOfSpace, SourceError, UsageError
from ..folders import paths_in
from ..processes import Process
from .layout import CheckpointName, Metrics, check_paths, metrics_from_json, metrics_to_json, seal, unseal

_FICLONE = 0x40049409
_SMALL = 2**20  # copying this much costs about as much as a link, and nobody can rewrite a copy
_COPIED = 8 * 2**20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TICK_NS = 20_000_000  # file times are as coarse as the kernel's tick: 4 to 10 ms

_held: set[Path] = set()
"""Lock files this process holds. Opening and closing one of them, even to look, would drop the lock."""


def default_dir() -> Path:
    """Where pending saves lie unless told otherwise."""
    return home_directory() / "spool"


@dataclass(slots=True)
class PinnedFile:
    """One file of a pending save, as it was when it was handed over. ``sha256`` is set once it was sent and verified."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    source: str
    sha256: str | None = None
    sample: str | None = None
    object: str | None = None


@dataclass(slots=True)
class Entry:
    """One pending save.

    ``session`` is the process that sends it, ``origin`` the one it was handed over to; they differ once it was adopted. ``name`` is given
    when a lease is held. ``passing`` marks a save from the middle of an epoch, which gives way before others do. ``dropped`` is set, with
    the reason, when policy dropped the step: what remains to be sent is a record of that. ``base`` is the generation of the run that this
    save continues: the one its session had taken, else that of the checkpoint it had restored, 0 on a new run.
    """

    run: str
    store: StoreConfig | None
    step: int
    counter: int
    directory: Path = Path()
    session: str = ""
    origin: str = ""
    files: list[PinnedFile] = field(default_factory=list)
    epoch: int | None = None
    metrics: Metrics = field(default_factory=dict)
    identity: Mapping[str, str | int] = field(default_factory=dict)
    best: tuple[str, str] | None = None
    saved_s: float = 0.0
    final: bool = False
    passing: bool = False
    rank: int = 0
    world_size: int = 1
    base: int = 0
    name: CheckpointName | None = None
    dropped: str | None = None
    error: str | None = None

    @property
    def size_bytes(self) -> int:
        """The sum of all files."""
        return sum(file.size for file in self.files)

    def file_path(self, file: PinnedFile) -> Path:
        """The pinned copy of ``file``."""
        return self.directory / "files" / file.path

    def check(self, file: PinnedFile) -> None:
        """Nothing when the pinned copy is what was handed over. Raises ``SourceError`` naming the file when it was rewritten in place.

        Size and time tell. The inode does not: a spool may have been moved to another disk.
        """
        try:
            now = self.file_path(file).stat()
        except OSError as error:
            raise SourceError(
                f"step {self.step}: the pinned copy of {file.source} is gone ({error.strerror}); this step cannot be sent"
            ) from error
        if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
            raise SourceError(
                f"step {self.step}: {file.source} was rewritten in place before it had been sent, so this step is lost; from now on this "
                "file is copied when it is handed over. A trainer that writes a new file and renames it avoids the copy"
            )

    def to_bytes(self) -> bytes:
        """The record as JSON with a checksum over itself."""
        return seal(
            {
                "format": "stagekit-pending-save",
                "version": 1,
                "session": self.session,
                "origin": self.origin,
                "run": self.run,
                "store": asdict(self.store) if self.store is not None else None,
                "step": self.step,
                "counter": self.counter,
                "epoch": self.epoch,
                "metrics": metrics_to_json(self.metrics),
                "identity": dict(self.identity),
                "best": list(self.best) if self.best else None,
                "saved_s": round(self.saved_s, 3),
                "final": self.final,
                "passing": self.passing,
                "rank": self.rank,
                "world_size": self.world_size,
                "base": self.base,
                "name": str(self.name) if self.name is not None else None,
                "dropped": self.dropped,
                "error": self.error,
                "files": [asdict(file) for file in self.files],
            }
        )

    @classmethod
    def read(cls, directory: Path) -> Entry:
        """The entry in ``directory``. Raises ``ManifestError`` when its record is damaged, ``FileNotFoundError`` when there is none."""
        source = directory / "record.json"
        values = unseal(source.read_bytes(), "stagekit-pending-save", 1, source=str(source))
        try:
            name, best = values["name"], values["best"]
            return cls(
                directory=directory,
                session=values["session"],
                origin=values["origin"],
                run=values["run"],
                store=StoreConfig.from_record(values["store"]),
                step=values["step"],
                counter=values["counter"],
                files=[PinnedFile(**file) for file in values["files"]],
                epoch=values["epoch"],
                metrics=metrics_from_json(values["metrics"], str(source)),
                identity=values["identity"],
                best=(best[0], best[1]) if best else None,
                saved_s=values["saved_s"],
                final=values["final"],
                passing=values.get("passing", False),
                rank=values["rank"],
                world_size=values["world_size"],
                base=values["base"],
                name=CheckpointName.parse(name) if name is not None else None,
                dropped=values["dropped"],
                error=values["error"],
            )
        except (KeyError, TypeError) as error:
            raise ManifestError(f"{source}: it is no record of a pending save ({error})") from None


class Spool:
    """The pending saves of this process in one directory. Making it touches nothing; the first pin makes the directory."""

    def __init__(self, directory: Path, *, sleep: Callable[[float], None] = time.sleep, now_ns: Callable[[], int] = time.time_ns) -> None:
        self.directory = directory
        self.session = uuid.uuid4().hex[:8]
        self._sleep, self._now_ns = sleep, now_ns
        self._count = 0
        self._lock = threading.Lock()
        self._session_file: int | None = None
        self._reflinks = True
        self._seen: dict[int, tuple[int, int]] = {}  # inodes of pending saves, and what was in them
        self._rewritten: set[int] = set()
        self._largest = 0
        self._coming: dict[Path, contextlib.ExitStack] = {}
        self.over: Callable[[], bool] = lambda: False
        """Asked between the pieces of a copy: once it is true, that pin is given up."""

    # -------------------------------------------------------------------------------------------------------- pinning

    def reserve(self) -> Path:
        """A new, empty directory for a trainer to write into, on the spool's disk, so that ``accept`` neither links nor copies.

        Copies with a budget for this disk make room first for as much as the largest save of this process took.
        """
        directory = self._new_directory()
        self._coming[directory.parent] = announced = contextlib.ExitStack()
        announced.enter_context(self._announced(self._largest, directory.parent))
        return directory

    def prepare(self) -> None:
        """Make the directory for pending saves now, so that a spool that is not there later was removed, moved or unmounted.

        A disk that takes no directory is told by the first pin.
        """
        with contextlib.suppress(OSError):
            (self.directory / "entries").mkdir(parents=True, exist_ok=True)

    def _new_directory(self) -> Path:
        self._open()
        with self._lock:
            self._count += 1
            directory = self.directory / "incoming" / f"{self.session}-{self._count}"
        (directory / "files").mkdir(parents=True)
        return directory / "files"

    def accept(self, reserved: Path, entry: Entry) -> Entry:
        """Make what lies in ``reserved`` a pending save, whole or not at all. ``entry.directory`` and ``entry.files`` are filled in."""
        entry.files = [self._stat(reserved / path, path, str(reserved / path)) for path, _ in _walk(reserved)]
        return self._commit(reserved.parent, entry)

    def pin(self, source: Path, entry: Entry, *, holding: Mapping[str, int] | None = None) -> Entry:
        """Make the files below ``source`` (or the single file) a pending save, whole or not at all: reflink, hard link, or copy.

        ``source`` may be changed, rotated or removed once this returns; only rewriting a file *in place* harms, which is noticed.
        Raises ``UsageError`` when there is nothing to save or a name cannot be stored, ``SourceError`` when a file cannot be read,
        ``OutOfSpace`` when the spool's disk is full. After a failure nothing is pinned. With ``holding`` (path to size) anything else that
        was pinned is a ``SourceError``, too.
        """
        found = [(source.name, source)] if source.is_file() else _walk(source)
        if not found:
            raise UsageError(f"step {entry.step}: {source} holds no file, so there is nothing to save")
        try:
            check_paths(path for path, _ in found)
        except ManifestError as error:
            raise UsageError(f"step {entry.step}: {source} cannot be saved: {error}; rename it") from None
        reserved = self._new_directory()
        try:
            entry.files = []
            with self._announced(self._new_bytes(file for _, file in found), reserved.parent):
                for path, file in found:
                    target = reserved / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._pin_file(file, target)
                    entry.files.append(self._stat(target, path, str(file)))
            if holding is not None and {file.path: file.size for file in entry.files} != dict(holding):
                raise SourceError(f"step {entry.step}: {source} changed after it was found complete, so it is not saved")
            return self._commit(reserved.parent, entry)
        except OSError as error:
            self._discard(reserved.parent)
            if error.errno in _NO_SPACE:
                what = f"step {entry.step}: no space in {self.directory} to pin {source}"
                what += "; free some, or give another disk (spool_dir=, --spool)"
                if not _is_same_disk(source, self.directory):
                    what += ". Pinning takes next to none where the spool is on the file system of the checkpoints"
                raise OutOfSpace(what) from error
            raise SourceError(f"step {entry.step}: cannot pin {source}: {error}") from error
        except BaseException:
            self._discard(reserved.parent)
            raise

    def note_generation(self, run: str, generation: int) -> None:
        """Note that a checkpoint of ``run`` with this generation came from here. What the next process here saves continues it, also where
        that one is killed before it can ask the bucket. A note that cannot be written costs no more than that."""
        path = self._generation_path(run)
        if generation > self.known_generation(run):
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f"{path.name}.{self.session}")
                temporary.write_text(str(generation))
                temporary.replace(path)

    def known_generation(self, run: str) -> int:
        """The newest generation of ``run`` that is noted here; 0 when there is none."""
        try:
            return int(self._generation_path(run).read_text())
        except (OSError, ValueError):
            return 0

    def _generation_path(self, run: str) -> Path:
        return self.directory / "generations" / hashlib.sha256(run.encode()).hexdigest()[:16]

    def release(self, reserved: Path) -> None:
        """Remove a directory of ``reserve`` that will not be accepted."""
        self._discard(reserved.parent)

    def note_rewritten(self, entry: Entry) -> None:
        """Copy the files of ``entry`` from now on: one of them was found rewritten in place."""
        with self._lock:
            self._rewritten.update(file.inode for file in entry.files)

    def _pin_file(self, source: Path, target: Path) -> None:
        before = source.stat()
        small = before.st_size <= _SMALL
        if not small and (self._reflink(source, target) or self._link(source, target, before)):
            return
        try:
            self._copy(source, target)
        except OSError as error:
            if not small or error.errno not in _NO_SPACE:
                raise
            target.unlink(missing_ok=True)
            if self._link(source, target, before):  # a full disk has room for a link
                return
            raise
        after = source.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise SourceError(f"{source} changed while it was copied; hand a checkpoint over once it is written completely")

    def _link(self, source: Path, target: Path, before: os.stat_result) -> bool:
        """Whether a hard link could be made. An inode that was rewritten in place before is not trusted with one."""
        if self._is_rewritten(before):
            return False
        try:
            os.link(source, target, follow_symlinks=True)
        except OSError as error:
            # Another file system, one without links, one link too many, or somebody else's file (protected_hardlinks).
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES):
                raise
            return False
        # A write in the same tick as the last one would leave the time as it is, and so would not be noticed.
        while abs(self._now_ns() - target.stat().st_mtime_ns) < _TICK_NS:
            self._sleep(_TICK_NS / 1e9)
        return True

    def _copy(self, source: Path, target: Path) -> None:
        with source.open("rb") as reader, target.open("xb") as writer:
            while data := reader.read(_COPIED):
                if self.over():
                    raise SourceError(f"{source} was not copied to the end, since the time for it was over; it stays where it is")
                writer.write(data)

    def _is_rewritten(self, now: os.stat_result) -> bool:
        """Whether this inode was handed over before with other content, or was found changed after it was."""
        with self._lock:
            content = (now.st_size, now.st_mtime_ns)
            if self._seen.get(now.st_ino, content) != content:
                self._rewritten.add(now.st_ino)
            self._seen[now.st_ino] = content
            return now.st_ino in self._rewritten

    def _reflink(self, source: Path, target: Path) -> bool:
        if not self._reflinks:
            return False
        try:
            with source.open("rb") as reader, target.open("xb") as writer:
                fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return True
        except OSError as error:
            target.unlink(missing_ok=True)
            if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS):
                self._reflinks = False
            elif error.errno not in (errno.EXDEV, errno.EPERM):
                raise
            return False

    def _stat(self, pinned: Path, path: str, source: str) -> PinnedFile:
        now = pinned.stat()
        return PinnedFile(path, now.st_size, now.st_mtime_ns, now.st_ino, source)

    def _announced(self, size: int, incoming: Path) -> contextlib.AbstractContextManager[None]:
        """``size`` bytes come within the block. What lies elsewhere than the machine's spool is in nobody's budget."""
        return pinning(size, incoming.name) if self.directory == default_dir() else contextlib.nullcontext()

    def _new_bytes(self, files: Iterable[Path]) -> int:
        """What pinning ``files`` adds to what is pinned: those that a pending save holds already are linked once more."""
        found = [file.stat() for file in files]
        with self._lock:
            return sum(one.st_size for one in found if one.st_ino not in self._seen)

    def _commit(self, incoming: Path, entry: Entry) -> Entry:
        entry.directory, entry.session, entry.origin = incoming, self.session, self.session
        self.save(entry, durable=False)
        entry.directory = self.directory / "entries" / incoming.name
        self._arrived(incoming)
        try:
            incoming.rename(entry.directory)
        except FileNotFoundError:
            # Not made anew: saves of other trainings may have been in it, and an empty one would tell teardown that nothing waits.
            raise SourceError(
                f"step {entry.step} is not saved: {self.directory}, where saves wait until they are in the bucket, was removed or moved "
                "since this training began. Put it back, or start the training again"
            ) from None
        self._largest = max(self._largest, entry.size_bytes)
        return entry

    def _arrived(self, incoming: Path) -> None:
        if announced := self._coming.pop(incoming, None):
            announced.close()

    # -------------------------------------------------------------------------------------------------------- records

    def save(self, entry: Entry, *, durable: bool = True) -> None:
        """Write the record anew: temporary name, rename. ``durable`` also outlasts a power cut, and may wait for a busy disk."""
        temporary = entry.directory / "record.json.new"
        with temporary.open("wb") as file:
            file.write(entry.to_bytes())
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(entry.directory / "record.json")
        if durable:
            _sync_directory(entry.directory)
            _sync_directory(entry.directory.parent)

    def remove(self, entry: Entry) -> None:
        """Let go of an entry's files. The caller has seen them verified in the bucket, dropped by policy, or known to be damaged."""
        self._discard(entry.directory)
        with self._lock:
            for file in entry.files:
                self._seen.pop(file.inode, None)  # its number may now go to another file

    def strip(self, entry: Entry) -> None:
        """Let go of the files of an entry that policy dropped; its record stays until the bucket has one too."""
        shutil.rmtree(entry.directory / "files", ignore_errors=True)

    def _discard(self, directory: Path) -> None:
        self._arrived(directory)
        trash = self.directory / "trash" / directory.name
        try:
            trash.parent.mkdir(parents=True, exist_ok=True)
            directory.rename(trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)  # rubbish that stays is removed with the session

    # -------------------------------------------------------------------------------------------------------- sessions

    def adopt(self, run: str) -> list[Entry]:
        """Take over the pending saves of dead processes for ``run``, oldest first, and remove rubbish of dead processes.

        Two processes that call this at the same time never get the same entry.
        """
        adopted: list[Entry] = []
        if not (self.directory / "entries").is_dir():
            return adopted
        self._open()
        for session in self._dead_sessions():
            for entry in _entries(self.directory):
                if entry.session == session and entry.run == run:
                    entry.session = self.session
                    self.save(entry)
                    adopted.append(entry)
            if not any(entry.session == session for entry in _entries(self.directory)):
                for leftover in [*self.directory.glob(f"incoming/{session}-*"), *self.directory.glob(f"trash/{session}-*")]:
                    shutil.rmtree(leftover, ignore_errors=True)
                (self.directory / "sessions" / f"{session}.lock").unlink(missing_ok=True)
        return sorted(adopted, key=lambda entry: (entry.saved_s, entry.counter))

    def close(self) -> None:
        """End the session. Entries that are left can be adopted by another process at once."""
        with self._lock:
            if self._session_file is None:
                return
            lock = self._lock_path
            with contextlib.suppress(OSError):
                if not any(entry.session == self.session for entry in _entries(self.directory)):
                    lock.unlink(missing_ok=True)
            os.close(self._session_file)
            self._session_file = None
            _held.discard(lock)

    @property
    def _lock_path(self) -> Path:
        return (self.directory / "sessions" / f"{self.session}.lock").absolute()

    def _open(self) -> None:
        with self._lock:
            if self._session_file is not None:
                return
            for name in ("sessions", "incoming", "entries", "trash"):
                (self.directory / name).mkdir(parents=True, exist_ok=True)
            self._session_file = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.write(self._session_file, json.dumps(asdict(Process.current())).encode())
            with contextlib.suppress(OSError):  # a file system without locks, where ``_is_over`` looks at the process instead
                fcntl.lockf(self._session_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _held.add(self._lock_path)

    def _dead_sessions(self) -> Iterator[str]:
        """Sessions whose process has ended, each locked by us while the caller works on it."""
        known = {path.name.removesuffix(".lock") for path in paths_in(self.directory / "sessions", "*.lock")}
        known.update(path.name.rpartition("-")[0] for path in paths_in(self.directory / "entries"))
        for session in sorted(known - {self.session}):
            path = (self.directory / "sessions" / f"{session}.lock").absolute()
            if path in _held:
                continue
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _is_over(file):
                    yield session
            finally:
                os.close(file)


def pending(directory: Path | None = None) -> list[Entry]:
    """Every pending save below ``directory`` (the default spool), of any process, oldest first. Only reads.

    Raises ``CheckpointError`` naming a record that is damaged: it may stand for a checkpoint that is nowhere else. Raises ``OSError`` where
    a folder or a record may not be read.
    """
    return sorted(_entries(directory or default_dir()), key=lambda entry: (entry.saved_s, entry.counter))


def is_there(directory: Path) -> bool:
    """Whether a spool that was used on this machine is there. Raises ``OSError`` where that may not be looked at."""
    return (directory / "entries").exists()


def is_alive(entry: Entry) -> bool:
    """Whether the process that is to send ``entry`` still lives. Raises ``OSError`` where its lock may not be looked at."""
    path = (entry.directory.parent.parent / "sessions" / f"{entry.session}.lock").absolute()
    if path in _held:
        return True
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _is_over(file)
    finally:
        os.close(file)


def _is_over(file: int) -> bool:
    """Whether the process behind a session's file has ended. Takes the lock when it has."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
    try:
        return Process(**json.loads(os.pread(file, 4096, 0))).is_dead()
    except (ValueError, TypeError):
        return False


def _entries(directory: Path) -> Iterator[Entry]:
    for folder in paths_in(directory / "entries"):
        try:
            yield Entry.read(folder)
        except FileNotFoundError as error:
            if not folder.is_dir():
                continue  # it was finished while we looked
            raise CheckpointError(f"the pending save in {folder} has no record. Look at its files/ before you remove it") from error
        except (ManifestError, json.JSONDecodeError) as error:
            raise CheckpointError(
                f"the pending save in {folder} cannot be read: {error}. Look at its files/ before you remove it"
            ) from error


def _walk(source: Path) -> list[tuple[str, Path]]:
    """Files below ``source`` as (path with slashes, file), sorted. Symbolic links are followed; one that leads in a circle is refused."""
    if not source.is_dir():
        raise UsageError(f"{source} is neither a directory nor a file, so there is nothing to save")
    found: list[tuple[str, Path]] = []

    def enter(folder: Path, prefix: str, above: tuple[Path, ...]) -> None:
        real = folder.resolve()
        if real in above:
            raise UsageError(f"{folder} is a symbolic link to a folder it lies in and cannot be saved; remove it")
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise SourceError(f"cannot read {folder}: {error.strerror}") from error
        for name in names:
            item = folder / name
            try:
                kind = item.stat().st_mode
            except OSError as error:
                raise SourceError(f"cannot read {item}: {error.strerror}") from error
            if stat.S_ISDIR(kind):
                enter(item, f"{prefix}{name}/", (*above, real))
            elif stat.S_ISREG(kind):
                found.append((prefix + name, item))
            else:
                raise UsageError(f"{item} is no regular file and cannot be saved; remove it from the checkpoint's directory")

    enter(source, "", ())
    return sorted(found)


def _is_same_disk(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_dev == other.stat().st_dev
    except OSError:
        return False


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
