"""Several real processes at one destination at the same time, and what one process needs in memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stagekit.config import StoreConfig
from stagekit.publishing import publish, source_of
from stagekit.store import open_store
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore

from ..rigs.servers import S3Server
from .conftest import start, tree


def undisturbed(raw: Path) -> dict[str, bytes]:
    store = MemoryStore(f"memory://together/{raw.parent.name}")
    publish(source_of(raw), store, shard_size="64KiB")
    return tree(store)


@pytest.mark.parametrize("kind", ["directory", "moto"])
def test_three_runs_of_the_same_plan(
    raw: Path, tmp_path: Path, kind: str, s3_server: Callable[[str], S3Server], credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    config = None
    dest, options = str(tmp_path / "out"), ["--shard-size", "64KiB", "--workers", "1", "--json", "--limit-rate", "600kB/s"]
    if kind == "moto":
        server = s3_server(kind)
        config = credentials_for(server)
        dest = f"s3://{server.create_bucket()}/out"
        options += ["--endpoint-url", str(config.endpoint_url), "--profile", str(config.profile)]
    runs = [start(raw, dest, *options) for _ in range(3)]
    results = [json.loads(run.communicate()[0].splitlines()[-1]) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], results
    assert len({result["digest"] for result in results}) == 1
    assert tree(open_store(dest, config)) == undisturbed(raw)


def test_another_plan_is_refused_while_a_run_is_alive_and_does_not_disturb_it(raw: Path, tmp_path: Path) -> None:
    first = start(raw, tmp_path / "out", "--shard-size", "64KiB", "--workers", "1", "--json", "--limit-rate", "300kB/s")
    assert first.stdout is not None
    for line in first.stdout:
        if json.loads(line).get("name") == "claimed":
            break
    first.send_signal(signal.SIGSTOP)  # alive for as long as the other one takes
    second = start(raw, tmp_path / "out", "--shard-size", "32KiB", "--takeover")
    _, err = second.communicate()
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 1
    assert f"process {first.pid} on " in err
    assert "is publishing other data (or with other options) there right now; wait until it has ended" in err
    first.communicate()
    assert first.returncode == 0
    assert tree(DirectoryStore(tmp_path / "out")) == undisturbed(raw)


_MEASURE = """
import resource, sys
from contextlib import contextmanager
from stagekit.publishing import publish, source_of
from stagekit.store.base import ObjectInfo, WrappedStore
from stagekit.store.memory import MemoryStore

class Sink(WrappedStore):
    # Takes parts as S3 does, and keeps of a tar only its size: it is not the disk that is measured.
    sizes = {}
    @contextmanager
    def multipart(self, key, *, part_size):
        parts = {}
        class Parts:
            def put_part(self, number, data):
                parts[number] = len(data)
        yield Parts()
        self.sizes[key] = sum(parts.values())
    def head(self, key):
        return ObjectInfo(key, self.sizes[key], "x") if key in self.sizes else self.inner.head(key)
    def list(self, prefix=""):
        yield from self.inner.list(prefix)
        yield from (ObjectInfo(key, size, "x") for key, size in self.sizes.items())

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
publish(source_of(sys.argv[1]), Sink(MemoryStore("memory://sink/place")), workers=1)
assert sum(Sink.sizes.values()) > 3 * 2**30
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_depend_on_the_size_of_a_file(tmp_path: Path) -> None:
    """3 GiB go through within 64 MiB and the parts that are on their way."""
    (tmp_path / "raw").mkdir()
    with (tmp_path / "raw" / "large.bin").open("wb") as file:
        file.truncate(3 * 2**30)  # sparse
    done = subprocess.run([sys.executable, "-c", _MEASURE, tmp_path / "raw"], capture_output=True, text=True, check=True)
    parts = 6 * 16 * 2**20
    assert int(done.stdout) <= 64 * 2**20 + parts
