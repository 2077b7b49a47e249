"""Killed, interrupted, terminated: real processes, at moments nobody chose."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from pathlib import Path

import pytest

from stagekit.indexing import index_shards
from stagekit.store.directory import STAGING, DirectoryStore
from stagekit.store.memory import MemoryStore

from ..publishing.conftest import STAGEKIT, tree
from .tars import put_tars

TARS = 12


def start(folder: Path, dest: Path) -> subprocess.Popen[str]:
    command = [*STAGEKIT, "index", f"{folder}/", str(dest), "--threads", "2", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stop_at(
    process: subprocess.Popen[str], stages: int = -1, number: signal.Signals = signal.SIGKILL
) -> tuple[int, list[dict[str, object]]]:
    """Send the signal when so many stages were reported (-1: never). Returns the exit code and what was printed."""
    assert process.stdout is not None
    assert process.stderr is not None
    lines, seen = [], 0
    for line in process.stdout:
        lines.append(json.loads(line))
        seen += lines[-1]["event"] == "stage"
        if seen == stages:
            process.send_signal(number)
            seen += 1
    code = process.wait()
    process.stdout.close()
    process.stderr.close()
    return code, lines


def journals(dest: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in dest.glob(".indexing/**/*.journal")}


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, bytes]:
    """What lies at the destination when nothing goes wrong."""
    put_tars(DirectoryStore(tmp_path / "tars"), TARS, each=40)
    dest = MemoryStore(f"memory://{tmp_path.name}/undisturbed")
    index_shards(f"{tmp_path}/tars/", dest)
    return tree(dest)


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    rng = random.Random(5)
    dest = tmp_path / "out"
    kept: dict[Path, tuple[int, int]] = {}
    for _ in range(6):
        stop_at(start(tmp_path / "tars", dest), rng.randrange(1, 6), signal.SIGKILL)
        if (dest / "manifest.json").exists():
            break
        now = journals(dest)
        assert kept.items() <= now.items(), "a tar that was read already was read again"
        kept = now
    code, lines = stop_at(start(tmp_path / "tars", dest))
    assert code == 0
    assert lines[-1]["read_shards"] == TARS - len(kept)
    assert tree(dest) == undisturbed
    code, lines = stop_at(start(tmp_path / "tars", dest))
    assert lines[-1]["unchanged"] is True


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_nothing_half_published(tmp_path: Path, undisturbed: dict[str, bytes], number: signal.Signals, expected: int) -> None:
    dest = tmp_path / "out"
    code, lines = stop_at(start(tmp_path / "tars", dest), 3, number)
    assert code == expected
    assert "the same command continues" in str(lines[-1]["message"])
    assert not (dest / "manifest.json").exists()
    kept = len(journals(dest))
    code, lines = stop_at(start(tmp_path / "tars", dest))
    assert (code, lines[-1]["read_shards"]) == (0, TARS - kept)
    assert tree(dest) == undisturbed


def test_what_a_killed_run_was_writing_goes_and_what_others_are_sending_stays(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    dest = tmp_path / "out"
    stop_at(start(tmp_path / "tars", dest), 2)
    killed, others = (dest / STAGING / name for name in ("1f", "2f"))
    for path in (killed / "shards" / "shard-000002.tar.idx", killed / "manifest.json", others / "shards" / "shard-000099.tar"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half of")
    code, _ = stop_at(start(tmp_path / "tars", dest))
    assert code == 0
    assert tree(dest) == {**undisturbed, f"{STAGING}/2f/shards/shard-000099.tar": b"half of"}
