"""Patterns for ``--include`` and ``--exclude``: what a shell and a .gitignore have taught people to expect.

A pattern without a slash is matched against the last component of a path, wherever it lies: ``*.txt``, ``README``. One with a slash
is matched against the whole path relative to the source: ``train/*.jpg``, ``**/thumbs/*``. ``*`` and ``?`` stop at a slash, ``**``
does not, ``[…]`` and ``[!…]`` are sets. A trailing slash is ignored. A directory that matches an exclude pattern is not entered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ..errors import UsageError


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """A function that tells whether a relative path matches one of ``patterns``. Raises ``UsageError`` for one that cannot be meant."""
    names: list[str] = []
    paths: list[str] = []
    for pattern in patterns:
        cleaned = pattern.removeprefix("./").rstrip("/")
        if not cleaned or cleaned.startswith("/") or ".." in cleaned.split("/"):
            raise UsageError(f"pattern {pattern!r}: write it relative to the source folder, such as '*.txt' or 'train/**'")
        (paths if "/" in cleaned else names).append(_expression(cleaned, pattern))
    by_name = re.compile("|".join(names)).fullmatch if names else None
    by_path = re.compile("|".join(paths)).fullmatch if paths else None

    def matches(path: str) -> bool:
        if by_name is not None and by_name(path.rpartition("/")[2]):
            return True
        return by_path is not None and by_path(path) is not None

    return matches


def _expression(pattern: str, shown: str) -> str:
    """The pattern as a regular expression for ``fullmatch``."""
    result = ["(?s:"]
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if pattern.startswith("**/", position):
            result.append("(?:.*/)?")
            position += 3
        elif pattern.startswith("**", position):
            result.append(".*")
            position += 2
        elif character == "*":
            result.append("[^/]*")
            position += 1
        elif character == "?":
            result.append("[^/]")
            position += 1
        elif character == "[":
            end = pattern.find("]", position + (3 if pattern[position + 1 : position + 2] == "!" else 2))
            if end < 0:
                raise UsageError(f"pattern {shown!r}: '[' is never closed; write '[[]' for the character itself")
            inside = pattern[position + 1 : end].replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
            negated = inside.startswith("!")
            result.append(f"(?!/)[{'^' if negated else ''}{inside[negated:]}]")
            position = end + 1
        else:
            result.append(re.escape(character))
            position += 1
    return "".join(result) + ")"
