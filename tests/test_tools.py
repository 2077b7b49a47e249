"""The commands that a person starts with, and that a build runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("tools/test", "tools/check", "tools/demo", ".ci/run")


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_can_be_started_and_parses(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    done = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_soak_starts_and_says_what_it_does() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/soak", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stream, sync and pull at once" in done.stdout


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


@pytest.fixture
def scripted(tmp_path: Path) -> Path:
    """A copy of the scripts beside environments that are there already, whose Python only says what it was asked to do."""
    (tmp_path / "tools").mkdir()
    for name in ("test", "environment"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, code in (("test", 0), ("mosaicml", 3)):
        python = tmp_path / f".venv-{name}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\ncase "$*" in *pip*) echo "{name} installs" >&2;; *) echo "{name} runs $*"; exit {code};; esac\n')
        python.chmod(0o755)
    return tmp_path


def run_scripted(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    # Not as root: what the system lacks is not installed from a test.
    path = folder / "bin"
    path.mkdir(exist_ok=True)
    (path / "id").write_text("#!/bin/sh\necho 1000\n")
    (path / "id").chmod(0o755)
    environ = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run([folder / "tools" / "test", *arguments], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.returncode, [line for line in done.stdout.splitlines() if line]


def test_both_environments_run_and_either_may_fail(scripted: Path) -> None:
    code, said = run_scripted(scripted)
    assert code == 3, "the second one failed"
    assert said[0].startswith("test runs -m pytest -n ")
    assert said[1:] == ["mosaicml runs -m pytest tests/mosaicml tests/hooks/test_transformers.py"]


def test_quick_leaves_the_second_environment_out_and_says_so(scripted: Path) -> None:
    code, said = run_scripted(scripted, "--quick")
    assert code == 0
    assert said[0].startswith("test runs -m pytest --quick -n ")
    assert said[1].startswith("LEFT OUT: tests/mosaicml, which has an environment of its own: ")
    code, said = run_scripted(scripted, "tests/store", "-x")
    assert (code, said[0]) == (0, "test runs -m pytest tests/store -x")
    assert said[1].startswith("LEFT OUT: tests/mosaicml")


def test_a_path_in_the_second_environment_runs_there_alone(scripted: Path) -> None:
    assert run_scripted(scripted, "tests/mosaicml/test_mds.py", "-x") == (3, ["mosaicml runs -m pytest tests/mosaicml/test_mds.py -x"])


def test_an_environment_is_made_once_and_again_when_the_requirements_change(scripted: Path) -> None:
    def installs() -> int:
        environ = {**os.environ, "PATH": f"{scripted / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(
            [scripted / "tools" / "test", "--quick"], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        return done.stderr.count("test installs")

    run_scripted(scripted, "--quick")
    assert installs() == 0
    with (scripted / "pyproject.toml").open("a") as file:
        file.write("# another requirement\n")
    assert installs() == 2
    assert installs() == 0
