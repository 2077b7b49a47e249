"""Space on this machine that is promised to somebody: while a copy with a budget is under way, whatever is cached keeps out of its way.

::

    HOME/disk/<id>              one promise: the budget it belongs to and the bytes it takes; locked while its process lives
    HOME/disk/<id>.pin          a checkpoint of so many bytes is about to be pinned, in a folder of that name; locked as well
    HOME/disk/<id>.pin.<id>     that promise's copy has made room for it

A promise is written before its bytes are, and the cache looks at all of them each time it adds a block, so the sum holds at every moment.
Checkpoints never wait for anybody's budget, but whoever pins one says so first and gives the copies a moment to make room.
The kernel drops the locks with the process; what nobody holds any more is removed by the next one who looks.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import home_directory
from .locks import held, is_held

ANSWER_S = 10.0
"""A copy that has not made room by then is not waited for: it hangs, or is stopped."""
_POLL_S = 0.005
_PIN = ".pin"
_STAGES = ("incoming", "entries", "trash")
"""The folders of the spool, in the order in which a checkpoint goes through them: looked at in this order, none is missed on its way."""


@dataclass(frozen=True, slots=True)
class Promise:
    """``size`` bytes of a budget of ``limit`` bytes, taken by a copy that is under way."""

    id: str
    limit: int
    size: int


@contextmanager
def promised(limit: int, size: int) -> Iterator[Promise]:
    """Of a budget of ``limit`` bytes for this machine, ``size`` are taken within the block."""
    promise = Promise(uuid.uuid4().hex, limit, size)
    with _held(promise.id, {"limit": limit, "bytes": size}):
        yield promise


@dataclass(frozen=True, slots=True)
class Pin:
    """A checkpoint of ``size`` bytes, as far as is known, that is about to be pinned in the spool's folder ``folder``."""

    id: str
    folder: str
    size: int


@contextmanager
def pinning(size: int, folder: str, *, answer_s: float = ANSWER_S, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """A checkpoint of ``size`` bytes is pinned within the block, in the spool's folder called ``folder``.

    The block begins once every copy with a budget has made room, or ``answer_s`` seconds later, and never fails for want of it. It costs
    nothing where no copy ever had a budget.
    """
    if not size or not _folder().exists():
        yield
        return
    name = f"{uuid.uuid4().hex}{_PIN}"
    with ExitStack() as announced:
        with suppress(OSError):  # a disk too full for this is too full for what follows, which says so
            announced.callback(_remove_answers, name)  # last
            announced.enter_context(_held(name, {"bytes": size, "folder": folder}))
            for _ in range(round(answer_s / _POLL_S)):
                if all((_folder() / f"{name}.{promise.id}").exists() for promise in promises()):
                    break
                sleep(_POLL_S)
        yield


def _remove_answers(pin: str) -> None:
    for found in _folder().glob(f"{pin}.*"):
        found.unlink(missing_ok=True)


def promises() -> list[Promise]:
    """The promises of all processes that live."""
    return [Promise(name, found["limit"], found["bytes"]) for name, found in _living("")]


def pins() -> list[Pin]:
    """Checkpoints that are about to be pinned by processes that live."""
    return [Pin(name, found["folder"], found["bytes"]) for name, found in _living(_PIN)]


def answer(promise: Promise, pin: Pin) -> None:
    """Say that the copy of ``promise`` has made room for ``pin``."""
    with suppress(OSError):  # a disk without room for an empty file costs the other side its patience, and nothing else
        told = _folder() / f"{pin.id}.{promise.id}"
        told.touch()
        if not (_folder() / pin.id).exists():
            told.unlink()  # nobody asks any more, and nobody removes it


def promised_bytes() -> int:
    """The sum of all promises of processes that live."""
    return sum(promise.size for promise in promises())


def left_to_cache() -> int | None:
    """How many bytes all that is cached may take now; ``None`` while there is no promise."""
    found = promises()
    if not found:
        return None
    taken = sum(promise.size for promise in found) + pinned_bytes(pins())
    return max(0, min(promise.limit for promise in found) - taken)


def pinned_bytes(coming: Iterable[Pin] = ()) -> int:
    """What checkpoints that wait for the bucket take of this machine's disk; a file that is pinned twice counts once.

    ``coming``, looked up before, count as what they will be.
    """
    due = {pin.folder: pin.size for pin in coming}
    found: dict[str, dict[tuple[int, int], int]] = {folder: {} for folder in due}
    for stage in _STAGES:
        top = home_directory() / "spool" / stage
        for folder, _, names in os.walk(top):
            pin, *below = Path(folder).relative_to(top).parts or ("",)
            there = found.get(pin, found.setdefault("", {}))
            for name in names if below[:1] == ["files"] else ():  # the rest are records
                with suppress(FileNotFoundError):
                    stat = Path(folder, name).lstat()
                    there[stat.st_dev, stat.st_ino] = stat.st_size
    sizes = {folder: sum(there.values()) for folder, there in found.items()}
    return sum(max(size, due.get(folder, 0)) for folder, size in sizes.items())


def is_removing() -> bool:
    """Whether a checkpoint is being removed. Its names are gone before its space is; its folder goes last."""
    try:
        return bool(os.listdir(home_directory() / "spool" / _STAGES[-1]))
    except FileNotFoundError:
        return False


@contextmanager
def _held(name: str, values: Mapping[str, int | str]) -> Iterator[None]:
    """A file that others see within the block, locked."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    path, fresh = folder / name, folder / f".{name}"
    with held(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
        try:
            os.write(handle, json.dumps(values).encode())
            fresh.rename(path)  # only now does anybody look at it
            yield
        finally:
            for one in (fresh, path):
                one.unlink(missing_ok=True)


def _living(suffix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files with that suffix that somebody holds, and what is in them."""
    try:
        entries = list(os.scandir(_folder()))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name.startswith(".") or os.path.splitext(entry.name)[1] != suffix:
            continue
        path = Path(entry.path)
        with suppress(FileNotFoundError):
            if is_held(path):
                yield entry.name, json.loads(path.read_bytes())
            else:
                path.unlink()  # whoever made it is dead


def _folder() -> Path:
    return home_directory() / "disk"
