"""The first samples of a data set, made fit to be looked at: pictures small, texts short. What is in them is somebody else's and is never
believed: only formats that are plainly pictures are opened, and no picture is decoded that would be huge."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_PICTURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_NAMES = frozenset(("png", "jpg", "jpeg", "gif", "webp"))
_NO_PICTURE = "cannot be decoded as a picture: it is damaged, or none"
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_SIDE = 240
_MOST_PIXELS = 50_000_000
_MOST_UNDECODED = 64 << 10
_HEAD = 280


@dataclass(frozen=True, slots=True)
class Picture:
    """``source`` is a ``data:`` URL; ``width`` and ``height`` are those to be shown, 0 where they are not known. ``tiny`` was enlarged."""

    source: str
    width: int
    height: int
    tiny: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """One field of a sample: a picture, or the beginning of a text (``cut`` when there is more), or neither.

    ``trouble`` tells why what is or is called a picture is not shown.
    """

    name: str
    bytes: int
    picture: Picture | None = None
    text: str | None = None
    cut: bool = False
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One sample, its fields sorted by name."""

    key: str
    fields: tuple[Shown, ...]


def shown(samples: Iterable[Mapping[str, Any]]) -> list[ShownSample]:
    """``samples``, which are raw bytes. Raises what reading them raises."""
    return [
        ShownSample(str(one["__key__"]), tuple(_field(name, bytes(one[name])) for name in sorted(one) if not name.startswith("__")))
        for one in samples
    ]


def _field(name: str, data: bytes) -> Shown:
    kind = next((kind for magic, kind in _PICTURES.items() if data.startswith(magic)), None)
    if kind == "webp" and data[8:12] != b"WEBP":
        kind = None
    if kind is not None:
        found = _picture(data, kind)
        return Shown(name, len(data), trouble=found) if isinstance(found, str) else Shown(name, len(data), picture=found)
    head = _head(data)
    trouble = _NO_PICTURE if name.lower().rpartition(".")[2] in _NAMES else None
    return Shown(name, len(data), text=head, cut=head is not None and len(data) > _HEAD, trouble=trouble)


def _head(data: bytes) -> str | None:
    """The beginning of ``data`` where it is text."""
    head = data[:_HEAD]
    for cut in range(min(4, len(head) + 1)):  # the last character may be cut in two
        try:
            found = head[: len(head) - cut].decode()
        except UnicodeDecodeError:
            if len(data) <= _HEAD:
                return None
            continue
        return found if found.strip() and not any(character < " " and character not in "\n\r\t" for character in found) else None
    return None


def _picture(data: bytes, kind: str) -> Picture | str:
    """A small copy of a picture, or why there is none."""
    try:
        from PIL import Image
    except ImportError:
        return _as_it_is(data, kind) if len(data) <= _MOST_UNDECODED else "not shown: making it small needs Pillow"
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            if opened.width * opened.height > _MOST_PIXELS:
                return f"not shown: {opened.width:,} × {opened.height:,} pixels are too many"
            opened.draft("RGB", (2 * _SIDE, 2 * _SIDE))
            small = opened.convert("RGBA" if opened.mode in ("LA", "PA", "P", "RGBA") else "RGB")
            small.thumbnail((_SIDE, _SIDE))
            out = io.BytesIO()
            photo = kind == "jpeg" or (small.mode == "RGB" and max(small.size) > 64)
            small.save(out, "JPEG" if photo else "PNG", **({"quality": 80} if photo else {}))
    except Exception:
        return _NO_PICTURE  # a damaged picture raises nearly anything
    factor = max(1, 96 // max(small.size))
    source = _url(out.getvalue(), "jpeg" if photo else "png")
    return Picture(source, small.width * factor, small.height * factor, tiny=factor > 1)


def _as_it_is(data: bytes, kind: str) -> Picture:
    return Picture(_url(data, kind), 0, 0)


def _url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
