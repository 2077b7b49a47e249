"""One path through everything, on every dialect of S3 there is, and with keys that expire on the way."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import stagekit
from stagekit.config import StoreConfig
from stagekit.report import RunInfo
from stagekit.store import open_store
from stagekit.torch import StreamLoader

from .conftest import S3Place
from .rigs.servers import S3Server

SAMPLES = 120


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Raw files whose names and sizes are awkward enough."""
    directory = tmp_path / "raw"
    directory.mkdir()
    for number in range(SAMPLES):
        (directory / f"sämple {number:03}.bin").write_bytes(bytes([number]) * (1 + 977 * (number % 23)))
        (directory / f"sämple {number:03}.cls").write_text(str(number % 7))
    return directory


def save(run: stagekit.Run, step: int, loader: StreamLoader) -> None:
    with run.checkpoint(step=step, metrics={"loss": 1 / step}) as directory:
        (Path(directory) / "loader.json").write_text(json.dumps(loader.state_dict()))
        (Path(directory) / "wëights.bin").write_bytes(bytes([step]) * 300_000)


def train(machine: Path, url: str, config: StoreConfig, *, stop_after: int | None) -> list[str]:
    """The keys of the samples that this machine trained on, from where the run is to the end of the epoch or to ``stop_after`` batches."""
    run = stagekit.Run(f"{url}/run", store=config, spool_dir=machine / "spool", keep_last=3)
    loader = StreamLoader(f"{url}/data", batch_size=8, store=config, drop_last=False, decode=None)
    found = run.restore(machine / "restored", allow_fresh=True)
    if found is not None:
        loader.load_state_dict(json.loads((machine / "restored" / "loader.json").read_text()))
    step = found.step if found is not None else 0
    seen: list[str] = []
    for number, batch in enumerate(loader, 1):
        seen.extend(key for key in batch["__key__"] if key)
        step += 1
        save(run, step, loader)
        if number == stop_after:
            break
    run.close()
    return seen


def whole_path(raw: Path, url: str, config: StoreConfig, tmp_path: Path) -> None:
    """Shard, verify, stream with checkpoints, stop, resume on another machine, prune, look."""
    stagekit.shard(raw, f"{url}/data", store=config, shard_size="1MB")
    assert stagekit.verify(f"{url}/data", deep=True, store=config).ok
    first = train(tmp_path / "one", url, config, stop_after=6)
    second = train(tmp_path / "two", url, config, stop_after=None)
    assert len(first) == 48
    assert sorted(first + second) == sorted({*first, *second})
    assert len(first + second) == SAMPLES
    pruned = stagekit.prune(f"{url}/run", keep_last=1, store=config)
    assert pruned is not None
    found = stagekit.info(f"{url}/run", store=config)
    assert isinstance(found, RunInfo)
    assert [one.step for one in found.checkpoints] == [15]
    assert found.unfinished == ()
    assert found.damaged == ()
    assert stagekit.verify(f"{url}/run", deep=True, store=config).ok
    assert list(open_store(url, config).open_uploads()) == []


def test_one_path_on_every_dialect(any_s3: S3Place, raw: Path, tmp_path: Path) -> None:
    whole_path(raw, any_s3.url, any_s3.config, tmp_path)


_KEYS = r"""
import datetime, json, sys
with open(sys.argv[1], "a") as file:
    file.write("asked\n")
soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=2)
print(json.dumps({"Version": 1, "AccessKeyId": sys.argv[2], "SecretAccessKey": sys.argv[3], "Expiration": soon.isoformat()}))
"""


def test_keys_that_expire_are_renewed_on_the_way(
    rclone_server: S3Server, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile whose keys come from a program and hold for two seconds, so that they run out again and again while everything goes on."""
    asked, program = tmp_path / "asked", tmp_path / "keys.py"
    program.write_text(_KEYS)
    command = f"{sys.executable} -I -S {program} {asked} {rclone_server.access_key} {rclone_server.secret_key}"
    (tmp_path / "config").write_text(f"[profile renewed]\ncredential_process = {command}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    bucket = rclone_server.create_bucket()
    whole_path(raw, f"s3://{bucket}", StoreConfig(endpoint_url=rclone_server.endpoint_url, profile="renewed"), tmp_path)
    assert len(asked.read_text().splitlines()) > 5
