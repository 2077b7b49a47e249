"""A run on a store in memory that a test can make fail, with every event kept and no pause between tries."""

from __future__ import annotations

import errno
import fcntl
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stagekit.errors import StagekitError
from stagekit.progress import Event, Message, Stage
from stagekit.runs import Run
from stagekit.runs.sync import SyncSettings
from stagekit.store.base import WrappedStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from .proxied import certificates, proxied

__all__ = ["certificates", "proxied"]


class Events(list[Event]):
    """What a run reported, in order."""

    def texts(self, level: str | None = None) -> list[str]:
        return [event.text for event in self if isinstance(event, Message) and level in (None, event.level)]

    def stages(self, name: str) -> list[str]:
        return [event.subject for event in self if isinstance(event, Stage) and event.name == name]


class Gate:
    """Holds a store's calls back until it is opened: a network that has stopped moving."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, _call: object) -> None:
        self.reached.set()
        assert self.opened.wait(60), "the test never opened its gate"


class NoConditions(WrappedStore):
    """A store that ignores ``If-None-Match``, as Ceph did for long and ``rclone serve s3`` does."""

    def conditional_create(self) -> bool:
        return False


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def store() -> FaultStore:
    return FaultStore(MemoryStore(f"memory://{uuid.uuid4().hex}/run"))


@pytest.fixture
def make_run(store: FaultStore, events: Events, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """A function that makes runs on ``store``; those a test leaves open are closed behind it, without a word about what they lost."""
    made: list[Run] = []

    def make(where: Any = None, **options: Any) -> Run:
        options.setdefault("settings", SyncSettings(retry_after_s=lambda _: 0.01, parts_timeout_s=0.2, sleep=lambda _: None))
        options.setdefault("spool_dir", tmp_path / "spool")
        options.setdefault("on_event", events.append)
        options.setdefault("drain_s", 20)
        run = Run(store if where is None else where, **options)
        made.append(run)
        return run

    yield make
    for run in made:
        run.finish_for_termination(0.5)
        try:
            run.close()
        except StagekitError:
            continue


@pytest.fixture
def no_reflinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system on which a file cannot be cloned, whatever this machine has: pinning links."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "no clones here")

    monkeypatch.setattr(fcntl, "ioctl", refuse)


def fill(directory: Path, content: bytes = b"weights") -> Path:
    """A checkpoint directory as a trainer leaves it, in new files."""
    (directory / "sub").mkdir(parents=True)
    (directory / "model.bin").write_bytes(content)
    (directory / "sub" / "config.json").write_bytes(b"{}")
    return directory
