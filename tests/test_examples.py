"""The examples run as they stand, and show what they claim to show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import stagekit
from stagekit.demo.digits import export_digits

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_digits.py"


def test_it_is_short_and_plain() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 60
    code = "\n".join(lines).split('"""', 2)[2]
    ours = [line for line in code.splitlines() if re.search(r"stagekit|StreamLoader|\brun\b", line)]
    assert len(ours) <= 6, "\n".join(ours)


def test_the_demo_trains_with_the_very_same_file() -> None:
    shipped = Path(stagekit.__file__).parent / "demo" / "train.py"
    assert shipped.read_text() == EXAMPLE.read_text(), "after a change: cp examples/train_digits.py stagekit/demo/train.py"


def test_it_trains_and_a_second_start_finds_the_work_done(tmp_path: Path) -> None:
    """Needs no bucket and no server: every URL may be a directory."""
    export_digits(tmp_path / "raw")
    for part in ("train", "held-out"):
        stagekit.shard(tmp_path / "raw" / part, tmp_path / "digits" / part)
    command = [sys.executable, "-W", "error", str(EXAMPLE), str(tmp_path / "digits"), str(tmp_path / "run")]
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=150)
    epochs = re.findall(r"epoch +(\d+) +loss [\d.]+ +accuracy ([\d.]+)", first.stdout)
    assert [int(number) for number, _ in epochs] == list(range(1, 13))
    assert float(epochs[-1][1]) >= 0.95
    second = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert "epoch" not in second.stdout
