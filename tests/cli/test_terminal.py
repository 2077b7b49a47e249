"""Every command that takes long, on a terminal and without one: a bar there, lines here, and no colour for who wants none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stagekit.store.directory import DirectoryStore

from ..indexing.tars import samples, tar
from ..made import make_checkpoint, make_run

# All in one process, one after the other, as a person would call them.
COMMANDS = """
import sys
from stagekit.cli import main
for line in sys.stdin.read().splitlines():
    code = main(line.split())
    print("code", code, line, flush=True)
"""
COLOUR = re.compile(rb"\x1b\[[0-9;]*\b(?:3[0-7]|38|9[0-7])\b[0-9;]*m")
# What each shows while it works, by the name of its task.
TASKS = {
    "shard raw data --shard-size 1MiB": "shard",
    "verify data --deep": "verify",
    "pull data copy": "pull",
    "push raw other": "push raw",
    "cp other third": "copy",
    "index old/a.tar indexed": "index",
    "prune run --keep-last 1": "prune",
    "teardown --watch out --run run --durable .": "comparing files",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands work on; each test has them work in a directory of its own below."""
    return tmp_path_factory.mktemp("terminal")


def prepared(folder: Path) -> Path:
    folder.mkdir()
    (folder / "raw").mkdir()
    for number in range(20):
        (folder / "raw" / f"{number:03}.txt").write_bytes(b"x" * 5000)
    (folder / "old").mkdir()
    (folder / "old" / "a.tar").write_bytes(tar(samples(0, 9)))
    run = DirectoryStore(str(folder / "run"))
    make_run(run)
    for step in (1, 2, 3):
        make_checkpoint(run, step, {"model.bin": b"m" * 1000 * step})
    (folder / "out").mkdir()
    (folder / "out" / "model.bin").write_bytes(b"m" * 3000)
    return folder


def drawn(folder: Path, isolated: Path, **environ: str) -> tuple[bytes, bytes]:
    """What the commands write to standard output, and what to a terminal that is their standard error."""
    leader, follower = os.openpty()
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment = {**clean, "HOME": str(isolated), "TERM": "xterm-256color", "COLUMNS": "120", **environ}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMANDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=follower, cwd=folder, env=environment
    )
    os.close(follower)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n".join(TASKS).encode())
    process.stdin.close()
    shown = b""
    try:
        while piece := os.read(leader, 65536):
            shown += piece
    except OSError:
        pass  # Linux says so when the other end is closed
    finally:
        os.close(leader)
    out = process.stdout.read()
    process.stdout.close()
    process.wait()
    return out, shown


def codes(out: bytes) -> dict[str, int]:
    found = re.findall(r"^code (\d+) (.*)$", out.decode(), re.MULTILINE)
    return {line: int(code) for code, line in found}


@pytest.mark.timeout(300)
def test_on_a_terminal_every_long_command_draws_a_bar(place: Path, isolated: Path) -> None:
    out, shown = drawn(prepared(place / "drawn"), isolated)
    assert codes(out) == dict.fromkeys(TASKS, 0), shown.decode()
    for command, task in TASKS.items():
        assert re.search(rf"{task}[^\n]*━".encode(), shown), command
    assert COLOUR.search(shown)
    assert b"\x1b" not in out, "results are for pipes, too"


@pytest.mark.timeout(300)
def test_no_color_and_a_dumb_terminal_are_obeyed(place: Path, isolated: Path) -> None:
    out, shown = drawn(prepared(place / "plain"), isolated, NO_COLOR="1")
    assert codes(out) == dict.fromkeys(TASKS, 0), shown.decode()
    assert "━".encode() in shown
    assert not COLOUR.search(shown)
    out, shown = drawn(prepared(place / "dumb"), isolated, TERM="dumb")
    assert codes(out) == dict.fromkeys(TASKS, 0), shown.decode()
    assert b"\x1b" not in shown
    for command, task in TASKS.items():
        assert re.search(rf"^{task}[^\n]*: ".encode(), shown, re.MULTILINE), command
