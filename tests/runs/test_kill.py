"""Killed at every named stage, before and after every kind of request, and at random times: nothing that was reported safe is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagekit.config import StoreConfig
from stagekit.runs.spool import pending
from stagekit.testing.kill import KILLED

from ..rigs.servers import S3Server
from .trainer import oracle, start

STAGES = [
    ("checkpoint.pinned", 0),
    ("checkpoint.pinned", 2),
    ("checkpoint.leased", 0),
    ("checkpoint.recorded", 0),
    ("checkpoint.recorded", 1),
    ("checkpoint.file-sent", 0),
    ("checkpoint.file-sent", 4),
    ("checkpoint.files-sent", 1),
    ("checkpoint.manifest-sent", 0),
    ("checkpoint.manifest-sent", 1),
    ("checkpoint.verified", 1),
    ("checkpoint.unpinned", 1),
    ("prune.recorded", 0),
    ("prune.manifest-deleted", 0),
    ("prune.object-deleted", 0),
    ("prune.object-deleted", 1),
]
CALLS = [("put", key) for key in ("owners/*.claim", "owners/*.json", "run.json", "*/files/model.bin", "*/manifest.json")]
CALLS += [("delete", "*/manifest.json"), ("head", "*/manifest.json"), ("list", "owners/")]

Options = Callable[..., dict[str, Any]]


@pytest.fixture
def options(tmp_path: Path) -> Options:
    def make(**more: Any) -> dict[str, Any]:
        (tmp_path / "scratch").mkdir(exist_ok=True)
        (tmp_path / "bucket" / "other-run").mkdir(parents=True, exist_ok=True)
        (tmp_path / "bucket" / "other-run" / "keep.txt").write_bytes(b"not this run's")
        return {
            "run": str(tmp_path / "bucket" / "run"),
            "journal": str(tmp_path / "journal"),
            "scratch": str(tmp_path / "scratch"),
            "steps": 4,
            "keep_last": 2,
            **more,
        }

    return make


def finish(options: dict[str, Any], tmp_path: Path) -> None:
    """The next start on the same disk brings everything that was handed over into the bucket and goes on to the end."""
    plain = {key: value for key, value in options.items() if not key.startswith("kill")}
    process = start(plain, tmp_path / "home")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert oracle(plain, tmp_path / "new") == options["steps"]
    assert pending(tmp_path / "home" / "spool") == []
    assert (tmp_path / "bucket" / "other-run" / "keep.txt").read_bytes() == b"not this run's"


@pytest.mark.parametrize(("stage", "skip"), STAGES)
def test_killed_at_a_stage(options: Options, tmp_path: Path, stage: str, skip: int) -> None:
    chosen = options(kill_stage={"name": stage, "skip": skip})
    process = start(chosen, tmp_path / "home")
    process.communicate(timeout=120)
    assert process.returncode == KILLED, "the stage was never passed"
    oracle(chosen, tmp_path / "new")
    finish(chosen, tmp_path)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("operation", "key"), CALLS)
def test_killed_at_a_request(options: Options, tmp_path: Path, operation: str, key: str, after: bool) -> None:
    chosen = options(kill_call={"operation": operation, "key": key, "after": after})
    process = start(chosen, tmp_path / "home")
    process.communicate(timeout=120)
    assert process.returncode == KILLED, "the request was never made"
    oracle(chosen, tmp_path / "new")
    finish(chosen, tmp_path)


def kill_at_random(options: dict[str, Any], tmp_path: Path, *, rounds: int, longest_s: float, seed: int) -> set[int | None]:
    """Start, kill -9, look; now and then on a new disk. Returns the steps that were found."""
    chance = random.Random(seed)
    found: set[int | None] = set()
    for number in range(rounds):
        home = tmp_path / f"home-{number // 8}"
        process = start(options, home)
        time.sleep(chance.uniform(0.15, longest_s))  # a real moment of a real process: there is no clock to pass in
        process.kill()
        process.communicate()
        found.add(oracle(options, tmp_path / "new"))
    return found


@pytest.mark.timeout(600)
def test_fifty_kills_at_random(options: Options, tmp_path: Path) -> None:
    chosen = options(steps=100_000, keep_last=3)
    found = kill_at_random(chosen, tmp_path, rounds=50, longest_s=1.2, seed=1)
    assert len(found) > 10, "the training came on between the kills"
    assert (tmp_path / "bucket" / "other-run" / "keep.txt").read_bytes() == b"not this run's"


@pytest.mark.timeout(600)
def test_kills_at_random_on_a_real_server(
    options: Options, tmp_path: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    config = credentials_for(moto_server)
    chosen = options(run=f"s3://{moto_server.create_bucket()}/run", store={"endpoint_url": config.endpoint_url, "profile": config.profile})
    chosen["steps"] = 100_000
    found = kill_at_random(chosen, tmp_path, rounds=12, longest_s=3.0, seed=2)
    assert len(found) > 2, "the training came on between the kills"
