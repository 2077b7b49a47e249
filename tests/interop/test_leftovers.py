"""What killed runs left in shared memory is told from what somebody has: by real processes that hold it, in the real shared memory."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stagekit.interop import leftovers
from stagekit.interop.leftovers import SHARED_MEMORY, directories_in_use, remove_unfinished

NAMES = ("locals", "next_epoch")

# It holds the objects as Python's SharedMemory does ("opened"), by a mapping whose file is closed ("mapped"), or by marks, as a run that
# mosaicml() started does ("marked", which ends well, and "killed"); or it leaves its marks to a child that was forked ("forked").
_HOLDER = """
import mmap, os, sys, types
from pathlib import Path
how, held = sys.argv[1], []
sys.modules["stagekit.interop"] = package = types.ModuleType("stagekit.interop")  # without what it imports, which loads PyTorch
package.__path__ = [os.path.dirname(sys.argv[2])]
from stagekit.interop import leftovers
for path in map(Path, sys.argv[3:]):
    if how in ("marked", "killed", "forked"):
        leftovers.mark(int(path.name[:6]), path.parent)
        continue
    descriptor = os.open(path, os.O_RDWR)
    held.append(mmap.mmap(descriptor, 0))
    if how == "mapped":
        os.close(descriptor)
if how == "forked" and os.fork():
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="stagekit-test-") as made:
        yield Path(made)


def dataset(folder: Path, number: int, *directories: str) -> list[str]:
    """The objects of a dataset, as MosaicML's package makes them."""
    text = "\0".join([*directories, str(number)]).encode()
    (folder / f"{number:06}_locals").write_bytes((struct.pack("=i", 4 + len(text)) + text).ljust(4096, b"\0"))
    (folder / f"{number:06}_next_epoch").write_bytes(bytes(8))
    return [f"{number:06}_locals", f"{number:06}_next_epoch"]


@contextmanager
def somebody(how: str, *paths: Path) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, how, str(leftovers.__file__), *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        if how == "killed":
            process.kill()
        process.stdin.close()
        assert process.wait(60) == (-9 if how == "killed" else 0)


def is_waited_for() -> bool:
    """Whether somebody waits for a lease of this process to end."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(words[1:3] == ["LEASE", "BREAKING"] and str(os.getpid()) in words for words in locks)


def remove_leftovers(folder: Path) -> list[str]:
    """What was removed, and whether time was given to those who remove it by themselves."""
    waits: list[float] = []
    removed = leftovers.remove_leftovers(NAMES, folder, sleep=waits.append)
    assert bool(waits) == any(not name.endswith("_stagekit") for name in removed)
    return sorted(removed)


def test_only_what_nobody_has_is_removed(folder: Path) -> None:
    dead = dataset(folder, 0, "/data/a") + dataset(folder, 3, "/data/b")
    opened, mapped = dataset(folder, 1, "/data/c", "/data/d"), dataset(folder, 2, "/data/e")
    others = ["000000_barrier", "psm_1234", "sem.x", "0001_locals", "000004_locals_x"]
    for name in others:
        (folder / name).write_bytes(b"x")
    # One object of each is held: the dataset's others stay with it.
    with somebody("opened", folder / opened[1], folder / opened[0]), somebody("mapped", folder / mapped[0]):
        assert directories_in_use(folder) == set(), "perhaps it is only looked at"
        assert remove_leftovers(folder) == dead
        assert sorted(os.listdir(folder)) == sorted([*opened, *mapped, *others])
    assert remove_leftovers(folder) == sorted(opened + mapped)
    assert sorted(os.listdir(folder)) == sorted(others)
    assert remove_leftovers(folder / "nowhere") == []


def test_a_mark_tells_the_living_from_those_who_look(folder: Path) -> None:
    marked, forked = dataset(folder, 0, "/data/a", "/data/b"), dataset(folder, 1, "/data/c")
    files = [folder / name for name in (*marked, *forked)]
    # As a later run does: it looks at all there is, and keeps it open.
    with somebody("opened", *files):
        with somebody("killed", files[0]), somebody("forked", files[2]):
            assert directories_in_use(folder) == {"/data/a", "/data/b", "/data/c"}
            assert remove_leftovers(folder) == []
        deadline = time.monotonic() + 60
        while directories_in_use(folder):  # nobody can wait for the forked one, whose parent is gone
            assert time.monotonic() < deadline
        assert remove_leftovers(folder) == sorted([*marked, "000000_stagekit", *forked, "000001_stagekit"])
        assert os.listdir(folder) == []


def test_the_mark_of_an_earlier_dataset_says_nothing_of_a_later_one(folder: Path) -> None:
    first = dataset(folder, 0, "/data/a")
    with somebody("killed", folder / first[0]):
        pass
    (folder / first[0]).rename(folder / "kept")  # so that the later one cannot get its identity
    later = dataset(folder, 0, "/data/b")
    with somebody("opened", folder / later[0]):
        assert remove_leftovers(folder) == []
    with somebody("marked", folder / later[0]):
        with somebody("marked", folder / later[0]):  # another rank, which ends first
            pass
        assert directories_in_use(folder) == {"/data/b"}
    assert sorted(os.listdir(folder)) == [*later, "kept"], "an orderly end leaves no mark"
    with somebody("killed", folder / later[0]):
        (folder / later[0]).unlink()
        (folder / later[1]).unlink()
    assert remove_leftovers(folder) == ["000000_stagekit"]
    with somebody("marked", folder / later[0]):
        assert os.listdir(folder) == ["kept"], "there is nothing to mark"


def test_what_this_process_has_counts_as_well(folder: Path) -> None:
    dataset(folder, 0, "/data/a")
    with (folder / "000000_next_epoch").open("r+b"):
        assert remove_leftovers(folder) == []
    with somebody("marked", folder / "000000_locals"), (folder / "000000_locals").open("r+b") as file:
        assert directories_in_use(folder) == {"/data/a"}
        file.write(struct.pack("=i", 0))  # MosaicML's package writes this when a dataset is deleted
        file.flush()
        assert directories_in_use(folder) == set()


def test_what_cannot_be_told_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset(folder, 0, "/data/a")

    def refuse(descriptor: int, command: int, *argument: int) -> int:
        raise OSError(22, "Invalid argument")  # what a file system without leases says

    monkeypatch.setattr("fcntl.fcntl", refuse)
    assert remove_leftovers(folder) == []
    assert len(os.listdir(folder)) == 2


def test_who_opens_it_meanwhile_waits_and_nobody_is_ended(folder: Path) -> None:
    path = folder / "000000_locals"
    path.write_bytes(b"content")
    with ExitStack() as held:
        assert leftovers._lease(path, held)
        with subprocess.Popen([sys.executable, "-c", f"print(open({str(path)!r}).read())"], stdout=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + 60
            while not is_waited_for():
                assert time.monotonic() < deadline
            held.close()
            assert process.communicate(timeout=60)[0] == "content\n"
            assert process.returncode == 0


def test_unfinished_downloads_go_unless_somebody_writes_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    left, written, kept = tmp_path / "sub" / ".shard.00000.mds.7-1f.part", tmp_path / ".shard.00001.mds.8-1f.part", tmp_path / "a.part"
    for path in (left, written, kept):
        path.write_bytes(b"x")
    with somebody("opened", written):
        assert remove_unfinished(tmp_path) == [left.name]
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([written.name, "a.part", "sub"])
