"""One budget for pulls, cached blocks and pinned checkpoints: kept at every instant, and what gives way is said."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagekit.budget import left_to_cache, pinned_bytes, promised, promised_bytes
from stagekit.config import cache_directory
from stagekit.copies.pull import pull
from stagekit.errors import OutOfSpace
from stagekit.progress import Event, Message
from stagekit.shards.index import block_digest
from stagekit.store.memory import MemoryStore
from stagekit.stream.cache import Cache, give_way
from stagekit.transfer.fetch import Range

from .stream.remote import Remote

PAGE = 4096  # tmpfs gives its space by these, so sizes of whole pages are what a file takes there
MB = 244 * PAGE
BLOCK = MB // 4
RECORDS = 25 * PAGE  # of this machine: ledgers, promises, the journal, a page or more each


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 32 MiB with this machine's records, cache and spool on it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], check=True)
    monkeypatch.setenv("STAGEKIT_HOME", str(disk / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk / "cache"))
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


class Caching:
    """A training that keeps blocks: each call caches one more."""

    def __init__(self, limit: int, name: str) -> None:
        self._store = MemoryStore(f"memory://{name}/blocks")
        self._cache = Cache(cache_directory(), limit, dataset="ab" * 32, largest_block=BLOCK)
        self._number = 0

    def one_more(self) -> None:
        data = self._number.to_bytes(8) * (BLOCK // 8)
        key = str(self._number)
        self._number += 1
        self._store.put(key, data)
        self._cache.fetch(Remote(self._store), Range(key, 0, len(data), digest=block_digest(data)))


def taken(disk: Path) -> int:
    """Bytes that are in use on the file system, at one moment."""
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_the_peak_stays_below_the_budget_while_a_training_caches_and_checkpoints_are_pinned(disk: Path) -> None:
    limit = 30 * MB
    caching = Caching(28 * MB, "peak")
    for _ in range(80):
        caching.one_more()
    pinned = disk / "home" / "spool" / "entries" / "a-1" / "files" / "model.pt"
    pinned.parent.mkdir(parents=True)
    pinned.write_bytes(bytes(3 * MB))
    source = MemoryStore("memory://budget-peak/model")
    for number in range(24):
        source.put(f"{number}.bin", os.urandom(MB // 2))
    assert taken(disk) > 22 * MB
    peaks: list[int] = []
    during: list[int] = []
    events: list[Event] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            peaks.append(taken(disk))

    def listen(event: Event) -> None:
        events.append(event)
        caching.one_more()  # a training goes on meanwhile
        peaks.append(taken(disk))
        during.append(promised_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        pulled = pull("memory://budget-peak/model", disk / "model", disk=limit, on_event=listen)
    finally:
        ended.set()
        looking.join()
    assert pulled.files == 24
    assert max(during) == 12 * MB
    assert max(peaks) < limit + RECORDS
    assert max(peaks) > limit - 2 * BLOCK - RECORDS  # it was close
    (told,) = [event.text for event in events if isinstance(event, Message)]
    assert told == "5.00 MB of cached blocks gave way to memory://budget-peak/model; they are fetched again when needed"
    assert promised_bytes() == 0
    assert left_to_cache() is None


def test_what_does_not_fit_beside_checkpoints_is_refused_with_the_numbers(disk: Path) -> None:
    caching = Caching(10 * MB, "refused")
    for _ in range(20):
        caching.one_more()
    pinned = disk / "home" / "spool" / "entries" / "a-1" / "files" / "model.pt"
    pinned.parent.mkdir(parents=True)
    pinned.write_bytes(bytes(3 * MB))
    os.link(pinned, pinned.with_name("again.pt"))  # shared with an earlier checkpoint: it takes its space once
    assert pinned_bytes() == 3 * MB
    MemoryStore("memory://budget-refused/model").put("model.bin", bytes(8 * MB))
    with promised(20 * MB, 2 * MB), pytest.raises(OutOfSpace) as caught:
        pull("memory://budget-refused/model", disk / "model", disk="12MB")
    assert str(caught.value) == (
        f"pulling memory://budget-refused/model to {disk / 'model'} needs 8.00 MB, and of the 12.0 MB that --disk allows 7.00 MB are left: "
        "pinned checkpoints hold 3.00 MB, cached blocks in use 0 B, other pulls 2.00 MB; raise it, or wait for them"
    )
    assert not (disk / "model").exists()
    assert pinned.exists()
    assert pull("memory://budget-refused/model", disk / "model", disk="12MB").files == 1


_DIES = """
import os, sys
from stagekit.budget import promised
with promised(100, 70):
    print("promised", flush=True)
    sys.stdin.read()
    os._exit(9)
"""


def test_a_promise_ends_with_its_process(isolated: Path) -> None:
    with promised(1000, 10), promised(500, 20):
        assert (promised_bytes(), left_to_cache()) == (30, 470)
        other = subprocess.Popen([sys.executable, "-c", _DIES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "promised\n"
        assert (promised_bytes(), left_to_cache()) == (100, 0)
        other.communicate()
        assert other.returncode == 9
        assert (promised_bytes(), left_to_cache()) == (30, 470)
    assert os.listdir(isolated / "stagekit" / "disk") == []


def test_a_cache_gives_way_oldest_first_and_one_that_is_not_there_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert give_way(cache_directory(), 0) == (0, 0)
    caching = Caching(10 * MB, "oldest")
    for _ in range(4):
        caching.one_more()
    blocks = sorted((cache_directory() / ("ab" * 16)).iterdir())
    for age, block in enumerate(blocks):
        os.utime(block, ns=(age, age))
    assert give_way(cache_directory(), 3 * BLOCK - 1) == (2 * BLOCK, 2 * BLOCK)
    assert sorted((cache_directory() / ("ab" * 16)).iterdir()) == blocks[2:]
