"""A checkpoint back on disk: whole or not at all, the newest whole one, and never "none" for "cannot tell"."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import uuid
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from stagekit.errors import (
    BucketNotFound,
    CheckpointError,
    DamagedCheckpoint,
    Denied,
    ManifestError,
    NoValidCheckpoint,
    OutOfSpace,
    Unreachable,
    UsageError,
)
from stagekit.progress import Progress
from stagekit.runs import Run, catalog
from stagekit.runs.layout import CheckpointName, seal, unseal
from stagekit.runs.restore import restore, restore_checkpoint
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from ..made import make_checkpoint
from .conftest import Events, Gate, NoConditions, fill

Make = Callable[..., Run]
OTHER = CheckpointName(1, 200, 200, "1a2b3c4d")


def files(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def three(store: FaultStore) -> list[CheckpointName]:
    """Steps 100, 200 and 300, oldest first."""
    return [make_checkpoint(store, step, {"model.pt": b"model %d" % step, "sub/a.json": b"{}"}) for step in (100, 200, 300)]


def test_the_newest_comes_back_with_every_byte(store: FaultStore, three: list[CheckpointName], events: Events, tmp_path: Path) -> None:
    found = restore(store, tmp_path / "new", on_event=events.append)
    assert found is not None
    assert found.step == 300
    assert files(tmp_path / "new") == {"model.pt": b"model 300", "sub/a.json": b"{}"}
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    last = [event for event in events if isinstance(event, Progress)][-1]
    assert (last.task, last.done, last.total, last.finished) == ("restoring step 300", 11, 11, True)


def test_newest_means_generation_before_step(store: FaultStore, three: list[CheckpointName], tmp_path: Path) -> None:
    make_checkpoint(store, 150, {"model.pt": b"after a rollback"}, generation=2)
    found = restore(store, tmp_path / "new")
    assert found is not None
    assert found.step == 150


def test_an_attempt_without_a_manifest_is_not_there(store: FaultStore, three: list[CheckpointName], tmp_path: Path) -> None:
    make_checkpoint(store, 400, {"model.pt": b"half"}, commit=False)
    found = restore(store, tmp_path / "new")
    assert found is not None
    assert found.step == 300
    with pytest.raises(CheckpointError, match="step 400 was begun and never committed"):
        restore(store, tmp_path / "other", 400)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda store, name: store.put(name.file_key("model.pt"), b"model 3O0"), r"model\.pt: expected sha-256 [0-9a-f]{64}, found"),
        (lambda store, name: store.put(name.file_key("model.pt"), b"short"), r"model\.pt: expected 9 bytes, the store holds 5"),
        (lambda store, name: store.delete(name.file_key("sub/a.json")), r"files/sub/a\.json is missing"),
        (lambda store, name: store.put(name.manifest_key, b"{"), r"manifest\.json is damaged"),
        (lambda store, name: store.put(name.manifest_key, store.get(OTHER.manifest_key)), r"moved or copied"),
    ],
    ids=["flipped", "short", "missing", "manifest", "wrong-place"],
)
def test_a_damaged_one_is_rejected_loudly_and_the_next_older_taken(
    store: FaultStore,
    three: list[CheckpointName],
    events: Events,
    tmp_path: Path,
    spoil: Callable[[FaultStore, CheckpointName], None],
    words: str,
) -> None:
    spoil(store, three[2])
    found = restore(store, tmp_path / "new", on_event=events.append)
    assert found is not None
    assert found.step == 200
    assert files(tmp_path / "new")["model.pt"] == b"model 200"
    [told] = events.texts("warning")
    assert told.endswith("this checkpoint is rejected, the next older one is taken")
    with pytest.raises((DamagedCheckpoint, ManifestError), match=words):
        restore(store, tmp_path / "strict", strict=True)
    with pytest.raises(NoValidCheckpoint, match=words):
        restore(store, tmp_path / "asked", 300)
    assert [path.name for path in tmp_path.iterdir()] == ["new"], "after a failure the target is as it was"


@pytest.mark.parametrize(
    "hidden", ["checkpoints/000000000003*", "*000000000003*", "c*", "*"], ids=["folder", "step", "all but owners", "all"]
)
@pytest.mark.parametrize("conditional", [True, False])
def test_a_listing_that_lags_hides_no_newest_checkpoint(make_run: Make, tmp_path: Path, hidden: str, conditional: bool) -> None:
    inner = MemoryStore(f"memory://{uuid.uuid4().hex}/run")
    writer, reader = FaultStore(inner if conditional else NoConditions(inner)), FaultStore(inner)
    for step in (1, 2, 3):
        run = make_run(writer, spool_dir=tmp_path / f"machine-{step}")  # a generation each
        for number in (0, 1):
            run.submit(fill(tmp_path / f"out-{step}-{number}", b"%d" % step), step=10 * step + number)
            run.drain()
        run.close()
    reader.hide("commits/000003-*/000002")
    reader.hide("owners/000003*")
    reader.hide(hidden.replace("000000000003", "00000000003"))
    found = make_run(reader).restore(tmp_path / "new")
    assert found is not None
    assert found.step == 31
    newest = make_run(reader).latest()
    assert newest is not None
    assert newest.step == 31


def test_a_newest_commit_that_has_vanished_is_told_and_not_passed_over_in_silence(
    store: FaultStore, make_run: Make, events: Events, tmp_path: Path
) -> None:
    run = make_run()
    for step in (1, 2):
        run.submit(fill(tmp_path / f"out-{step}"), step=step)
        run.drain()
    run.close()
    for info in list(store.list("checkpoints/")):
        if info.key.startswith("checkpoints/000000000002"):
            store.delete(info.key)
    found = make_run().restore(tmp_path / "new")
    assert found is not None
    assert found.step == 1
    assert any("step 2: it was committed, and memory://" in text for text in events.texts("warning"))
    with pytest.raises(DamagedCheckpoint, match=r"step 2: it was committed, and .*manifest\.json is missing"):
        make_run().restore(tmp_path / "strict", strict=True)
    assert make_run().latest() == found


def test_a_commit_between_two_looks_of_a_reader_has_not_vanished(make_run: Make, events: Events, tmp_path: Path) -> None:
    inner = MemoryStore(f"memory://{uuid.uuid4().hex}/run")
    writer, reader, gate = FaultStore(inner), FaultStore(inner), Gate()
    writer.act("put", gate, "*/manifest.json")
    run = make_run(writer)
    run.submit(fill(tmp_path / "out"), step=1)
    assert gate.reached.wait(60)

    def commit(_call: object) -> None:
        gate.opened.set()
        run.drain()

    reader.act("list", commit, "owners/*", skip=1)  # the manifest was not there; now the reader asks whether a commit is noted
    newest = make_run(reader, spool_dir=tmp_path / "reader").latest()
    assert newest is not None
    assert newest.step == 1
    assert events.texts("warning") == []


def test_what_is_removed_while_a_reader_looks_gives_way_to_what_replaced_it(make_run: Make, tmp_path: Path) -> None:
    inner = MemoryStore(f"memory://{uuid.uuid4().hex}/run")
    reader, run = FaultStore(inner), make_run(inner, keep_last=1)
    run.submit(fill(tmp_path / "out-1"), step=1)
    run.drain()

    def replace(_call: object) -> None:
        run.submit(fill(tmp_path / "out-2"), step=2)
        run.drain()
        assert [name.step for name in catalog.attempts(inner)] == [2]

    reader.act("get", replace, "*/manifest.json")
    newest = make_run(reader, spool_dir=tmp_path / "reader").latest()
    assert newest is not None
    assert newest.step == 2


def test_one_bad_body_is_fetched_again(store: FaultStore, three: list[CheckpointName], events: Events, tmp_path: Path) -> None:
    store.corrupt(three[2].file_key("model.pt"))
    found = restore(store, tmp_path / "new", on_event=events.append)
    assert found is not None
    assert found.step == 300
    assert events.texts("warning") == []


def test_all_damaged_is_an_error_and_no_new_run(store: FaultStore, three: list[CheckpointName], make_run: Make, tmp_path: Path) -> None:
    for name in three:
        store.delete(name.file_key("model.pt"))
    with pytest.raises(NoValidCheckpoint, match=r"none of those asked for \(latest\) is whole.*step 100"):
        make_run().restore(tmp_path / "new")
    with pytest.raises(NoValidCheckpoint, match="none of them is whole"):
        make_run().latest()
    assert not (tmp_path / "new").exists()


def test_a_new_run_is_none(make_run: Make, tmp_path: Path) -> None:
    assert make_run().restore(tmp_path / "new") is None
    assert make_run().latest() is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="has no checkpoint of step 5; it has no checkpoint at all"):
        make_run().restore(tmp_path / "new", 5)


@pytest.mark.parametrize("error", [Denied("listing: forbidden"), Unreachable("no answer"), BucketNotFound("no such bucket")], ids=repr)
@pytest.mark.parametrize("operation", ["children", "get", "head"])
def test_cannot_tell_is_never_none(
    store: FaultStore, three: list[CheckpointName], make_run: Make, events: Events, tmp_path: Path, operation: str, error: Exception
) -> None:
    store.fail(operation, error, times=None)  # type: ignore[arg-type]  # one of its operations
    with pytest.raises(type(error)):
        make_run().restore(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    assert make_run().restore(tmp_path / "new", allow_fresh=True) is None
    assert any("starting from scratch, as allow_fresh says, although" in text for text in events.texts("warning"))


def test_a_mistake_in_the_call_is_not_forgiven_by_allow_fresh(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_bytes(b"keep")
    for target in (tmp_path / "full", tmp_path / "full" / "mine.txt"):
        with pytest.raises(UsageError, match="give a new"):
            make_run().restore(target, allow_fresh=True)
    assert files(tmp_path / "full") == {"mine.txt": b"keep"}
    assert store.calls == [], "refused before the store is asked"


def test_an_empty_directory_a_mount_point_and_the_current_directory_can_be_targets(
    store: FaultStore, three: list[CheckpointName], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    assert restore(store, tmp_path / "empty") is not None
    assert files(tmp_path / "empty")["model.pt"] == b"model 300"

    def busy(self: Path, target: Path) -> Path:
        if self.name.endswith(".restoring"):
            raise OSError(16, "Device or resource busy")
        return Path(os.rename(self, target) or target)

    monkeypatch.setattr(Path, "rename", busy)
    (tmp_path / "mounted").mkdir()
    assert restore(store, tmp_path / "mounted") is not None
    assert files(tmp_path / "mounted")["sub/a.json"] == b"{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "mounted"]


def test_what_dead_restores_of_the_same_target_left_goes_and_what_a_living_one_has_stays(
    store: FaultStore, three: list[CheckpointName], tmp_path: Path
) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    dead, living, own = ended.pid, os.getppid(), os.getpid()
    gone = [f".new.{dead}.restoring", f".restoring-{dead}", f"..restoring-{dead}.{dead}.restoring"]
    stay = [f".new.{living}.restoring", f".other.{dead}.restoring", f".restoring-{living}", f"..restoring-{living}.{living}.restoring"]
    for name in gone + stay:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").write_bytes(b"half")
    assert restore(store, tmp_path / "new") is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*gone[1:], *stay, "new"])
    assert restore(store, tmp_path / f".restoring-{own}") is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*stay, "new", f".restoring-{own}"])
    far = tmp_path / f".far.{dead}.restoring"  # of another container, where the number means another process
    far.mkdir()
    held = os.open(far, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert restore(store, tmp_path / "far") is not None
    assert far.exists()
    os.close(held)


def test_space_is_checked_before_a_byte_is_fetched(
    store: FaultStore, three: list[CheckpointName], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(OutOfSpace, match="it needs 11 B and the disk has 10 B free"):
        restore(store, tmp_path / "new")
    assert not [call for call in store.calls if call.operation == "get" and "/files/" in call.key]
    assert list(tmp_path.iterdir()) == []


def test_times_follow_the_steps(store: FaultStore, three: list[CheckpointName], tmp_path: Path) -> None:
    for step in (300, 100, 200):
        restore(store, tmp_path / str(step), step)
    for path in ("", "model.pt", "sub", "sub/a.json"):
        times = [(tmp_path / str(step) / path).stat().st_mtime_ns for step in (100, 200, 300)]
        assert times == sorted(set(times))
    (tmp_path / "later").mkdir()
    assert (tmp_path / "later").stat().st_mtime_ns > max(times), "what the trainer writes next is newer"


def test_nothing_is_unpickled(store: FaultStore, tmp_path: Path) -> None:
    make_checkpoint(store, 1, {"model.pt": b"cos\nsystem\n(S'touch /tmp/pwned-by-a-checkpoint'\ntR."})
    restore(store, tmp_path / "new")
    assert not Path("/tmp/pwned-by-a-checkpoint").exists()
    assert files(tmp_path / "new")["model.pt"].startswith(b"cos\nsystem")


def test_the_best_by_a_metric(store: FaultStore, make_run: Make, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not say which metric decides what is best.*It has no metrics"):
        make_run().restore(tmp_path / "new", "best")
    losses = {1: 0.5, 2: 0.2, 3: float("nan"), 4: 0.2, 5: 0.9}
    for step, loss in losses.items():
        make_checkpoint(store, step, {"model.pt": b"%d" % step}, metrics={"loss": loss})
    with pytest.raises(CheckpointError, match="Its metrics are loss"):
        make_run().restore(tmp_path / "new", "best")
    with pytest.raises(CheckpointError, match="no checkpoint with a number for the metric 'acc'"):
        make_run(keep_best=("acc", "max", 1)).restore(tmp_path / "new", "best")
    least = make_run(keep_best=("loss", "min", 1)).restore(tmp_path / "least", "best")
    most = make_run(keep_best=("loss", "max", 1)).restore(tmp_path / "most", "best")
    assert least is not None
    assert most is not None
    assert (least.step, most.step) == (4, 5)
    make_checkpoint(store, 6, {"model.pt": b"6"}, metrics={"loss": 0.3}, best=("loss", "min"))
    told_by_manifest = make_run().restore(tmp_path / "told", "best")
    assert told_by_manifest is not None
    assert told_by_manifest.step == 4


@pytest.mark.usefixtures("three")
def test_a_step_that_nobody_saved_names_those_there_are(make_run: Make, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint of step 150; it has 100, 200, 300"):
        make_run().restore(tmp_path / "new", 150)


def test_another_base_model_is_refused_and_other_differences_are_told(make_run: Make, events: Events, tmp_path: Path) -> None:
    first = make_run(base_model="org/base@1")
    with first.checkpoint(step=1) as directory:
        (directory / "adapter.bin").write_bytes(b"a")
    first.close()
    with pytest.raises(CheckpointError, match="continues the base model org/base@1, and this training says org/base@2"):
        make_run(base_model="org/base@2").restore(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert make_run(base_model="org/base@1", world_size=2).restore(tmp_path / "new") is not None
    assert any("it was saved by 1 ranks, now there are 2" in text for text in events.texts("warning"))


@pytest.mark.parametrize(
    ("name", "saved", "words"),
    [
        ("dataset", "aa", "it was trained on the data set aa, now it is bb"),
        ("torch", "0.1", "it was saved with torch 0.1, now it is "),
        ("numpy", "0.1", "it was saved with numpy 0.1, now it is "),
        ("code", "f00d", "it was saved by the code at commit f00d, now it is beef"),
    ],
)
def test_whatever_a_checkpoint_was_made_with_is_compared(
    store: FaultStore,
    make_run: Make,
    events: Events,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    saved: str,
    words: str,
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("beef\n")
    monkeypatch.chdir(tmp_path)
    make_checkpoint(store, 1, {"model.pt": b"m"}, identity={name: saved})
    run = make_run()
    run.made_with(dataset="bb")
    assert run.restore(tmp_path / "new") is not None
    [told] = events.texts("warning")
    assert words in told


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["../outside"], r"'\.\.' component"),
        (["sub/../../outside"], r"'\.\.' component"),
        (["/etc/outside"], "is absolute"),
        (["model.pt", "Model.PT"], "differ in upper and lower case only"),
        (["model.pt", "model.pt/outside"], "is a file and also the folder of"),
        (["x" * 300], "is too long"),
    ],
)
def test_a_hostile_manifest_is_refused_before_a_byte_is_written(store: FaultStore, tmp_path: Path, paths: list[str], words: str) -> None:
    name = make_checkpoint(store, 1, {"model.pt": b"m"})
    values = unseal(bytes(store.get(name.manifest_key)), "stagekit-checkpoint", 1, source="")
    record = values["files"][0]
    values["files"] = [{**record, "path": path, "object": name.file_key("model.pt")} for path in paths]
    store.put(name.manifest_key, seal(values))
    store.calls.clear()
    with pytest.raises(NoValidCheckpoint, match=words):
        restore(store, tmp_path / "below" / "new")
    assert list(tmp_path.iterdir()) == []
    assert not [call for call in store.calls if "/files/" in call.key]


def test_a_size_that_no_disk_has_is_refused_before_a_byte_is_written(store: FaultStore, tmp_path: Path) -> None:
    name = make_checkpoint(store, 1, {"model.pt": b"m"})
    values = unseal(bytes(store.get(name.manifest_key)), "stagekit-checkpoint", 1, source="")
    values["files"][0]["bytes"] = 10**18
    store.put(name.manifest_key, seal(values))
    with pytest.raises(OutOfSpace, match=r"it needs 1000 PB and the disk has"):
        restore(store, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_restore_leaves_no_target(store: FaultStore, three: list[CheckpointName], tmp_path: Path) -> None:
    [*_, newest] = catalog.read_all(store).checkpoints[:1]

    def interrupt(event: object) -> None:
        if getattr(event, "name", "") == "restore.file-fetched":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore_checkpoint(store, newest, tmp_path / "new", on_event=interrupt)
    assert list(tmp_path.iterdir()) == []
