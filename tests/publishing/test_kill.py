"""Killed, interrupted, terminated: real processes, at moments nobody chose, on a directory and on an S3 server."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from stagekit.config import StoreConfig
from stagekit.publishing import publish, source_of
from stagekit.store import open_store
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.proxy import FaultProxy

from ..rigs.servers import S3Server
from .conftest import STAGEKIT, children_of, start, tree, wait_for_the_end_of

OPTIONS = ["--shard-size", "64KiB", "--workers", "2", "--json"]
ROUNDS = 20


def undisturbed(raw: Path) -> dict[str, bytes]:
    store = MemoryStore(f"memory://undisturbed/{raw.parent.name}")
    publish(source_of(raw), store, shard_size="64KiB")
    return tree(store)


def kill_at(process: subprocess.Popen[str], stages: int) -> None:
    """``kill -9`` for the parent alone when it has reported so many stages; its children have to notice by themselves."""
    assert process.stdout is not None
    seen = 0
    children: list[int] = []
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "stage":
            seen += 1
            with suppress(OSError):  # it may be ending by itself
                children = children_of(process.pid) or children
            if seen == stages:
                process.kill()
    process.wait()
    wait_for_the_end_of(children)
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()


def finish(*arguments: str | Path) -> dict[str, object]:
    done = subprocess.run([*STAGEKIT, "shard", *map(str, arguments)], capture_output=True, text=True, check=True)
    last: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return last


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_9_at_random_moments_in_a_directory(raw: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    dest = tmp_path / "out"
    kept: dict[str, tuple[int, int]] = {}
    for _ in range(ROUNDS):
        kill_at(start(raw, dest, *OPTIONS), rng.randrange(1, 8))
        assert not (dest / "manifest.json").exists()
        now = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in dest.glob("shards/*.tar") if _is_finished(path)}
        assert {name: now.get(name) for name in kept} == kept, "a finished shard was written again"
        kept = now
    result = finish(raw, dest, *OPTIONS)
    assert result["kept_shards"] == len(kept)
    assert result["kept_shards"] + result["sent_shards"] == sum(name.endswith(".tar") for name in undisturbed(raw))
    assert tree_without_staging(dest) == undisturbed(raw)
    assert finish(raw, dest, *OPTIONS)["unchanged"] is True


def _is_finished(tar: Path) -> bool:
    return tar.with_suffix(".blocks").exists()


def tree_without_staging(dest: Path) -> dict[str, bytes]:
    """The objects as the store sees them: what a killed process was writing is none."""
    return tree(DirectoryStore(dest))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_9_at_random_moments_against_a_server(
    raw: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    rng = random.Random(2)
    config = credentials_for(moto_server)
    url = f"s3://{moto_server.create_bucket()}/data"
    direct = open_store(url, config)
    with FaultProxy(moto_server.endpoint_url) as log:
        reach = [url, "--endpoint-url", log.endpoint_url, "--profile", str(config.profile), *OPTIONS]
        finished: set[str] = set()
        for _ in range(ROUNDS):
            log.clear()
            kill_at(start(raw, *reach), rng.randrange(1, 8))
            assert not sent(log) & finished, "a finished shard was sent again"
            names = [info.key for info in direct.list()]
            assert "manifest.json" not in names
            finished = {name.removesuffix(".blocks") for name in names if name.endswith(".blocks")}
        log.clear()
        result = finish(raw, *reach)
        assert not sent(log) & finished, "a finished shard was sent again"
        assert result["kept_shards"] == len(finished) > 0
        # A kill in the middle of asking what the server can do leaves the empty object that it was asked with.
        assert {key: data for key, data in tree(direct).items() if not key.startswith(".stagekit-probe-")} == undisturbed(raw)
        log.clear()
        assert finish(raw, *reach)["unchanged"] is True
        assert not [request for request in log.requests if request.method in ("PUT", "POST")]


def sent(log: FaultProxy) -> set[str]:
    """The shards of which something was sent."""
    keys = {request.key.removeprefix("data/") for request in log.requests if request.method in ("PUT", "POST")}
    return {key.partition(".")[0] for key in keys if key.startswith("shards/")}


@pytest.mark.parametrize(("number", "code", "words"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")])
def test_an_interrupted_run_leaves_no_process_and_continues(raw: Path, tmp_path: Path, number: int, code: int, words: str) -> None:
    dest = tmp_path / "out"
    process = start(raw, dest, *OPTIONS[:-1], "--json", "--limit-rate", "300kB/s")
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if (event["event"], event.get("name")) == ("stage", "shard"):
            break
    children = children_of(process.pid)
    assert len(children) == 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: everyone in the foreground gets it
    else:
        process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == code
    wait_for_the_end_of(children)
    assert words in json.loads(out.splitlines()[-1])["message"]
    assert "Traceback" not in err
    assert not (dest / "manifest.json").exists()
    assert json.loads((dest / ".claim.json").read_text())["running"] is False
    assert finish(raw, dest, *OPTIONS)["kept_shards"]
    assert tree_without_staging(dest) == undisturbed(raw)


_DIE_IN_THE_LAST_PART = """
import sys
from stagekit.config import StoreConfig
from stagekit.publishing import publish, source_of
from stagekit.store import open_store
from stagekit.testing.kill import KillingStore
raw, url, endpoint, profile = sys.argv[1:]
store = KillingStore(open_store(url, StoreConfig(endpoint_url=endpoint, profile=profile)), "complete", "*.tar")
publish(source_of(raw), store)
"""


def test_an_upload_that_a_killed_run_left_open_is_dropped(
    tmp_path: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    import sys

    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "large.bin").write_bytes(random.Random(3).randbytes(17 * 2**20))
    config = credentials_for(moto_server)
    url = f"s3://{moto_server.create_bucket()}/data"
    killed = subprocess.run([sys.executable, "-c", _DIE_IN_THE_LAST_PART, raw, url, str(config.endpoint_url), str(config.profile)])
    assert killed.returncode == 137
    store = open_store(url, config)
    assert [upload.key for upload in store.open_uploads()] == ["shards/000000.tar"]
    publish(source_of(raw), url, store=config)
    assert list(store.open_uploads()) == []


@pytest.mark.slow
def test_a_worker_whose_parent_is_killed_takes_its_upload_back(
    tmp_path: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for name in ("a", "b"):
        (raw / f"{name}.bin").write_bytes(random.Random(name).randbytes(20 * 2**20))
    config = credentials_for(moto_server)
    url = f"s3://{moto_server.create_bucket()}/data"
    store = open_store(url, config)
    with FaultProxy(moto_server.endpoint_url) as log:
        options = [
            "--endpoint-url",
            log.endpoint_url,
            "--profile",
            str(config.profile),
            "--json",
            "--workers",
            "2",
            "--shard-size",
            "16MiB",
        ]
        process = start(raw, url, *options, "--limit-rate", "6MB/s")
        children: list[int] = []
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            children = children_of(process.pid)
            if event["event"] == "progress" and any("uploads" in request.query for request in log.requests):
                break
        process.kill()
        process.communicate()
        assert len(children) == 2
        wait_for_the_end_of(children)
    assert list(store.open_uploads()) == []
