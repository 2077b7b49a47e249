"""Every error is explained, where it is drawn and where users look it up: the tree in errors.py, and the tables of docs/errors.md."""

from __future__ import annotations

import re
from pathlib import Path

from stagekit import errors

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
CLASSES = {name: one for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.StagekitError)}


def others(kind: type) -> list[str]:
    """The bases that a class has beside its place in the tree: Python's own words."""
    return [base.__name__ for base in kind.__bases__ if base.__module__ == "builtins" and base is not Exception]


def test_the_tree_is_drawn_as_it_is() -> None:
    drawn = re.findall(r"^ {4}((?:│   |    )*)(?:[├└]── )?(\w+)(?: \((\w+)\))?", (errors.__doc__ or "").split("::\n", 1)[1], re.MULTILINE)
    way: list[str] = []
    found = {}
    for bars, name, also in drawn:
        depth = 0 if name == "StagekitError" else len(bars) // 4 + 1
        way = [*way[:depth], name]
        found[name] = (way[-2] if depth else "Exception", [also] if also else [])
    assert found == {name: (one.__bases__[0].__name__, others(one)) for name, one in CLASSES.items()}


def test_the_page_explains_each_error_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)`(?: \(`(\w+)`\))? \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(CLASSES)
    for name, also, comes_when, what_to_do in rows:
        kind = CLASSES[name]
        parent = kind.__bases__[0].__name__
        # A word of Python's, or the class above it, where that is not merely the base of a table.
        beside = {*others(kind), parent} - {"StagekitError", "StoreError", "Exception"}
        assert also in (beside or {""}), name
        assert min(len(comes_when), len(what_to_do)) > 10, name


def test_the_page_says_which_errors_may_pass() -> None:
    [told] = re.findall(r"\*\*What may pass.*?\n\n", PAGE.read_text(), re.DOTALL)
    listed = told.partition("These are ")[2].partition(". ")[0]
    passing = {name for name, one in CLASSES.items() if getattr(one, "transient", False)}
    assert set(re.findall(r"`(\w+)`", listed)) == passing
