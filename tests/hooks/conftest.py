"""A bucket that can be made to refuse, and runs on one machine after the other that use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagekit.errors import Denied
from stagekit.hooks.loop import Run
from stagekit.progress import Event
from stagekit.runs.sync import SyncSettings
from stagekit.store.directory import DirectoryStore
from stagekit.testing.faults import Call, FaultStore


@pytest.fixture
def store(tmp_path: Path) -> FaultStore:
    return FaultStore(DirectoryStore(tmp_path / "bucket" / "run"))


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def make_run(store: FaultStore, events: list[Event], tmp_path: Path) -> Callable[..., Run]:
    """A function that makes a run on a new machine: another disk each time."""
    count = iter(range(100))

    def make(**options: Any) -> Run:
        settings = SyncSettings(retry_after_s=lambda _: 0.01)
        chosen = {"spool_dir": tmp_path / f"spool-{next(count)}", "drain_s": 10} | options
        return Run(store, on_event=events.append, settings=settings, **chosen)

    return make


@pytest.fixture
def refuse(store: FaultStore) -> Callable[[], list[str]]:
    """A function that makes the bucket refuse every put, until the list it returns is cleared."""

    def start() -> list[str]:
        refusing = ["no"]

        def act(_: Call) -> None:
            for words in refusing:
                raise Denied(words)

        store.act("put", act, times=None)
        return refusing

    return start
