"""Keys, manifests and references: exact round trips, and every malformed one named."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagekit.errors import ManifestError, UsageError
from stagekit.runs.layout import (
    CheckpointManifest,
    CheckpointName,
    FileRecord,
    PartRecord,
    RunRecord,
    SupersededRecord,
    check_paths,
    check_step,
    parse_reference,
    seal,
    unseal,
)

NAME = CheckpointName(generation=4, step=1200, counter=7, owner="1a2b3c4d")
HASH = "ab" * 32


def manifest(*paths: str) -> CheckpointManifest:
    return CheckpointManifest(NAME, tuple(FileRecord(path, 3, HASH) for path in paths), epoch=2, metrics={"loss": 0.5})


def test_names_say_where_things_lie() -> None:
    assert str(NAME) == "000000001200-000004-000007-1a2b3c4d"
    assert CheckpointName.parse(str(NAME)) == NAME
    assert NAME.folder == "checkpoints/000000001200-000004-000007-1a2b3c4d/"
    assert NAME.manifest_key == NAME.folder + "manifest.json"
    assert NAME.file_key("sub/model.pt") == NAME.folder + "files/sub/model.pt"
    assert NAME.part_key(3) == NAME.folder + "parts/rank-00003.json"
    assert NAME.superseded_key == "superseded/000000001200-000004-000007-1a2b3c4d.json"


def test_newest_is_generation_then_step_then_counter() -> None:
    oldest_first = [
        CheckpointName(1, 5000, 9, "ffffffff"),
        CheckpointName(2, 100, 1, "00000000"),
        CheckpointName(2, 200, 2, "00000000"),
        CheckpointName(2, 200, 3, "00000000"),
    ]
    shuffled = [oldest_first[index] for index in (2, 0, 3, 1)]
    assert sorted(shuffled) == oldest_first


@pytest.mark.parametrize("text", ["", "1200", "000000001200", "000000001200-000004-000007-1A2B3C4D", "0-0-0-0", f"{NAME}x", f"../{NAME}"])
def test_other_folders_are_no_checkpoints(text: str) -> None:
    assert CheckpointName.parse(text) is None


names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20).filter(
    lambda part: part not in (".", "..")
)


@given(
    paths=st.lists(st.lists(names, min_size=1, max_size=3).map("/".join), max_size=5, unique_by=str.casefold),
    metrics=st.dictionaries(st.text(max_size=10), st.floats(), max_size=4),
    epoch=st.none() | st.integers(0, 10**6),
    best=st.none() | st.tuples(st.text(max_size=5), st.sampled_from(["min", "max"])),
    identity=st.dictionaries(st.text(max_size=10), st.text(max_size=10) | st.integers(0, 100), max_size=3),
)
def test_a_manifest_comes_back_as_it_was(
    paths: list[str],
    metrics: dict[str, float],
    epoch: int | None,
    best: tuple[str, str] | None,
    identity: dict[str, str | int],
) -> None:
    records = tuple(FileRecord(path, len(path), HASH, NAME.file_key("base") if index % 2 else None) for index, path in enumerate(paths))
    try:
        check_paths(paths)
    except ManifestError:
        return  # a file that is also a folder
    written = CheckpointManifest(NAME, records, epoch=epoch, metrics=metrics, identity=identity, best=best, saved_s=12.5)
    read = CheckpointManifest.from_bytes(written.to_bytes(), source="here")
    assert read.files == records
    assert read.name == NAME
    assert (read.epoch, read.best, dict(read.identity), read.saved_s) == (epoch, best, identity, 12.5)
    assert list(read.metrics) == sorted(metrics)
    assert all(read.metrics[key] == value or (math.isnan(read.metrics[key]) and math.isnan(value)) for key, value in metrics.items())


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["/etc/passwd"], "is absolute"),
        (["../model.pt"], "'.' or '..' component"),
        (["a/../../b"], "'.' or '..' component"),
        (["a//b"], "'.' or '..' component"),
        (["a/./b"], "'.' or '..' component"),
        ([""], "'.' or '..' component"),
        (["a\0b"], "NUL"),
        (["a", "a"], "is listed twice"),
        (["Model.pt", "model.pt"], "differ in upper and lower case only"),
        (["a", "a/b"], "also the folder of"),
        (["A", "a/b"], "also the folder of"),
        (["x" * 256], "too long"),
        (["/".join(["x" * 200] * 5)], "too long"),
        (["\udcff"], "not valid Unicode"),
    ],
)
def test_paths_that_could_leave_the_target_or_hit_each_other_are_refused(paths: list[str], words: str) -> None:
    with pytest.raises(ManifestError, match=words.replace(".", r"\.")):
        check_paths(paths)


def test_a_hostile_path_in_a_manifest_is_refused_when_it_is_read() -> None:
    values = json.loads(manifest("model.pt").to_bytes())
    del values["checksum"]
    values["files"][0]["path"] = "../../.bashrc"
    with pytest.raises(ManifestError, match="component"):
        CheckpointManifest.from_bytes(seal(values), source="s3://b/run")


@pytest.mark.parametrize(
    "place",
    [
        "../other-run/checkpoints/000000001200-000004-000007-1a2b3c4d/files/a",
        "checkpoints/000000001200-000004-000007-1a2b3c4d/files/../../../other",
        "checkpoints/000000001200-000004-000007-1a2b3c4d/manifest.json",
        "owners/000001-1a2b3c4d.json",
        "checkpoints/x/files/a",
        7,
    ],
)
def test_a_reference_out_of_the_run_is_refused(place: object) -> None:
    values = json.loads(manifest("model.pt").to_bytes())
    del values["checksum"]
    values["files"][0]["object"] = place
    with pytest.raises(ManifestError, match="no file of a checkpoint of this run"):
        CheckpointManifest.from_bytes(seal(values), source="s3://b/run")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 1300}, "no checkpoint name for step 1300"),
        ({"name": "latest"}, "no checkpoint name"),
        ({"files": None}, "lists no files"),
        ({"files": [3]}, "a file is no JSON object"),
        ({"files": [{"path": "a", "bytes": -1, "sha256": HASH}]}, "'a' has no size"),
        ({"files": [{"path": "a", "bytes": True, "sha256": HASH}]}, "'a' has no size"),
        ({"files": [{"path": "a", "bytes": 1, "sha256": "AB"}]}, "'a' has no sha256"),
        ({"files": [{"path": "a", "bytes": 1, "sha256": HASH, "mode": 7}]}, "unknown entries"),
        ({"metrics": {"loss": "low"}}, "metric 'loss' is 'low'"),
        ({"metrics": {"loss": True}}, "metric 'loss' is True"),
        ({"metrics": []}, "metrics is no JSON object"),
        ({"identity": 1}, "identity is no JSON object"),
        ({"epoch": -1}, "epoch -1 is no number"),
        ({"best": ["loss", "least"]}, "no metric with min or max"),
        ({"version": 2}, "reads version 1"),
        ({"format": "stagekit-dataset"}, "is no stagekit-checkpoint"),
    ],
)
def test_a_manifest_with_something_wrong_names_it(change: dict[str, object], words: str) -> None:
    values = json.loads(manifest("model.pt").to_bytes())
    del values["checksum"]
    with pytest.raises(ManifestError, match=words) as raised:
        CheckpointManifest.from_bytes(seal({**values, **change}), source="s3://b/run/manifest.json")
    assert "s3://b/run/manifest.json" in str(raised.value)


@given(st.data())
def test_any_change_of_a_sealed_record_is_noticed(data: st.DataObject) -> None:
    sealed = bytearray(manifest("model.pt", "sub/config.json").to_bytes())
    at = data.draw(st.integers(0, len(sealed) - 1))
    bit = data.draw(st.integers(0, 7))
    sealed[at] ^= 1 << bit
    read: CheckpointManifest | str
    try:
        read = CheckpointManifest.from_bytes(bytes(sealed), source="here")
    except ManifestError as error:
        read = str(error)
    # A change of white space alone says the same.
    assert read == manifest("model.pt", "sub/config.json") or (isinstance(read, str) and "here" in read)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"step": NaN}', b"[" * 100_000, manifest("a").to_bytes()[:-40]])
def test_what_is_no_record_is_damaged(data: bytes) -> None:
    with pytest.raises(ManifestError, match="here"):
        unseal(data, "stagekit-checkpoint", 1, source="here")


def test_the_other_records_come_back_as_they_were() -> None:
    superseded = SupersededRecord(1200, "retention", (("model.pt", 3, HASH),))
    assert SupersededRecord.from_bytes(superseded.to_bytes(), source="here") == superseded
    part = PartRecord(3, (FileRecord("rng-3.pt", 3, HASH),))
    assert PartRecord.from_bytes(part.to_bytes(), source="here") == part
    run = RunRecord(12.5, "0.1.0")
    assert RunRecord.from_bytes(run.to_bytes(), source="here") == run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://b/run", ("s3://b/run", "latest")),
        ("s3://b/run@1200", ("s3://b/run", 1200)),
        ("s3://b/run@latest", ("s3://b/run", "latest")),
        ("s3://b/run@best", ("s3://b/run", "best")),
        ("s3://profile@b/run@7", ("s3://profile@b/run", 7)),
        ("s3://profile@bucket", ("s3://profile@bucket", "latest")),
        ("s3://1200@bucket/run", ("s3://1200@bucket/run", "latest")),
        ("runs/first@0", ("runs/first", 0)),
        ("first@12", ("first", 12)),
        ("/data/me@home", ("/data/me@home", "latest")),
        ("/data/me@home@3", ("/data/me@home", 3)),
        ("@1200", ("@1200", "latest")),
        ("s3://b/run@000000000100-000002-000007-1a2b3c4d", ("s3://b/run", CheckpointName(2, 100, 7, "1a2b3c4d"))),
        ("/runs/a@12/b", ("/runs/a@12/b", "latest")),
    ],
)
def test_references(text: str, expected: tuple[str, object]) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize("step", [-1, 10**12, True, "5", 1.0])
def test_steps_that_are_none(step: object) -> None:
    with pytest.raises(UsageError, match="is no step"):
        check_step(step)  # type: ignore[arg-type]  # that is the test
