"""Brace notation, in which WebDataset's users name their shards: ``shard-{000000..000099}.tar``.

The rules are those of the ``braceexpand`` package, which WebDataset uses, and so nearly those of bash.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator

from ..errors import UsageError

MOST = 1_000_000
_MOST_BRACES = 100

_NUMBERS = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)(?:\.\.-?([0-9]+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?([0-9]+))?")
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase


def expand(pattern: str) -> list[str]:
    """Every text that ``pattern`` stands for, in order; one without braces stands for itself.

    ========================  =======================================================
    ``{000..012}``            numbers, filled up with zeros to the longer one's width
    ``{0..10..2}``            every second one; ``{3..0}`` counts down
    ``{a..e}``                letters
    ``{train,val}-{0..3}``    lists, also nested, and every combination
    ``a{0..1}.tar::b.tar``    several patterns, as WebDataset joins them
    ``x{1}``, ``\\{``         braces with nothing to choose from, or after a backslash, are kept
    ========================  =======================================================

    Raises ``UsageError`` for braces that do not match, and for more than a million texts.
    """
    if pattern.count("{") > _MOST_BRACES:
        raise UsageError(f"{pattern[:60]!r}… has more than {_MOST_BRACES} braces; give several patterns")
    found: list[str] = []
    for part in pattern.split("::"):
        texts = itertools.islice(_texts(part), MOST + 1 - len(found))
        found.extend((re.sub(r"\\(.)", r"\1", text) for text in texts) if "\\" in part else texts)
        if len(found) > MOST:
            raise UsageError(f"{pattern!r} stands for more than {MOST:,} names; give a prefix, or several patterns")
    return found


def _texts(pattern: str) -> Iterator[str]:
    """What ``pattern`` stands for, backslashes still in it. The last braces vary fastest."""
    opened = _find_pair(pattern)
    if opened is None:
        yield pattern
        return
    start, end = opened
    before, inside = pattern[:start], pattern[start + 1 : end]
    choices = _choices(inside)
    for middle in _kept(inside) if choices is None else choices:
        # What stands behind is expanded again for every choice: nothing is held but where each loop is.
        for rest in _texts(pattern[end + 1 :]):
            yield before + middle + rest


def _kept(inside: str) -> Iterator[str]:
    return ("{" + text + "}" for text in _texts(inside))


def _choices(inside: str) -> Iterator[str] | None:
    """What a pair of braces chooses from; ``None`` when it is neither a range nor a list."""
    if match := _NUMBERS.fullmatch(inside):
        return _numbers(match[1], match[2], match[3])
    if match := _LETTERS.fullmatch(inside):
        return _letters(match[1], match[2], match[3])
    parts, depth, start = [], 0, 0
    for at, char in _special(inside):
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
        elif not depth:
            parts.append(inside[start:at])
            start = at + 1
    if not parts:
        return None
    return itertools.chain.from_iterable(map(_texts, [*parts, inside[start:]]))


def _numbers(first: str, last: str, step: str | None) -> Iterator[str]:
    padded = any(number.lstrip("-").startswith("0") and number.lstrip("-") != "0" for number in (first, last))
    width = max(len(first), len(last)) if padded else 0
    start, end, by = int(first), int(last), int(step or 1) or 1
    numbers = range(start, end + 1, by) if start < end else range(start, end - 1, -by)
    return (f"{number:0{width}d}" for number in numbers)


def _letters(first: str, last: str, step: str | None) -> Iterator[str]:
    start, end, by = _ALPHABET.index(first), _ALPHABET.index(last), int(step or 1) or 1
    return (_ALPHABET[at] for at in (range(start, end + 1, by) if start < end else range(start, end - 1, -by)))


def _find_pair(pattern: str) -> tuple[int, int] | None:
    """Where the first outermost pair of braces opens and closes."""
    depth, start = 0, 0
    pair: tuple[int, int] | None = None
    for at, char in _special(pattern):
        if char == "{":
            start = start if depth else at
            depth += 1
        elif char == "}":
            depth -= 1
            if depth < 0:
                break
            if not depth and pair is None:
                pair = start, at
    if depth:
        raise UsageError(f"{pattern!r}: its braces do not match; write \\{{ for a brace that is part of a name")
    return pair


def _special(text: str) -> Iterator[tuple[int, str]]:
    """Braces and commas that no backslash takes their meaning from, with their places."""
    skip = False
    for at, char in enumerate(text):
        if skip:
            skip = False
        elif char == "\\":
            skip = True
        elif char in "{},":
            yield at, char
