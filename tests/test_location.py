from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagekit.errors import LocationError
from stagekit.location import Location
from stagekit.store import open_store

NAMES = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..")
)


@pytest.mark.parametrize(
    ("text", "scheme", "bucket", "path", "profile"),
    [
        ("s3://bucket", "s3", "bucket", "", None),
        ("s3://bucket/", "s3", "bucket", "", None),
        ("s3://bucket/a/b/", "s3", "bucket", "a/b", None),
        ("S3://bucket/A", "s3", "bucket", "A", None),
        ("s3://contabo@bucket/a", "s3", "bucket", "a", "contabo"),
        ("s3://me@work@bucket/a", "s3", "bucket", "a", None),
        ("memory://name/a", "memory", "name", "a", None),
        ("gs://bucket/a b", "gs", "bucket", "a b", None),
        ("s3://bucket/a%2Fb+c#d?e", "s3", "bucket", "a%2Fb+c#d?e", None),
        ("file:///data/raw", "file", "", "/data/raw", None),
        ("/data/raw/", "file", "", "/data/raw", None),
        ("/data/../raw", "file", "", "/raw", None),
    ],
)
def test_a_text_becomes_its_parts(text: str, scheme: str, bucket: str, path: str, profile: str | None) -> None:
    if text.count("@") > 1:
        with pytest.raises(LocationError, match="is no profile name"):
            Location.parse(text)
        return
    assert Location.parse(text) == Location(scheme, bucket, path, profile)


def test_a_relative_path_is_taken_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Location.parse("raw/images").local_path == tmp_path / "raw/images"
    assert Location.parse(Path("raw")).local_path == tmp_path / "raw"
    monkeypatch.setenv("HOME", "/home/me")
    assert str(Location.parse("~/raw")) == "/home/me/raw"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "an empty text is no location"),
        ("s3:/bucket/a", r"without its two slashes; write s3://…"),
        ("s3://", "names no bucket; write s3://bucket/prefix"),
        ("s3:///a", "names no bucket"),
        ("s3://bucket/\udcff", "is not UTF-8, and keys are; check the URL"),
        ("s3://a", "'a' is no bucket name"),
        ("s3://under score/x", "'under score' is no bucket name"),
        ("file://data", r"a file URL needs an absolute path, file:///…"),
        ("s3://@bucket/x", "'' is no profile name"),
    ],
)
def test_a_text_that_cannot_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(LocationError, match=words):
        Location.parse(text)


@pytest.mark.parametrize("where", [None, 5, 0.5, ["s3://bucket/a"]])
def test_what_is_no_text_is_refused_by_name(where: Any) -> None:
    """As in ``Dataset(os.environ.get("DATA"))``."""
    for take in (Location.parse, open_store):
        with pytest.raises(LocationError) as caught:
            take(where)
        assert str(caught.value) == f"{where!r} is no location; give a directory or a URL such as s3://bucket/prefix"


@pytest.mark.parametrize("text", ["s3://AKIA:sentinel@bucket/x", "sftp://me:sentinel@host/x"])
def test_keys_and_passwords_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(LocationError, match="a URL with a key or password in it is not accepted") as caught:
        Location.parse(text)
    assert "sentinel" not in str(caught.value)


@given(st.lists(NAMES, max_size=4), st.sampled_from(["s3://bucket", "s3://profile@bucket", "memory://name", "gs://bucket"]))
def test_text_and_location_are_the_same(parts: list[str], root: str) -> None:
    location = Location.parse("/".join([root, *parts]))
    assert Location.parse(str(location)) == location
    assert Location.parse(location) is location
    assert pickle.loads(pickle.dumps(location)) == location


@given(st.lists(NAMES, min_size=1, max_size=4))
def test_below_and_above(parts: list[str]) -> None:
    root = Location.parse("s3://bucket/base")
    below = root / "/".join(parts)
    assert below.path == "base/" + "/".join(parts)
    assert root.contains(below)
    assert not below.contains(root)
    for _ in parts:
        below = below.parent
    assert below == root


def test_contains_goes_by_whole_components() -> None:
    run = Location.parse("s3://bucket/run-1")
    assert run.contains(run)
    assert not run.contains(Location.parse("s3://bucket/run-10"))
    assert not run.contains(Location.parse("s3://other@bucket/run-1/a"))
    assert Location.parse("s3://bucket").contains(run)
    assert Location.parse("/").contains(Location.parse("/data"))
    assert not Location.parse("/data").contains(Location.parse("/database"))


def test_names_and_parents() -> None:
    assert Location.parse("s3://bucket/a/b").name == "b"
    assert Location.parse("s3://bucket").name == "bucket"
    assert Location.parse("s3://bucket").parent == Location.parse("s3://bucket")
    assert str(Location.parse("/data").parent) == "/"
    assert str(Location.parse("/").parent) == "/"
    assert str(Location.parse("/") / "data") == "/data"
    assert (Location.parse("s3://bucket/a") / "") == Location.parse("s3://bucket/a")


def test_a_url_is_no_path_on_this_machine() -> None:
    with pytest.raises(LocationError, match="s3://bucket/a is not a directory on this machine"):
        _ = Location.parse("s3://bucket/a").local_path


def test_a_remote_of_rclones_is_a_location() -> None:
    location = Location.parse("rclone:nas:share/a b/")
    assert (location.scheme, location.bucket, location.path) == ("rclone", "nas", "share/a b")
    assert str(location / "c") == "rclone:nas:share/a b/c"
    assert str(location.parent) == "rclone:nas:share"
    assert Location.parse(str(location)) == location
    assert str(Location.parse("rclone:nas:") / "c") == "rclone:nas:c"
    absolute = Location.parse("rclone:nas:/data/")
    assert str(absolute / "c") == "rclone:nas:/data/c"
    assert Location.parse("rclone:nas:share").contains(location)
    assert not Location.parse("rclone:nas:sha").contains(location)
