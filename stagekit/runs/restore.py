"""A checkpoint back on local disk: the newest whole one, every hash checked, there completely or not at all. Nothing is unpickled."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import (
    BadDigest,
    CheckpointError,
    Conflict,
    DamagedCheckpoint,
    InvalidReply,
    NotFound,
    NoValidCheckpoint,
    OutOfSpace,
    UsageError,
)
from ..locks import hold
from ..progress import Message, Progress, Stage, Subscriber, ignore
from ..store.base import Store
from ..transfer.fetch import fetch_file
from ..units import format_size
from . import catalog
from .layout import Checkpoint, CheckpointName, Selector

_FIRST_MTIME_NS = 1_577_836_800 * 10**9  # 2020-01-01: before anything that a trainer writes from now on
_STEP_NS = 10**6


def restore(
    store: Store,
    directory: Path,
    selector: Selector = "latest",
    *,
    strict: bool = False,
    best: tuple[str, str] | None = None,
    threads: int = 8,
    on_event: Subscriber = ignore,
) -> Checkpoint | None:
    """Put the checkpoint that ``selector`` means into ``directory``, which must be empty or missing. ``None`` for a run that has none.

    Newest means highest (generation, step). One that turns out damaged is told to ``on_event`` as a warning, naming the file and the
    hashes, and the next older one is taken; ``strict`` stops instead. A step that was asked for by number is never replaced by another.
    Raises ``NoValidCheckpoint`` when there are checkpoints and none is whole, ``CheckpointError`` for a step or metric nobody saved,
    ``UsageError`` for a target with something in it, ``OutOfSpace`` before a byte is fetched when it would not fit, and the store's
    errors when it cannot be told what there is. After any of them ``directory`` is as it was.
    """
    refuse_target(directory)
    return first_taken(
        store,
        selector,
        lambda checkpoint: restore_checkpoint(store, checkpoint, directory, threads=threads, on_event=on_event),
        strict=strict,
        best=best,
        on_event=on_event,
    )


def first_taken(
    store: Store,
    selector: Selector,
    take: Callable[[Checkpoint], None],
    *,
    strict: bool = False,
    best: tuple[str, str] | None = None,
    on_event: Subscriber = ignore,
) -> Checkpoint | None:
    """The checkpoint that ``restore`` would put back, given to ``take``, which raises ``DamagedCheckpoint`` to have the next one."""

    asked_for = isinstance(selector, int | CheckpointName)  # no other one takes its place
    then = "" if asked_for else ", the next older one is taken"

    def reject(error: Exception) -> None:
        if strict:
            raise error
        on_event(Message(f"{error}; this checkpoint is rejected{then}", "warning"))

    checkpoint, rejected = catalog.first_whole(store, lambda: catalog.candidates(store, selector, best=best), take, reject)
    if checkpoint is not None:
        catalog.tell_of_others(store, selector, checkpoint, on_event)
        return checkpoint
    if rejected is not None:
        raise NoValidCheckpoint(
            f"{store.location} has checkpoints and none of those asked for ({selector}) is whole; the last one looked at: {rejected}"
        ) from rejected
    if asked_for:
        raise CheckpointError(f"{store.location}: step {selector} was begun and never committed; take another one")
    return None


def restore_checkpoint(store: Store, checkpoint: Checkpoint, directory: Path, *, threads: int = 8, on_event: Subscriber = ignore) -> None:
    """Fetch all files of ``checkpoint`` into ``directory`` (empty or missing), compare every sha-256, then make them visible at once.

    Modification times follow the step, since trainers rotate checkpoints by them. Raises ``DamagedCheckpoint`` naming the first file that
    is missing or differs, ``UsageError`` for a target with something in it, and ``OutOfSpace``. After any error the target is as it was.
    A killed process leaves a hidden directory beside it, which the next restore of the same target removes.
    """
    refuse_target(directory)
    directory = directory.absolute()
    _remove_dead(directory)
    _check_space(checkpoint, directory)
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.restoring")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    held = _lock(partial)
    task, total, done = f"restoring step {checkpoint.step}", checkpoint.size_bytes, 0

    def count(arrived: int) -> None:
        nonlocal done
        done += arrived
        on_event(Progress(task, done, total))

    try:
        for record in checkpoint.files:
            target = partial / record.path
            target.parent.mkdir(parents=True, exist_ok=True)
            key = record.key(checkpoint.name)
            with damage_named(store, checkpoint, key):
                fetch_file(store, key, target, size=record.bytes, sha256=record.sha256, threads=threads, on_bytes=count)
            on_event(Stage("restore.file-fetched", f"{checkpoint.step}/{record.path}"))
        stamp(partial, checkpoint.step)
        _reveal(partial, directory)
    finally:
        if held is not None:
            os.close(held)
        shutil.rmtree(partial, ignore_errors=True)
    on_event(Progress(task, total, total, finished=True))


@contextmanager
def damage_named(store: Store, checkpoint: Checkpoint, key: str | None = None) -> Iterator[None]:
    """Errors that say that a file of ``checkpoint`` is not there, or not what it was, as ``DamagedCheckpoint``. ``key`` is the file's."""
    damaged = f"step {checkpoint.step} of {store.location} is damaged"
    try:
        yield
    except NotFound as error:
        raise DamagedCheckpoint(f"{damaged}: {f'{key} is missing' if key else error}") from error
    except (BadDigest, Conflict) as error:
        raise DamagedCheckpoint(f"{damaged}: {error}") from error
    except InvalidReply as error:
        if error.transient:
            raise
        raise DamagedCheckpoint(f"{damaged}: {error}") from error


def stamp(directory: Path, step: int) -> None:
    """Give everything in ``directory`` a modification time that follows ``step``: trainers rotate checkpoints by it."""
    mtime_ns = _FIRST_MTIME_NS + step * _STEP_NS
    for item in [*sorted(directory.rglob("*"), reverse=True), directory]:
        os.utime(item, ns=(mtime_ns, mtime_ns))


def refuse_target(directory: Path) -> None:
    """Nothing when ``directory`` is missing or empty. Raises ``UsageError``: restoring never mixes with what is there."""
    if directory.is_dir():
        if first := next(directory.iterdir(), None):
            raise UsageError(f"restoring into {directory}: it is not empty (it holds {first.name}); give a new directory")
    elif os.path.lexists(directory):
        raise UsageError(f"restoring into {directory}: it is no directory; give a new one")


def _remove_dead(directory: Path) -> None:
    """Remove what killed processes left of restoring into ``directory``. What cannot be told to be dead stays."""
    # Trainers' directories are restored into one named after the process first.
    by_process = directory.name == f".restoring-{os.getpid()}"
    target = r"\.restoring-\d+" if by_process else re.escape(directory.name)
    left = re.compile(rf"\.{target}\.(\d+)\.restoring" + (r"|\.restoring-(\d+)" if by_process else ""))
    with suppress(OSError):
        for path in directory.parent.iterdir():
            match = left.fullmatch(path.name)
            if match is not None and not _lives(int(match[match.lastindex or 1])) and (held := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(held)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _lock(directory: Path) -> int | None:
    """``directory`` open and locked until it is closed or this process ends; ``None`` when another has it, or that cannot be told."""
    try:
        return hold(directory)
    except OSError:
        return None


def _check_space(checkpoint: Checkpoint, directory: Path) -> None:
    existing = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if free < checkpoint.size_bytes:
        raise OutOfSpace(
            f"restoring step {checkpoint.step} into {directory}: it needs {format_size(checkpoint.size_bytes)} and the disk has "
            f"{format_size(free)} free; free some, or give a directory on another disk"
        )


def _reveal(partial: Path, directory: Path) -> None:
    """One rename where the target can be replaced; a mount point or the current directory keeps its inode, so its children are moved."""
    try:
        partial.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        moved: list[Path] = []
        try:
            for child in sorted(partial.iterdir()):
                shutil.move(child, directory / child.name)
                moved.append(directory / child.name)
        except BaseException:
            for child in moved:
                with suppress(OSError):
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
            raise
