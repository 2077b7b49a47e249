from __future__ import annotations

import pytest

from stagekit.errors import UsageError
from stagekit.sources.glob import matcher


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.txt", "a.txt", True),
        ("*.txt", "deep/down/a.txt", True),
        ("*.txt", "a.txt/b.jpg", False),
        ("README", "deep/README", True),
        ("README", "README.md", False),
        ("train/*.jpg", "train/a.jpg", True),
        ("train/*.jpg", "train/sub/a.jpg", False),
        ("train/*.jpg", "x/train/a.jpg", False),
        ("train/**", "train/sub/a.jpg", True),
        ("train/**", "training/a.jpg", False),
        ("**/thumbs/*", "thumbs/a.jpg", True),
        ("**/thumbs/*", "a/b/thumbs/a.jpg", True),
        ("**/thumbs/*", "a/xthumbs/a.jpg", False),
        ("**/*.jpg", "a.jpg", True),
        ("a?.jpg", "ab.jpg", True),
        ("a?c/x.jpg", "a/c/x.jpg", False),
        ("[ab].jpg", "b.jpg", True),
        ("[!ab].jpg", "b.jpg", False),
        ("[!ab].jpg", "c.jpg", True),
        ("x/[!a]b", "x//b", False),
        ("[]].jpg", "].jpg", True),
        ("[[].jpg", "[.jpg", True),
        ("a+b (1).jpg", "a+b (1).jpg", True),
        ("a.jpg", "abjpg", False),
        ("./train/", "train", True),
        ("line*", "line\nbreak", True),
    ],
)
def test_patterns_match_as_a_shell_would(pattern: str, path: str, expected: bool) -> None:
    assert matcher([pattern])(path) is expected


def test_one_of_several_patterns_is_enough() -> None:
    matches = matcher(["*.jpg", "labels/*.json"])
    assert matches("a/b.jpg")
    assert matches("labels/b.json")
    assert not matches("other/b.json")


def test_no_pattern_matches_nothing() -> None:
    assert not matcher([])("a.jpg")


@pytest.mark.parametrize("pattern", ["", "/", "/absolute/*", "../up", "a/../b"])
def test_a_pattern_that_leaves_the_source_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="relative to the source folder"):
        matcher([pattern])


def test_an_open_set_is_refused() -> None:
    with pytest.raises(UsageError, match="'\\[' is never closed"):
        matcher(["a[b"])
