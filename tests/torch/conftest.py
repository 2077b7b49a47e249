from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from ..stream.build import build, numbered


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread or a file descriptor behind."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    if _new(threads) or open_files() > files:
        gc.collect()  # an exception that was caught keeps its frames, and what they hold, in a cycle
    # A thread that was inside a read when its test let go of it ends a moment later, and so do those of torch's queues.
    deadline = time.monotonic() + 10
    while (left := _new(threads)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
    while open_files() > files and time.monotonic() < deadline:
        time.sleep(0.02)
    assert open_files() <= files


def _new(threads: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in threads and thread.name.startswith("stagekit")]


def open_files() -> int:
    """Open file descriptors, without those that are kept for the next request: connections to a store, and what obstore waits with."""
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += not os.readlink(f"/proc/self/fd/{entry}").startswith(("socket:", "anon_inode:[event"))
    return found


@pytest.fixture
def store(request: pytest.FixtureRequest) -> FaultStore:
    """60 samples in three shards, blocks of three; the field ``cls`` is the sample's number."""
    inner = MemoryStore(
        f"memory://torch-{request.node.nodeid}/digits".replace("::", "-").replace("/", "-").replace("memory:--", "memory://")
    )
    build(inner, numbered(60, field="cls"), shards=[20, 30, 10])
    return FaultStore(inner)
