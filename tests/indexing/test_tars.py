"""Which tars a pattern means, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from stagekit.errors import KeyNotAllowed, SourceError, UsageError
from stagekit.indexing.tars import find
from stagekit.location import Location
from stagekit.progress import Message
from stagekit.store import Where
from stagekit.store.memory import MemoryStore


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A place in memory with five tars and some other objects."""
    url = f"memory://{tmp_path.name}"
    store = MemoryStore(url)
    for key in ("ds/a/0.tar", "ds/a/1.tar", "ds/b/0.tar", "ds/b/x.tar.gz", "ds/notes.txt", "other/é 1.tar", "other/2.tar", "ds-2/3.tar"):
        store.put(key, key.encode())
    return url


def names(patterns: Iterable[Where], dest: str) -> list[tuple[str, str | None]]:
    tars, missing = find(patterns, Location.parse(dest))
    assert missing == []
    assert all(bytes(tar.store.get(tar.key)).decode() in str(tar.location) for tar in tars)
    return [(tar.name, tar.url) for tar in tars]


def test_below_the_data_set_a_tar_keeps_its_name(base: str) -> None:
    assert names([f"{base}/ds/a/{{0..1}}.tar", f"{base}/ds/b/0.tar"], f"{base}/ds") == [
        ("a/0.tar", None),
        ("a/1.tar", None),
        ("b/0.tar", None),
    ]


def test_elsewhere_it_is_called_what_tells_it_from_the_others(base: str) -> None:
    assert names([f"{base}/ds/{{b,a}}/0.tar"], f"{base}/index") == [
        ("shards/b/0.tar", f"{base}/ds/b/0.tar"),
        ("shards/a/0.tar", f"{base}/ds/a/0.tar"),
    ]
    assert names([f"{base}/ds/b/0.tar"], f"{base}/index") == [("shards/0.tar", f"{base}/ds/b/0.tar")]
    assert names([f"{base}/ds-2/3.tar"], f"{base}/ds") == [("shards/3.tar", f"{base}/ds-2/3.tar")]
    assert names([f"{base}/other/2.tar", f"{base}/ds/a/0.tar"], f"{base}/ds") == [
        ("shards/2.tar", f"{base}/other/2.tar"),
        ("a/0.tar", None),
    ]


def test_a_prefix_means_all_tars_below_and_says_how_many(base: str) -> None:
    told: list[object] = []
    tars, _ = find([f"{base}/ds/"], Location.parse(f"{base}/ds"), on_event=told.append)
    assert [tar.name for tar in tars] == ["a/0.tar", "a/1.tar", "b/0.tar"]
    assert told == [Message(f"3 tars, 30 B, below {base}/ds; 1 more are compressed, and are left out")]
    assert names([MemoryStore(f"{base}/other"), Location.parse(f"{base}/ds-2")], f"{base}/x") == [
        ("shards/other/2.tar", f"{base}/other/2.tar"),
        ("shards/other/é 1.tar", f"{base}/other/é 1.tar"),
        ("shards/ds-2/3.tar", f"{base}/ds-2/3.tar"),
    ]


def test_paths_are_taken_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0.tar", "1.tar"):
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.chdir(tmp_path)
    expected = [("0.tar", None), ("1.tar", None)]
    assert names([Path("0.tar"), "1.tar"], str(tmp_path)) == expected
    assert names(["{0..1}.tar"], str(tmp_path)) == expected
    assert names([tmp_path], str(tmp_path)) == expected
    assert names(["."], str(tmp_path / "out")) == [(f"shards/{name}", str(tmp_path / name)) for name in ("0.tar", "1.tar")]


def test_what_is_not_there_is_told_apart(base: str) -> None:
    tars, missing = find([f"{base}/ds/a/{{0..3}}.tar"], Location.parse(f"{base}/ds"))
    assert [tar.name for tar in tars] == ["a/0.tar", "a/1.tar"]
    assert [one.url for one in missing] == [f"{base}/ds/a/2.tar", f"{base}/ds/a/3.tar"]


@pytest.mark.parametrize(
    ("patterns", "dest", "error", "words"),
    [
        ([], "{base}/x", UsageError, "no tar is named; give a pattern"),
        (["{base}/ds/b/x.tar.gz"], "{base}/x", UsageError, "ranges of a compressed tar cannot be read; decompress it first"),
        (
            ["{base}/ds/a/*.tar"],
            "{base}/x",
            UsageError,
            r"'\*' is no brace notation; write \{000000\.\.000099\}, or give the prefix .*/ds/a/",
        ),
        (["pipe:curl -s http://x/a.tar"], "{base}/x", UsageError, "a command's output has no ranges to read later"),
        (["{base}/empty/"], "{base}/x", SourceError, "there is no .tar below it, and 0 other objects"),
        (["{base}/ds/a/0.tar", "{base}/ds/a/{{0..1}}.tar"], "{base}/x", UsageError, "/ds/a/0.tar: it is named twice"),
        (["{base}/ds/a/0.tar", "{base}/0.tar"], "{base}/ds/a", UsageError, None),
        (["{base}/ds/a\\\\b.tar"], "{base}/ds", KeyNotAllowed, r"a shard cannot be called 'a\\\\b.tar'; rename the tar"),
        (["/tmp/x.tar"], "s3://bucket/x", UsageError, "a data set in a bucket cannot name a path on this machine"),
        (["{base}/ds/{{0..1.tar"], "{base}/x", UsageError, "its braces do not match"),
    ],
)
def test_what_is_refused(base: str, patterns: list[str], dest: str, error: type[Exception], words: str | None) -> None:
    if words is None:
        MemoryStore(base).put("0.tar", b"0.tar")
        MemoryStore(base).put("ds/a/shards/0.tar", b"x")
        patterns = [*patterns, "{base}/ds/a/shards/0.tar"]
        words = "it and .*/0.tar would both be called shards/0.tar; name each tar once, or choose another destination"
    with pytest.raises(error, match=words):
        find([pattern.format(base=base) for pattern in patterns], Location.parse(dest.format(base=base)))


def test_what_names_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="3 is no location; give a directory or a URL"):
        find([3], Location.parse(tmp_path))  # type: ignore[list-item]
