from __future__ import annotations

import os
import pickle
import random
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagekit.store.base import Store


def make_raw(root: Path, samples: int = 60, *, seed: int = 0, largest: int = 20_000) -> Path:
    """A folder of class folders with two files a sample; the same seed gives the same bytes."""
    rng = random.Random(seed)
    for number in range(samples):
        directory = root / f"class{number % 3}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:04d}.png").write_bytes(rng.randbytes(rng.randrange(largest)))
        (directory / f"{number:04d}.json").write_text(f'{{"number": {number}}}')
    return root


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """60 samples, about 0.6 MB."""
    return make_raw(tmp_path / "raw")


def tree(root: Path | Store) -> dict[str, bytes]:
    """Every object at a place, by key."""
    if not isinstance(root, Path):
        return {info.key: bytes(root.get(info.key)) for info in root.list()}
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


# In a process of its own: the package leaves files open, which this suite counts as a failure.
_WEBDATASET = """
import pickle, sys, webdataset
samples = webdataset.WebDataset(sys.argv[1:], shardshuffle=False, empty_check=False)
read = [{name: value for name, value in sample.items() if name in ("__key__",) or not name.startswith("__")} for sample in samples]
sys.stdout.buffer.write(pickle.dumps(read))
"""


def read_by_webdataset(urls: list[str]) -> list[dict[str, object]]:
    """The samples that the ``webdataset`` package finds in shards, undecoded."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _WEBDATASET, *urls], capture_output=True, check=True)
    found: list[dict[str, object]] = pickle.loads(done.stdout)
    return found


STAGEKIT = [sys.executable, "-m", "stagekit"]
"""The command line in a process of its own, without depending on a script in PATH."""


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """``stagekit shard …`` in a process group of its own."""
    command = [*STAGEKIT, "shard", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options)


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children."""
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def wait_for_the_end_of(pids: list[int], *, timeout_s: float = 30) -> None:
    """Return when all these processes are gone; they need not be our children."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([descriptor], [], [], timeout_s)
            assert ended, f"process {pid} is still there after {timeout_s} s"
        finally:
            os.close(descriptor)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of two megabytes. Only root can mount one."""
    small = tmp_path / "small-disk"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], check=True)
    try:
        yield small
    finally:
        subprocess.run(["umount", small], check=True)
