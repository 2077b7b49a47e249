"""What of MosaicML's format needs none of its packages: columns, the index, room on the disk, the plan."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import stagekit
from stagekit.cli import main
from stagekit.errors import ManifestError, MissingExtra, PublishError, SourceError, UsageError
from stagekit.mds import index, mds_outline
from stagekit.mds.columns import ENCODINGS, chosen, columns_of, encoding_of, value_of
from stagekit.mds.scratch import scratch_folder
from stagekit.publishing import source_of
from stagekit.publishing.begun import begun


def raw(root: Path, samples: int = 40) -> Path:
    rng = random.Random(5)
    root.mkdir()
    for number in range(samples):
        (root / f"{number:03d}.png").write_bytes(rng.randbytes(rng.randrange(3000)))
        (root / f"{number:03d}.cls").write_text(str(number % 3))
    return root


@pytest.mark.parametrize(
    ("field", "encoding"),
    [("jpg", "bytes"), ("seg.png", "bytes"), ("npy", "bytes"), ("cls", "int"), ("txt", "str"), ("json", "json"), ("meta.json", "json")],
)
def test_the_encoding_of_a_field(field: str, encoding: str) -> None:
    assert encoding_of(field) == encoding


def test_columns_are_the_fields_and_the_key() -> None:
    fields = {"png": 3, "cls": 3}
    assert columns_of(fields, 3, {}, source="raw") == {"__key__": "str", "cls": "int", "png": "bytes"}
    assert columns_of(fields, 3, chosen(["cls:uint8"]), source="raw")["cls"] == "uint8"
    assert chosen({"seg.png": "bytes"}) == {"seg.png": "bytes"}
    with pytest.raises(SourceError, match=r"reading raw: 2 of 3 samples have the field 'json'.*every sample has every column.*--exclude"):
        columns_of({"png": 3, "json": 2}, 3, {}, source="raw")
    with pytest.raises(UsageError, match="column 'jpg': no sample of raw has that field; it has cls, png"):
        columns_of(fields, 3, {"jpg": "bytes"}, source="raw")
    for option in ("cls", "cls:pkl", ":int"):
        with pytest.raises(UsageError, match="write NAME:ENCODING with one of bytes, str, json"):
            chosen([option])
    with pytest.raises(UsageError, match="give a list"):
        chosen("cls:int")


@pytest.mark.parametrize(
    ("encoding", "data", "value"),
    [
        ("bytes", b"\xff", b"\xff"),
        ("str", "né".encode(), "né"),
        ("int", b" -7\n", -7),
        ("uint8", b"255", 255),
        ("float32", b"0.5", 0.5),
        ("str_int", b"123456789012345678901234567890", 123456789012345678901234567890),
        ("str_float", b"1e3", 1000.0),
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
    ],
)
def test_the_value_that_is_stored(encoding: str, data: bytes, value: object) -> None:
    assert value_of("f", encoding, data, key="k") == value


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("str", b"\xff"),
        ("int", b"cat"),
        ("int", b"9223372036854775808"),
        ("uint8", b"256"),
        ("int8", b"-129"),
        ("json", b"NaN"),
        ("json", b"{"),
    ],
)
def test_a_value_that_is_none_is_named(encoding: str, data: bytes) -> None:
    with pytest.raises(SourceError, match=rf"the field 'f' of the sample 'k' is no {encoding}: .*--column f:bytes"):
        value_of("f", encoding, data, key="k")
    assert value_of("f", "bytes", data, key="k") == data
    assert encoding in ENCODINGS


def entry(name: str, size: int = 10, samples: int = 2) -> dict[str, Any]:
    return {"samples": samples, "raw_data": {"basename": name, "bytes": size, "hashes": {"sha256": "ab"}}, "format": "mds"}


def test_the_index_comes_back() -> None:
    entries = [index.renamed(entry("shard.00000.mds"), index.shard_name(7)), entry("shard.00008.1.mds")]
    assert [index.name_of(one) for one in entries] == ["shard.00007.mds", index.shard_name(8, 1)]
    assert index.from_bytes(index.to_bytes(entries), source="x") == entries
    assert json.loads(index.to_bytes(entries))["version"] == 2
    assert all(index.is_shard(index.name_of(one)) for one in entries)
    assert not any(map(index.is_shard, ("index.json", "shard.1.mds", "shard.00000.mds.zstd", "a/shard.00000.mds")))
    for bad in (b"", b"[]", b'{"shards": [{}]}', b'{"shards": [{"samples": "2", "raw_data": {"basename": "a", "bytes": 1}}]}'):
        with pytest.raises(ManifestError, match=r"there is no index of MosaicML's format.*choose another destination"):
            index.from_bytes(bad, source="there")


def test_room_on_the_disk_goes_with_its_process(tmp_path: Path) -> None:
    left = tmp_path / "stagekit-mds-left"
    left.mkdir()
    (left / "shard.00000.mds").write_bytes(b"x")
    other = tmp_path / "other"
    other.mkdir()
    held = tmp_path / "stagekit-mds-held"
    held.mkdir()
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    later = left.stat().st_mtime + 3600
    try:
        with scratch_folder(parent=tmp_path, clock=lambda: left.stat().st_mtime + 1) as folder:
            assert left.exists(), "so young that its process may be about to lock it"
            (folder / "file").write_bytes(b"y")
        assert not folder.exists()
        with scratch_folder(parent=tmp_path, clock=lambda: later) as folder:
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder.name, held.name, other.name])
    finally:
        os.close(descriptor)


def test_the_plan_counts_in_the_files_own_size(tmp_path: Path) -> None:
    source = source_of(raw(tmp_path / "raw"))
    plan = mds_outline(source, shard_size=20_000)
    payload = plan.plan.plan.payload_bytes
    assert len(plan.shards) == -(-payload // 20_000) or len(plan.shards) == -(-payload // 20_000) + 1, "tars would be twice as many"
    assert [shard.name for shard in plan.shards] == [index.shard_name(number) for number in range(len(plan.shards))]
    assert payload < plan.bytes < 1.1 * payload
    assert plan.plan.notes == (), "tar's headers are no business of this format"
    assert mds_outline(source, shard_size=20_000).record == plan.record
    assert plan.record["columns"] == {"__key__": "str", "cls": "int", "png": "bytes"}
    with pytest.raises(UsageError, match="counts in 32 bits"):
        mds_outline(source, shard_size="4GiB")


def test_a_sample_beyond_32_bits_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    with (tmp_path / "raw" / "a.bin").open("wb") as file:
        file.truncate(2**32)
    with pytest.raises(SourceError, match=r"the sample 'a' has .* bytes, and MosaicML's format counts in 32 bits"):
        mds_outline(source_of(tmp_path / "raw"))


def test_a_dry_run_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = raw(tmp_path / "raw")
    assert main(["shard", str(folder), str(tmp_path / "out"), "--format", "mds", "--dry-run", "--column", "cls:uint8"]) == 0
    printed = capsys.readouterr().out
    assert "80 fields in 40 samples" in printed
    assert "as about 1 file of MosaicML's format" in printed
    assert "cls: 40 samples, 40 B, as uint8" in printed
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(raw(tmp_path / "raw"))
    assert main(["shard", folder, str(tmp_path / "out"), "--format", "mds", "--update"]) == 2
    assert "--update adds tars to a data set of tars" in capsys.readouterr().err
    assert main(["shard", folder, str(tmp_path / "out"), "--column", "cls:int"]) == 2
    assert "--column is for --format mds" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_the_package_the_extra_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "streaming", None)
    with pytest.raises(MissingExtra, match=r"needs the package 'mosaicml-streaming'.*pip install '?mosaicml-streaming"):
        stagekit.shard_mds(raw(tmp_path / "raw"), tmp_path / "out")
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []
    assert begun() == [], "teardown would ask for shards of which none was made"


def test_a_destination_with_something_else_is_refused(tmp_path: Path) -> None:
    folder = raw(tmp_path / "raw")
    stagekit.shard(folder, tmp_path / "tars")
    with pytest.raises(PublishError, match=r"'manifest.json', which is no part of a data set in MosaicML's format; nothing was written"):
        stagekit.shard_mds(folder, tmp_path / "tars")
    shutil.rmtree(tmp_path / "tars")
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "index.json").write_text("{}")
    with pytest.raises(ManifestError, match="no index of MosaicML's format"):
        stagekit.shard_mds(folder, tmp_path / "tars")
    with pytest.raises(PublishError, match=r"'index.json', which is no part of a data set"):
        stagekit.shard(folder, tmp_path / "tars")
