"""``stagekit shard`` as a person meets it: words, exit codes, JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stagekit.cli import main
from stagekit.config import StoreConfig
from stagekit.dataset import Dataset
from stagekit.testing.proxy import FaultProxy, Status

from ..rigs.servers import S3Server
from .conftest import make_raw


def stagekit(*arguments: str | Path) -> int:
    return main(["shard", *map(str, arguments)])


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_raw(tmp_path / "raw", 9)


def test_the_summary_goes_to_standard_output_and_the_rest_to_standard_error(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small / ".hidden").write_text("x")
    assert stagekit(small, tmp_path / "out", "--labels", "dir", "--samples-per-shard", "4") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"published {tmp_path}/out: 3 shards sent in ")
    assert "  9 samples in 3 shards, " in out
    assert "  left out: 1 dot-files" in out
    assert f"stagekit.torch.StreamLoader('{tmp_path}/out', batch_size=9)" in out
    assert "(27 files, 3 of 3 shards)" in err
    assert len(Dataset(tmp_path / "out")) == 9


def test_a_second_run_says_that_there_is_nothing_to_do(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stagekit(small, tmp_path / "out")
    capsys.readouterr()
    assert stagekit(small, tmp_path / "out") == 0
    assert capsys.readouterr().out.startswith(f"nothing to do: {tmp_path}/out holds this data set already")


def test_json_lines(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stagekit(small, tmp_path / "out", "--json") == 0
    out, err = capsys.readouterr()
    assert not err
    *events, last = lines(out)
    assert {event["event"] for event in events} <= {"stage", "progress", "message"}
    assert last["event"] == "published"
    assert (last["samples"], last["shards"], last["sent_shards"], last["unchanged"]) == (9, 1, 1, False)
    assert last["digest"] == Dataset(tmp_path / "out").digest


def test_a_dry_run_prints_the_plan_and_writes_nothing(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stagekit(small, tmp_path / "out", "--dry-run", "--samples-per-shard", "4", "--labels", "dir") == 0
    out = capsys.readouterr().out
    assert "shards/000000.tar" in out
    assert "27 fields in 9 samples: " in out
    assert "(headers and padding add " in out
    assert "sending takes " in out
    assert "3 classes: class0, class1, class2" in out
    assert not (tmp_path / "out").exists()
    assert stagekit(small, "s3://never-asked/x", "--dry-run", "--json") == 0
    plan = lines(capsys.readouterr().out)[-1]
    assert plan["event"] == "plan"
    assert stagekit(small, tmp_path / "out", "--json") == 0
    assert plan["shards"] == [
        {"name": record.name, "bytes": record.bytes, "samples": record.samples} for record in Dataset(tmp_path / "out").shards
    ]


def test_folder_options_reach_the_folder(small: Path, tmp_path: Path) -> None:
    for name in ("cat.v1.txt", "cat.v2.txt", "left.out"):
        (small / name).write_text("x")
    (small / "link.txt").symlink_to(small / "cat.v1.txt")
    (small / "README").write_text("x")
    options = [
        "--include",
        "*.txt",
        "--include",
        "README",
        "--exclude",
        "left*",
        "--symlinks",
        "skip",
        "--dots",
        "rewrite",
        "--on-bad",
        "skip",
    ]
    assert stagekit(small, tmp_path / "out", *options) == 0
    assert [sample["__key__"] for sample in Dataset(tmp_path / "out")] == ["cat_v1", "cat_v2"]


# ------------------------------------------------------------------------------------------------ one sentence and a non-zero exit code


def failure(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 1) -> str:
    """The one line with which the command fails."""
    assert stagekit(*arguments) == code
    out, err = capsys.readouterr()
    assert not out
    errors = [line for line in err.splitlines() if line.startswith("stagekit: error: ")]
    assert len(errors) == 1, err
    assert err.splitlines()[-1] == errors[0]
    assert "Traceback" not in err
    return errors[0].removeprefix("stagekit: error: ")


def test_an_empty_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "raw").mkdir()
    assert "there is no file to pack in it" in failure(capsys, tmp_path / "raw", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere: there is no such folder; check the path" in failure(capsys, tmp_path / "nowhere", tmp_path / "out")


def test_duplicate_fields_and_dots(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small / "a.jpg").write_text("x")
    (small / "a.JPG").write_text("x")
    assert "has the field 'jpg' twice: a.JPG and a.jpg" in failure(capsys, small, tmp_path / "out")
    (small / "a.JPG").rename(small / "a.v2.jpg")
    assert "a.jpg, a.v2.jpg. Say dots='rewrite' (--dots rewrite)" in failure(capsys, small, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_beyond_ustar_and_not_utf_8(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small / ("x" * 101 + ".jpg")).write_text("x")
    assert "it has 105 bytes, and USTAR holds 100" in failure(capsys, small, tmp_path / "out")
    (small / ("x" * 101 + ".jpg")).unlink()
    (small / os.fsdecode(b"caf\xe9.jpg")).write_text("x")
    assert r"caf\\xe9.jpg': it is not UTF-8" in failure(capsys, small, tmp_path / "out")


def test_a_destination_inside_the_source(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the destination lies inside the source" in failure(capsys, small, small / "out")
    assert "the destination lies inside the source" in failure(capsys, small, small / "out", "--dry-run")


def test_a_destination_with_something_else(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stagekit(small, tmp_path / "out")
    capsys.readouterr()
    (small / "new.txt").write_text("x")
    assert "holds another data set (9 samples in 1 shard, digest" in failure(capsys, small, tmp_path / "out")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "raw2").mkdir()
    other = make_raw(tmp_path / "elsewhere" / "raw", 3)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("x")
    assert "it holds 'notes.txt', which is no part of a data set" in failure(capsys, other, tmp_path / "used")


def test_no_credentials(
    small: Path, moto_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    message = failure(capsys, small, "s3://some-bucket/x", "--endpoint-url", moto_server.endpoint_url)
    assert "s3://some-bucket/x" in message
    assert "credentials" in message


def test_a_bucket_that_is_not_there(
    small: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = credentials_for(moto_server)
    message = failure(capsys, small, "s3://no-such-bucket/x", "--endpoint-url", moto_server.endpoint_url, "--profile", str(config.profile))
    assert "no-such-bucket" in message
    assert "bucket" in message


def test_a_forbidden_bucket(
    small: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = credentials_for(moto_server)
    bucket = moto_server.create_bucket()
    with FaultProxy(moto_server.endpoint_url) as proxy:
        proxy.fault(Status(403, "AccessDenied"), method="PUT")
        message = failure(capsys, small, f"s3://{bucket}/x", "--endpoint-url", proxy.endpoint_url, "--profile", str(config.profile))
    assert f"s3://{bucket}/x" in message


@pytest.mark.rig("fuse")  # whoever can mount that can mount a small disk
def test_a_full_disk(small: Path, full_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small / "large.bin").write_bytes(bytes(3 * 2**20))
    message = failure(capsys, small, full_disk / "out")
    assert "the disk is full; free some space" in message
    assert str(full_disk / "out") in message
    assert not (full_disk / "out" / "manifest.json").exists()
    assert not list((full_disk / "out").rglob("*.tar"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shard-size", "big"], "big"),
        (["--workers", "0"], "workers"),
        (["--labels", "file"], "labels"),
        (["--include", "../x"], "relative to the source folder"),
        (["--limit-rate", "fast"], "limit_rate: 'fast' is not a rate"),
    ],
)
def test_options_that_cannot_be_meant(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in failure(capsys, small, tmp_path / "out", *arguments, code=2)
    assert not (tmp_path / "out").exists()
