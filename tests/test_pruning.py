"""Pruning by hand: what is told is exactly what goes, nothing that somebody may need goes, and a prefix is only looked at unless asked."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path

import pytest

import stagekit
from stagekit.cli import main
from stagekit.errors import CheckpointError, Denied, UsageError
from stagekit.processes import Process
from stagekit.progress import Event, Message
from stagekit.pruning import Pruning, survey
from stagekit.runs import Run, catalog, lease
from stagekit.runs.retention import Policy
from stagekit.store.base import Store
from stagekit.store.below import Below
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from .made import make_checkpoint, make_dataset, make_run

ELSEWHERE = Process("other-host", "other-boot", "pid:[1]", 77, "12345")
TWO_DAYS_S = 2 * 86_400.0


@pytest.fixture
def bucket() -> FaultStore:
    return FaultStore(MemoryStore(f"memory://{uuid.uuid4().hex}"))


def later(where: Store, policy: Policy | None = None, **options: object) -> Pruning:
    """A survey two days from now."""
    return survey(where, policy=policy or Policy(), clock=lambda: time.time() + TWO_DAYS_S, **options)  # type: ignore[arg-type]  # handed on


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list()}


@pytest.fixture
def run(bucket: FaultStore) -> Store:
    """Four checkpoints and an attempt that was never committed."""
    place = Below(bucket, "runs/first/")
    make_run(place)
    for step in range(1, 5):
        make_checkpoint(place, step, {"model.bin": b"%d" % step * 100})
    make_checkpoint(place, 5, {"model.bin": b"half"}, commit=False)
    bucket.put("runs/second/notes.txt", b"not this run's")
    return place


def test_a_run_keeps_what_the_rules_say_and_what_is_told_is_what_goes(bucket: FaultStore, run: Store) -> None:
    before = keys(bucket)
    told = stagekit.prune(run, keep_last=2, dry_run=True)
    assert keys(bucket) == before
    done = stagekit.prune(run, keep_last=2)
    assert [place.lines for place in done.places] == [place.lines for place in told.places]
    [place] = done.places
    assert {f"runs/first/{key}" for key, _ in place.objects} == before - keys(bucket)
    assert place.steps == (1, 2)
    assert place.lines[0].endswith("runs/first: 200 B (4 objects; step 1, 2)")
    assert "delete " + str(run.location) + "/checkpoints/000000000001-000001-000001-1a2b3c4d/files/model.bin (100 B)" in place.lines
    assert told.line.endswith("200 B to free (a dry run: nothing is removed)")
    assert [one.step for one in catalog.read_all(run).checkpoints] == [4, 3]


def test_without_rules_only_old_leftovers_go(bucket: FaultStore, run: Store) -> None:
    assert stagekit.prune(run).line.endswith("nothing to remove"), "the attempt is young"
    half = "runs/first/checkpoints/000000000005-000001-000005-1a2b3c4d/files/"
    with bucket.inner.multipart(half + "large.bin", part_size=5):
        wanted = later(run)
        [place] = wanted.places
        assert [upload.key for upload in place.uploads] == [half.removeprefix("runs/first/") + "large.bin"]
        assert place.lines[0].endswith("4 B (1 objects; 1 unfinished uploads)")
    before = keys(bucket) - {half + "large.bin"}
    bucket.delete(half + "large.bin")
    wanted.carry_out()
    assert before - keys(bucket) == {half + "model.bin"}
    assert [one.step for one in catalog.read_all(run).checkpoints] == [4, 3, 2, 1]


def test_a_run_that_may_be_alive_is_refused_unless_told(bucket: FaultStore, run: Store) -> None:
    lease.take(run, "aaaaaaaa", ELSEWHERE, clock=lambda: 0.0)
    before = keys(bucket)
    with pytest.raises(CheckpointError, match="process 77 on other-host may still be writing to this run; nothing is removed"):
        stagekit.prune(run, keep_last=1)
    assert keys(bucket) == before
    assert [place.steps for place in later(run, Policy(keep_last=1)).places] == [(1, 2, 3)], "silent for two days"
    assert stagekit.prune(run, keep_last=1, allow_live=True).places[0].steps == (1, 2, 3)


def test_a_takeover_meanwhile_stops_it_and_leaves_whole_checkpoints(run: Store) -> None:
    wanted = survey(run, policy=Policy(keep_last=1))
    lease.take(run, "bbbbbbbb", ELSEWHERE, clock=lambda: 0.0)
    with pytest.raises(CheckpointError, match=r"took the run over meanwhile \(generation 1\)"):
        wanted.carry_out()
    for checkpoint in catalog.read_all(run).checkpoints:
        catalog.confirm(run, checkpoint)
    assert len(catalog.read_all(run).checkpoints) == 4


def test_a_prefix_is_only_looked_at_unless_asked_and_everything_below_it_is_found(bucket: FaultStore, run: Store) -> None:
    data = Below(bucket, "data/deep/digits/")
    make_dataset(data)
    data.put("shards/000009.tar", b"from before it was replaced")
    told = later(bucket, Policy(keep_last=3))
    before = keys(bucket)
    told.carry_out()
    assert keys(bucket) == before
    assert told.dry_run
    assert {(place.kind, place.url.rpartition("/")[2]) for place in told.places} == {("dataset", "digits"), ("run", "first")}
    later(bucket, Policy(keep_last=3), dry_run=False).carry_out()
    gone = before - keys(bucket)
    assert "data/deep/digits/shards/000009.tar" in gone
    assert all(key.startswith(("runs/first/checkpoints/00000000000", "data/deep/digits/shards/000009")) for key in gone)
    stagekit.Dataset(data).table(0)


def test_scratch_objects_of_killed_processes_are_in_no_listing_and_go_when_they_are_old(bucket: FaultStore, run: Store) -> None:
    make_dataset(Below(bucket, "data/digits/"))
    probes = {f"{folder}.stagekit-probe-0123456789abcdef" for folder in ("", "runs/", "runs/first/", "data/digits/")}
    before = keys(bucket)
    for key in probes:
        bucket.put(key, b"right")
    assert [entry.url.rpartition("/")[2] for entry in stagekit.ls(bucket)] == ["data", "runs"]
    assert not [place for place in survey(bucket, policy=Policy()).places if "probe" in str(place.objects)], "they may be in use"
    told = later(bucket, Policy(keep_last=4), dry_run=False)
    told.carry_out()
    assert before - keys(bucket) == {key for key in before if "/000000000005-" in key}, "and the attempt without a commit"
    assert not probes & keys(bucket)


def test_open_uploads_that_belong_to_nothing_are_found_below_a_prefix(bucket: FaultStore) -> None:
    with bucket.inner.multipart("lost/big.bin", part_size=5):
        [place] = later(bucket).places
        assert (place.kind, [upload.key for upload in place.uploads]) == ("folder", ["lost/big.bin"])
        assert survey(bucket, policy=Policy()).places == []


def test_a_data_set_that_is_being_written_is_left_alone(bucket: FaultStore) -> None:
    make_dataset(bucket)
    bucket.put("shards/000009.tar", b"on its way")
    bucket.put(".claim.json", b"{}")
    events: list[Event] = []
    assert later(bucket, on_event=events.append).places == []
    assert any(isinstance(event, Message) and "is being written, or its writer died" in event.text for event in events)


@pytest.mark.parametrize("operation", ["list", "children", "get", "head"])
def test_not_seeing_removes_nothing(bucket: FaultStore, run: Store, operation: str) -> None:
    before = keys(bucket.inner)
    bucket.fail(operation, Denied("no"), times=None)  # type: ignore[arg-type]  # one of its operations
    with pytest.raises(Denied):
        stagekit.prune(run, keep_last=1)
    assert keys(bucket.inner) == before


def test_an_age_below_an_hour_is_refused(bucket: FaultStore) -> None:
    with pytest.raises(UsageError, match=r"older_than: 1 min is less than an hour"):
        stagekit.prune(bucket, older_than="60s")


def test_the_command_prints_the_same_whether_it_is_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = DirectoryStore(tmp_path / "run")
    make_run(place)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
        make_checkpoint(place, step, {"model.bin": b"x" * 10}, metrics={"loss": loss})
    url = str(tmp_path / "run")
    printed = []
    for mode in ("--dry-run", "--no-dry-run"):
        assert main(["prune", url, "--keep-last", "1", "--keep-best", "loss:min:1", "--json", mode]) == 0
        printed.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    pruned = [[line for line in lines if line["event"] == "pruned"] for lines in printed]
    assert pruned[0] == pruned[1]
    assert pruned[0][0]["steps"] == [1]
    assert printed[1][0] == {"event": "freed", "url": url, "bytes": 10, "dry_run": False}, "and it is told first"
    assert [one.step for one in Run(url).checkpoints()] == [3, 2]
    assert main(["prune", url, "--keep-best", "loss"]) == 2
    assert "--keep-best: 'loss' is not METRIC:min|max:N" in capsys.readouterr().err
