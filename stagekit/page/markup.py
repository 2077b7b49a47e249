"""HTML and SVG from values. What is no ``Markup`` is escaped when it becomes part of an element, so nothing that comes from a bucket can
become a tag."""

from __future__ import annotations

import html
import unicodedata

_EMPTY = frozenset({"meta", "img", "line", "rect", "circle", "path"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: str) -> Markup:
    """``value`` as it is read: escaped, and without control characters, which a browser would hide or obey."""
    return Markup(html.escape("".join("�" if _is_control(character) else character for character in value)))


def _is_control(character: str) -> bool:
    """Whether it is a control character, or one that turns the direction of what follows."""
    if "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069":
        return True
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs")


def tag(name: str, /, *content: str, **attributes: str | float | None) -> Markup:
    """One element. In names of attributes ``_`` stands for ``-`` and a last ``_`` for nothing; those that are ``None`` are left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_number(value))}"' for key, value in attributes.items() if value is not None
    )
    if name in _EMPTY and not content:
        return Markup(f"<{name}{written}>" if name in ("meta", "img") else f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{joined(*content)}</{name}>")


def joined(*parts: str) -> Markup:
    """``parts`` one after the other, escaped where they are no ``Markup``."""
    return Markup("".join(part if isinstance(part, Markup) else text(part) for part in parts))


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
