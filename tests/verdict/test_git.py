"""What git says and what it does not: read without writing, bounded in time, and unclear wherever it refuses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stagekit.verdict.git import Checkout, Unclear, enclosing, judge, look

from .ordinary import git, make_checkout


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for name in ("work", "remote"):
        (tmp_path / name).mkdir()
    make_checkout(tmp_path / "work", tmp_path / "remote")
    return tmp_path / "work"


def seen(work: Path) -> Checkout:
    found = look(work)
    assert isinstance(found, Checkout), found
    return found


def test_a_pushed_checkout_has_nothing_to_tell_and_is_not_written_to(work: Path) -> None:
    (work / "train.py").touch()  # git would refresh its index now
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    found = seen(work)
    assert judge(found, lambda path: False, time.time()) == []
    assert found.tracked == {str(work / "train.py"), str(work / ".gitignore")}
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before


def test_names_that_are_hard_to_write_are_read(work: Path) -> None:
    names = ["zwei Wörter.py", "a\nb.py", '"quoted".py', "->.py"]
    for name in names:
        (work / name).write_text("1")
    assert {path.name for path in seen(work).untracked} == set(names)
    git(work, "add", ".")
    assert set(seen(work).modified) == set(names)
    assert {str(work / name) for name in names} <= seen(work).tracked


def test_a_rename_and_a_deletion_are_changes(work: Path) -> None:
    git(work, "mv", "train.py", "fit.py")
    (work / ".gitignore").unlink()
    assert set(seen(work).modified) == {"fit.py", ".gitignore"}
    (finding,) = judge(seen(work), lambda path: path == ".gitignore", time.time())
    assert finding.what == "1 file changed and not committed, such as fit.py"


def test_a_new_repository_has_changes_and_no_commits(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", "a.py")
    found = seen(tmp_path)
    assert (found.has_commits, found.modified, found.unpushed) == (False, ("a.py",), ())
    assert [one.what for one in judge(found, lambda path: False, 0.0)] == ["1 file changed and not committed, such as a.py"]


def test_a_branch_that_was_never_pushed_counts_also_when_another_one_is_checked_out(work: Path) -> None:
    git(work, "checkout", "-qb", "idea")
    git(work, "commit", "-q", "--allow-empty", "-m", "one")
    git(work, "commit", "-q", "--allow-empty", "-m", "two")
    git(work, "checkout", "-q", "main")
    (finding,) = judge(seen(work), lambda path: False, time.time())
    assert finding.what == "2 commits on no remote"
    assert finding.age_s is not None
    assert finding.fix == f"git -C {work} push --all origin"


def test_a_remote_on_this_machine_is_told(work: Path, tmp_path: Path) -> None:
    git(work, "remote", "set-url", "origin", str(tmp_path / "remote"))
    (finding,) = judge(seen(work), lambda path: False, time.time())
    assert (finding.weight, finding.what) == ("note", f"its remote origin is a directory of this machine, {tmp_path / 'remote'}")


def test_settings_of_another_checkout_are_not_taken_for_this_one(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert seen(work).untracked == ()


def test_a_git_that_hangs_is_given_up_with_its_helpers(work: Path, tmp_path: Path) -> None:
    program = tmp_path / "git"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/helper\nwait\n")
    program.chmod(0o755)
    found = look(work, program=str(program), patience_s=1.0)
    assert isinstance(found, Unclear)
    assert found.why == "git did not answer within 1 s"
    (finding,) = judge(found, lambda path: False, 0.0)
    assert (finding.weight, finding.fix) == ("CANNOT TELL", f"see what it says: git -C {work} status")
    helper = Path("/proc") / (tmp_path / "helper").read_text().strip() / "stat"
    deadline = time.monotonic() + 60
    while helper.exists() and helper.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "its helper outlives it"


def test_a_checkout_of_somebody_else_asks_for_that_user(work: Path, tmp_path: Path) -> None:
    program = tmp_path / "git"
    program.write_text(f"#!/bin/sh\necho \"fatal: detected dubious ownership in repository at '{work}'\" >&2\nexit 128\n")
    program.chmod(0o755)
    found = look(work, program=str(program))
    assert isinstance(found, Unclear)
    assert found.why.startswith("git refuses to tell: detected dubious ownership")
    assert found.fix == "run stagekit teardown as the user who owns the checkout"


def test_the_checkout_around_a_directory(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "deep" / "er").mkdir(parents=True)
    assert enclosing(work / "deep" / "er") == work
    assert enclosing(work) == work
    assert enclosing(tmp_path / "remote") is None
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", f"/nowhere:{work / 'deep'}")
    assert enclosing(work / "deep" / "er") is None, "as git itself would have it"
    assert enclosing(work / "deep") == work
