"""A missing rig is never passed over in silence: it fails a build, and a person is told its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.available import missing_rigs, must_run

ROOT = Path(__file__).parents[2]
# Pretends to be an ordinary user whose machine has no nginx, around the real conftest.
PLUGIN = """
import os
os.geteuid = lambda: 1000
from tests.rigs import available
available.missing_rigs = lambda: {"nginx": "The fast web server is nginx."}
"""
TESTS = """
import pytest
def test_needs_nothing(): pass
@pytest.mark.rig("nginx")
def test_needs_nginx(): raise AssertionError("it ran")
@pytest.mark.slow
def test_takes_long(): pass
"""


def run(directory: Path, *options: str, **environ: str) -> str:
    """What pytest prints for ``TESTS`` on such a machine."""
    (directory / "pretend.py").write_text(PLUGIN)
    (directory / "test_it.py").write_text(TESTS)
    clean = {name: value for name, value in os.environ.items() if name != "CI"}
    plain = ["-q", "-c", "pyproject.toml", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plain, "-p", "pretend", "-p", "tests.conftest", *options, str(directory / "test_it.py")],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}", **environ},
        capture_output=True,
        text=True,
    ).stdout


def test_a_person_without_root_is_told_which_rig_is_missing(tmp_path: Path) -> None:
    printed = run(tmp_path)
    assert "LEFT OUT: 1 tests that need 'nginx'. The fast web server is nginx." in printed
    assert "2 passed, 1 deselected" in printed.splitlines()[-1]


def test_a_build_fails_when_a_rig_is_missing(tmp_path: Path) -> None:
    printed = run(tmp_path, CI="true")
    assert "LEFT OUT" not in printed
    assert "it ran" in printed
    assert "1 failed, 2 passed" in printed.splitlines()[-1]


def test_quick_says_what_it_leaves_out(tmp_path: Path) -> None:
    printed = run(tmp_path, "--quick", CI="true")
    assert "LEFT OUT: 1 tests that need 'nginx'. You asked for --quick." in printed
    assert "LEFT OUT: 1 tests that need 'slow'. You asked for --quick." in printed
    assert "1 passed, 2 deselected" in printed.splitlines()[-1]


def test_also_several_processes_tell_what_was_left_out_once(tmp_path: Path) -> None:
    printed = run(tmp_path, "--quick", "-n", "2")
    assert printed.count("LEFT OUT: 1 tests that need 'nginx'. You asked for --quick.") == 1
    assert "1 passed" in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("root", "ci", "runs"), [(True, "", True), (True, "true", True), (False, "true", True), (False, "1", True), (False, "", False)]
)
def test_root_and_builds_run_everything(root: bool, ci: str, runs: bool) -> None:
    assert must_run({"CI": ci}, root=root) is runs


def test_what_is_missing_comes_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.rigs.available.PATH", str(tmp_path))
    missing = missing_rigs()
    assert sorted(missing) == ["chromium", "fuse", "nginx", "rgw"]
    assert "needs radosgw, radosgw-admin, ceph, ceph-mon" in missing["rgw"]
    assert all(reason.endswith("tools/test installs it when run as root.") for reason in missing.values())


def test_a_rig_that_does_not_start_fails_its_tests_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(
        "import pytest\n"
        "from contextlib import contextmanager\n"
        "from tests.conftest import start_rig\n"
        "@contextmanager\n"
        "def broken():\n"
        "    raise RuntimeError('radosgw ended while it was starting. The end of radosgw.log: no space left')\n"
        "    yield\n"
        "@pytest.fixture\n"
        "def rgw(): yield from start_rig('rgw', broken())\n"
        "def test_it(rgw): pass\n"
    )
    printed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", str(tmp_path / "test_broken.py")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    ).stdout
    assert "The test rig 'rgw' did not start: radosgw ended while it was starting. The end of radosgw.log: no space left" in printed
    assert "1 error" in printed.splitlines()[-1]
