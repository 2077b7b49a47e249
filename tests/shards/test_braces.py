"""Brace notation, compared with the ``braceexpand`` package (a dependency of ``webdataset``), whose semantics it has."""

from __future__ import annotations

import re

import braceexpand
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.errors import UsageError
from stagekit.shards.braces import MOST, expand


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("s-{000..002}.tar", ["s-000.tar", "s-001.tar", "s-002.tar"]),
        ("s-{8..11}.tar", ["s-8.tar", "s-9.tar", "s-10.tar", "s-11.tar"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{3..0}", ["3", "2", "1", "0"]),
        ("{0..10..4}", ["0", "4", "8"]),
        ("{a..c}", ["a", "b", "c"]),
        ("{train,val}-{0..1}.tar", ["train-0.tar", "train-1.tar", "val-0.tar", "val-1.tar"]),
        ("{a,b{0..1}}.tar", ["a.tar", "b0.tar", "b1.tar"]),
        ("{,x}y", ["y", "xy"]),
        ("x{1}.tar", ["x{1}.tar"]),
        (r"x\{0..1\}.tar", ["x{0..1}.tar"]),
        ("a{0..1}.tar::b.tar", ["a0.tar", "a1.tar", "b.tar"]),
    ],
)
def test_examples(pattern: str, expected: list[str]) -> None:
    assert expand(pattern) == expected
    theirs = [text for part in pattern.split("::") for text in braceexpand.braceexpand(part)]
    assert theirs == expected


@settings(max_examples=400)
@given(st.lists(st.sampled_from(["{", "}", ",", "..", "0", "1", "03", "-2", "a", "d", "Z", "/", "\\", "x.tar"]), max_size=14).map("".join))
def test_any_pattern_means_what_it_means_to_webdataset(pattern: str) -> None:
    theirs: list[str] | None
    try:
        theirs = list(braceexpand.braceexpand(pattern))
    except braceexpand.UnbalancedBracesError:
        theirs = None
    if theirs is None or _closes_what_is_not_open(pattern):
        with pytest.raises(UsageError, match="its braces do not match"):
            expand(pattern)
    elif not re.search(r"\{[A-Za-z]\.\.[A-Za-z](\.\.-?\d+)?\}|\\\\", pattern):
        # It loses letters in ranges that run down to A, and unescapes twice what stands in braces that it keeps.
        assert expand(pattern) == theirs


def _closes_what_is_not_open(pattern: str) -> bool:
    """``}{``, which braceexpand takes for balanced."""
    depth = 0
    for brace in re.findall(r"\\.|[{}]", pattern):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return True
    return False


def test_letters_run_down_to_the_first() -> None:
    assert expand("{C..A}") == ["C", "B", "A"]
    assert expand("{b..Y..2}") == ["b", "Z"]


def test_a_forged_range_takes_no_memory() -> None:
    with pytest.raises(UsageError, match="more than 1,000,000 names; give a prefix"):
        expand("{0..99999999999}")
    with pytest.raises(UsageError, match="more than 1,000,000 names"):
        expand("{0..999}{0..999}{0..9}")
    with pytest.raises(UsageError, match="has more than 100 braces"):
        expand("{a}" * 5000)
    assert len(expand(f"{{1..{MOST // 10}}}")) == MOST // 10
