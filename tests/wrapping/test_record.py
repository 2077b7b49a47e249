"""What is recorded of an attempt, and what ``stagekit resume`` makes of it on the next machine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from stagekit.errors import CheckpointError, ManifestError
from stagekit.runs.layout import seal
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore
from stagekit.wrapping import record
from stagekit.wrapping.again import Again, again
from stagekit.wrapping.record import DIFF_BYTES, Attempt, Code, code_at, freeze

from .machine import TOY, Machine


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *arguments], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    directory = tmp_path / "code"
    directory.mkdir()
    git(directory, "init", "-q")
    (directory / "train.py").write_text("lr = 1\n")
    git(directory, "add", ".")
    git(directory, "commit", "-q", "-m", "first")
    return directory


def attempt(name: str = "000001-0123abcd", **more: object) -> Attempt:
    values: dict[str, object] = {
        "name": name,
        "command": ("python", "train.py"),
        "options": ("--to", "s3://b/run", "--watch", "out"),
        "directory": "/root/train",
        "started_s": 1.5,
        "python": "3.11.4",
        "packages": {"torch": "2.5.0", "numpy": "1.26.0", "my_pkg": "1"},
    }
    return Attempt(**(values | more))  # type: ignore[arg-type]


def test_a_record_comes_back_as_it_was_and_the_newest_is_first() -> None:
    store = MemoryStore("memory://records/run")
    first = attempt(code=Code("c0ffee", "https://x/y", "diff", True, ("a",)), world_size=8)
    record.save(store, first)
    record.save(store, attempt("000012-0123abcd"))
    store.put("record/notes.txt", b"somebody's own")
    assert record.attempts(store) == ["000012-0123abcd", "000001-0123abcd"]
    assert record.load(store, "000001-0123abcd") == first
    assert first.number == 1
    assert first.line == "stagekit run --to s3://b/run --watch out -- python train.py"
    with pytest.raises(ManifestError, match="it is no record of an attempt"):
        Attempt.from_bytes(seal({"format": "stagekit-attempt", "version": 1, "name": "x"}), source="x")


def test_the_code_is_told_by_commit_diff_and_untracked_files(checkout: Path) -> None:
    git(checkout, "remote", "add", "origin", "https://me:pa55word@example.org/x.git")
    (checkout / "train.py").write_text('lr = 2\napi_key = "0123456789"\n')
    (checkout / "new.py").write_text("x")
    code = code_at(checkout, ["lr = 2"])
    assert code is not None
    assert code.commit == git(checkout, "rev-parse", "HEAD")
    assert code.remote == "https://[redacted]@example.org/x.git"
    assert code.untracked == ("new.py",)
    assert "-lr = 1\n+[redacted]\n" in code.changes
    assert "0123456789" not in code.changes
    assert not code.cut
    assert code_at(checkout.parent) is None


def test_a_long_diff_is_cut(checkout: Path) -> None:
    (checkout / "train.py").write_text("y = 1\n" * (DIFF_BYTES // 6))
    code = code_at(checkout)
    assert code is not None
    assert code.cut
    assert len(code.changes.encode()) <= DIFF_BYTES


def test_the_packages_are_those_of_the_commands_own_python(tmp_path: Path) -> None:
    python, packages = freeze([sys.executable, "train.py"])
    assert python == ".".join(map(str, sys.version_info[:3]))
    assert packages["numpy"] == metadata.version("numpy")
    other = tmp_path / "python3"
    other.write_text('#!/bin/bash\necho \'["3.9.1", {"torch": "1.0"}]\'\n')
    other.chmod(0o755)
    assert freeze([str(other), "train.py"]) == ("3.9.1", {"torch": "1.0"})
    script = tmp_path / "torchrun"
    script.write_text(f"#!{other}\n")
    script.chmod(0o755)
    assert freeze(["env", str(script), "train.py"]) == ("3.9.1", {"torch": "1.0"})
    other.write_text("#!/bin/bash\nexit 3\n")
    assert freeze([str(other), "train.py"])[1] == packages


def test_what_is_different_here_is_told() -> None:
    code = Code("c0ffee", "https://x/y", "diff --git a b", False, ("data.csv",))
    found = Again("s3://b/run", attempt(code=code), "3.12.0", {"NumPy": "2.0.0", "my-pkg": "1"}, None)
    assert found.missing == ["torch==2.5.0"]
    assert found.different == [("numpy", "1.26.0", "2.0.0")]
    assert found.lines == [
        "# attempt 1 of s3://b/run, in /root/train",
        "# it ran on Python 3.11.4, here it is 3.12.0",
        "# the code was at c0ffee, here it is no checkout of git",
        "# it had changes that were not committed: stagekit resume s3://b/run --diff prints them for git apply",
        "# not in git and not recorded: 1 file, such as data.csv",
        "# missing packages: torch==2.5.0",
        "# packages of another version: numpy 2.0.0 (was 1.26.0)",
        "git clone https://x/y y && cd y",
        "git checkout c0ffee",
        "stagekit run --to s3://b/run --watch out -- python train.py",
    ]
    same = Again("s3://b/run", attempt(code=code), "3.11.9", dict(attempt().packages), code)
    assert len(same.lines) == 3, "nothing but what is never recorded"


# ------------------------------------------------------------------------------------------------------------ the commands


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine", str(tmp_path / "bucket" / "run"), options=())


def test_each_attempt_leaves_a_record_without_the_environment(machine: Machine) -> None:
    machine.environ["MY_API_KEY"] = "sesame-12345"
    assert machine.run("1", options=("--keep-last", "3", "--stall", "30m")).code == 0
    done = machine.stagekit(*machine.line(["bash", "-c", "echo sesame-12345", "--token", "abc"]))
    assert done.code == 0, done.err
    store = DirectoryStore(machine.url)
    for info in store.list("record/"):
        data = bytes(store.get(info.key)).decode()
        for secret in ("sesame", '"abc"', os.environ["PATH"]):
            assert secret not in data
    newest, first = (record.load(store, name) for name in record.attempts(store))
    assert first.command == (sys.executable, TOY, "out", "1")
    assert first.options == ("--to", machine.url, "--watch", "out", "--stall", "1800", "--keep-last", "3")
    assert first.directory == str(machine.directory)
    assert newest.command == ("bash", "-c", "echo [redacted]", "--token", "[redacted]")


def test_resume_prints_the_line_and_exec_runs_it_here(tmp_path: Path, machine: Machine) -> None:
    assert machine.run("2").code == 0
    other = Machine(tmp_path / "other", machine.url)
    printed = other.stagekit("resume", machine.url)
    assert printed.code == 0, printed.err
    first, *_, last = printed.out.splitlines()
    assert first == f"# attempt 1 of {machine.url}, in {machine.directory}"
    assert last == f"stagekit run --to {machine.url} --watch out -- {sys.executable} {TOY} out 2"
    (event,) = other.stagekit("resume", machine.url, "--json").events
    assert event["command"] == [sys.executable, TOY, "out", "2"]
    done = other.stagekit("resume", machine.url, "--exec")
    assert done.code == 0, done.err
    assert done.out == f"from 2 of {machine.url} in {other.out}/checkpoint-2\ndone\n"


def test_resume_prints_the_changes_for_git_apply(checkout: Path, machine: Machine) -> None:
    machine.directory = checkout
    (checkout / "train.py").write_text("lr = 2\n")
    assert machine.stagekit(*machine.line(["true"])).code == 0
    changes = machine.stagekit("resume", machine.url, "--diff").out
    git(checkout, "checkout", "train.py")
    subprocess.run(["git", "apply"], cwd=checkout, input=changes, text=True, check=True)
    assert (checkout / "train.py").read_text() == "lr = 2\n"


def test_a_command_whose_secrets_were_taken_out_is_printed_and_not_run(machine: Machine) -> None:
    assert machine.stagekit(*machine.line(["bash", "-c", "true", "--token", "abc"])).code == 0
    assert machine.stagekit("resume", machine.url).out.endswith("-- bash -c true --token '[redacted]'\n")
    done = machine.stagekit("resume", machine.url, "--exec")
    assert done.code == 2
    assert "secrets were taken out of the recorded command, so it cannot be started as it is; fill them in: stagekit run" in done.err


def test_nothing_recorded_is_told(tmp_path: Path, machine: Machine) -> None:
    assert machine.run("1", options=("--no-record",)).code == 0
    done = machine.stagekit("resume", machine.url)
    assert done.code == 1
    assert "no start of stagekit run is recorded there" in done.err
    assert machine.run("1").code == 0
    done = machine.stagekit("resume", machine.url, "--attempt", "9")
    assert "no attempt 9 is recorded there; it has 2" in done.err
    with pytest.raises(CheckpointError, match="no start of stagekit run is recorded"):
        again(tmp_path / "nowhere")
