"""The verdict as a matrix: one clean run on this machine, then one fault at a time, each by exit code, named thing and fixing command."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from stagekit import mounts
from stagekit.cli import main
from stagekit.config import StoreConfig, home_directory
from stagekit.location import Location
from stagekit.processes import Process
from stagekit.publishing.begun import note_begun
from stagekit.runs import Run
from stagekit.runs.home import remember
from stagekit.runs.layout import CheckpointName, FileRecord, PartRecord, SupersededRecord
from stagekit.runs.lease import Lease
from stagekit.runs.spool import Entry, Spool
from stagekit.store.directory import DirectoryStore
from stagekit.testing.proxy import FaultProxy, Status, WrongDate
from stagekit.wrapping.note import Note

from ..made import make_checkpoint, make_dataset
from ..rigs.servers import S3Server
from .ordinary import git, make_caches, make_checkout


@dataclass
class Machine:
    """A server on which a training has ended well: two checkpoints in ``out``, both in the run's bucket, which is a directory that stays.

    It was started in ``work``, a checkout that is pushed, on a machine with the usual caches.
    """

    work: Path
    out: Path
    url: str
    monkeypatch: pytest.MonkeyPatch
    children: ExitStack
    arguments: list[str] = field(default_factory=list)

    def git(self, *arguments: str) -> None:
        git(self.work, *arguments)

    @property
    def store(self) -> DirectoryStore:
        return DirectoryStore(self.url)

    def newest(self) -> CheckpointName:
        run = Run(self.url)
        return run.checkpoints()[0].name

    def child(self, program: str, *arguments: str, keeping: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        """Another process on this machine that runs ``program`` until it says ``ready``; it ends with the test at the latest."""
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD + program, self.url, str(self.out), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=keeping,
        )
        self.children.enter_context(process)
        self.children.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def dead_child(self, program: str, *arguments: str) -> None:
        self.child(program + "\nos.kill(os.getpid(), 9)\n", *arguments).wait(timeout=60)


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

BEHIND = """
run = Run(url)
run.heartbeat(1400)
ready()
"""

PUBLISHING = """
from stagekit.publishing.writer import ShardWriter
writer = ShardWriter(sys.argv[3]).__enter__()
writer.write({"__key__": "a", "txt": b"a"})
ready()
"""

WRITING = """
log = open(out / "train.log", "a")
ready()
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose only commit is pushed."""
    work, remote = tmp_path_factory.mktemp("pushed"), tmp_path_factory.mktemp("remote")
    make_checkout(work, remote)
    return work


@pytest.fixture
def machine(pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    work, url = tmp_path / "work", str(tmp_path / "bucket" / "run")
    shutil.copytree(pushed, work)
    make_caches(Path.home(), work)
    out = work / "out"
    out.mkdir()
    monkeypatch.chdir(work)
    with Run(url, on_event=lambda event: None) as run:
        run.watch(out)
        for step in (100, 200):
            folder = out / f"checkpoint-{step}"
            (folder / "deep").mkdir(parents=True)
            (folder / "model.bin").write_bytes(b"%d" % step * 1000)
            (folder / "deep" / "rng.bin").write_bytes(b"rng %d" % step)
            run.submit(folder, step=step)
    with ExitStack() as children:
        yield Machine(work, out, url, monkeypatch, children, ["--durable", str(tmp_path / "bucket")])


# ------------------------------------------------------------------------------------------------------------------------ the faults


def nothing(machine: Machine) -> None:
    pass


def a_new_file(machine: Machine) -> None:
    (machine.out / "logs").mkdir()
    (machine.out / "logs" / "train.log").write_text("loss 0.3\n")


def an_unfinished_checkpoint(machine: Machine) -> None:
    folder = machine.out / "checkpoint-300"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 300, "epoch": 1.0, "log_history": []}')
    (folder / "optimizer.pt").write_bytes(b"cut")


def a_changed_file(machine: Machine) -> None:
    (machine.out / "checkpoint-100" / "model.bin").write_bytes(b"9" * 3000)


def a_new_file_behind_a_link(machine: Machine) -> None:
    elsewhere = machine.work.parent / "elsewhere"
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


def a_record_that_is_missing(machine: Machine) -> None:
    machine.dead_child(STILL_SENDING)
    (record,) = home_directory().glob("spool/entries/*/record.json")
    record.unlink()


def a_start_directory_that_is_not_there(machine: Machine) -> None:
    started = machine.work.parent / "started"
    started.mkdir()
    machine.monkeypatch.chdir(started)
    with Run(machine.url, on_event=lambda event: None) as run:
        run.watch(machine.out)
        run.drain()
    machine.monkeypatch.chdir(machine.work)
    started.rename(machine.work.parent / "moved")


def a_watched_link_that_leads_elsewhere(machine: Machine) -> None:
    for name in ("real-1", "real-2"):
        (machine.work.parent / name).mkdir()
    link = machine.work.parent / "link"
    link.symlink_to(machine.work.parent / "real-1")
    with Run(machine.url, on_event=lambda event: None) as run:
        run.watch(link)
        run.drain()
    (machine.work.parent / "real-1" / "notes.txt").write_text("only here")
    link.unlink()
    link.symlink_to(machine.work.parent / "real-2")


def watched_directories_of_an_earlier_start(machine: Machine) -> None:
    machine.out.rename(machine.work.parent / "away")
    with Run(machine.url, on_event=lambda event: None) as run:
        run.watch(machine.work / "data")
        run.drain()
    (machine.work.parent / "away").rename(machine.out)
    (machine.out / "notes.txt").write_text("only here")


def a_half_written_record(machine: Machine) -> None:
    (home_directory() / "runs" / ".0123456789abcdef.json.4194303").touch()


def a_dirty_checkout_around_what_is_named(machine: Machine) -> None:
    an_untracked_script(machine)
    machine.arguments += ["--watch", str(machine.out)]


def the_usual_spool_is_not_there(machine: Machine) -> None:
    machine.dead_child(STILL_SENDING)
    shutil.rmtree(machine.out / "checkpoint-300")
    (home_directory() / "spool").rename(machine.work.parent / "moved")


def training(machine: Machine) -> None:
    machine.child(TRAINING)


def a_writer_without_a_run(machine: Machine) -> None:
    machine.child(WRITING)
    machine.arguments += ["--ignore", "train.log"]


def a_command_that_outlived_its_stagekit_run(machine: Machine) -> None:
    with machine.monkeypatch.context() as patch:
        patch.setenv("STAGEKIT_RUN", machine.url)
        machine.child("ready()\nsys.stdin.read()\n")


def a_command_that_outlived_its_killed_stagekit_run(machine: Machine) -> None:
    """It has the lock of the note, as a command that ``stagekit run`` starts."""
    ended = replace(Process.current(), pid=2**22 - 1, started="1")
    note = Note("000001-0123abcd", machine.url, None, {"out": machine.out}, (), 30.0, None, None, "python train.py", ended, 1.0)
    note.write()
    lock = note.hold()
    os.set_inheritable(lock, True)
    with machine.monkeypatch.context() as patch:
        patch.setenv("STAGEKIT_RUN", machine.url)
        machine.child("ready()\nsys.stdin.read()\n", keeping=(lock,))
    os.close(lock)


def a_command_of_another_run(machine: Machine) -> None:
    with machine.monkeypatch.context() as patch:
        patch.setenv("STAGEKIT_RUN", machine.url + "-2")
        machine.child("ready()\nsys.stdin.read()\n")


def a_command_that_left_a_name_that_no_store_takes(machine: Machine) -> None:
    (machine.out / "checkpoint-100").rename(machine.work.parent / "bucket" / "elsewhere")
    (machine.out / os.fsdecode(b"bad\xff.txt")).write_text("x")
    logs = home_directory() / "wrapped" / "000001-0123abcd"
    logs.mkdir(parents=True)
    ended = replace(Process.current(), pid=2**22 - 1, started="1")
    Note(logs.name, machine.url, None, {"out": machine.out}, (), 30.0, None, logs, "python train.py", ended, 1.0, killed=False).write()


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


def missing_checkpoints(machine: Machine) -> None:
    """Somebody removed them; that they were committed is still noted."""
    for info in list(machine.store.list("checkpoints/")):
        machine.store.delete(info.key)
    shutil.rmtree(machine.out)


def a_missing_manifest(machine: Machine) -> None:
    machine.store.delete(machine.newest().manifest_key)
    shutil.rmtree(machine.out / "checkpoint-200")


def a_step_that_policy_dropped(machine: Machine) -> None:
    folder = machine.out / "checkpoint-50"
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"dropped")
    record = SupersededRecord(50, "retention", (("model.bin", 7, hashlib.sha256(b"dropped").hexdigest()),))
    machine.store.put(CheckpointName(1, 50, 1, "0123abcd").superseded_key, record.to_bytes())


def a_step_of_several_ranks_that_rank_0_dropped(machine: Machine) -> None:
    a_step_that_policy_dropped(machine)
    (machine.out / "checkpoint-50" / "rng-1.bin").write_bytes(b"of rank 1")
    part = PartRecord(1, (FileRecord("rng-1.bin", 9, hashlib.sha256(b"of rank 1").hexdigest()),))
    machine.store.put(CheckpointName(1, 50, 1, "0123abcd").part_key(1), part.to_bytes())


def no_such_directory(machine: Machine) -> None:
    machine.arguments += ["--watch", str(machine.work / "outt")]


def no_such_run(machine: Machine) -> None:
    machine.arguments += ["--run", machine.url + "-typo", "--watch", str(machine.work.parent / "empty")]
    (machine.work.parent / "empty").mkdir()


def a_mounted_bucket(machine: Machine) -> None:
    lines = f"1 0 0:2 / / rw - ext4 x rw\n2 1 0:1 / {machine.out} rw - fuse.rclone contabo:bucket rw\n"
    table = mounts.MountTable(mounts.parse_mountinfo(lines.encode()))
    machine.monkeypatch.setattr(mounts.MountTable, "read", classmethod(lambda cls: table))


def a_bucket_mounted_below(machine: Machine) -> None:
    inside, elsewhere = machine.out / "inside", machine.work.parent / "elsewhere"
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


def a_spool_that_is_not_there(machine: Machine) -> None:
    """Of a run with a disk of its own for pending saves, which is not mounted any more: its mount point is empty."""
    disk = machine.work.parent / "disk"
    with Run(machine.url, spool_dir=disk, on_event=lambda event: None) as run:
        run.submit(machine.out / "checkpoint-200", step=200)
    shutil.rmtree(disk)
    disk.mkdir()


def a_spool_that_was_never_needed(machine: Machine) -> None:
    machine.dead_child("Run(url, spool_dir=sys.argv[3]).drain()\nready()\n", str(machine.work.parent / "disk"))


def a_watched_directory_that_is_not_there(machine: Machine) -> None:
    machine.out.rename(machine.work / "data")


def watch_on_a_disk(machine: Machine, below: str) -> None:
    """A training watched a directory on another disk, which is not mounted any more."""
    disk = machine.work.parent / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        (disk / below).mkdir(exist_ok=True)
        with Run(machine.url, on_event=lambda event: None) as run:
            run.watch(disk / below)
            run.drain()
        (disk / below / "new.txt").write_text("nowhere else")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def a_watched_directory_on_a_disk_that_is_not_mounted(machine: Machine) -> None:
    watch_on_a_disk(machine, "out")


def a_watched_disk_that_is_not_mounted(machine: Machine) -> None:
    watch_on_a_disk(machine, "")


def a_directory_that_nobody_wrote_to(machine: Machine) -> None:
    """The training saved to ``out``, and ``outt`` was watched."""
    (machine.work / "outt").mkdir()
    url = str(machine.work.parent / "bucket" / "other")
    with Run(url, on_event=lambda event: None) as run:
        run.watch(machine.work / "outt")
        run.drain()
    DirectoryStore(url).put("run.json", machine.store.get("run.json"))


def nothing_recorded(machine: Machine) -> None:
    shutil.rmtree(home_directory())


def a_run_without_a_checkpoint(machine: Machine) -> None:
    for info in [*machine.store.list("checkpoints/"), *machine.store.list("commits/")]:
        machine.store.delete(info.key)
    shutil.rmtree(machine.out)
    machine.arguments += ["--ignore", "out"]


def a_changed_script(machine: Machine) -> None:
    (machine.work / "train.py").write_text("print(2)\n")


def an_untracked_script(machine: Machine) -> None:
    (machine.work / "eval.py").write_text("print(3)\n")


def an_untracked_folder(machine: Machine) -> None:
    (machine.work / "notes").mkdir()
    (machine.work / "notes" / "a.md").write_text("it works")


def an_untracked_copy_of_a_checkpoint(machine: Machine) -> None:
    shutil.copytree(machine.out / "checkpoint-200", machine.work / "best")


def a_commit_that_is_not_pushed(machine: Machine) -> None:
    a_changed_script(machine)
    machine.git("commit", "-qam", "a better loss")


def a_commit_on_no_branch(machine: Machine) -> None:
    machine.git("checkout", "-q", "--detach")
    a_commit_that_is_not_pushed(machine)


def a_stash(machine: Machine) -> None:
    a_changed_script(machine)
    machine.git("stash", "-q")


def a_submodule_with_a_commit_of_its_own(machine: Machine) -> None:
    library = machine.work.parent / "library"
    library.mkdir()
    (machine.work.parent / "library.git").mkdir()
    make_checkout(library, machine.work.parent / "library.git")
    machine.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(machine.work.parent / "library.git"), "library")
    machine.git("commit", "-qm", "library")
    machine.git("update-ref", "refs/remotes/origin/main", "HEAD")
    git(machine.work / "library", "remote", "set-url", "origin", "https://git.example.org/somebody/library")
    git(machine.work / "library", "commit", "-q", "--allow-empty", "-m", "mine")
    git(machine.work / "library", "branch", "mine")
    git(machine.work / "library", "reset", "-q", "--hard", "HEAD~")


def a_change_in_another_work_tree(machine: Machine) -> None:
    machine.git("worktree", "add", "-q", "--detach", str(machine.work.parent / "tree"))
    (machine.work.parent / "tree" / "eval.py").write_text("print(5)\n")


def no_remote(machine: Machine) -> None:
    machine.git("remote", "remove", "origin")


def a_damaged_checkout(machine: Machine) -> None:
    (machine.work / ".git" / "HEAD").write_text("nothing")


def no_git(machine: Machine) -> None:
    (machine.work.parent / "bin").mkdir()
    machine.monkeypatch.setenv("PATH", str(machine.work.parent / "bin"))


def a_checkout_that_is_watched(machine: Machine) -> None:
    """With all of its caches, and nothing in it but what is pushed."""
    shutil.copytree(machine.work, machine.work.parent / "other", ignore=shutil.ignore_patterns("out"))
    machine.arguments += ["--run", machine.url, "--watch", str(machine.work.parent / "other")]


def a_watched_checkout_with_a_change(machine: Machine) -> None:
    a_checkout_that_is_watched(machine)
    (machine.work.parent / "other" / "train.py").write_text("print(4)\n")


def tracked_files_below_a_watched_directory(machine: Machine) -> None:
    (machine.out / "config.yaml").write_text("lr: 1")
    machine.git("add", "-f", "out/config.yaml")
    machine.git("commit", "-qm", "config")
    machine.git("update-ref", "refs/remotes/origin/main", "HEAD")


def an_offline_wandb_run(machine: Machine) -> None:
    run = machine.work / "wandb" / "offline-run-20260101_000000-abcd1234"
    (run / "files").mkdir(parents=True)
    (run / "run-abcd1234.wandb").write_bytes(b"log")
    (run / "files" / "config.yaml").write_text("lr: 1")


def a_wandb_run_that_is_synced(machine: Machine) -> None:
    an_offline_wandb_run(machine)
    (machine.work / "wandb" / "offline-run-20260101_000000-abcd1234" / "run-abcd1234.wandb.synced").touch()
    online = machine.work / "wandb" / "run-20260101_000000-dcba4321"
    online.mkdir()
    (online / "run-dcba4321.wandb").write_bytes(b"log")
    shutil.copytree(machine.work / "wandb", machine.out / "wandb")


def an_offline_wandb_run_that_is_watched(machine: Machine) -> None:
    an_offline_wandb_run(machine)
    (machine.work / "wandb").rename(machine.out / "wandb")


def tensorboard(machine: Machine) -> None:
    (machine.work / "runs" / "first").mkdir(parents=True)
    (machine.work / "runs" / "first" / "events.out.tfevents.1700000000.host.1.0").write_bytes(b"scalars")


def mlflow(machine: Machine) -> None:
    (machine.work / "mlruns" / "0" / "aa" / "metrics").mkdir(parents=True)
    (machine.work / "mlruns" / "0" / "aa" / "metrics" / "loss").write_bytes(b"1700000000 0.5 1")


def mlflow_of_today(machine: Machine) -> None:
    (machine.work / "mlflow.db").write_bytes(b"SQLite format 3")


def aim(machine: Machine) -> None:
    (machine.work / ".aim" / "meta").mkdir(parents=True)
    (machine.work / ".aim" / "meta" / "index").write_bytes(b"rocks")


def trackio(machine: Machine) -> None:
    folder = Path.home() / ".cache" / "huggingface" / "trackio"
    folder.mkdir(parents=True)
    for name in ("llm.db", "llm.db.lock", "older.db"):
        (folder / name).write_bytes(name.encode())
    os.utime(folder / "older.db", (1, 1))


def a_save_beside(machine: Machine) -> None:
    """What git is told to leave out is nobody's loss but for what looks like a save, and is none of the bucket's."""
    (machine.work / "data" / "final").mkdir(parents=True)
    (machine.work / "data" / "final" / "model.safetensors").write_bytes(b"the last weights")
    shutil.copy(next(machine.out.rglob("model.bin")), machine.work / "data" / "copied.pt")


def tensorboard_that_is_watched(machine: Machine) -> None:
    tensorboard(machine)
    (machine.work / "runs").rename(machine.out / "runs")


def tensorboard_that_git_ignores(machine: Machine) -> None:
    """What git is told to leave out is nobody's loss but for what a tracker wrote there."""
    tensorboard(machine)
    (machine.work / "runs").rename(machine.work / "data")


def shards_of_a_dead_process(machine: Machine) -> None:
    machine.dead_child(PUBLISHING, str(machine.work.parent / "shards"))


def shards_that_are_not_there_any_more(machine: Machine) -> None:
    note_begun(Location.parse(str(machine.work.parent / "shards")), None)


def shards_that_are_given_up(machine: Machine) -> None:
    shards_of_a_dead_process(machine)
    machine.arguments += ["--ignore", str(machine.work.parent / "shards")]


def shards_on_their_way(machine: Machine) -> None:
    machine.child(PUBLISHING + "sys.stdin.read()", str(machine.work.parent / "shards"))


def steps_that_nobody_saved(machine: Machine) -> None:
    machine.child(BEHIND + "sys.stdin.read()")


def steps_that_ended_with_their_process(machine: Machine) -> None:
    machine.dead_child(BEHIND)


def a_base_model_in_a_directory(machine: Machine) -> None:
    identity = {"base_model": "llama@content-0123456789abcdef"}
    make_checkpoint(machine.store, 300, {"adapter.bin": b"adapter"}, identity=identity)


def a_base_model_that_is_elsewhere(machine: Machine) -> None:
    a_base_model_in_a_directory(machine)
    machine.arguments += ["--ignore", "llama"]


def a_base_model_of_the_hubs_cache(machine: Machine) -> None:
    identity = {"base_model": f"{'0123456789' * 4}@content-0123456789abcdef"}
    make_checkpoint(machine.store, 300, {"adapter.bin": b"adapter"}, identity=identity)


def trained_on(machine: Machine, place: Path) -> DirectoryStore:
    store = DirectoryStore(str(place))
    digest = make_dataset(store).digest
    make_checkpoint(machine.store, 300, {"model.bin": b"300"}, identity={"dataset": digest})
    remember(machine.url, None, home_directory() / "spool", datasets={digest: str(place)})
    return store


def a_data_set_that_is_gone(machine: Machine) -> None:
    trained_on(machine, machine.work.parent / "bucket" / "digits").delete("manifest.json")


def another_data_set(machine: Machine) -> None:
    store = trained_on(machine, machine.work.parent / "bucket" / "digits")
    make_dataset(store, 12, shards=(12,))


def a_data_set_on_this_machine(machine: Machine) -> None:
    trained_on(machine, machine.work.parent / "digits")


def other_bytes(machine: Machine) -> None:
    machine.store.put(machine.newest().file_key("model.bin"), b"201" * 1000)


def other_bytes_deep(machine: Machine) -> None:
    other_bytes(machine)
    machine.arguments.append("--deep")


def whole_deep(machine: Machine) -> None:
    machine.arguments.append("--deep")


def a_volume_that_stays(machine: Machine) -> None:
    a_new_file(machine)
    machine.arguments += ["--durable", str(machine.out)]


def a_volume_that_is_not_there(machine: Machine) -> None:
    machine.arguments += ["--durable", str(machine.work.parent / "workspace")]


def a_run_on_this_disk(machine: Machine) -> None:
    machine.arguments.clear()


@dataclass(frozen=True)
class Row:
    """``fault`` must be answered with ``code``; a finding of ``row`` has these words, and a fix with those."""

    fault: Callable[[Machine], None]
    code: int
    row: str | None = None
    words: str = ""
    fix: str = ""
    in_shell: bool = True


MATRIX = {
    "clean": Row(nothing, 0),
    "a new file": Row(a_new_file, 3, "file", "1 file is in no verified checkpoint, such as train.log (9 B", "teardown --ignore 'logs/*'"),
    "an unfinished checkpoint": Row(
        an_unfinished_checkpoint, 3, "file", "optimizer.pt; it is not a finished checkpoint, since it lacks ", "--ignore 'checkpoint-300/*'"
    ),
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
    "a pinned copy rewritten": Row(
        a_pinned_copy_that_was_rewritten, 3, "failed", "1 file cannot be sent as they were saved: ", "copy what is of use"
    ),
    "a damaged record": Row(a_damaged_record, 3, "spool", "a pending save cannot be read", "before you remove it"),
    "a missing record": Row(a_record_that_is_missing, 3, "spool", "has no record", "before you remove it"),
    "a start directory that is gone": Row(
        a_start_directory_that_is_not_there, 4, "started", "which is not there any more: its code", "teardown --ignore /"
    ),
    "a watched link that leads elsewhere": Row(a_watched_link_that_leads_elsewhere, 3, "file", "notes.txt: 1 file is in no", "--ignore "),
    "watched before": Row(watched_directories_of_an_earlier_start, 3, "file", "notes.txt: 1 file is in no", "--ignore "),
    "a half-written record": Row(a_half_written_record, 4, "records", "a run could not be noted here", "; then let go of the trace: rm "),
    "untracked around what is named": Row(
        a_dirty_checkout_around_what_is_named, 3, "git", "1 file is not in git and in no verified checkpoint", "add eval.py"
    ),
    "the usual spool is gone": Row(
        the_usual_spool_is_not_there, 4, "spool", "a spool that was used here is not there any more", "mkdir -p "
    ),
    "training": Row(training, 3, "writer", "is training and writes to this run", "kill "),
    "a writer without a run": Row(a_writer_without_a_run, 3, "process", "train.log open for writing", "kill "),
    "a command that outlived its stagekit run": Row(
        a_command_that_outlived_its_stagekit_run, 3, "process", "was started by a stagekit run for it, and lives on", "kill "
    ),
    "a command that outlived its killed stagekit run": Row(
        a_command_that_outlived_its_killed_stagekit_run, 3, "process", "was started by a stagekit run for it, and lives on", "kill "
    ),
    "a killed stagekit run whose command lives": Row(
        a_command_that_outlived_its_killed_stagekit_run, 3, "wrapped", "lives on: nobody sends what it saves", "stop the process"
    ),
    "a command of another run": Row(a_command_of_another_run, 0),
    "a command that left a name that no store takes": Row(
        a_command_that_left_a_name_that_no_store_takes, 3, "wrapped", "may be in no bucket: ", "mend that, then: stagekit teardown --run "
    ),
    "another machine": Row(another_machine, 0, "writer", "process 77 on other-server now, which is another machine"),
    "another container": Row(another_container, 4, "writer", "in another container of this machine", "look in that container"),
    "a missing object": Row(a_missing_object, 3, "damaged", "step 200 is not whole in the bucket: model.bin missing", "stagekit verify"),
    "a cut object": Row(a_cut_object, 3, "damaged", "model.bin missing or of another size", "stagekit verify"),
    "an older checkpoint damaged": Row(an_older_checkpoint_damaged, 0, "damaged", "step 100 is not whole", "stagekit verify"),
    "a damaged manifest": Row(a_damaged_manifest, 3, "damaged", "the manifest of step 200 is damaged", "stagekit verify"),
    "missing checkpoints": Row(missing_checkpoints, 3, "damaged", "it was committed, and ", "stagekit verify"),
    "a missing manifest": Row(a_missing_manifest, 3, "damaged", "it was committed, and ", "stagekit verify"),
    "a step that policy dropped": Row(
        a_step_that_policy_dropped, 0, "superseded", "out: 1 file of steps that policy dropped, such as checkpoint-50/"
    ),
    "a step that policy dropped, of several ranks": Row(
        a_step_of_several_ranks_that_rank_0_dropped, 0, "superseded", "out: 2 files of steps that policy dropped, such as checkpoint-50/"
    ),
    "no such directory": Row(no_such_directory, 4, "watched", "there is no such directory", "ls "),
    "no such run": Row(no_such_run, 4, "run", "there is no run at this URL", "stagekit ls"),
    "a mounted bucket": Row(a_mounted_bucket, 4, "mount", "fuse.rclone", "umount -l", in_shell=False),
    "a bucket mounted below": Row(a_bucket_mounted_below, 4, "mount", "inside: it is not looked at", "--ignore inside", in_shell=False),
    "a bucket linked to": Row(a_bucket_mounted_below, 4, "mount", "link: it is not looked at", "--ignore link", in_shell=False),
    "damaged records": Row(damaged_records_of_this_machine, 4, "records", "records cannot be read", "--run RUN --watch DIR"),
    "a spool that is not there": Row(
        a_spool_that_is_not_there, 4, "spool", "a spool that was used here is not there any more", "mkdir -p "
    ),
    "a spool that was never needed": Row(a_spool_that_was_never_needed, 0),
    "a watched directory that is not there": Row(
        a_watched_directory_that_is_not_there, 4, "watched", "out was watched and is not there any more: ", "teardown --watch DIR"
    ),
    "a watched directory on a disk that is not mounted": Row(
        a_watched_directory_on_a_disk_that_is_not_mounted, 4, "watched", "the disk that it was on is not there any more", "--watch DIR"
    ),
    "a watched disk that is not mounted": Row(
        a_watched_disk_that_is_not_mounted, 4, "watched", "the disk that it was on is not there any more", "--watch DIR"
    ),
    "a directory that nobody wrote to": Row(
        a_directory_that_nobody_wrote_to, 4, "watched", "no file was ever seen below it, and its run has no checkpoint", "--watch DIR"
    ),
    "nothing recorded": Row(nothing_recorded, 4, "scope", "nothing is watched and no run is recorded", "--watch DIR --run RUN"),
    "a run without a checkpoint": Row(a_run_without_a_checkpoint, 0, "run", "the run has no checkpoint yet"),
    "git: changed": Row(a_changed_script, 3, "git", "1 file changed and not committed, such as train.py", "commit -am"),
    "git: untracked": Row(an_untracked_script, 3, "git", "1 file is not in git and in no verified checkpoint", "add eval.py && git -C"),
    "git: an untracked folder": Row(an_untracked_folder, 3, "git", "in no verified checkpoint, such as a.md", "--ignore 'notes/*'"),
    "git: untracked and in the bucket": Row(an_untracked_copy_of_a_checkpoint, 0),
    "git: not pushed": Row(a_commit_that_is_not_pushed, 3, "git", "1 commit on no remote", "push --all origin"),
    "git: on no branch": Row(a_commit_on_no_branch, 3, "git", "1 commit on no remote", "push --all origin"),
    "git: stashed": Row(a_stash, 3, "git", "1 stash, which no push takes along", "stash branch stashed"),
    "git: in a submodule": Row(
        a_submodule_with_a_commit_of_its_own, 3, "git", "library: 1 commit on no remote", "library push --all origin"
    ),
    "git: in another work tree": Row(a_change_in_another_work_tree, 3, "git", "tree/eval.py: 1 file is not in git", "tree add eval.py"),
    "git: no remote": Row(no_remote, 3, "git", "it has no remote, so its commits are nowhere else", "remote add origin URL"),
    "git: damaged": Row(a_damaged_checkout, 4, "git", "git refuses to tell: not a git repository", "status"),
    "git: missing": Row(no_git, 4, "git", "git is not installed here", "apt-get install -y git", in_shell=False),
    "git: watched and pushed": Row(a_checkout_that_is_watched, 0),
    "git: watched and changed": Row(a_watched_checkout_with_a_change, 3, "git", "1 file changed and not committed", "commit -am"),
    "git: tracked below a watched directory": Row(tracked_files_below_a_watched_directory, 0),
    "wandb: offline": Row(an_offline_wandb_run, 3, "tracker", "a wandb run that was made offline and not synced (8 B", "wandb sync /"),
    "wandb: offline and watched": Row(an_offline_wandb_run_that_is_watched, 3, "tracker", "made offline and not synced", "wandb sync /"),
    "wandb: synced": Row(a_wandb_run_that_is_synced, 0),
    "a save beside": Row(a_save_beside, 4, "beside", "1 file that looks like a save lies where nothing is watched", "stagekit push /"),
    "MLflow": Row(mlflow, 3, "tracker", "1 file of MLflow is in no bucket that is known here", "--ignore 'mlruns/*'"),
    "MLflow of today": Row(mlflow_of_today, 3, "tracker", "1 file of MLflow is in no bucket", "--ignore 'mlflow.db'"),
    "Aim": Row(aim, 3, "tracker", "1 file of Aim is in no bucket that is known here", "--ignore '.aim/*'"),
    "Trackio": Row(trackio, 4, "tracker", "1 file of Trackio is in no bucket that is known here, such as llm.db", "--ignore 'trackio/*'"),
    "TensorBoard": Row(tensorboard, 3, "tracker", "1 file of TensorBoard is in no bucket that is known here", "--ignore 'runs/*'"),
    "TensorBoard, watched": Row(tensorboard_that_is_watched, 3, "tracker", "1 file of TensorBoard is in no bucket", "--ignore 'runs/*'"),
    "TensorBoard, ignored by git": Row(tensorboard_that_git_ignores, 3, "tracker", "1 file of TensorBoard is in no", "--ignore 'data/*'"),
    "shards: left by a dead process": Row(
        shards_of_a_dead_process, 3, "publication", "shards were built and not published", "stagekit shard DATA "
    ),
    "shards: gone": Row(shards_that_are_not_there_any_more, 4, "publication", "nothing of it is there any more", "--ignore /"),
    "shards: given up": Row(shards_that_are_given_up, 0),
    "shards: on their way": Row(shards_on_their_way, 3, "publication", "is publishing shards", "wait until process"),
    "steps that nobody saved": Row(steps_that_nobody_saved, 3, "steps", "has trained step 1,400 and step 200 is the newest", "let it save"),
    "steps and time that would be lost": Row(steps_that_nobody_saved, 3, "steps", "safe: you lose 1,200 steps, ", "let it save"),
    "steps that ended with their process": Row(steps_that_ended_with_their_process, 0, "steps", "what it did not save is gone already"),
    "a base model in a directory": Row(
        a_base_model_in_a_directory, 4, "base model", "the base model llama, a directory of this machine", "teardown --ignore llama"
    ),
    "a base model that is elsewhere": Row(a_base_model_that_is_elsewhere, 0),
    "a base model of the Hub's cache": Row(a_base_model_of_the_hubs_cache, 0),
    "a data set that is gone": Row(a_data_set_that_is_gone, 4, "data set", "is not there any more, and a resume needs it", "stagekit info"),
    "another data set": Row(another_data_set, 4, "data set", "another data set is there than", "stagekit info"),
    "a data set on this machine": Row(a_data_set_on_this_machine, 0, "data set", "is on this machine; a resume elsewhere needs it"),
    "other bytes, not read": Row(other_bytes, 0),
    "other bytes, read": Row(other_bytes_deep, 3, "damaged", "model.bin other bytes than were saved", "--deep"),
    "whole, read": Row(whole_deep, 0),
    "a volume that stays": Row(a_volume_that_stays, 0, "file", "it lies on a volume that outlives this server"),
    "a volume that is not there": Row(a_volume_that_is_not_there, 4, "durable", "there is no such directory", "ls "),
    "a run on this disk": Row(a_run_on_this_disk, 3, "disk", "the run lies on a disk of this machine, which goes with it", "--durable "),
}
ANSWERS = {0: "YES", 3: "NO", 4: "CANNOT TELL"}


def ask(machine: Machine, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, list[dict[str, Any]]]:
    code = main(["teardown", *machine.arguments, "--json", *more])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


STAGEKIT = f"{sys.executable} -m stagekit"


def in_a_shell(arguments: list[str]) -> tuple[int, str]:
    """The exit code and the output of the command line that people are told to use."""
    command = f"{STAGEKIT} teardown {shlex.join(arguments)} && echo destroyed"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ("destroyed" in done.stdout.splitlines()) is (done.returncode == 0), done
    return done.returncode, done.stdout.removesuffix("destroyed\n")


@pytest.mark.parametrize("name", MATRIX)
def test_the_matrix(name: str, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    row = MATRIX[name]
    row.fault(machine)
    if row.in_shell:
        code, shown = in_a_shell(machine.arguments)
    else:
        code = main(["teardown", *machine.arguments])
        shown = capsys.readouterr().out
    assert code == row.code, shown
    lines = shown.splitlines()
    assert lines[-1].startswith(f"{ANSWERS[code]}: ")
    if row.row is not None:
        told = [number for number, line in enumerate(lines) if row.words in line]
        assert told, shown
        if row.fix:
            assert lines[told[0] + 1].strip().startswith("fix: ")
            assert row.fix in lines[told[0] + 1]
    again, records = ask(machine, capsys)
    assert again == code
    assert records[0]["event"] == "scope"
    findings = [record for record in records if record["event"] == "finding"]
    assert records[-1] == {"event": "verdict", "answer": ANSWERS[code], "findings": len(findings)}
    # A bucket that stays does not lie on the root file system.
    findings = [finding for finding in findings if (finding["row"], finding["weight"]) != ("durable", "note")]
    if row.row is None:
        assert findings == []
    else:
        fitting = [one for one in findings if one["row"] == row.row and row.words.partition(" (")[0] in f"{one['subject']}: {one['what']}"]
        assert fitting, findings
        assert row.fix in fitting[0]["fix"]
        assert {one["weight"] for one in findings} <= {"note", *([ANSWERS[code]] if code else []), "CANNOT TELL"}


CLOSING = """
import contextlib, io, json, os, sys
from stagekit.cli import main
for closed, arguments in json.loads(sys.argv[1]):
    mode = os.stat(closed).st_mode
    os.chmod(closed, 0)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(["teardown", *arguments, "--json"])
    os.chmod(closed, mode)
    print(json.dumps([code, said.getvalue().splitlines()]))
"""
OBEYING = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
"""Root as somebody whom the modes of files bind."""


def test_what_may_not_be_read_cannot_be_told(machine: Machine) -> None:
    """The newest step is in the spool and nowhere else."""
    machine.dead_child(STILL_SENDING)
    shutil.rmtree(machine.out / "checkpoint-300")
    home = home_directory()
    (home / "wrapped").mkdir()
    new = machine.out / "checkpoint-100" / "new.bin"
    new.write_bytes(b"new")
    (record,) = home.glob("spool/entries/*/record.json")
    spool = "cannot be read (Permission denied), and saves that are in no bucket may wait there"
    cases = [
        (home / "spool", 4, "spool", spool),
        (home / "spool" / "entries", 4, "spool", spool),
        (home / "spool" / "sessions", 4, "spool", spool),
        (record, 4, "spool", spool),
        (home / "wrapped", 3, "wrapped", "whether a stagekit run lives, or has left something, cannot be told"),
        (home / "runs", 3, "records", "records cannot be read: [Errno 13]"),
        (home, 4, "records", "records cannot be read: [Errno 13]"),
        (machine.out, 3, "file", "it cannot be read: Permission denied"),
        (new, 3, "file", "it cannot be read (Permission denied), and nothing of its size is in a bucket"),
        (machine.out / "checkpoint-200" / "model.bin", 3, "file", "it cannot be read: Permission denied"),
    ]
    # Where the spool can be read its save would be sent, and nothing would be left.
    asked = [(case, more) for case in cases for more in ([[], ["--check"]] if case[1] == 4 else [["--check"]])]
    given = json.dumps(
        [(str(case[0]), [*machine.arguments, *more, *([] if case[0] == new else ["--ignore", new.name])]) for case, more in asked]
    )
    first = OBEYING if os.getuid() == 0 else []
    done = subprocess.run([*first, sys.executable, "-c", CLOSING, given], capture_output=True, text=True, check=True)
    for ((closed, answer, row, words), _), line in zip(asked, done.stdout.splitlines(), strict=True):
        code, shown = json.loads(line)
        assert code == answer, (closed, shown)
        told = [one for one in map(json.loads, shown) if one["event"] == "finding" and one["row"] == row and words in one["what"]]
        assert [one["weight"] for one in told] == ["CANNOT TELL"], (closed, shown)
        assert f"ls -ld {closed}" in told[0]["fix"]
        if closed == new:
            assert not any('"weight": "NO", "row": "file"' in one for one in shown), shown
    new.unlink()
    assert main(["teardown", *machine.arguments]) == 0


def test_the_scope_is_printed_first(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["teardown", *machine.arguments, "--ignore", "*.tmp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [*lines[:6], lines[-1]] == [
        f"watching  {machine.out}",
        f"started   {machine.work}",
        f"run       {machine.url}",
        f"spool     {home_directory() / 'spool'}",
        f"durable   {machine.work.parent / 'bucket'}",
        "ignoring  *.tmp",
        "YES: nothing in this scope would be lost with this server",
    ]


def test_check_writes_nothing_here_and_in_the_bucket(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.dead_child(STILL_SENDING)

    def everything() -> dict[str, tuple[int, int]]:
        top = machine.work.parent
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


# ------------------------------------------------------------------------------------------------- stores that cannot be looked at


@pytest.fixture
def hanging_endpoint() -> Iterator[str]:
    """An endpoint that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def cannot_tell(arguments: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    began_s = time.monotonic()
    code = main(["teardown", *arguments])
    took_s = time.monotonic() - began_s
    shown = capsys.readouterr().out
    assert code == 4, shown
    for one in words:
        assert one in shown
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


def test_a_git_that_hangs_and_stores_that_hang_are_waited_for_together(
    machine: Machine, hanging_endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    programs = machine.work.parent / "bin"
    programs.mkdir()
    (programs / "git").write_text("#!/bin/sh\nexec sleep 600\n")
    (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    for number in range(3):
        remember(f"s3://bucket/{number}", StoreConfig(endpoint_url=hanging_endpoint), home_directory() / "spool", working=machine.work)
    note_begun(Location.parse("s3://bucket/shards"), StoreConfig(endpoint_url=hanging_endpoint))
    last_knew = "shards were sent here and not published when this machine last knew; now it cannot be looked at"
    cannot_tell(machine.arguments, capsys, "git did not answer within 6 s", "s3://bucket/2: the run cannot be looked at", last_knew)


def test_lost_credentials_cannot_be_told(moto_server: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    cannot_tell(["--run", "s3://bucket/run", "--endpoint-url", moto_server.endpoint_url], capsys, "cannot be looked at")


def test_a_missing_bucket_cannot_be_told(
    moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = credentials_for(moto_server)
    arguments = ["--run", "s3://no-such-bucket-here/run", "--endpoint-url", moto_server.endpoint_url, "--profile", str(config.profile)]
    cannot_tell(arguments, capsys, "no-such-bucket-here")


def train(bucket: str, config: StoreConfig) -> str:
    """A run with one checkpoint of ``out``, in the current directory."""
    Path("out").mkdir()
    Path("out/model.bin").write_bytes(b"model")
    url = f"s3://{bucket}/run"
    with Run(url, store=config, on_event=lambda event: None) as run:
        run.submit("out", step=1)
    return url


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
    url = train(fresh_bucket(moto_server), config)
    assert main(["teardown"]) == 0
    capsys.readouterr()
    with FaultProxy(moto_server.endpoint_url) as proxy:
        proxy.fault(Status(403, "AccessDenied"), key=key)
        arguments = ["--run", url, "--endpoint-url", proxy.endpoint_url, "--profile", str(config.profile), "--watch", str(tmp_path / "out")]
        cannot_tell(arguments, capsys, "use credentials that may list and read the run")


def test_a_store_that_takes_no_writes_is_told_at_once(
    moto_server: S3Server,
    fresh_bucket: Callable[[S3Server], str],
    credentials_for: Callable[[S3Server], StoreConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with FaultProxy(moto_server.endpoint_url) as proxy:
        config = replace(credentials_for(moto_server), endpoint_url=proxy.endpoint_url)
        url = train(fresh_bucket(moto_server), config)
        left = Spool(home_directory() / "spool")
        left.pin(tmp_path / "out", Entry(url, config, 2, 1, saved_s=1_700_000_000.0))
        left.close()
        proxy.fault(Status(500), method="PUT")
        began_s = time.monotonic()
        assert main(["teardown", "--json"]) == 3
        assert time.monotonic() - began_s < 30.0, "it is promised within ten"
    told = {one["row"]: one for one in map(json.loads, capsys.readouterr().out.splitlines()) if one["event"] == "finding"}
    assert told["bucket"]["weight"] == "CANNOT TELL"
    assert "takes no writes for this run, so what waits here for it is not sent: " in told["bucket"]["what"]
    assert "1 file to be sent" in told["queued"]["what"]


# --------------------------------------------------------------------------------------------------------------- rows about a bucket


@dataclass
class Rented:
    """A server whose run is in a bucket of a real S3 server, reached through ``proxy``."""

    server: S3Server
    bucket: str
    url: str
    proxy: FaultProxy


def rules(rented: Rented, *rules: dict[str, Any]) -> None:
    rented.server.client().put_bucket_lifecycle_configuration(Bucket=rented.bucket, LifecycleConfiguration={"Rules": list(rules)})


def expires(days: int, prefix: str) -> dict[str, Any]:
    return {"ID": "scratch", "Status": "Enabled", "Filter": {"Prefix": prefix}, "Expiration": {"Days": days}}


def all_is_well(rented: Rented) -> None:
    pass


def a_rule_that_expires_soon(rented: Rented) -> None:
    rules(rented, expires(3, "run/"))


def a_rule_that_expires_late(rented: Rented) -> None:
    rules(rented, expires(90, ""))


def a_rule_for_something_else(rented: Rented) -> None:
    rules(rented, expires(1, "run-old/"), {**expires(1, ""), "Status": "Disabled"})


def rules_that_may_not_be_read(rented: Rented) -> None:
    rented.proxy.fault(Status(403, "AccessDenied"), where=lambda request: "lifecycle" in request.query)


def rules_that_are_not_supported(rented: Rented) -> None:
    rented.proxy.fault(Status(501, "NotImplemented"), where=lambda request: "lifecycle" in request.query)


def uploads_that_may_not_be_listed(rented: Rented) -> None:
    rented.proxy.fault(Status(403, "AccessDenied"), where=lambda request: "uploads" in request.query)


def an_upload_that_nobody_finished(rented: Rented) -> None:
    rented.server.client().create_multipart_upload(Bucket=rented.bucket, Key="run/checkpoints/x/files/model.bin")


def a_clock_that_is_behind(rented: Rented) -> None:
    rented.proxy.fault(WrongDate(630.0))


def a_clock_that_the_store_refuses(rented: Rented) -> None:
    rented.proxy.fault(Status(403, "RequestTimeTooSkewed"))


def keys_that_may_write_and_not_read(rented: Rented) -> None:
    for method in ("GET", "HEAD"):
        rented.proxy.fault(Status(403, "AccessDenied"), method=method)


BUCKET_ROWS: dict[str, tuple[Callable[[Rented], None], Row]] = {
    "clean": (all_is_well, Row(nothing, 0)),
    "a rule that expires soon": (
        a_rule_that_expires_soon,
        Row(nothing, 3, "expiry", "lifecycle rule 'scratch' removes step 1 in 3.0 days", "get-bucket-lifecycle-configuration --bucket"),
    ),
    "a rule that expires late": (a_rule_that_expires_late, Row(nothing, 0, "expiry", "removes step 1 in 90.0 days")),
    "a rule for something else": (a_rule_for_something_else, Row(nothing, 0)),
    "rules that may not be read": (rules_that_may_not_be_read, Row(nothing, 0, "expiry", "may not read the bucket's lifecycle rules")),
    "rules that are not supported": (rules_that_are_not_supported, Row(nothing, 0)),
    "uploads that may not be listed": (uploads_that_may_not_be_listed, Row(nothing, 0, "multipart", "may not list unfinished uploads")),
    "an unfinished upload": (
        an_upload_that_nobody_finished,
        Row(nothing, 0, "multipart", "1 unfinished multipart upload is billed", "stagekit prune s3://"),
    ),
    "a clock that is behind": (
        a_clock_that_is_behind,
        Row(nothing, 0, "clock", "this machine's clock is 10 min ", "timedatectl set-ntp true"),
    ),
    "a clock that the store refuses": (
        a_clock_that_the_store_refuses,
        Row(nothing, 4, "bucket", "set this machine's clock", "timedatectl set-ntp true"),
    ),
    "keys that may write and not read": (
        keys_that_may_write_and_not_read,
        Row(nothing, 4, "bucket", "access denied", "use credentials that may list and read the run"),
    ),
}


@pytest.mark.parametrize("name", BUCKET_ROWS)
def test_the_rows_about_a_bucket(
    name: str,
    moto_server: S3Server,
    fresh_bucket: Callable[[S3Server], str],
    credentials_for: Callable[[S3Server], StoreConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault, row = BUCKET_ROWS[name]
    monkeypatch.chdir(tmp_path)
    config, bucket = credentials_for(moto_server), fresh_bucket(moto_server)
    with FaultProxy(moto_server.endpoint_url) as proxy:
        url = train(bucket, replace(config, endpoint_url=proxy.endpoint_url))
        fault(Rented(moto_server, bucket, url, proxy))
        code, shown = in_a_shell([])
        assert code == row.code, shown
        again = main(["teardown", "--json"])
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert again == code
    findings = [record for record in records if record["event"] == "finding"]
    if row.row is None:
        assert [(one["row"], one["weight"]) for one in findings] == [("disk", "note")], "its store answers on this machine"
        assert shown.splitlines()[-1].startswith("YES: ")
        return
    (told,) = [one for one in findings if one["row"] == row.row]
    assert row.words in told["what"]
    assert row.words in shown
    assert row.fix in told["fix"]
    assert row.fix in shown
