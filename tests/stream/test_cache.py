"""The cache on disk: what it keeps, what it never exceeds, and what is left when a process is killed in it."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stagekit.dataset import Dataset
from stagekit.errors import CorruptShard, MountRefused, UsageError
from stagekit.mounts import MountTable, parse_mountinfo
from stagekit.progress import Event, Message
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore
from stagekit.stream.cache import Cache
from stagekit.testing.faults import FaultStore
from stagekit.torch import StreamLoader

from ..rigs.fuse import FuseMount
from .build import build, numbered
from .remote import Remote

BLOCK = 3 * 1024
ALL = 20 * BLOCK  # what the blocks of 60 samples have


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def a_store(name: str, *, size: int = 0, shards: tuple[int, ...] = (21, 30, 9)) -> FaultStore:
    inner = MemoryStore(f"memory://cache-{name}/d")
    build(inner, numbered(sum(shards), field="cls", size=size), shards=shards)
    return FaultStore(Remote(inner))


def files(directory: Path) -> dict[str, int]:
    """Every block in the cache, and its size. What another process moves to its place meanwhile is not seen twice."""
    found = {}
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and path.name != "ledger":
                found[str(path.relative_to(directory))] = path.stat().st_size
    return found


def total(directory: Path) -> int:
    return sum(files(directory).values())


def epoch(dataset: Dataset, number: int = 0) -> tuple[list[int], StreamLoader]:
    loader = StreamLoader(dataset, 5, window=4, threads=0, connections=2, seed=number)
    return sorted(n for batch in loader for n in batch["cls"].tolist()), loader


def tars(store: FaultStore) -> int:
    return sum(call.key.endswith(".tar") for call in store.calls)


class TestKeeping:
    def test_the_second_epoch_needs_no_link(self, cache_dir: Path) -> None:
        store = a_store("second")
        loader = StreamLoader(store, 5, window=4, connections=2, cache_dir=cache_dir, cache_limit="1MB")
        first = sorted(n for batch in loader for n in batch["cls"].tolist())
        assert loader.receipt is not None
        assert (loader.receipt.bytes_fetched, loader.receipt.bytes_cached) == (ALL, 0)
        asked = tars(store)
        assert sorted(n for batch in loader for n in batch["cls"].tolist()) == first == list(range(60))
        assert tars(store) == asked
        assert (loader.receipt.bytes_fetched, loader.receipt.bytes_cached) == (0, ALL)
        assert "0 B fetched (0.00 of the data set), 61.4 kB from the cache" in str(loader.receipt)
        assert total(cache_dir) == ALL

    def test_reading_without_torch_fills_and_uses_it(self, cache_dir: Path) -> None:
        store = a_store("plain")
        for _ in range(2):
            assert len(list(Dataset(store, cache_dir=cache_dir, cache_limit=ALL))) == 60
        assert tars(store) == 20

    def test_a_copy_elsewhere_finds_the_same_blocks(self, cache_dir: Path) -> None:
        epoch(Dataset(a_store("here"), cache_dir=cache_dir, cache_limit=ALL))
        other = a_store("there")
        assert epoch(Dataset(other, cache_dir=cache_dir, cache_limit=ALL))[0] == list(range(60))
        assert tars(other) == 0

    def test_equal_shard_names_do_not_collide(self, cache_dir: Path) -> None:
        ours, theirs = a_store("ours"), a_store("theirs", shards=(30, 12))
        for _ in range(2):
            assert epoch(Dataset(ours, cache_dir=cache_dir, cache_limit="1MB"))[0] == list(range(60))
            assert len(epoch(Dataset(theirs, cache_dir=cache_dir, cache_limit="1MB"))[0]) == 40
        assert (tars(ours), tars(theirs)) == (20, 14)

    def test_damage_is_found_removed_and_fetched_again(self, cache_dir: Path) -> None:
        store = a_store("damage")
        dataset = Dataset(store, cache_dir=cache_dir, cache_limit=ALL)
        epoch(dataset)
        flipped, cut, *_ = sorted(cache_dir.glob("*/" + "[0-9a-f]" * 32))
        data = bytearray(flipped.read_bytes())
        data[700] ^= 1
        flipped.write_bytes(data)
        os.truncate(cut, 10)
        asked = tars(store)
        assert epoch(dataset)[0] == list(range(60))
        assert tars(store) == asked + 2
        assert total(cache_dir) == ALL == Cache(cache_dir, ALL, dataset=dataset.digest, largest_block=1).held_bytes
        assert epoch(dataset)[1].receipt.bytes_fetched == 0  # type: ignore[union-attr]

    def test_what_is_damaged_where_it_lies_is_not_kept(self, cache_dir: Path) -> None:
        store = a_store("source")
        store.corrupt("shards/000000.tar", offset=600, times=None)
        with pytest.raises(CorruptShard, match="block 0 of 7"):
            list(Dataset(store, cache_dir=cache_dir, cache_limit=ALL))
        assert len(files(cache_dir)) < 20

    def test_it_can_be_pickled(self, cache_dir: Path) -> None:
        dataset = Dataset(Remote(MemoryStore("memory://cache-second/d")), cache_dir=cache_dir, cache_limit=ALL)
        epoch(dataset)
        again: Dataset = pickle.loads(pickle.dumps(dataset))
        assert again.cache is not None
        assert epoch(again)[1].receipt.bytes_cached == ALL  # type: ignore[union-attr]


class TestLimit:
    def test_a_full_cache_keeps_its_own_and_admits_no_more(self, cache_dir: Path) -> None:
        store = a_store("full")
        dataset = Dataset(store, cache_dir=cache_dir, cache_limit=8 * BLOCK + 100)
        for number in range(3):
            found, loader = epoch(dataset, number)
            assert found == list(range(60))
            assert loader.receipt is not None
            assert loader.receipt.bytes_cached == (8 * BLOCK if number else 0)
            assert total(cache_dir) == 8 * BLOCK

    def test_others_go_longest_unused_first_and_what_is_read_stays(self, cache_dir: Path) -> None:
        old = Dataset(a_store("old"), cache_dir=cache_dir, cache_limit=20 * BLOCK)
        epoch(old)
        blocks = sorted(cache_dir.glob("*/" + "[0-9a-f]" * 32))
        for age, path in enumerate(blocks):
            os.utime(path, ns=(age * 10**9, age * 10**9))
        reading = os.open(blocks[0], os.O_RDONLY)
        fcntl.flock(reading, fcntl.LOCK_SH)  # as a reader in another process does
        new = a_store("new", shards=(12,), size=4)
        dataset = Dataset(new, cache_dir=cache_dir, cache_limit=20 * BLOCK)
        assert len(list(dataset)) == 12
        left = [path.exists() for path in blocks]
        assert left == [True] + [False] * 4 + [True] * 15
        assert total(cache_dir) == 20 * BLOCK
        os.close(reading)

    def test_a_lower_limit_is_honoured_at_once(self, cache_dir: Path) -> None:
        dataset = Dataset(a_store("lower"), cache_dir=cache_dir, cache_limit=20 * BLOCK)
        epoch(dataset)
        Dataset(dataset.store, cache_dir=cache_dir, cache_limit=5 * BLOCK)
        assert total(cache_dir) == 5 * BLOCK

    def test_below_one_block_is_refused_with_both_numbers(self, cache_dir: Path) -> None:
        with pytest.raises(UsageError, match=r"cache_limit: 3\.00 kB \(3000 bytes\) is less than one block.*3\.07 kB \(3072 bytes\)"):
            Dataset(a_store("tiny"), cache_dir=cache_dir, cache_limit=3000)

    def test_arguments_that_cannot_be_meant(self, cache_dir: Path) -> None:
        store = a_store("arguments")
        with pytest.raises(UsageError, match=r"cache_dir: say how much .* may hold with cache_limit="):
            Dataset(store, cache_dir=cache_dir)
        with pytest.raises(UsageError, match="cache_limit: 'much' is not a size"):
            Dataset(store, cache_dir=cache_dir, cache_limit="much")
        cache_dir.write_text("a file")
        with pytest.raises(UsageError, match=r"cache_dir: .* cannot be used \(File exists\)|cache_dir: .* \(Not a directory\)"):
            Dataset(store, cache_dir=cache_dir, cache_limit=ALL)
        with pytest.raises(UsageError, match=r"belong to the Dataset here"):
            StreamLoader(Dataset(store), 5, cache_limit=ALL)

    def test_the_default_place(self, isolated: Path) -> None:
        epoch(Dataset(a_store("default"), cache_limit=ALL))
        assert total(isolated / ".cache" / "stagekit") == ALL


class TestWhereNot:
    def test_a_local_source_is_not_cached(self, tmp_path: Path, cache_dir: Path) -> None:
        build(DirectoryStore(tmp_path / "data"), numbered(60, field="cls"))
        before = files(tmp_path / "data")
        told: list[Event] = []
        loader = StreamLoader(tmp_path / "data", 5, cache_dir=cache_dir, cache_limit="1MB", on_event=told.append)
        assert len(list(loader)) == 12
        assert not cache_dir.exists()
        assert files(tmp_path / "data") == before
        assert any("is on this machine already, so nothing of it is cached" in one.text for one in told if isinstance(one, Message))

    def test_a_mounted_bucket_is_refused(self, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache_dir.mkdir()
        line = f"30 20 0:50 / {cache_dir} rw - fuse.rclone remote:bucket rw\n"
        table = MountTable(parse_mountinfo(b"20 0 8:1 / / rw - ext4 /dev/sda1 rw\n" + line.encode()))
        monkeypatch.setattr(MountTable, "read", classmethod(lambda cls: table))
        with pytest.raises(MountRefused, match=r"caching blocks in .* is refused"):
            Dataset(a_store("mount"), cache_dir=cache_dir, cache_limit=ALL)

    def test_a_real_mount_is_refused_before_anything_is_written_there(self, fuse: FuseMount, tmp_path: Path) -> None:
        data = tmp_path / "data"
        build(DirectoryStore(data), numbered(6, field="cls"))
        code = """
import sys
from stagekit.dataset import Dataset
from stagekit.errors import MountRefused
from stagekit.store.directory import DirectoryStore
from tests.stream.remote import Remote
for place in (sys.argv[2], sys.argv[2] + "/new/cache"):
    try:
        Dataset(Remote(DirectoryStore(sys.argv[1])), cache_dir=place, cache_limit="1MB")
    except MountRefused as error:
        print(error)
"""
        done = fuse.python(code, data, fuse.mount_point)
        assert done.returncode == 0, done.stderr
        told = done.stdout.splitlines()
        assert len(told) == 2, told
        assert all("caching blocks in" in line and "fuse.rclone" in line and str(fuse.mount_point) in line for line in told)
        assert fuse.run("find", fuse.mount_point, "-mindepth", "1").stdout == ""

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
    def test_a_full_disk_is_told_once_and_reading_goes_on(self, cache_dir: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        store = a_store("disk")
        told: list[Event] = []
        dataset = Dataset(store, cache_dir=cache_dir, cache_limit=ALL, on_event=told.append)
        written = 0

        def write(descriptor: int, data: Any) -> int:
            nonlocal written
            written += 1
            if written > 3:
                raise OSError(code, os.strerror(code))
            return real(descriptor, data)

        real = os.write
        monkeypatch.setattr("stagekit.stream.cache.os.write", write)
        with pytest.warns(RuntimeWarning, match=r"the cache in .* cannot be written \(.*\); reading goes on without it") as warned:
            found = [epoch(dataset)[0] for _ in range(2)]
        assert found == [list(range(60))] * 2
        assert len(warned) == 1
        assert [one.level for one in told if isinstance(one, Message) and "goes on without it" in one.text] == ["warning"]
        assert total(cache_dir) == 3 * BLOCK
        monkeypatch.undo()
        assert Cache(cache_dir, ALL, dataset=dataset.digest, largest_block=1).held_bytes == 3 * BLOCK


_JOB = """
import sys
from pathlib import Path
from stagekit.dataset import Dataset
sys.path.insert(0, sys.argv[4])
from tests.stream.remote import remote
from stagekit.order import Epoch, share
from stagekit.stream.reader import Reader, Budget

dataset = Dataset(remote(Path(sys.argv[1])), cache_dir=sys.argv[2], cache_limit=int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
fetched = cached = 0
for number in range(int(sys.argv[6])):
    epoch = Epoch(dataset.block_samples, number, digest=dataset.digest, seed=int(sys.argv[5]), shuffle=True, window=4)
    reader = Reader(dataset, epoch, [((0, len(dataset)),)], 7, budget=Budget(2**20, 2**20), connections=4)
    assert sorted(int(s["__key__"]) for group in reader for s in group) == list(range(len(dataset)))
    fetched, cached = fetched + reader.bytes_fetched, cached + reader.bytes_cached
print(fetched, cached, flush=True)
"""


def start_job(data: Path, cache_dir: Path, limit: int, *, seed: int, epochs: int) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    job = subprocess.Popen(
        [sys.executable, "-c", _JOB, str(data), str(cache_dir), str(limit), str(root), str(seed), str(epochs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    return job


def go(job: subprocess.Popen[str]) -> None:
    assert job.stdin is not None
    job.stdin.write("\n")
    job.stdin.flush()


@pytest.fixture
def watched(cache_dir: Path) -> Iterator[list[int]]:
    """How much the directory held, looked at again and again, each time between two changes: files are renamed while one looks."""
    seen: list[int] = []
    over = threading.Event()
    look = Cache(cache_dir, 2**40, dataset="00" * 32, largest_block=1)._open()

    def watch() -> None:
        while not over.wait(0.002):
            with look.locked() as ledger:
                seen.append(total(cache_dir))
                assert seen[-1] <= ledger.held

    thread = threading.Thread(target=watch)
    thread.start()
    yield seen
    over.set()
    thread.join()


class TestProcesses:
    """Real processes that share one directory."""

    def test_the_limit_holds_at_every_instant(self, tmp_path: Path, cache_dir: Path, watched: list[int]) -> None:
        build(DirectoryStore(tmp_path / "one"), numbered(150, field="cls", size=20_000), shards=[150])
        build(DirectoryStore(tmp_path / "two"), numbered(120, field="cls", size=20_000), shards=[120])
        limit = 30 * 63_000
        jobs = [start_job(tmp_path / name, cache_dir, limit, seed=seed, epochs=3) for name, seed in (("one", 1), ("one", 2), ("two", 3))]
        for job in jobs:
            go(job)
        results = [job.communicate(timeout=100)[0].split() for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0, 0]
        assert len(watched) > 20
        assert max(watched) <= limit
        assert total(cache_dir) > limit // 2
        # The two jobs on the same data used each other's blocks, too.
        assert sum(int(result[1]) for result in results) > 0

    def test_a_killed_process_leaves_nothing_that_counts(self, tmp_path: Path, cache_dir: Path) -> None:
        build(DirectoryStore(tmp_path / "one"), numbered(150, field="cls", size=20_000), shards=[150])
        digest = Dataset(tmp_path / "one").digest
        limit = 60 * 63_000
        for seed in range(4):
            job = start_job(tmp_path / "one", cache_dir, limit, seed=seed, epochs=1000)
            go(job)
            deadline = time.monotonic() + 30
            while not any(cache_dir.glob("incoming/*")) and total(cache_dir) < limit // 2 and time.monotonic() < deadline:
                pass
            job.send_signal(signal.SIGKILL)
            job.communicate()
        # One that it was writing, as if killed in the middle.
        (cache_dir / "incoming" / "123456789-0").write_bytes(bytes(1000))
        with Cache(cache_dir, limit, dataset=digest, largest_block=1)._open().locked() as ledger:
            ledger.held += 1000
        cache = Cache(cache_dir, limit, dataset=digest, largest_block=1)
        assert cache.held_bytes >= total(cache_dir)
        assert list((cache_dir / "incoming").iterdir()) == []
        job = start_job(tmp_path / "one", cache_dir, limit, seed=9, epochs=2)
        go(job)
        out, _ = job.communicate(timeout=60)
        assert job.returncode == 0
        assert int(out.split()[1]) >= 50 * 63_000
        assert total(cache_dir) <= limit

    def test_a_forked_child_has_locks_of_its_own(self, cache_dir: Path) -> None:
        cache = Cache(cache_dir, ALL, dataset="ab" * 32, largest_block=1)
        with cache._open().locked() as ledger:
            name = ledger.new_name()
        child = os.fork()
        if not child:  # what fails here shows in the status
            held = cache.held_bytes
            with cache._open().locked() as ledger:
                os._exit(10 if held == 0 and ledger.lives(name) and ledger.new_name().split("-")[0] != name.split("-")[0] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
        with cache._open().locked() as ledger:
            assert ledger.lives(name)

    def test_a_ledger_that_was_deleted_is_made_anew(self, cache_dir: Path) -> None:
        dataset = Dataset(a_store("ledger"), cache_dir=cache_dir, cache_limit=ALL)
        epoch(dataset)
        del dataset
        (cache_dir / "ledger").unlink()
        assert Dataset(a_store("ledger"), cache_dir=cache_dir, cache_limit=ALL).cache.held_bytes == ALL  # type: ignore[union-attr]
