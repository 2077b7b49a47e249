"""What a training asked of object storage: recorded with its run, and the same as a proxy in between saw."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import stagekit
from stagekit.config import StoreConfig
from stagekit.errors import ManifestError
from stagekit.report import RunInfo
from stagekit.runs import Run, traffic
from stagekit.store import open_store
from stagekit.store.usage import Usage
from stagekit.testing.proxy import FaultProxy
from stagekit.torch import StreamLoader

from ..rigs.servers import S3Server


def test_a_run_records_what_it_and_its_data_cost(
    moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig], tmp_path: Path
) -> None:
    bucket, plain = moto_server.create_bucket(), credentials_for(moto_server)
    raw = tmp_path / "raw"
    raw.mkdir()
    for number in range(300):
        (raw / f"{number:03}.bin").write_bytes(bytes([number % 256]) * 20_000)
    stagekit.shard(raw, f"s3://{bucket}/data", store=plain)
    url = f"s3://{bucket}/runs/first"
    with FaultProxy(moto_server.endpoint_url) as proxy:
        config = replace(plain, endpoint_url=proxy.endpoint_url)
        run = Run(url, store=config, spool_dir=tmp_path / "spool")
        loader = StreamLoader(f"s3://{bucket}/data", batch_size=30, store=config, decode=None)
        began = len(proxy.requests)
        for step, _ in enumerate(loader, 1):
            with run.checkpoint(step=step) as directory:
                (Path(directory) / "model.bin").write_bytes(bytes([step]) * 500_000)
            run.drain()
        assert loader.receipt is not None
        data = [one for one in proxy.requests[began:] if one.key.startswith("data/")]
        run.close()
        mine = [one for one in proxy.requests if one.key.startswith("runs/first/") or one.query.get("prefix", "").startswith("runs/first/")]
        around = [one for one in proxy.requests if one.key in ("runs/run.json", "runs/manifest.json")]
    assert loader.receipt.requests == len(data)
    assert loader.receipt.received_bytes == pytest.approx(sum(one.sent for one in data), rel=0.05)
    assert f"fetched (1.00 of the data set) in {len(data)} requests" in str(loader.receipt)

    found = stagekit.info(url, store=plain, price_per_gb=100.0)
    assert isinstance(found, RunInfo)
    recorded = found.traffic[url]
    assert recorded.requests == pytest.approx(len(mine), rel=0.05)
    assert recorded.sent_bytes == pytest.approx(sum(one.received for one in mine), rel=0.05)
    assert found.traffic[f"s3://{bucket}/runs"].requests == len(around) > 0, "is the new run inside another?"
    assert found.traffic[f"s3://{bucket}/data"].received_bytes > 6_000_000
    total = sum(found.traffic.values(), Usage())
    lines = "\n".join(found.lines)
    assert f"traffic    {url}: {recorded}, costs {recorded.cost(100.0):.2f}" in lines
    assert f"traffic    together, of 1 training that finished: {total}, costs {total.cost(100.0):.2f}" in lines
    assert found.record["cost"] == pytest.approx(total.cost(100.0))
    assert found.record["traffic"][url]["requests"] == recorded.requests

    again = Run(url, store=plain, spool_dir=tmp_path / "spool")
    again.submit(_checkpoint(tmp_path / "more"), step=99)
    again.close()
    both, trainings = traffic.recorded(open_store(url, plain))
    assert trainings == 2
    assert recorded.requests < both[url].requests < 3 * recorded.requests


_KILLED = """
import os, sys
from stagekit.config import StoreConfig
from stagekit.runs.traffic import Traffic
from stagekit.store import open_store
traffic = Traffic(sys.argv[1], every_s=0)
store = open_store(sys.argv[1], StoreConfig(endpoint_url=sys.argv[2]))
store.head("data")
if child := os.fork():  # as a worker of a DataLoader
    os.waitpid(child, 0)
    print("counted", flush=True)
    sys.stdin.read()
else:
    store.get("data")
    store.get("data")
os._exit(9)
"""


def test_what_a_killed_training_and_its_workers_asked_is_taken_in_by_the_next_one_once(
    moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig], isolated: Path
) -> None:
    url = f"s3://{moto_server.create_bucket()}/run"
    config = credentials_for(moto_server)
    open_store(url, config).put("data", bytes(5000))
    command = [sys.executable, "-c", _KILLED, url, str(config.endpoint_url)]
    keys = {"AWS_ACCESS_KEY_ID": moto_server.access_key, "AWS_SECRET_ACCESS_KEY": moto_server.secret_key}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **keys}) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"counted\n"
        mine, other = traffic.Traffic(url), traffic.Traffic(url)
        open_store(url, config).head("data")
        # The training still lives; its worker does not.
        assert mine.collected() == {url: Usage(3, 0, 10_000)}
        killed.communicate(b"")
    later = traffic.Traffic(url)
    assert later.collected() == {url: Usage(1, 0, 0)}
    assert traffic.Traffic(url).collected() == {}
    assert other.collected() == {url: Usage(1, 0, 0)}
    assert list((isolated / "stagekit" / "traffic").iterdir()) == []


def _checkpoint(directory: Path) -> Path:
    directory.mkdir()
    (directory / "model.bin").write_bytes(b"weights")
    return directory


def test_a_run_in_a_directory_costs_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", spool_dir=tmp_path / "spool")
    run.submit(_checkpoint(tmp_path / "one"), step=1)
    run.close()
    closed = list((tmp_path / "run" / "owners").glob("*.closed"))
    assert [path.read_bytes() for path in closed] == [b""]
    assert traffic.recorded(open_store(tmp_path / "run")) == ({}, 0)


def test_a_record_that_is_none_is_refused_and_passed_over(tmp_path: Path) -> None:
    good = traffic.to_bytes({"s3://bucket/run": Usage(1, 2, 3)})
    assert traffic.from_bytes(good, source="x") == {"s3://bucket/run": Usage(1, 2, 3)}
    with pytest.raises(ManifestError, match="x is damaged"):
        traffic.from_bytes(good.replace(b'"requests": 1', b'"requests": 9').replace(b'"requests":1', b'"requests":9'), source="x")
    store = open_store(tmp_path)
    store.put("owners/000001-1a2b3c4d.closed", b"rubbish")
    store.put("owners/000002-1a2b3c4d.closed", good)
    assert traffic.recorded(store) == ({"s3://bucket/run": Usage(1, 2, 3)}, 1)
