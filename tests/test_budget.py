"""One budget for pulls, cached blocks and pinned checkpoints: kept at every instant, and what gives way is said."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stagekit.budget import left_to_cache, pinned_bytes, pinning, pins, promised, promised_bytes
from stagekit.config import cache_directory
from stagekit.copies.pull import pull
from stagekit.copies.room import room_within
from stagekit.errors import OutOfSpace, UsageError
from stagekit.progress import Event, Message, ignore
from stagekit.runs.spool import Entry, Spool, default_dir
from stagekit.shards.index import block_digest
from stagekit.store.base import Data, WrappedStore
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


class Held(WrappedStore):
    """Objects with a number of ``held`` and above are not handed out before ``go`` is set. ``asked`` is set when one is waited for."""

    def __init__(self, inner: MemoryStore, held: int) -> None:
        super().__init__(inner)
        self._held = held
        self.asked, self.go = threading.Event(), threading.Event()

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        if key.endswith(".bin") and int(key.removesuffix(".bin")) >= self._held:
            self.asked.set()
            assert self.go.wait(120)
        return self.inner.get(key, start, length, if_match=if_match)


class Watched:
    """The most that was in use on ``disk`` at any moment within the block."""

    def __init__(self, disk: Path) -> None:
        self.peak = 0
        self._disk, self._ended = disk, threading.Event()
        self._looking = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(0.0005):  # Python's lock is for the others, too
            self.peak = max(self.peak, taken(self._disk))

    def __enter__(self) -> Watched:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._looking.join()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def saved(spool: Spool, source: Path, size: int) -> Entry:
    """A checkpoint of ``size`` bytes, written elsewhere and pinned, which copies it to the spool's disk."""
    source.mkdir(exist_ok=True)
    (source / "model.pt").write_bytes(os.urandom(size))
    return spool.pin(source, Entry(run="s3://bucket/run", store=None, step=1, counter=1))


def numbered(name: str, count: int) -> MemoryStore:
    source = MemoryStore(f"memory://{name}/model")
    for number in range(count):
        source.put(f"{number:02d}.bin", os.urandom(MB // 2))
    return source


def test_the_peak_stays_below_the_budget_when_a_checkpoint_is_pinned_while_a_pull_runs(disk: Path, tmp_path: Path) -> None:
    limit = 30 * MB
    caching = Caching(28 * MB, "meanwhile")
    for _ in range(80):
        caching.one_more()
    source = Held(numbered("budget-meanwhile", 24), 8)
    spool = Spool(default_dir())
    events: list[Event] = []
    entries: list[Entry] = []

    def train() -> None:
        source.asked.wait(120)
        entries.append(saved(spool, tmp_path / "out", 22 * MB))  # beside it 8 of the 12 MB fit, and no block
        caching.one_more()
        source.go.set()
        until(lambda: any("waits until" in event.text for event in events if isinstance(event, Message)))
        until(lambda: taken(disk) > limit - MB)  # it fills what is left
        caching.one_more()
        spool.remove(entries[0])  # it is in the bucket

    training = threading.Thread(target=train)
    with Watched(disk) as watched:
        training.start()
        pulled = pull(source, disk / "model", disk=limit, on_event=events.append)
        training.join()
    assert pulled.files == 24
    assert len(entries) == 1
    assert watched.peak < limit + RECORDS
    told = [event.text for event in events if isinstance(event, Message)]
    assert told[0] == "2.00 MB of cached blocks gave way to memory://budget-meanwhile/model; they are fetched again when needed"
    assert told[1] == "18.0 MB of cached blocks gave way to a checkpoint or another pull; they are fetched again when needed"
    assert told[2].startswith(
        f"pulling memory://budget-meanwhile/model to {disk / 'model'} waits until checkpoints are in the bucket: of the "
    )
    assert told[2].endswith("are left: pinned checkpoints hold 22.0 MB, cached blocks in use 0 B, other pulls 0 B")
    assert os.listdir(disk / "home" / "disk") == []


def test_what_has_arrived_goes_when_a_checkpoint_leaves_no_room_for_it(disk: Path, tmp_path: Path) -> None:
    limit = 30 * MB
    source = Held(numbered("budget-overrun", 24), 16)
    spool = Spool(default_dir())
    arrived = disk / ".model.pull" / "files"
    refused: list[OutOfSpace] = []

    def copy() -> None:
        with pytest.raises(OutOfSpace) as caught:
            pull(source, disk / "model", disk=limit)
        refused.append(caught.value)

    copying = threading.Thread(target=copy)
    with Watched(disk) as watched:
        copying.start()
        until(lambda: arrived.exists() and len(list(arrived.iterdir())) == 16)
        entry = saved(spool, tmp_path / "out", 24 * MB)
        source.go.set()
        copying.join()
    assert watched.peak < limit + RECORDS
    assert entry.size_bytes == 24 * MB
    (error,) = refused
    assert str(error).startswith(
        f"pulling memory://budget-overrun/model to {disk / 'model'}: 8.00 MB had come and was removed again, since a checkpoint was saved "
        "meanwhile; of the 30.0 MB that --disk allows "
    )
    assert str(error).endswith(". Raise it, or repeat the command when they are in the bucket")
    assert sorted(os.listdir(disk)) == ["home"]
    spool.remove(entry)
    assert pull(source, disk / "model", disk=limit).files == 24


def test_checkpoints_that_stay_in_the_way_end_a_pull_and_a_pull_that_hangs_holds_no_checkpoint_up(isolated: Path, tmp_path: Path) -> None:
    clock = iter(range(0, 10**6, 100))
    pinned = isolated / "stagekit" / "spool" / "entries" / "a-1" / "files" / "model.pt"
    making = room_within(1000, 500, 0, lambda: None, name="x", target=tmp_path, on_event=ignore, clock=lambda: next(clock))
    with making as room:
        with room.taking(100):
            pass
        with pinning(900, "a-1"):
            pinned.parent.mkdir(parents=True)
            pinned.write_bytes(bytes(900))
        with pytest.raises(OutOfSpace, match=r"saved meanwhile were in its way for 10 min; of the 1.00 kB that --disk allows 100 B are"):
            with room.taking(10):
                pass
        pinned.unlink()
        with pinning(1, "b-1"), room.taking(10):
            pass
    waits: list[float] = []
    with promised(1000, 10), pinning(5, "a-1", answer_s=0.5, sleep=waits.append):  # nobody makes room for it
        assert sum(waits) == pytest.approx(0.5)
        assert [(pin.folder, pin.size) for pin in pins()] == [("a-1", 5)]
        assert left_to_cache() == 985
    assert os.listdir(isolated / "stagekit" / "disk") == []


def test_a_program_that_cannot_be_held_up_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--disk with --engine s5cmd: a program cannot be held up while it writes; leave one"):
        pull("memory://nobody/x", tmp_path / "x", engine="s5cmd", disk="1GB")


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
