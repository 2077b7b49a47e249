"""``stagekit index`` as people type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagekit.cli import main
from stagekit.dataset import Dataset
from stagekit.store.directory import DirectoryStore

from .tars import put_tars, samples, tar


@pytest.fixture
def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three tars in ``ds/``, and this directory as the current one."""
    put_tars(DirectoryStore(tmp_path / "ds"), 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ds"


def test_what_it_says(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "ds/shard-{000000..000002}.tar", "out"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"indexed {tars.parent}/out: 3 tars read in ")
    assert out[1].startswith("  24 samples in 3 shards, ")
    assert "  cls: 24 × 1 B" in out
    assert "  3 tars stay where they are; the data set needs them there, unchanged" in out
    assert len(Dataset("out")) == 24
    assert main(["index", "ds/", "out"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"nothing to do: {tars.parent}/out holds this data set already")
    assert f"3 tars, {_size(tars)}, below {tars}" in captured.err


def _size(tars: Path) -> str:
    from stagekit.units import format_size

    return format_size(sum(path.stat().st_size for path in tars.glob("*.tar")))


def test_for_programs(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "ds/shard-000000.tar", "ds/shard-{000001,000002}.tar", "ds", "--json", "--threads", "3"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["samples"], last["elsewhere"], last["read_shards"]) == ("indexed", 24, 0, 3)


def test_failures_are_one_line(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tars / "shard-000003.tar").write_bytes(tar(samples(20, 6)))
    assert main(["index", "ds", "out"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("stagekit: error: the key '000020' is in ")
    assert "--repeated-keys allow" in error
    assert main(["index", "ds", "out", "--repeated-keys", "allow"]) == 0
    assert "nothing to do" not in capsys.readouterr().out
    assert main(["index", "ds/*.tar", "out"]) == 2
    assert main(["index", "out"]) == 2
    (tars / "shard-000004.tar").write_bytes(b"")
    assert main(["index", "ds", "other", "--repeated-keys", "allow", "--on-bad", "skip"]) == 0
    captured = capsys.readouterr()
    assert "warning: left out " in captured.err
    assert "  left out: 1 tar, listed above" in captured.out
