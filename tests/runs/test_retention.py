"""What is kept and what goes: a pure policy, a sweep that any crash leaves whole, and a dry run that tells exactly the truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stagekit
from stagekit.errors import CheckpointError, Denied, Fenced, Unreachable, UsageError
from stagekit.processes import Process
from stagekit.progress import Stage
from stagekit.report import RunInfo
from stagekit.runs import Run, catalog, lease, retention
from stagekit.runs.layout import Checkpoint, CheckpointManifest, CheckpointName, SupersededRecord
from stagekit.runs.retention import Policy, execute, plan
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from ..made import make_checkpoint
from .conftest import Events, fill

Make = Callable[..., Run]


def of(*steps: int, **metrics: float) -> list[Checkpoint]:
    return [Checkpoint(CheckpointManifest(CheckpointName(1, step, step, "1a2b3c4d"), (), metrics=metrics), "") for step in steps]


def kept(policy: Policy, checkpoints: list[Checkpoint], *protected: int) -> list[int]:
    names = {one.name for one in checkpoints if one.step in protected}
    dropped = {one.step for one in policy.dropped(checkpoints, protected=names)}
    return [one.step for one in checkpoints if one.step not in dropped]


def test_without_a_policy_everything_is_kept() -> None:
    assert kept(Policy(), of(*range(100))) == list(range(100))
    assert not Policy().asked


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(keep_last=1), [9]),
        (Policy(keep_last=3), [7, 8, 9]),
        (Policy(keep_last=100), list(range(10))),
        (Policy(keep_every=4), [0, 4, 8, 9]),
        (Policy(keep_every=4, keep_last=2), [0, 4, 8, 9]),
        (Policy(keep_best=("loss", "min", 2)), list(range(10))),  # none has that metric: it may be mistyped
    ],
    ids=str,
)
def test_what_any_rule_wants_is_kept_and_always_the_newest(policy: Policy, expected: list[int]) -> None:
    assert kept(policy, of(*range(10))) == expected


def test_the_best_are_kept_and_nan_is_never_best() -> None:
    losses = [0.5, math.nan, 0.1, 0.3, math.inf, 0.9]
    checkpoints = [one for step, loss in enumerate(losses) for one in of(step, loss=loss)]
    assert kept(Policy(keep_best=("loss", "min", 2)), checkpoints) == [2, 3, 5]
    assert kept(Policy(keep_best=("loss", "max", 1)), checkpoints) == [5], "neither is an infinity"


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_where_all_are_nan_nothing_tells_which_is_best(loss: float) -> None:
    checkpoints = [one for step in range(4) for one in of(step, loss=loss)]
    policy = Policy(keep_best=("loss", "min", 1))
    assert kept(policy, checkpoints) == [0, 1, 2, 3]
    assert "'loss', by which keep_best is to decide, is no finite number in any checkpoint" in (policy.undecided(checkpoints) or "")


def test_what_a_training_resumed_from_is_kept() -> None:
    assert kept(Policy(keep_last=1), of(*range(5)), 2) == [2, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 0},
        {"keep_last": True},
        {"keep_every": -1},
        {"keep_best": ("loss", "least", 1)},
        {"keep_best": ("loss", "min", 0)},
        {"keep_best": ("loss",)},
    ],
    ids=str,
)
def test_policies_that_cannot_be_meant(options: dict[str, object], make_run: Make) -> None:
    with pytest.raises(UsageError, match="keep_"):
        make_run(**options)


def everything(store: FaultStore) -> dict[str, bytes]:
    return {info.key: bytes(store.inner.get(info.key)) for info in store.inner.list()}


def whole(store: FaultStore) -> list[int]:
    """The steps that a reader can have, each confirmed."""
    found = catalog.read_all(store.inner)
    assert not found.damaged
    for checkpoint in found.checkpoints:
        catalog.confirm(store.inner, checkpoint)
    return [one.step for one in found.checkpoints]


@pytest.fixture
def five(store: FaultStore) -> list[CheckpointName]:
    """Steps 1 to 5; 3 and 5 refer to the base model that step 1 sent."""
    names = [make_checkpoint(store, 1, {"base.bin": b"base", "head.bin": b"1"})]
    for step in range(2, 6):
        shared = {"base.bin": names[0].file_key("base.bin")} if step in (3, 5) else {}
        names.append(make_checkpoint(store, step, {"base.bin": b"base", "head.bin": b"%d" % step}, shared=shared))
    store.put("logs/train.txt", b"no checkpoint's")
    return names


def test_a_dry_run_names_exactly_what_the_real_one_removes(store: FaultStore, five: list[CheckpointName]) -> None:
    before = everything(store)
    wanted = plan(store, Policy(keep_last=1))
    assert everything(store) == before
    assert [one.step for one in wanted.checkpoints] == [1, 2, 3, 4]
    execute(store, wanted, check=lambda: None)
    after = everything(store)
    manifests = {name.manifest_key for name in five[:4]}
    assert before.keys() - after.keys() == manifests | {key for key, _ in wanted.objects}
    assert wanted.freed_bytes == sum(len(before[key]) for key, _ in wanted.objects)
    assert after.keys() - before.keys() == {name.superseded_key for name in five[:4]}
    assert whole(store) == [5]
    assert five[0].file_key("base.bin") in after, "step 5 refers to it"
    assert not plan(store, Policy(keep_last=1))


def test_what_stays_of_a_removed_one_for_others_is_no_unfinished_attempt(store: FaultStore, five: list[CheckpointName]) -> None:
    execute(store, plan(store, Policy(keep_last=1)), check=lambda: None)
    found = stagekit.info(store)
    assert isinstance(found, RunInfo)
    assert [one.line for one in found.unfinished] == ["step 1 (generation 1): removed, but for files that other checkpoints refer to"]
    assert any(entry.note == "removed, but for files that others refer to" for entry in stagekit.ls(store))
    assert not any(fault.what == "unfinished" for fault in stagekit.verify(store).findings)


@pytest.mark.parametrize("harm", ["file", "manifest"])
def test_damage_of_the_newest_is_shown(store: FaultStore, make_run: Make, tmp_path: Path, harm: str) -> None:
    run = make_run()
    for step in (1, 2):
        run.submit(fill(tmp_path / str(step)), step=step)
    run.close()
    newest = run.checkpoints()[0].name
    store.delete(newest.file_key("model.bin") if harm == "file" else newest.manifest_key)
    found = stagekit.info(store)
    assert isinstance(found, RunInfo)
    assert "is missing" in found.damaged[0]
    assert (len(found.damaged), found.unfinished) == (1, ())


def test_what_went_leaves_a_record(store: FaultStore, five: list[CheckpointName]) -> None:
    execute(store, plan(store, Policy(keep_last=4)), check=lambda: None)
    record = SupersededRecord.from_bytes(bytes(store.get(five[0].superseded_key)), source="")
    assert (record.step, record.reason) == (1, "retention")
    assert [(path, size) for path, size, _ in record.files] == [("base.bin", 4), ("head.bin", 1)]


def test_a_shared_file_goes_when_the_last_that_refers_to_it_has_gone(store: FaultStore, five: list[CheckpointName]) -> None:
    execute(store, plan(store, Policy(keep_last=1)), check=lambda: None)
    make_checkpoint(store, 6, {"head.bin": b"6"})
    execute(store, plan(store, Policy(keep_last=1)), check=lambda: None)
    assert whole(store) == [6]
    assert not [key for key in everything(store) if key.startswith("checkpoints/") and "000000000006" not in key]


@pytest.mark.parametrize("stop", range(14))
def test_a_crash_at_any_point_leaves_whole_checkpoints_and_a_rerun_finishes(
    store: FaultStore, five: list[CheckpointName], stop: int
) -> None:
    seen = 0

    def crash(event: object) -> None:
        nonlocal seen
        if isinstance(event, Stage):
            if seen == stop:
                raise KeyboardInterrupt
            seen += 1

    policy = Policy(keep_last=2)
    with suppress(KeyboardInterrupt):
        execute(store, plan(store, policy), check=lambda: None, on_event=crash)
    assert seen == min(stop, 10), "three records, three manifests and four objects"
    assert whole(store)[:2] == [5, 4]
    execute(store, plan(store, policy), check=lambda: None)
    assert whole(store) == [5, 4]
    left = {key for key in everything(store) if key.startswith("checkpoints/")}
    referenced = {record.key(one.name) for one in catalog.read_all(store).checkpoints for record in one.files}
    assert left == referenced | {name.manifest_key for name in five[3:]}


def test_the_newest_whole_one_and_anything_newer_stay(store: FaultStore, five: list[CheckpointName]) -> None:
    store.delete(five[4].file_key("head.bin"))
    wanted = plan(store, Policy(keep_last=1))
    assert [one.step for one in wanted.checkpoints] == [1, 2, 3]


def test_a_damaged_manifest_stops_the_sweep(store: FaultStore, five: list[CheckpointName]) -> None:
    store.put(five[2].manifest_key, b"{")
    before = everything(store)
    with pytest.raises(CheckpointError, match=r"nothing is removed, since a manifest is damaged and may refer to any file.*000000000003"):
        plan(store, Policy(keep_last=1))
    assert everything(store) == before


@pytest.mark.parametrize("operation", ["children", "get", "head", "list"])
def test_a_store_that_cannot_be_seen_loses_nothing(store: FaultStore, five: list[CheckpointName], operation: str) -> None:
    before = everything(store)
    store.fail(operation, Unreachable("no answer"), times=None)  # type: ignore[arg-type]  # one of its operations
    with pytest.raises(Unreachable):
        plan(store, Policy(keep_last=1))
    assert everything(store) == before


def test_a_zombie_removes_nothing(store: FaultStore, five: list[CheckpointName]) -> None:
    zombie, _ = lease.take(store, "aaaaaaaa", Process.current(), clock=lambda: 0.0)
    lease.take(store, "bbbbbbbb", Process.current(), clock=lambda: 0.0)
    before = everything(store)
    with pytest.raises(Fenced):
        execute(store, plan(store, Policy(keep_last=1)), check=lambda: lease.check(store, zombie))
    assert everything(store) == before


def test_an_empty_run_is_no_reason_to_delete(store: FaultStore) -> None:
    assert not plan(store, Policy(keep_last=1))
    assert not plan(store, Policy(keep_last=1), leftovers_before_s=math.inf)


def test_leftovers_of_writers_that_were_taken_over_go_when_they_are_old(store: FaultStore, five: list[CheckpointName]) -> None:
    half = make_checkpoint(store, 6, {"head.bin": b"half"}, commit=False)
    for owner in ("aaaaaaaa", "bbbbbbbb"):
        lease.take(store, owner, Process.current(), clock=lambda: 0.0)
    own = make_checkpoint(store, 7, {"head.bin": b"on its way"}, generation=2, commit=False)
    assert not plan(store, Policy())
    assert not plan(store, Policy(), leftovers_before_s=0.0), "younger than that"
    with store.inner.multipart(half.file_key("big.bin"), part_size=5), store.inner.multipart(own.file_key("big.bin"), part_size=5):
        wanted = plan(store, Policy(), leftovers_before_s=math.inf)
        assert [key for key, _ in wanted.objects] == [half.file_key("head.bin")]
        assert [upload.key for upload in wanted.uploads] == [half.file_key("big.bin")]


def test_a_run_prunes_and_keeps_what_it_resumed_from(store: FaultStore, make_run: Make, events: Events, tmp_path: Path) -> None:
    make_checkpoint(store, 1, {"model.bin": b"1"})
    make_checkpoint(store, 2, {"model.bin": b"2"})
    run = make_run(keep_last=1)
    assert run.restore(tmp_path / "restored", 1) is not None
    for step in (3, 4, 5):
        run.submit(fill(tmp_path / str(step)), step=step)
        run.drain()
    run.close()
    assert whole(store) == [5, 1]
    assert any("as asked by keep_*: step 2" in text for text in events.texts("info"))


def test_a_key_that_may_not_delete_still_saves_and_says_so_once(store: FaultStore, make_run: Make, events: Events, tmp_path: Path) -> None:
    store.fail("delete", Denied("deleting: not allowed"), times=None)
    run = make_run(keep_last=1)
    for step in (1, 2, 3):
        run.submit(fill(tmp_path / str(step)), step=step)
    run.close()
    assert whole(store) == [3, 2, 1]
    assert len([text for text in events.texts("warning") if "old checkpoints are not removed: deleting: not allowed" in text]) == 1


@given(
    steps=st.lists(st.integers(0, 60), unique=True, max_size=12),
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 20),
    keep_best=st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
    losses=st.lists(st.floats(), min_size=61, max_size=61),
    links=st.lists(st.integers(0, 11), min_size=12, max_size=12),
)
def test_whatever_the_policy_every_checkpoint_left_is_whole(
    steps: list[int],
    keep_last: int | None,
    keep_every: int | None,
    keep_best: tuple[str, str, int] | None,
    losses: list[float],
    links: list[int],
) -> None:
    store = MemoryStore("memory://retention-property/run")
    for info in list(store.list()):
        store.delete(info.key)
    names: list[CheckpointName] = []
    for index, step in enumerate(sorted(steps)):
        shared = {"base": names[links[index]].file_key("base")} if links[index] < index else {}
        if shared and not any(info.key == shared["base"] for info in store.list()):
            shared = {}
        names.append(make_checkpoint(store, step, {"base": b"base", "head": b"%d" % step}, shared=shared, metrics={"loss": losses[step]}))
    policy = Policy(keep_last, keep_every, keep_best)
    before = {one.name for one in catalog.read_all(store).checkpoints}
    wanted = retention.plan(store, policy)
    retention.execute(store, wanted, check=lambda: None)
    found = catalog.read_all(store)
    assert {one.name for one in found.checkpoints} == before - {one.name for one in wanted.checkpoints}
    for checkpoint in found.checkpoints:
        catalog.confirm(store, checkpoint)
    if names:
        assert names[-1] in {one.name for one in found.checkpoints}
