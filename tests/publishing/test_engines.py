"""Many machines through an engine that is there already: here Dask, with a worker that is killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagekit.errors import MissingExtra, StagekitError, UsageError
from stagekit.progress import Event, Progress
from stagekit.publishing import publish, shard, source_of
from stagekit.publishing.engines import open_executor
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore

from .conftest import STAGEKIT, make_raw, tree


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A scheduler and two worker processes."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50) as cluster:
        yield cluster


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return make_raw(tmp_path / "raw", 240)


def undisturbed(raw: Path) -> dict[str, bytes]:
    store = MemoryStore(f"memory://engines/{raw.parent.name}")
    publish(source_of(raw), store, shard_size="64KiB")
    return tree(store)


def url_of(cluster: Any) -> str:
    return str(cluster.scheduler_address).replace("tcp://", "dask://")


@pytest.mark.slow
def test_dask_with_a_worker_killed_in_mid_run(raw: Path, tmp_path: Path, cluster: Any) -> None:
    from distributed import Client

    killed: list[int] = []

    def kill_one(event: Event) -> None:
        if isinstance(event, Progress) and not killed and "3 of" in event.note:
            killed.append(client.run(os.getpid).popitem()[1])
            os.kill(killed[0], signal.SIGKILL)

    with Client(cluster, set_as_default=False) as client:
        done = publish(source_of(raw), tmp_path / "out", shard_size="64KiB", executor=client.get_executor(pure=False), on_event=kill_one)
    assert killed
    assert killed[0] != os.getpid()
    assert done.manifest.samples == 240
    assert tree(DirectoryStore(tmp_path / "out")) == undisturbed(raw)


@pytest.mark.slow
def test_an_engine_by_its_url(raw: Path, tmp_path: Path, cluster: Any) -> None:
    dataset = shard(raw, tmp_path / "out", shard_size="64KiB", executor=url_of(cluster))
    assert len(dataset) == 240
    command = [*STAGEKIT, "shard", raw, tmp_path / "again", "--shard-size", "64KiB", "--executor", url_of(cluster)]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    assert "240 samples in" in done.stdout
    assert tree(tmp_path / "out") == tree(tmp_path / "again") == undisturbed(raw)


def test_an_engine_that_is_not_there() -> None:
    with pytest.raises(StagekitError, match=r"connecting to dask://127\.0\.0\.1:9: no Dask scheduler answers there; check host and port"):
        with open_executor("dask://127.0.0.1:9"):
            pass


@pytest.mark.parametrize("name", ["ray://head:10001", "dask://", "dask://host:port", "two", "dask://host:1/path", "", "dask://host?x=1"])
def test_names_of_no_engine(name: str) -> None:
    with pytest.raises(UsageError, match=r"names no engine; write dask://host:port .* or pass any concurrent\.futures\.Executor"):
        with open_executor(name):
            pass


def test_what_is_no_executor(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is neither a concurrent\.futures\.Executor nor a URL such as dask://host:8786"):
        publish(source_of(raw), tmp_path / "out", executor=3)  # type: ignore[arg-type]


def test_the_engine_s_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(MissingExtra, match=r"pip install '?distributed"):
        with open_executor("dask://host:8786"):
            pass
