"""Copies to a local disk: a run's checkpoint, or a data set, every byte compared with its manifest."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .config import StoreConfig
from .contents import checkpoint_at, kind_of, nothing, refuse_selector
from .dataset import with_shards
from .errors import CheckpointError, ManifestError, OutOfSpace, StoreError, UsageError
from .mounts import refuse_mount
from .parallel import each
from .progress import Message, Progress, Subscriber, ignore
from .runs.layout import Selector, parse_reference
from .runs.restore import restore
from .shards.manifest import MANIFEST, WIDS, Manifest, blocks_name, index_name, wids_json
from .store import Where, open_store
from .store.base import Store
from .transfer.fetch import fetch_file
from .transfer.put import file_sha256
from .units import format_count, format_size


@dataclass(frozen=True, slots=True)
class Pulled:
    """What ``pull`` has put where. ``fetched_bytes`` came over the network; the rest was there already, verified."""

    url: str
    kind: Literal["dataset", "checkpoint"]
    directory: str
    files: int
    bytes: int
    fetched_bytes: int
    step: int | None = None

    @property
    def line(self) -> str:
        """One sentence for people."""
        if not self.files:
            return f"{self.url}: nothing was pulled"
        there = "" if self.fetched_bytes == self.bytes else f", {format_size(self.bytes - self.fetched_bytes)} of it was there already"
        return f"{self.url} is in {self.directory}: {format_count(self.files)} files, {format_size(self.bytes)}, every byte verified{there}"

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class _Piece:
    """One file to be had: from ``key``, or ``data`` itself where its digest is not in a manifest."""

    path: str
    key: str
    size: int
    sha256: str
    data: bytes | None = None


def pull(
    where: Where,
    directory: str | os.PathLike[str],
    *,
    store: StoreConfig | None = None,
    threads: int = 8,
    allow_mount: bool = False,
    strict: bool = False,
    allow_fresh: bool = False,
    on_event: Subscriber = ignore,
) -> Pulled:
    """Copy a checkpoint (``RUN``, ``RUN@latest``, ``RUN@best``, ``RUN@1200``) or a data set to a new or empty local directory.

    ``directory`` appears complete and verified, or not at all. It is never overwritten and nothing in it is deleted: one that holds the
    same files already is left as it is, and one that holds anything else is refused. A checkpoint that turns out damaged is told
    as a warning and the next older one is taken, unless a step was named or ``strict`` is set.
    A data set's pull that was killed goes on in ``.NAME.pull``
    beside the target when it is repeated, and fetches no verified file again.

    A run that has no checkpoint yet, or cannot be seen, or has none that is whole, raises, so that a script stops before it trains from
    scratch. ``allow_fresh`` accepts that with a warning: nothing is copied, and ``step`` of the result is ``None``.

    Raises ``OutOfSpace`` before the first byte when the disk is too small, ``MountRefused`` for a mounted bucket, ``BadDigest`` for an
    object that is not what its manifest says, ``CheckpointError`` for a step that is not there.

    Example: ``stagekit.pull("s3://bucket/run@1200", "checkpoint")``.
    """
    target = Path(os.path.abspath(os.path.expanduser(os.fspath(directory))))
    judged = refuse_mount(target, "pulling to", allow_mount=allow_mount)
    if judged.warning:
        on_event(Message(judged.warning, "warning"))
    url: Where = where
    selector: Selector = "latest"
    if isinstance(where, str):
        url, selector = parse_reference(where)
    opened = open_store(url, store, on_event=on_event)
    try:
        kind = kind_of(opened)
        if kind == "run":
            return _pull_checkpoint(opened, selector, target, threads, strict, on_event)
        if kind is None:
            raise nothing(opened, "pulling")
        if isinstance(where, str):
            refuse_selector(str(url), where, "pulling")
    except (StoreError, CheckpointError, ManifestError) as error:
        if not allow_fresh:
            raise
        on_event(Message(f"nothing is pulled, and training starts from scratch, as --allow-fresh says, although {error}", "warning"))
        return Pulled(str(opened.location), "checkpoint", str(target), 0, 0, 0)
    return _pull_dataset(opened, target, store, threads, on_event)


def _pull_checkpoint(store: Store, selector: Selector, target: Path, threads: int, strict: bool, on_event: Subscriber) -> Pulled:
    if _is_filled(target):
        checkpoint = checkpoint_at(store, selector)
        name = f"{store.location}@{checkpoint.step}"
        pieces = [_Piece(record.path, record.key(checkpoint.name), record.bytes, record.sha256) for record in checkpoint.files]
        _already_there(pieces, target, name, on_event)
        fetched = 0
    else:
        restored = restore(store, target, selector, strict=strict, threads=threads, on_event=on_event)
        if restored is None:
            raise CheckpointError(f"pulling {store.location}: the run has no checkpoint yet")
        checkpoint, name = restored, f"{store.location}@{restored.step}"
        fetched = checkpoint.size_bytes
    return Pulled(name, "checkpoint", str(target), len(checkpoint.files), checkpoint.size_bytes, fetched, checkpoint.step)


def _pull_dataset(store: Store, target: Path, config: StoreConfig | None, threads: int, on_event: Subscriber) -> Pulled:
    name = str(store.location)
    data = bytes(store.get(MANIFEST))
    manifest = Manifest.from_bytes(data, source=str(store.location / MANIFEST))
    if any(shard.url is not None for shard in manifest.shards):
        # The copy has its shards with it.
        store = with_shards(store, manifest, config, allow_mount=True, on_event=on_event)
        manifest = manifest.gathered()
        data = manifest.to_bytes()
    pieces = list(_dataset_pieces(store, manifest, data))
    if _is_filled(target):
        _already_there(pieces, target, name, on_event)
        fetched = 0
    else:
        fetched = _stage(store, pieces, target, name, threads, on_event)
    return Pulled(name, "dataset", str(target), len(pieces), sum(piece.size for piece in pieces), fetched)


def _is_filled(target: Path) -> bool:
    """Whether something is in ``target``. Raises ``UsageError`` when it is no directory."""
    if target.is_dir():
        return any(target.iterdir())
    if os.path.lexists(target):
        raise UsageError(f"pulling to {target}: that is no directory; give a new or empty one")
    return False


def _dataset_pieces(store: Store, manifest: Manifest, data: bytes) -> Iterator[_Piece]:
    """Every object of a data set, the manifest, whose bytes are ``data``, last."""
    for shard in manifest.shards:
        yield _Piece(shard.name, shard.name, shard.bytes, shard.sha256)
        for key, sha256 in ((index_name(shard.name), shard.idx_sha256), (blocks_name(shard.name), shard.blocks_sha256)):
            yield _Piece(key, key, store.head(key).size, sha256)
    for key, content in ((WIDS, wids_json(manifest)), (MANIFEST, data)):
        yield _Piece(key, key, len(content), hashlib.sha256(content).hexdigest(), content)


def _stage(store: Store, pieces: list[_Piece], target: Path, name: str, threads: int, on_event: Subscriber) -> int:
    """Bring ``pieces`` to ``target``. Returns the bytes fetched."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.pull"
    with _alone(partial, target):
        _remove_strangers(partial, {piece.path for piece in pieces})
        missing = [piece for piece in pieces if not _holds(partial / piece.path, piece)]
        needed, free = sum(piece.size for piece in missing), shutil.disk_usage(partial).free
        if needed > free:
            raise OutOfSpace(
                f"pulling {name} to {target} needs {format_size(needed)} and {format_size(free)} are free; "
                "make space or choose another disk"
            )
        bar = _Bar(f"pull {name}", sum(piece.size for piece in pieces), on_event)
        bar.add(bar.total - needed)
        at_once = max(1, min(len(missing), 4))

        def bring(piece: _Piece) -> None:
            path = partial / piece.path
            path.parent.mkdir(parents=True, exist_ok=True)
            if piece.data is not None:
                path.write_bytes(piece.data)
                bar.add(piece.size)
            else:
                inner = max(1, threads // at_once)
                fetch_file(store, piece.key, path, size=piece.size, sha256=piece.sha256, threads=inner, on_bytes=bar.add)

        for _ in each(bring, missing, threads=at_once):
            pass
        try:
            partial.rename(target)  # over an empty directory too
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise UsageError(
                    f"pulling {name} to {target}: something was written there meanwhile; the files are in {partial}"
                ) from error
            raise
        bar.finish()
    return needed


def _already_there(pieces: list[_Piece], target: Path, name: str, on_event: Subscriber) -> None:
    """Nothing when ``target`` holds exactly ``pieces``. Raises ``UsageError`` naming what differs."""
    there = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    strange = sorted(there - {piece.path for piece in pieces})
    if strange:
        raise UsageError(f"pulling {name} to {target}: it holds {strange[0]}, which does not belong to it; give a new or empty directory")
    for piece in pieces:
        if not _holds(target / piece.path, piece):
            state = "differs" if piece.path in there else "is missing"
            raise UsageError(
                f"pulling {name} to {target}: the directory is not empty and {piece.path} {state}; "
                "give a new or empty directory, or remove this one"
            )
    on_event(Message(f"{target} holds {name} already"))


def _holds(path: Path, piece: _Piece) -> bool:
    try:
        return not path.is_symlink() and path.is_file() and path.stat().st_size == piece.size and file_sha256(path) == piece.sha256
    except FileNotFoundError:
        return False


def _remove_strangers(partial: Path, wanted: set[str]) -> None:
    """Remove what an earlier pull of something else, or a killed one, left in the directory that is ours alone."""
    for path in partial.rglob("*"):
        if (path.is_symlink() or not path.is_dir()) and str(path.relative_to(partial)) not in wanted:
            path.unlink()


@contextmanager
def _alone(partial: Path, target: Path) -> Iterator[None]:
    """Be the only one who works in ``partial``; it is gone afterwards when nothing is in it. The kernel drops the lock with the process."""
    while True:
        partial.mkdir(exist_ok=True)
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Somebody else may have finished, and renamed the directory, between our open and our lock.
            if partial.exists() and os.path.samestat(os.fstat(handle), partial.stat()):
                break
            os.close(handle)
        except BlockingIOError:
            os.close(handle)
            raise UsageError(f"another pull to {target} is running; wait for it, or give another directory") from None
    try:
        yield
    finally:
        with suppress(OSError):
            partial.rmdir()
        os.close(handle)


class _Bar:
    """Bytes of several threads as one task."""

    def __init__(self, task: str, total: int, on_event: Subscriber) -> None:
        self.task, self.total, self.done = task, total, 0
        self._on_event, self._lock = on_event, threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.done += size
            self._on_event(Progress(self.task, self.done, self.total))

    def finish(self) -> None:
        self._on_event(Progress(self.task, self.done, self.total, finished=True))
