"""The verdict's parts: precedence, patterns, links, processes, buckets that lie, uploads that stall, and its speed."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from stagekit.errors import BucketNotFound, Denied, InvalidReply, Throttled, UploadFailed, UsageError
from stagekit.processes import Process
from stagekit.progress import Event
from stagekit.runs.home import remember
from stagekit.runs.lease import Lease
from stagekit.runs.spool import Entry
from stagekit.store.base import ObjectInfo
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore
from stagekit.verdict import finishing, processes, teardown
from stagekit.verdict.bucket import look_at_run
from stagekit.verdict.files import is_ignored
from stagekit.verdict.findings import Finding, Scope, Weight, decide
from stagekit.verdict.scope import Target, find_scope

from ..made import make_checkpoint, make_run

_numbers = itertools.count()
SCOPE = Scope(("/out",), ("s3://b/run",), ())


@pytest.fixture
def url() -> str:
    return f"memory://verdict-{next(_numbers)}/run"


def clock() -> float:
    return 1_700_001_000.0


# --------------------------------------------------------------------------------------------------------------------- precedence


@pytest.mark.parametrize("weights", [*itertools.product(("NO", "CANNOT TELL", "note"), repeat=2), ("note",), ()])
def test_no_comes_before_cannot_tell_before_yes(weights: tuple[Weight, ...]) -> None:
    verdict = decide([Finding(weight, "file", "x", "y") for weight in weights], SCOPE)
    expected = "NO" if "NO" in weights else "CANNOT TELL" if "CANNOT TELL" in weights else "YES"
    assert verdict.answer == expected
    assert verdict.line.startswith(expected)
    assert [finding.weight for finding in verdict.findings] == sorted(weights, key=["NO", "CANNOT TELL", "note"].index)


def test_a_finding_is_told_with_size_age_and_fix() -> None:
    finding = Finding("NO", "queued", "2 files", "s3://b/run@300", 3_400_000_000, 125.0, "stagekit teardown")
    assert finding.line.splitlines() == [
        "NO           s3://b/run@300: 2 files (3.40 GB, 2 min 5 s old)",
        "             fix: stagekit teardown",
    ]
    assert finding.record["bytes"] == 3_400_000_000


# -------------------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("path", "pattern", "covered"),
    [
        ("logs/a.txt", "logs/*", True),
        ("logs/a.txt", "logs", True),
        ("logs/a.txt", "logs/", True),
        ("logs/deep/a.txt", "logs", True),
        ("deep/logs/a.txt", "logs", True),
        ("a.txt", "*.txt", True),
        ("deep/a.txt", "*.txt", True),
        ("deep/a.txt", "deep/*.txt", True),
        ("other/a.txt", "deep/*.txt", False),
        ("logs2/a.txt", "logs", False),
        ("a.TXT", "*.txt", False),
        ("model.bin", "mod", False),
    ],
)
def test_what_a_pattern_covers(path: str, pattern: str, covered: bool) -> None:
    assert is_ignored(path, [pattern]) is covered


def test_links_in_a_circle_end_and_broken_ones_hold_nothing(url: str, tmp_path: Path) -> None:
    make_run(MemoryStore(url))
    make_checkpoint(MemoryStore(url), 1, {"a": b"a"})
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "a").write_bytes(b"a")
    (tmp_path / "out" / "deep" / "up").symlink_to(tmp_path / "out")
    (tmp_path / "out" / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "out" / "self").symlink_to(tmp_path / "out" / "self")
    os.mkfifo(tmp_path / "out" / "pipe")
    assert teardown([tmp_path / "out"], [url], clock=clock).answer == "YES"


def test_a_single_file_can_be_watched(url: str, tmp_path: Path) -> None:
    make_run(MemoryStore(url))
    make_checkpoint(MemoryStore(url), 1, {"model.bin": b"weights"})
    (tmp_path / "other-name.bin").write_bytes(b"weights")
    assert teardown([tmp_path / "other-name.bin"], [url], clock=clock).answer == "YES"
    (tmp_path / "other-name.bin").write_bytes(b"WEIGHTS")
    verdict = teardown([tmp_path / "other-name.bin"], [url], clock=clock)
    assert verdict.answer == "NO"
    assert verdict.findings[0].subject == str(tmp_path / "other-name.bin")


def test_files_without_any_run_say_that_a_run_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    verdict = teardown([tmp_path], clock=clock)
    assert verdict.answer == "NO"
    assert "name its run with --run" in verdict.findings[0].what


def test_findings_are_one_per_folder_with_the_sum_of_their_bytes(url: str, tmp_path: Path) -> None:
    make_run(MemoryStore(url))
    for number in range(2000):
        (tmp_path / "samples").mkdir(exist_ok=True)
        (tmp_path / "samples" / f"{number}").write_bytes(b"xyz")
    verdict = teardown([tmp_path], [url], clock=clock)
    (finding,) = [finding for finding in verdict.findings if finding.weight == "NO"]
    assert (finding.subject, finding.bytes) == (str(tmp_path / "samples"), 6000)
    assert "2,000 files are in no verified checkpoint" in finding.what


# ---------------------------------------------------------------------------------------------------------------------- processes


def fake_process(proc: Path, pid: int, path: str, flags: str, name: str = "3") -> Path:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "fdinfo").mkdir()
    (folder / "fd" / name).symlink_to(path)
    (folder / "fdinfo" / name).write_text(f"pos:\t0\nflags:\t{flags}\nmnt_id:\t9\n")
    (folder / "cmdline").write_bytes(b"python\0train.py\0")
    (folder / "maps").write_text("")
    return folder


def test_only_a_descriptor_for_writing_below_a_root_counts(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "out"
    root.mkdir()
    (proc / "self").mkdir(parents=True)
    fake_process(proc, 4194301, f"{root}/log", "0100000")
    fake_process(proc, 4194302, f"{root}-other/log", "0100001")
    fake_process(proc, 4194303, f"{root}/gone (deleted)", "0100001")
    assert processes.judge([root], proc=proc) == []
    fake_process(proc, 4194304, f"{root}/log", "0100002")
    (finding,) = processes.judge([root], proc=proc)
    assert (finding.weight, finding.subject) == ("NO", str(root))
    assert finding.what == f"process 4194304 (python train.py) has {root}/log open for writing"
    assert finding.fix.endswith("kill 4194304")


def test_a_process_that_ends_while_it_is_looked_at_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        maps = os.open(f"/proc/{child.pid}/maps", os.O_RDONLY)
        child.kill()
    folder = tmp_path / "proc" / "4194301"
    (folder / "fd").mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir()
    (folder / "maps").symlink_to(f"/proc/self/fd/{maps}")
    with pytest.raises(ProcessLookupError):
        (folder / "maps").read_text()
    assert processes.judge([tmp_path], proc=tmp_path / "proc") == []
    os.close(maps)


def test_a_process_that_may_not_be_looked_at_counts_only_for_users_who_could_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, root = tmp_path / "proc", tmp_path / "out"
    root.mkdir()
    (proc / "self").mkdir(parents=True)
    folder = fake_process(proc, 4194304, f"{root}/log", "0100002")
    listdir = os.listdir

    def forbidden(path: str | Path) -> list[str]:
        if Path(path) == folder / "fd":
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", forbidden)
    os.chown(folder, 12345, 12345)
    assert processes.judge([root], proc=proc) == []
    root.chmod(0o777)
    (finding,) = processes.judge([root], proc=proc)
    assert finding.weight == "CANNOT TELL"
    assert "user 12345" in finding.what
    os.chown(folder, 0, 0)
    assert processes.judge([root], proc=proc) == []


def test_a_system_without_proc_says_so(tmp_path: Path) -> None:
    (finding,) = processes.judge([tmp_path], proc=tmp_path / "none")
    assert finding.weight == "note"


# ------------------------------------------------------------------------------------------------------------------------- bucket


def test_a_listing_that_lags_behind_is_not_believed(url: str) -> None:
    store = MemoryStore(url)
    make_run(store)
    older = make_checkpoint(store, 1, {"a": b"a", "b": b"b"})
    make_checkpoint(store, 2, {"a": b"a2"})
    lagging = FaultStore(store)
    lagging.hide(older.file_key("a"))
    state = look_at_run(lagging, clock)
    assert state.seen
    assert state.findings == []
    assert len(state.held) == 3


def test_a_listing_that_shows_more_than_there_is_is_not_believed_for_the_newest(url: str, tmp_path: Path) -> None:
    store = MemoryStore(url)
    make_run(store)
    name = make_checkpoint(store, 1, {"a": b"a", "b": b"b"})

    class Stale(FaultStore):
        def list(self, prefix: str = ""):  # type: ignore[no-untyped-def]  # the same as FaultStore's
            listed = list(super().list(prefix))
            self.inner.delete(name.file_key("a"))
            return iter(listed)

    state = look_at_run(Stale(store), clock)
    assert [finding.row for finding in state.findings if finding.weight == "NO"] == ["damaged"]
    assert state.newest is None


class Counted(FaultStore):
    """A store that notes which objects it was asked for by HEAD, and says that all were written at ``written_s``."""

    def __init__(self, inner: MemoryStore, written_s: float) -> None:
        super().__init__(inner)
        self.asked: list[str] = []
        self.written_s = written_s

    def head(self, key: str) -> ObjectInfo:
        self.asked.append(key)
        return super().head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (replace(info, modified_s=self.written_s) for info in super().list(prefix))


def test_objects_that_were_not_verified_within_the_last_minutes_are_asked_for_one_by_one(url: str) -> None:
    inner = MemoryStore(url)
    make_run(inner)
    for step in (1, 2):
        make_checkpoint(inner, step, {f"{number}.bin": b"%d %d" % (step, number) for number in range(400)})
    old = Counted(inner, clock() - 3600)
    assert len(look_at_run(old, clock).held) == 800
    assert len([key for key in old.asked if key.endswith(".bin")]) == 500, "the listing speaks for the rest"
    assert sum("/000000000002-" in key for key in old.asked) == 400, "the newest checkpoint comes first"
    fresh = Counted(inner, clock() - 60)
    assert len(look_at_run(fresh, clock).held) == 800
    assert len([key for key in fresh.asked if key.endswith(".bin")]) == 1, "that these keys may read is seen by one"


@pytest.mark.parametrize("operation", ["get", "head", "list", "children"])
@pytest.mark.parametrize("error", [Denied("may not"), Throttled("slow down"), InvalidReply("a web page")])
def test_whatever_cannot_be_read_makes_it_cannot_tell(operation: str, error: Exception, url: str, tmp_path: Path) -> None:
    make_run(MemoryStore(url))
    make_checkpoint(MemoryStore(url), 1, {"a": b"a"})
    (tmp_path / "a").write_bytes(b"a")
    faulty = FaultStore(MemoryStore(url))
    faulty.fail(operation, error, times=None)  # type: ignore[arg-type]  # one of its operations
    verdict = teardown([tmp_path], [faulty], clock=clock)
    assert verdict.answer == "CANNOT TELL"
    assert any(finding.row == "bucket" and str(error) in finding.what and finding.fix for finding in verdict.findings)


def test_a_bucket_that_is_gone_has_a_way_out(url: str) -> None:
    """Looking again tells the same again; who removed it on purpose must learn how to leave it out."""
    store = FaultStore(MemoryStore(url))
    store.fail("children", BucketNotFound("listing: there is no bucket"), times=None)
    found = look_at_run(store, clock).findings
    assert [(one.weight, one.row) for one in found] == [("CANNOT TELL", "bucket")]
    assert "if the run was removed on purpose, name those that count: stagekit teardown --run RUN" in found[0].fix


def test_unfinished_uploads_are_notes_and_so_is_not_being_allowed_to_list_them(url: str) -> None:
    store = MemoryStore(url)
    make_run(store)
    with pytest.raises(RuntimeError, match="killed"), store.multipart("checkpoints/x", part_size=5):
        (finding,) = [one for one in look_at_run(store, clock).findings if one.row == "multipart"]
        raise RuntimeError("killed")
    assert (finding.weight, finding.what) == ("note", "1 unfinished multipart upload is billed")
    faulty = FaultStore(store)
    faulty.fail("open_uploads", Denied("may not"))
    (finding,) = [one for one in look_at_run(faulty, clock).findings if one.row == "multipart"]
    assert "may not list" in finding.what


def test_the_process_that_asks_does_not_stand_in_its_own_way(url: str) -> None:
    store = MemoryStore(url)
    make_run(store)
    make_checkpoint(store, 1, {"a": b"a"})
    lease = Lease(1, "0123abcd", Process.current(), clock())
    store.put(lease.key, lease.to_bytes())
    assert look_at_run(store, clock).findings == []


# -------------------------------------------------------------------------------------------------------------------------- scope


def test_a_directory_inside_another_is_looked_at_once(tmp_path: Path) -> None:
    (tmp_path / "out" / "deep").mkdir(parents=True)
    judged = find_scope([tmp_path / "out" / "deep", tmp_path / "out", tmp_path / "outer"])
    assert judged.roots == (tmp_path / "out", tmp_path / "outer")


def test_an_empty_text_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--watch "$OUT"`` with OUT unset, in a directory that happens to be empty, must not become a YES."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="watch: an empty text names no directory"):
        find_scope([""])
    assert find_scope(["."]).roots == (tmp_path,)


def test_a_run_is_the_same_with_and_without_a_slash(url: str) -> None:
    assert find_scope(runs=[url + "/", f"{url}@1200"]).scope.runs == (url,)


def test_a_run_in_another_processs_memory_is_not_in_the_default_scope(url: str, tmp_path: Path) -> None:
    remember(url, None, tmp_path / "spool", [tmp_path])
    assert find_scope().scope.runs == ()
    assert find_scope(runs=[url]).scope.runs == (url,)


# ---------------------------------------------------------------------------------------------------------------------- finishing


@dataclass
class Status:
    pending: tuple[int, ...]
    sent_bytes: int


class FakeRun:
    """What ``finishing`` does with a run: drains that end as scripted, each after some seconds and with so many bytes sent."""

    def __init__(self, script: list[tuple[float, int, bool]], now: list[float]) -> None:
        self.script, self.now, self.closed, self.sent_bytes = script, now, False, 0

    def __call__(self, where: object, **_: object) -> FakeRun:
        return self

    def status(self) -> Status:
        return Status((300,), self.sent_bytes)

    def drain(self, timeout_s: float) -> None:
        took_s, self.sent_bytes, done = self.script.pop(0)
        self.now[0] += took_s
        if not done:
            raise UploadFailed("step 300 is not in the bucket yet")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ([(60, 1, False), (60, 2, False), (10, 3, True)], 0),
        ([(60, 1, False), (60, 1, False), (60, 1, True)], 1),
        ([(60, 0, False), (60, 0, True)], 1),
        ([(0.1, 1, False), (60, 1, True)], 1),
    ],
    ids=["moves on", "stalls", "never moves", "refused at once"],
)
def test_sending_goes_on_for_as_long_as_something_moves(
    script: list[tuple[float, int, bool]], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    run = FakeRun(list(script), now)
    monkeypatch.setattr(finishing, "Run", run)
    entry = Entry(directory=tmp_path / "entries" / "dead-1", session="dead", run="s3://b/run", store=None, step=300, counter=1, files=[])
    events: list[Event] = []
    finishing.finish(Target("s3://b/run", "s3://b/run", None), [entry], events.append, clock=lambda: now[0])
    assert run.closed
    assert len(run.script) == left
