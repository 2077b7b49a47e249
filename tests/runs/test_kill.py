"""Killed at every named stage, before and after every kind of request, and at random times: nothing that was reported safe is lost."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagekit.runs
from stagekit.progress import Event, Stage, Subscriber, ignore
from stagekit.runs import Run, retention
from stagekit.runs.layout import CheckpointName
from stagekit.runs.spool import pending
from stagekit.store.directory import STAGING, DirectoryStore
from stagekit.testing.kill import KILLED
from stagekit.testing.proxy import Drop, Status

from .proxied import Proxied
from .trainer import oracle, start

SOURCES = Path(stagekit.runs.__file__).parent

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
    ("checkpoint.noted", 0),
    ("checkpoint.noted", 1),
    ("checkpoint.verified", 1),
    ("checkpoint.unpinned", 1),
    ("prune.recorded", 0),
    ("prune.manifest-deleted", 0),
    ("prune.object-deleted", 0),
    ("prune.object-deleted", 1),
]
ELSEWHERE = ("checkpoint.dropped", "checkpoint.part-sent", "restore.file-fetched", "prune.upload-aborted")
"""Stages that a plain training does not pass: tests of their own kill there."""

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
    plain = {key: value for key, value in options.items() if not key.startswith(("kill", "hold"))}
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


def test_every_stage_is_one_to_be_killed_at() -> None:
    found = {name for path in SOURCES.glob("*.py") for name in re.findall(r'Stage\("([a-z.-]+)"', path.read_text())}
    assert found == {name for name, _ in STAGES} | set(ELSEWHERE)


def test_killed_when_saves_were_dropped(options: Options, tmp_path: Path) -> None:
    chosen = options(kill_stage={"name": "checkpoint.dropped", "skip": 1}, hold=9, steps=9)
    process = start(chosen, tmp_path / "home")
    process.communicate(timeout=120)
    assert process.returncode == KILLED, "the stage was never passed"
    oracle(chosen, tmp_path / "new")
    finish(chosen, tmp_path)


def test_killed_when_a_prune_dropped_an_unfinished_upload(options: Options, tmp_path: Path) -> None:
    chosen = options()
    finish(chosen, tmp_path)
    store = DirectoryStore(tmp_path / "bucket" / "run")
    for number in range(3):
        path = tmp_path / "bucket" / "run" / STAGING / f"{number}f" / CheckpointName(1, 9, number, "1a2b3c4d").file_key("model.bin")
        path.parent.mkdir(parents=True)
        path.write_bytes(b"half of")

    def prune(on_event: Subscriber = ignore) -> None:
        plan = retention.plan(store, retention.Policy(), leftovers_before_s=time.time() + 10, over=True)
        retention.execute(store, plan, check=lambda: None, on_event=on_event)

    def die(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "prune.upload-aborted":
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            prune(die)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "the stage was never passed"
    assert len(list(store.open_uploads(""))) == 2
    assert oracle(chosen, tmp_path / "new") == chosen["steps"]
    prune()
    assert list(store.open_uploads("")) == []
    assert oracle(chosen, tmp_path / "new") == chosen["steps"]


def test_a_rank_that_is_killed_when_it_has_delivered(options: Options, tmp_path: Path) -> None:
    run = Run(tmp_path / "bucket" / "run", rank=0, world_size=2, spool_dir=tmp_path / "spool")
    chosen = options(kill_stage={"name": "checkpoint.part-sent", "skip": 0}, session=run.session(), rank=1, world_size=2)
    process = start(chosen, tmp_path / "home")
    process.communicate(timeout=120)
    assert process.returncode == KILLED, "the stage was never passed"
    with run.checkpoint(step=1) as directory:
        (directory / "rank-0.bin").write_bytes(b"of this rank")
    run.close()
    [checkpoint] = run.checkpoints()
    assert [record.path for record in checkpoint.files] == ["rank-0.bin", "rank-1.bin"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("operation", "key"), CALLS)
def test_killed_at_a_request(options: Options, tmp_path: Path, operation: str, key: str, after: bool) -> None:
    chosen = options(kill_call={"operation": operation, "key": key, "after": after})
    process = start(chosen, tmp_path / "home")
    process.communicate(timeout=120)
    assert process.returncode == KILLED, "the request was never made"
    oracle(chosen, tmp_path / "new")
    finish(chosen, tmp_path)


FLOOD = ("checkpoint.pinned", "checkpoint.dropped")
"""Stages that pass as fast as the trainer saves, whatever reaches the bucket."""


def kill_at_random(options: dict[str, Any], tmp_path: Path, *, rounds: int, seed: int) -> set[int | None]:
    """Start, kill -9, look; now and then on a new disk. Returns the steps that were found.

    The moment is a random one: so many stages further, and then anywhere behind that. How fast the machine is makes no difference.
    """
    chance = random.Random(seed)
    stages, said = tmp_path / "stages", tmp_path / "said"
    found: set[int | None] = set()
    for number in range(rounds):
        stages.write_bytes(b"")
        wanted = chance.choice((0, chance.randrange(20), chance.randrange(60)))
        with said.open("wb") as output:
            process = start({**options, "stages": str(stages)}, tmp_path / f"home-{number // 8}", said=output)
            while sum(stage not in FLOOD for stage in stages.read_text().splitlines()) < wanted:
                assert process.poll() is None, said.read_text()
                time.sleep(0.001)  # a real process comes on in its own time
            time.sleep(chance.uniform(0, 0.02 if wanted else 0.7))
            process.kill()
            process.wait()
        found.add(oracle(options, tmp_path / "new"))
    return found


ROUNDS = 36
ROUNDS_EACH = 8
"""Rounds on a directory, and on each of three servers behind the proxy."""


@pytest.mark.timeout(600)
def test_kills_at_random(options: Options, tmp_path: Path) -> None:
    chosen = options(steps=100_000, keep_last=3)
    found = kill_at_random(chosen, tmp_path, rounds=ROUNDS, seed=1)
    assert len(found) > 6, "the training came on between the kills"
    assert (tmp_path / "bucket" / "other-run" / "keep.txt").read_bytes() == b"not this run's"


@pytest.mark.timeout(600)
def test_kills_at_random_on_a_server_that_fails_now_and_then(proxied: Proxied, tmp_path: Path) -> None:
    chance = random.Random(proxied.server.name)
    for fault in (Status(500), Drop(), Drop(after_request=True)):
        proxied.proxy.fault(fault, where=lambda _: chance.random() < 0.02)
    chosen = proxied.options(100_000)
    found = kill_at_random(chosen, tmp_path, rounds=ROUNDS_EACH, seed=2)
    assert len(found) > 2, "the training came on between the kills"
    proxied.look(chosen)
