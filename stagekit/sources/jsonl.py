"""JSON lines: one object a line. Places are byte offsets of lines, so reading starts anywhere; the bytes of a line stay what they are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .compressed import is_compressed, opened
from .table import BadRow, Opener, Row, check_encoding

_BOM = b"\xef\xbb\xbf"


def _constant(name: str) -> None:
    raise ValueError(f"{name} is a number of no JSON reader but Python's")


def _check_characters(value: object) -> None:
    """Raise ``BadRow`` when a text in ``value`` is no Unicode, which an escape can write."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"its text holds half a character (a lone surrogate, \\u{ord(error.object[error.start]):x})") from None


def _finite(text: str) -> float:
    """A number with a point or an exponent, as Python reads it."""
    value = float(text)
    if math.isinf(value):
        raise BadRow(f"its number {text} is too large, and infinity to those who read it")
    return value


# What ``JSONDecoder.decode`` calls, without what it does about white space, of which a line has none at its ends.
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder(parse_float=_finite, parse_constant=_constant).scan_once  # type: ignore[attr-defined]  # not in the stubs


@dataclass(frozen=True)
class JsonLines:
    """``.jsonl`` and ``.ndjson``. Empty lines are passed over."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (".jsonl", ".ndjson")

    @property
    def counts(self) -> str:
        return "line"

    @property
    def raw(self) -> bool:
        return True

    def listed(self, folder: str, open_file: Opener) -> None:  # noqa: ARG002 - a folder of such files says nothing about them
        return None

    def rows(self, path: str, position: int, line: int, open_file: Opener) -> Iterator[tuple[int, int, Row | BadRow]]:
        whole = is_compressed(path)
        with opened(path, open_file) as file:
            if position:
                file.seek(position)
            for number, data in enumerate(file, line):
                begin = position
                if not whole:
                    position += len(data)
                if number == 1:
                    check_encoding(path, data)
                    data = data.removeprefix(_BOM)
                stripped = data.strip()
                if stripped:
                    yield begin, number, stripped

    def values(self, row: Row) -> dict[str, Any]:
        assert isinstance(row, bytes)
        try:
            text = row.decode()
            value, end = _scan(text, 0)
            if end != len(text):
                raise ValueError(f"something follows the value at character {end + 1}")
            if "\\" in text and ("\\ud" in text or "\\uD" in text):
                _check_characters(value)
        except UnicodeDecodeError as error:
            raise BadRow(f"byte {error.start + 1} of it is not UTF-8") from None
        except StopIteration as error:
            raise BadRow(f"it is no JSON (Expecting value at character {error.value + 1})") from None
        except RecursionError:
            raise BadRow("its JSON is nested too deeply") from None
        except json.JSONDecodeError as error:
            raise BadRow(f"it is no JSON ({error.msg} at character {error.pos + 1})") from None
        except ValueError as error:
            raise BadRow(f"it is no JSON ({error})") from None
        if not isinstance(value, dict):
            raise BadRow(f"it holds JSON, but no object ({{…}}): {row[:40].decode(errors='replace')!r}")
        return value
