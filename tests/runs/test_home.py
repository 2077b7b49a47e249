"""What a machine remembers of its runs, and what a checkpoint remembers of its training."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stagekit.config import StoreConfig
from stagekit.errors import CheckpointError, ManifestError
from stagekit.runs import Run, identity, known_runs
from stagekit.runs.home import remember


def test_runs_spools_and_directories_add_up(tmp_path: Path, isolated: Path) -> None:
    config = StoreConfig(endpoint_url="http://localhost:1", profile="contabo")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    remember("s3://b/two", None, tmp_path / "spool")
    remember("s3://b/one", config, tmp_path / "spool", [tmp_path / "a"], handed=[tmp_path / "a"])
    remember("s3://b/one", config, tmp_path / "other", [tmp_path / "b"])
    remember("s3://b/one", config, tmp_path / "other", [tmp_path / "b"])
    one, two = known_runs()
    assert (one.url, two.url) == ("s3://b/one", "s3://b/two")
    assert (one.store, two.store) == (config, None)
    assert one.spools == (tmp_path / "other", tmp_path / "spool")
    assert one.watched == (tmp_path / "a", tmp_path / "b")
    for name in ("a", "b"):
        (tmp_path / name).rmdir()
    remember("s3://b/one", config, tmp_path / "third")
    assert known_runs()[0].watched == (tmp_path / "b",), (
        "saves that were rotated away do not pile up; another directory may have been moved"
    )


def test_a_record_that_cannot_be_read_is_told(isolated: Path) -> None:
    remember("s3://b/one", None, isolated / "spool")
    [record] = (isolated / "stagekit" / "runs").glob("*.json")
    record.write_bytes(record.read_bytes().replace(b"s3://b/one", b"s3://b/two"))
    with pytest.raises(ManifestError, match=r"\.json is damaged"):
        known_runs()


def test_the_commit_of_the_code_is_read_from_gits_files(tmp_path: Path) -> None:
    assert identity.code_commit(tmp_path) is None

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "main")
    assert identity.code_commit(tmp_path) is None
    git("commit", "-q", "--allow-empty", "-m", "x")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    assert identity.code_commit(tmp_path / "deep" / "er") == commit
    git("pack-refs", "--all")
    assert identity.code_commit(tmp_path) == commit
    git("worktree", "add", "-q", "tree")
    assert identity.code_commit(tmp_path / "tree") == commit
    git("checkout", "-q", "--detach")
    assert identity.code_commit(tmp_path) == commit


def test_differences_are_told_and_another_base_model_is_refused() -> None:
    saved = {"world_size": 8, "torch": "2.6.0", "numpy": "2.1.0", "dataset": "aa", "code": "1" * 40, "base_model": "org/m@1"}
    assert identity.differences(saved, saved) == []
    assert identity.differences(saved, {}) == []
    told = identity.differences(saved, {**saved, "world_size": 4, "torch": "2.7.0", "dataset": "bb"})
    assert told == [
        "it was trained on the data set aa, now it is bb",
        "it was saved by 8 ranks, now there are 4",
        "it was saved with torch 2.6.0, now it is 2.7.0",
    ]
    with pytest.raises(CheckpointError, match="continues the base model org/m@1, and this training says org/m@2"):
        identity.differences(saved, {**saved, "base_model": "org/m@2"})


def test_a_home_that_cannot_be_written_is_told_once_with_its_place_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("STAGEKIT_HOME", str(tmp_path / "file" / "home"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.bin").write_bytes(b"x")
    told: list[str] = []
    with Run(
        str(tmp_path / "run"), spool_dir=tmp_path / "spool", on_event=lambda event: told.append(str(getattr(event, "text", "")))
    ) as run:
        run.submit(tmp_path / "out", step=1)
        run.watch(tmp_path)
        run.drain()
    (text,) = (text for text in told if "STAGEKIT_HOME" in text)
    assert text.startswith(
        f"{tmp_path}/file/home cannot be written (Not a directory), so this machine cannot note that it writes to {run.url}; "
    )
    assert text.endswith(f"free some space or set STAGEKIT_HOME, or name the run at the end: stagekit teardown --run {run.url}")
