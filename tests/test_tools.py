"""The commands that a person starts with, and that a build runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("tools/test", "tools/check", "tools/demo", ".ci/run")


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_can_be_started_and_parses(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    done = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_build_runs_what_a_person_runs() -> None:
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("tools/")]
    assert commands == ["tools/check", "tools/test"]


@pytest.mark.parametrize("script", ["tools/test", "tools/check"])
def test_an_old_python_is_named_with_the_remedy(script: str, tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.10.13\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run([ROOT / script], env={**os.environ, "PYTHON": str(old)}, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Python 3.10.13, and Stagekit needs Python 3.11 or newer; name one with PYTHON=python3.12" in done.stderr
