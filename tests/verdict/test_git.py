"""What git says and what it does not: read without writing, bounded in time, and unclear wherever it refuses."""

from __future__ import annotations

import shutil
import subprocess
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


def test_what_only_a_remote_on_this_machine_has_may_go_with_it(work: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    git(work, "remote", "add", "backup", str(remote))
    assert judge(seen(work), lambda path: False, time.time()) == [], "the other remote has it as well"
    git(work, "commit", "-q", "--allow-empty", "-m", "two")
    git(work, "push", "-q", "backup", "main")
    (finding,) = judge(seen(work), lambda path: False, time.time())
    assert (finding.weight, finding.what) == ("CANNOT TELL", f"1 commit on no remote but backup, a directory of this machine, {remote}")
    assert finding.fix.endswith(f"stagekit teardown --durable {remote}")
    (finding,) = judge(seen(work), lambda path: False, time.time(), lambda directory: directory == remote)
    assert (finding.weight, finding.fix) == ("note", "")


@pytest.mark.parametrize("written", ["file://{}", "{}", "../remote"])
def test_a_remote_on_this_machine_is_asked_for_what_it_has(work: Path, tmp_path: Path, written: str) -> None:
    remote = tmp_path / "remote"
    git(work, "remote", "set-url", "origin", written.format(remote))
    remote.rename(tmp_path / "moved")
    silent, beside = judge(seen(work), lambda path: False, time.time())
    assert (silent.weight, beside.weight) == ("CANNOT TELL", "CANNOT TELL")
    assert silent.what.startswith("its remote origin is a directory of this machine and does not answer")
    remote.mkdir()
    git(remote, "init", "-q", "--bare")
    assert [one.what for one in judge(seen(work), lambda path: False, 0.0)] == ["1 commit on no remote"]
    git(work, "push", "-q", "origin", "main")
    (beside,) = judge(seen(work), lambda path: False, 0.0)
    assert beside.what == f"1 commit on no remote but origin, a directory of this machine, {remote}"


@pytest.mark.parametrize("flag", ["skip-worktree", "assume-unchanged"])
def test_a_change_that_git_was_told_to_pass_over_is_told(work: Path, flag: str) -> None:
    git(work, "update-index", f"--{flag}", "train.py")
    assert told(work) == []
    (work / "train.py").write_text("print(2)\n")
    ((_, what, fix),) = told(work)
    assert what == "1 file changed that git was told to pass over (git update-index), such as train.py"
    assert f"update-index --no-{flag} train.py" in fix


def test_a_commit_that_only_a_tag_holds_is_told_unless_it_was_fetched(work: Path) -> None:
    git(work, "checkout", "-qb", "idea")
    git(work, "commit", "-q", "--allow-empty", "-m", "one")
    git(work, "tag", "v1")
    git(work, "checkout", "-q", "main")
    git(work, "branch", "-q", "-D", "idea")
    assert told(work) == [("work", "1 commit that only a tag of this repository holds", f"git -C {work} push origin --tags")]
    shutil.rmtree(work / ".git" / "logs")  # as in a clone, where nobody has made it
    assert told(work) == []


def test_a_changed_file_can_be_pushed_without_an_upstream_and_from_no_branch(work: Path, tmp_path: Path) -> None:
    git(work, "remote", "set-url", "origin", str(tmp_path / "remote"))
    git(work, "checkout", "-q", "--detach")
    (work / "train.py").write_text("print(2)\n")
    ((_, _, fix), _) = told(work)
    assert fix.startswith(f"git -C {work} switch -c rescued && ")
    who = "git -c user.name=a -c user.email=a@example.org"
    subprocess.run(fix.replace("git ", f"{who} "), shell=True, check=True, capture_output=True)
    assert [what for _, what, _ in told(work)] == [f"2 commits on no remote but origin, a directory of this machine, {tmp_path / 'remote'}"]


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


@pytest.fixture
def nested(work: Path, tmp_path: Path) -> Path:
    """The checkout with a submodule ``libs/one`` that has one of its own, ``two``; everything is pushed. Returns the inner one."""
    allowed = ("-c", "protocol.file.allow=always")
    for name in ("two", "one"):
        for part in (f"{name}-work", f"{name}-remote"):
            (tmp_path / part).mkdir()
        make_checkout(tmp_path / f"{name}-work", tmp_path / f"{name}-remote")
    git(tmp_path / "one-work", *allowed, "submodule", "add", "-q", str(tmp_path / "two-remote"), "two")
    git(tmp_path / "one-work", "commit", "-qm", "two")
    git(tmp_path / "one-work", "push", "-q", str(tmp_path / "one-remote"), "main")
    git(work, *allowed, "submodule", "add", "-q", str(tmp_path / "one-remote"), "libs/one")
    git(work, *allowed, "submodule", "update", "-q", "--init", "--recursive")
    git(work, "commit", "-qm", "libs")
    git(work, "update-ref", "refs/remotes/origin/main", "HEAD")
    for one in ("libs/one", "libs/one/two"):
        git(work / one, "remote", "set-url", "origin", "https://git.example.org/somebody/library")
    return work / "libs" / "one" / "two"


def told(work: Path) -> list[tuple[str, str, str]]:
    """Every finding about the checkout and what belongs to it: where, what, and how to fix it."""
    checkout = seen(work)
    findings = [finding for one in (checkout, *checkout.all_inner) for finding in judge(one, lambda path: False, time.time())]
    return [(str(Path(finding.subject).relative_to(work.parent)), finding.what, finding.fix) for finding in findings]


def test_what_a_submodule_has_of_its_own_is_told_where_it_lies(work: Path, nested: Path) -> None:
    assert told(work) == []
    (nested / "train.py").write_text("print(2)\n")
    (nested / "new.py").write_text("1")
    changed = "1 file changed and not committed, such as train.py"
    assert [one[:2] for one in told(work)] == [("work/libs/one/two", changed)]
    assert [path for one in seen(work).all_inner if isinstance(one, Checkout) for path in one.untracked] == [nested / "new.py"]
    git(nested, "stash", "-q", "-u")
    assert [one[:2] for one in told(work)] == [("work/libs/one/two", "1 stash, which no push takes along")]
    git(nested, "stash", "pop", "-q")
    git(nested, "commit", "-qam", "mine")
    outer, inner = told(work)
    assert outer[:2] == ("work/libs/one", "1 file changed and not committed, such as two")
    assert inner == ("work/libs/one/two", "1 commit on no remote", f"git -C {nested} branch rescued && git -C {nested} push --all origin")
    git(work, "config", "submodule.libs/one.ignore", "all")
    assert len(told(work)) == 2, "git status would say nothing"
    git(work, "submodule", "deinit", "-q", "-f", "libs/one")
    assert told(work) == []


def test_a_submodule_that_was_fetched_shallow_has_no_commits_of_its_own(work: Path, nested: Path) -> None:
    git(nested, "update-ref", "-d", "refs/remotes/origin/main")
    git(nested, "update-ref", "-d", "refs/remotes/origin/HEAD")
    git(nested, "branch", "-q", "-D", "main")
    shallow = work / ".git" / "modules" / "libs" / "one" / "modules" / "two" / "shallow"
    shallow.write_text(_head(nested))
    assert told(work) == []
    git(nested, "commit", "-q", "--allow-empty", "-m", "mine")
    assert [one[:2] for one in told(work)][-1] == ("work/libs/one/two", "1 commit on no remote")


def _head(directory: Path) -> str:
    return subprocess.run(["git", "-C", str(directory), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout


def test_the_other_work_trees_of_a_repository_are_judged_and_what_they_share_is_told_once(work: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    git(work, "worktree", "add", "-q", "--detach", str(tree))
    assert told(work) == told(tree) == []
    (tree / "train.py").write_text("print(2)\n")
    changed = "1 file changed and not committed, such as train.py"
    assert [one[:2] for one in told(work)] == [one[:2] for one in told(tree)] == [("tree", changed)]
    git(tree, "commit", "-qam", "on no branch")
    git(work, "commit", "-q", "--allow-empty", "-m", "on a branch")
    one, other = told(work)
    assert one == ("work", "1 commit on no remote", f"git -C {work} push --all origin")
    assert other == ("tree", "1 commit on no remote", f"git -C {tree} branch rescued && git -C {tree} push --all origin")
    (work / ".gitignore").write_text("x")
    git(work, "stash", "-q")
    assert sorted(one[1] for one in told(tree)) == ["1 stash, which no push takes along", "2 commits on no remote"]
    shutil.rmtree(tree)
    assert [one[0] for one in told(work)] == ["work", "work"]


def test_git_is_given_the_same_time_for_all_that_belongs_to_a_checkout(work: Path, nested: Path, tmp_path: Path) -> None:
    program = tmp_path / "git"
    program.write_text(f'#!/bin/sh\ncase "$*" in *libs/one*) exec sleep 600;; esac\nexec {shutil.which("git")} "$@"\n')
    program.chmod(0o755)
    found = look(work, program=str(program), patience_s=3.0)
    assert isinstance(found, Checkout)
    assert [(one.top, one.why) for one in found.all_inner if isinstance(one, Unclear)] == [
        (work / "libs" / "one", "git did not answer within 3 s")
    ]
