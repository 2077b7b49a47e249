"""The generated part of docs/python.md: ``python -m stagekit.reference docs/python.md`` writes it again, from the docstrings.

A test compares the page with what this would write, so that the two cannot drift apart.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
NOT_RUN = "<!-- not run: as it stands; tests/test_reference.py runs those that need no account, with a directory for the bucket -->"
PACKAGES = ("stagekit", "stagekit.torch", "stagekit.interop")
WIDTH = 110


def render() -> str:
    """A section for each public name: its signature, its docstring, and those of its methods."""
    sections = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = sorted((name for name in module.__all__ if not name.startswith("__")), key=str.lower)
        sections += ["\n".join(_section(f"{package}.{name}", getattr(module, name))) for name in names]
    return "\n".join(sections)


def replaced(page: str) -> str:
    """``page`` with its generated part as it must be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{render()}\n{END}{after}"


def _section(name: str, value: Any) -> list[str]:
    lines = [f"### {name}", "", "```text", _signature(name, value), "```", "", *_prose(inspect.getdoc(value) or ""), ""]
    members = [_member(name, member) for name, member in _public(value)] if inspect.isclass(value) else []
    return lines + (["| | |", "|---|---|", *members, ""] if members else [])


def _public(kind: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties with a docstring, in the order of the source, inherited ones first. Fields are in the signature."""
    seen: dict[str, Any] = {}
    for base in reversed([one for one in kind.__mro__ if one.__module__.split(".")[0] == "stagekit"]):
        seen.update(vars(base))
    for name, member in seen.items():
        if not name.startswith("_") and inspect.getdoc(member) and (callable(getattr(kind, name)) or _is_property(member)):
            yield name, member


def _is_property(member: Any) -> bool:
    return isinstance(member, property | functools.cached_property)


def _member(name: str, member: Any) -> str:
    """A row: how it is called, and what it promises first."""
    inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    called = f".{name}" if _is_property(member) else _on_one_line(f".{name}", inner)
    first = " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{called}`", _inline(first))) + " |"


def _on_one_line(name: str, function: Callable[..., Any]) -> str:
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name not in ("self", "cls")]
    return f"{name}({', '.join(_marked(parameters, plain=True))})"


def _signature(name: str, value: Any) -> str:
    """``value`` as it is called: on one line where that is short, else a parameter a line."""
    signature = inspect.signature(value)
    parts = _marked([one for one in signature.parameters.values() if one.name != "self"], plain=False)
    returned = "" if inspect.isclass(value) or signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    short = f"{name}({', '.join(parts)}){returned}"
    if len(short) <= WIDTH:
        return short
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def _marked(parameters: list[inspect.Parameter], *, plain: bool) -> list[str]:
    """The parameters as source, with the ``/`` and ``*`` between them; ``plain`` ones without types."""
    parts, keyword = [], False
    for number, one in enumerate(parameters):
        if one.kind is one.KEYWORD_ONLY and not keyword:
            parts.append("*")
        keyword |= one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        stars = "**" if one.kind is one.VAR_KEYWORD else "*" if one.kind is one.VAR_POSITIONAL else ""
        text = f"{stars}{one.name}" + ("" if plain or one.annotation is one.empty else f": {one.annotation}")
        if one.default is not one.empty:
            text += f"={_default(one.default)}" if plain else f" = {_default(one.default)}"
        parts.append(text)
        if one.kind is one.POSITIONAL_ONLY and (number + 1 == len(parameters) or parameters[number + 1].kind is not one.kind):
            parts.append("/")
    return parts


def _default(value: Any) -> str:
    return str(value.__name__) if callable(value) else repr(value).replace("'", '"')


def _prose(docstring: str) -> list[str]:
    """A docstring as Markdown: its code fenced, its parameters a list."""
    paragraphs: list[str] = []
    for text in docstring.split("\n\n"):
        if text.startswith("    "):  # code that a "::" announced
            paragraphs.append(_code(textwrap.dedent(text)))
        elif text.startswith(">>> "):
            paragraphs.append(_code("\n".join(line[4:].partition("  # doctest")[0] for line in text.splitlines())))
        elif text.startswith(":param "):
            paragraphs.append("\n".join(re.sub(r"^:param ([^:]+):", _parameters, line) for line in _joined(text)))
        elif text != "::":
            paragraphs.append(re.sub(r"::$", ":", text))
    return _inline("\n\n".join(paragraphs)).splitlines()


def _joined(paragraph: str) -> list[str]:
    """One line for each ``:param``."""
    return [" ".join(one.split()) for one in re.split(r"\n(?=:param )", paragraph)]


def _parameters(match: re.Match[str]) -> str:
    return "- " + ", ".join(f"`{name.strip()}`" for name in match[1].split(",")) + ":"


def _inline(text: str) -> str:
    return re.sub(r"(?<!`)``(?!`)", "`", text)


def _code(text: str) -> str:
    return f"{NOT_RUN}\n```python\n{text}\n```"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(replaced(target.read_text()))
