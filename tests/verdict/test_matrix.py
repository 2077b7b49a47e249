"""The verdict as a matrix: one clean run on this machine, then one fault at a time, each by exit code, named thing and fixing command."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stagekit import mounts
from stagekit.cli import main
from stagekit.config import StoreConfig, home_directory
from stagekit.processes import Process
from stagekit.runs import Run
from stagekit.runs.layout import CheckpointName, SupersededRecord
from stagekit.runs.lease import Lease
from stagekit.store.directory import DirectoryStore
from stagekit.testing.proxy import FaultProxy, Status

from ..rigs.servers import S3Server


@dataclass
class Machine:
    """A server on which a training has ended well: two checkpoints in ``out``, both in the run's bucket, which is a directory that stays."""

    out: Path
    url: str
    monkeypatch: pytest.MonkeyPatch
    children: ExitStack
    arguments: list[str] = field(default_factory=list)

    @property
    def store(self) -> DirectoryStore:
        return DirectoryStore(self.url)

    def newest(self) -> CheckpointName:
        run = Run(self.url)
        return run.checkpoints()[0].name

    def child(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Another process on this machine that runs ``program`` until it says ``ready``; it ends with the test at the latest."""
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD + program, self.url, str(self.out), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.children.enter_context(process)
        self.children.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def dead_child(self, program: str) -> None:
        self.child(program + "\nos.kill(os.getpid(), 9)\n").wait(timeout=60)


HEAD = """
import os, sys, time
from pathlib import Path
from stagekit.runs import Run, spool
from stagekit.store.directory import DirectoryStore
from stagekit.testing.faults import FaultStore
from stagekit.errors import Denied, Unreachable
url, out = sys.argv[1], Path(sys.argv[2])
def save(step):
    folder = out / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"%d" % step * 1000)
    return folder
def failing(error):
    store = FaultStore(DirectoryStore(url))
    for operation in ("put", "multipart"):
        store.fail(operation, error, "checkpoints/*", times=None)
    return store
def ready():
    print("ready", flush=True)
"""

STILL_SENDING = """
run = Run(failing(Unreachable("no answer")), on_event=lambda event: None)
run.submit(save(300), step=300)
ready()
"""

REFUSED = """
run = Run(failing(Denied("writing is forbidden")), on_event=lambda event: None)
run.submit(save(300), step=300)
while not any(entry.error for entry in spool.pending()):
    time.sleep(0.01)
ready()
"""

TRAINING = """
run = Run(url)
run.submit(save(300), step=300)
run.drain()
ready()
sys.stdin.read()
"""

WRITING = """
log = open(out / "train.log", "a")
ready()
sys.stdin.read()
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    out, url = tmp_path / "work" / "out", str(tmp_path / "bucket" / "run")
    out.mkdir(parents=True)
    monkeypatch.chdir(out.parent)
    with Run(url, on_event=lambda event: None) as run:
        run.watch(out)
        for step in (100, 200):
            folder = out / f"checkpoint-{step}"
            (folder / "deep").mkdir(parents=True)
            (folder / "model.bin").write_bytes(b"%d" % step * 1000)
            (folder / "deep" / "rng.bin").write_bytes(b"rng %d" % step)
            run.submit(folder, step=step)
    with ExitStack() as children:
        yield Machine(out, url, monkeypatch, children, ["--durable", str(tmp_path / "bucket")])


# ------------------------------------------------------------------------------------------------------------------------ the faults


def nothing(machine: Machine) -> None:
    pass


def a_new_file(machine: Machine) -> None:
    (machine.out / "logs").mkdir()
    (machine.out / "logs" / "train.log").write_text("loss 0.3\n")


def a_changed_file(machine: Machine) -> None:
    (machine.out / "checkpoint-100" / "model.bin").write_bytes(b"9" * 3000)


def a_new_file_behind_a_link(machine: Machine) -> None:
    elsewhere = machine.out.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "adapter.bin").write_bytes(b"adapter")
    (machine.out / "link").symlink_to(elsewhere)


def ignored_files(machine: Machine) -> None:
    a_new_file(machine)
    (machine.out / "__pycache__").mkdir()
    (machine.out / "__pycache__" / "train.cpython-311.pyc").write_bytes(b"x")
    machine.arguments += ["--ignore", "logs"]


def left_by_a_dead_process(machine: Machine) -> None:
    machine.dead_child(STILL_SENDING)


def left_by_a_dead_process_check(machine: Machine) -> None:
    machine.dead_child(STILL_SENDING)
    machine.arguments.append("--check")


def refused(machine: Machine) -> None:
    machine.dead_child(REFUSED)
    machine.arguments.append("--check")


def on_its_way(machine: Machine) -> None:
    machine.child(STILL_SENDING + "sys.stdin.read()")


def a_pinned_copy_that_was_rewritten(machine: Machine) -> None:
    machine.dead_child(STILL_SENDING)
    (pinned,) = home_directory().glob("spool/entries/*/files/model.bin")
    pinned.write_bytes(b"rewritten in place")


def a_damaged_record(machine: Machine) -> None:
    machine.dead_child(STILL_SENDING)
    (record,) = home_directory().glob("spool/entries/*/record.json")
    record.write_text("{")


def training(machine: Machine) -> None:
    machine.child(TRAINING)


def a_writer_without_a_run(machine: Machine) -> None:
    machine.child(WRITING)
    machine.arguments += ["--ignore", "train.log"]


def another_machine(machine: Machine) -> None:
    process = Process("other-server", "boot", "pid:[1]", 77, "1")
    lease = Lease(9, "0123abcd", process, 1_700_000_000.0)
    machine.store.put(lease.key, lease.to_bytes())


def another_container(machine: Machine) -> None:
    process = Process("container-7f3a", Process.current().boot_id, "pid:[1]", 77, "1")
    lease = Lease(9, "0123abcd", process, 1_700_000_000.0)
    machine.store.put(lease.key, lease.to_bytes())


def a_missing_object(machine: Machine) -> None:
    machine.store.delete(machine.newest().file_key("model.bin"))
    shutil.rmtree(machine.out / "checkpoint-200")


def a_cut_object(machine: Machine) -> None:
    machine.store.put(machine.newest().file_key("model.bin"), b"200")


def an_older_checkpoint_damaged(machine: Machine) -> None:
    older = Run(machine.url).checkpoints()[1].name
    machine.store.delete(older.file_key("model.bin"))
    shutil.rmtree(machine.out / "checkpoint-100")


def a_damaged_manifest(machine: Machine) -> None:
    machine.store.put(machine.newest().manifest_key, b"{}")
    shutil.rmtree(machine.out / "checkpoint-200")


def a_step_that_policy_dropped(machine: Machine) -> None:
    folder = machine.out / "checkpoint-50"
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"dropped")
    record = SupersededRecord(50, "retention", (("model.bin", 7, hashlib.sha256(b"dropped").hexdigest()),))
    machine.store.put(CheckpointName(1, 50, 1, "0123abcd").superseded_key, record.to_bytes())


def no_such_directory(machine: Machine) -> None:
    machine.arguments += ["--watch", str(machine.out.parent / "outt")]


def no_such_run(machine: Machine) -> None:
    machine.arguments += ["--run", machine.url + "-typo", "--watch", str(machine.out.parent / "empty")]
    (machine.out.parent / "empty").mkdir()


def a_mounted_bucket(machine: Machine) -> None:
    lines = f"1 0 0:2 / / rw - ext4 x rw\n2 1 0:1 / {machine.out} rw - fuse.rclone contabo:bucket rw\n"
    table = mounts.MountTable(mounts.parse_mountinfo(lines.encode()))
    machine.monkeypatch.setattr(mounts.MountTable, "read", classmethod(lambda cls: table))


def a_bucket_mounted_below(machine: Machine) -> None:
    inside, elsewhere = machine.out / "inside", machine.out.parent / "elsewhere"
    for folder in (inside, elsewhere):
        folder.mkdir()
        (folder / "object").write_text("seen only if the mount was touched")
    (machine.out / "link").symlink_to(elsewhere)
    mount = "rw - fuse.rclone contabo:bucket rw"
    lines = f"1 0 0:2 / / rw - ext4 x rw\n2 1 0:1 / {inside} {mount}\n3 1 0:1 / {elsewhere} {mount}\n"
    table = mounts.MountTable(mounts.parse_mountinfo(lines.encode()))
    machine.monkeypatch.setattr(mounts.MountTable, "read", classmethod(lambda cls: table))


def damaged_records_of_this_machine(machine: Machine) -> None:
    (record,) = home_directory().glob("runs/*.json")
    record.write_text("{")


def nothing_recorded(machine: Machine) -> None:
    shutil.rmtree(home_directory())


def a_run_without_a_checkpoint(machine: Machine) -> None:
    for info in list(machine.store.list("checkpoints/")):
        machine.store.delete(info.key)
    shutil.rmtree(machine.out)


@dataclass(frozen=True)
class Row:
    """``fault`` must be answered with ``code``; a finding of ``row`` has these words, and a fix with those."""

    fault: Callable[[Machine], None]
    code: int
    row: str | None = None
    words: str = ""
    fix: str = ""


MATRIX = {
    "clean": Row(nothing, 0),
    "a new file": Row(a_new_file, 3, "file", "1 file is in no verified checkpoint, such as train.log (9 B", "teardown --ignore 'logs/*'"),
    "a changed file": Row(a_changed_file, 3, "file", "checkpoint-100: 1 file is in no verified checkpoint", "--ignore"),
    "a link to a new file": Row(a_new_file_behind_a_link, 3, "file", "such as adapter.bin (7 B", "--ignore 'link/*'"),
    "ignored files": Row(ignored_files, 0),
    "left by a dead process": Row(left_by_a_dead_process, 0),
    "left by a dead process, only looking": Row(
        left_by_a_dead_process_check, 3, "queued", "1 file to be sent; the process that saved them is gone", "stagekit teardown --run"
    ),
    "steps that would be lost": Row(
        left_by_a_dead_process_check,
        3,
        "steps",
        "step 300 is here and step 200 is the newest that is safe: you lose 100 steps",
        "teardown --run",
    ),
    "refused by the store": Row(refused, 3, "failed", "did not reach the bucket: writing is forbidden", "stagekit teardown --run"),
    "on its way": Row(on_its_way, 3, "in flight", "1 file on the way, sent by a process that is alive", "wait for it"),
    "a pinned copy rewritten": Row(a_pinned_copy_that_was_rewritten, 3, "file", "checkpoint-300: 1 file is in no verified checkpoint", ""),
    "a damaged record": Row(a_damaged_record, 3, "spool", "a pending save cannot be read", "before you remove it"),
    "training": Row(training, 3, "writer", "is training and writes to this run", "kill "),
    "a writer without a run": Row(a_writer_without_a_run, 3, "process", "train.log open for writing", "kill "),
    "another machine": Row(another_machine, 0, "writer", "process 77 on other-server now, which is another machine"),
    "another container": Row(another_container, 4, "writer", "in another container of this machine", "look in that container"),
    "a missing object": Row(a_missing_object, 3, "damaged", "step 200 is not whole in the bucket: model.bin missing", "stagekit verify"),
    "a cut object": Row(a_cut_object, 3, "damaged", "model.bin missing or of another size", "stagekit verify"),
    "an older checkpoint damaged": Row(an_older_checkpoint_damaged, 0, "damaged", "step 100 is not whole", "stagekit verify"),
    "a damaged manifest": Row(a_damaged_manifest, 3, "damaged", "the manifest of step 200 is damaged", "stagekit verify"),
    "a step that policy dropped": Row(a_step_that_policy_dropped, 0, "superseded", "checkpoint-50: 1 file of steps that policy dropped"),
    "no such directory": Row(no_such_directory, 4, "watched", "there is no such directory", "ls "),
    "no such run": Row(no_such_run, 4, "run", "there is no run at this URL", "stagekit ls"),
    "a mounted bucket": Row(a_mounted_bucket, 4, "mount", "fuse.rclone", "umount -l"),
    "a bucket mounted below": Row(a_bucket_mounted_below, 4, "mount", "inside: it is not looked at", "--ignore inside"),
    "a bucket linked to": Row(a_bucket_mounted_below, 4, "mount", "link: it is not looked at", "--ignore link"),
    "damaged records": Row(damaged_records_of_this_machine, 4, "records", "records cannot be read", "--run RUN --watch DIR"),
    "nothing recorded": Row(nothing_recorded, 4, "scope", "nothing is watched and no run is recorded", "--watch DIR --run RUN"),
    "a run without a checkpoint": Row(a_run_without_a_checkpoint, 0, "run", "the run has no checkpoint yet"),
}
ANSWERS = {0: "YES", 3: "NO", 4: "CANNOT TELL"}


def ask(machine: Machine, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, list[dict[str, Any]]]:
    code = main(["teardown", *machine.arguments, "--json", *more])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", MATRIX)
def test_the_matrix(name: str, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    row = MATRIX[name]
    row.fault(machine)
    code = main(["teardown", *machine.arguments])
    shown = capsys.readouterr()
    assert code == row.code, shown
    lines = shown.out.splitlines()
    assert lines[-1].startswith(f"{ANSWERS[code]}: ")
    if row.row is not None:
        (told,) = [number for number, line in enumerate(lines) if row.words in line][:1]
        if row.fix:
            assert lines[told + 1].strip().startswith("fix: ")
            assert row.fix in lines[told + 1]
    again, records = ask(machine, capsys)
    assert again == code
    assert records[0]["event"] == "scope"
    findings = [record for record in records if record["event"] == "finding"]
    assert records[-1] == {"event": "verdict", "answer": ANSWERS[code], "findings": len(findings)}
    findings = [finding for finding in findings if finding["row"] != "durable"]  # the bucket lies on the root file system
    if row.row is None:
        assert findings == []
    else:
        fitting = [one for one in findings if one["row"] == row.row and row.words.partition(" (")[0] in f"{one['subject']}: {one['what']}"]
        assert fitting, findings
        assert row.fix in fitting[0]["fix"]
        assert {one["weight"] for one in findings} <= {"note", *([ANSWERS[code]] if code else []), "CANNOT TELL"}


def test_the_scope_is_printed_first(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["teardown", *machine.arguments, "--ignore", "*.tmp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [*lines[:6], lines[-1]] == [
        f"watching  {machine.out}",
        f"started   {machine.out.parent}",
        f"run       {machine.url}",
        f"spool     {home_directory() / 'spool'}",
        f"durable   {machine.out.parents[1] / 'bucket'}",
        "ignoring  *.tmp",
        "YES: nothing in this scope would be lost with this server",
    ]


def test_check_writes_nothing_here_and_in_the_bucket(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.dead_child(STILL_SENDING)

    def everything() -> dict[str, tuple[int, int]]:
        top = machine.out.parent
        paths = [*top.rglob("*"), *home_directory().rglob("*")]
        return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths}

    before = everything()
    assert main(["teardown", "--check"]) == 3
    assert everything() == before


def test_what_a_dead_process_left_is_sent_and_can_be_restored(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.dead_child(STILL_SENDING)
    assert main(["teardown", *machine.arguments]) == 0
    assert main(["pull", f"{machine.url}@300", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / "model.bin").read_bytes() == b"300" * 1000


def test_saves_of_a_run_that_is_not_named_count_too(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.dead_child(STILL_SENDING)
    other = str(tmp_path / "bucket" / "other")
    with Run(other, on_event=lambda event: None) as run:
        run.submit(machine.out / "checkpoint-100", step=1)
    assert main(["teardown", "--check", "--run", other, "--watch", str(machine.out / "checkpoint-100")]) == 3
    assert "to be sent" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "echoed"), [("clean", True), ("a new file", False), ("nothing recorded", False)])
def test_and_then_destroying_is_safe_in_a_shell(name: str, echoed: bool, machine: Machine) -> None:
    MATRIX[name].fault(machine)
    program = f"{sys.executable} -c 'import sys; from stagekit.cli import main; sys.exit(main())'"
    command = f"{program} teardown {shlex.join(machine.arguments)} && echo destroyed"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ("destroyed" in done.stdout) is echoed
    assert done.returncode == (0 if echoed else MATRIX[name].code)


# ------------------------------------------------------------------------------------------------- stores that cannot be looked at


@pytest.fixture
def hanging_endpoint() -> Iterator[str]:
    """An endpoint that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def cannot_tell(arguments: list[str], capsys: pytest.CaptureFixture[str], words: str) -> None:
    began_s = time.monotonic()
    code = main(["teardown", *arguments])
    took_s = time.monotonic() - began_s
    shown = capsys.readouterr().out
    assert code == 4, shown
    assert words in shown
    assert "fix: " in shown
    assert took_s < 10.0


def test_a_store_that_is_down_cannot_be_told(machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    cannot_tell(["--run", "s3://bucket/run", "--endpoint-url", f"http://127.0.0.1:{port}"], capsys, "cannot be looked at")


def test_a_store_that_hangs_cannot_be_told(
    hanging_endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    cannot_tell(["--run", "s3://bucket/run", "--endpoint-url", hanging_endpoint], capsys, "cannot be looked at")


def test_lost_credentials_cannot_be_told(moto_server: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    cannot_tell(["--run", "s3://bucket/run", "--endpoint-url", moto_server.endpoint_url], capsys, "cannot be looked at")


def test_a_missing_bucket_cannot_be_told(
    moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = credentials_for(moto_server)
    arguments = ["--run", "s3://no-such-bucket-here/run", "--endpoint-url", moto_server.endpoint_url, "--profile", str(config.profile)]
    cannot_tell(arguments, capsys, "no-such-bucket-here")


@pytest.mark.parametrize("key", ["*", "*/manifest.json", "*model.bin"])
def test_a_store_that_forbids_looking_cannot_be_told(
    key: str,
    moto_server: S3Server,
    fresh_bucket: Callable[[S3Server], str],
    credentials_for: Callable[[S3Server], StoreConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = credentials_for(moto_server)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.bin").write_bytes(b"model")
    url = f"s3://{fresh_bucket(moto_server)}/run"
    with Run(url, store=config, on_event=lambda event: None) as run:
        run.submit(tmp_path / "out", step=1)
    assert main(["teardown"]) == 0
    capsys.readouterr()
    with FaultProxy(moto_server.endpoint_url) as proxy:
        proxy.fault(Status(403, "AccessDenied"), key=key)
        arguments = ["--run", url, "--endpoint-url", proxy.endpoint_url, "--profile", str(config.profile), "--watch", str(tmp_path / "out")]
        cannot_tell(arguments, capsys, "use credentials that may list and read the run")
