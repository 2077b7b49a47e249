"""After each trainer's recipe, on a machine with ordinary caches and a pushed checkout, the answer is YES with zero flags."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stagekit.cli import main
from stagekit.publishing.writer import ShardWriter

from ..rigs.servers import S3Server
from .ordinary import make_caches, make_checkout
from .recipes import KINDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS)
def test_yes_with_zero_flags(
    kind: str,
    moto_server: S3Server,
    fresh_bucket: Callable[[S3Server], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (
        ("AWS_ENDPOINT_URL", moto_server.endpoint_url),
        ("AWS_ACCESS_KEY_ID", moto_server.access_key),
        ("AWS_SECRET_ACCESS_KEY", moto_server.secret_key),
        ("OMP_NUM_THREADS", "1"),
    ):
        monkeypatch.setenv(name, value)
    work, remote = tmp_path / "work", tmp_path / "remote"
    work.mkdir()
    remote.mkdir()
    make_checkout(work, remote)
    make_caches(Path.home(), work)
    bucket = f"s3://{fresh_bucket(moto_server)}"
    with ShardWriter(f"{bucket}/numbers") as writer:
        for number in range(16):
            writer.write({"__key__": f"{number:02}", "cls": number})
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.verdict.recipes", kind, f"{bucket}/runs/first", f"{bucket}/numbers"]
    trained = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert trained.returncode == 0, trained.stderr
    program = shlex.join([sys.executable, "-m", "stagekit"])
    done = subprocess.run(["bash", "-c", f"{program} teardown && echo destroyed"], cwd=work, capture_output=True, text=True, check=False)
    *scope, answer, destroyed = done.stdout.splitlines()
    assert answer == "YES: nothing in this scope would be lost with this server", done.stdout
    assert destroyed == "destroyed"
    assert f"run       {bucket}/runs/first" in scope
    assert f"started   {work}" in scope
    # The same machine with one line that nobody pushed.
    (work / "train.py").write_text("print('better')\n")
    assert main(["teardown"]) == 3
    assert "1 file changed and not committed, such as train.py" in capsys.readouterr().out
