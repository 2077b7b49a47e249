"""Samples: the rule that turns member names into keys and fields, the names a shard can hold, and values to bytes.

The rules are those of ``docs/format.md`` section 2.
"""

from __future__ import annotations

import io
import json
import operator
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..errors import KeyNotAllowed, MissingExtra, ShardError

NAME_BYTES = 100
PREFIX_BYTES = 155

# Nearly every key is made of these; whatever is not goes the long way and gets a message of its own.
_PLAIN_KEY = re.compile(r"[A-Za-z0-9-][A-Za-z0-9_ -]*(?:/[A-Za-z0-9_ -]+)*")
_PLAIN_KEYS = re.compile(rf"{_PLAIN_KEY.pattern}(?:\n{_PLAIN_KEY.pattern})*")
# WebDataset's own pattern of what it skips, anchored to the first component.
_META = re.compile(r"__[^/]*__(?:$|/)")


def split_name(path: str) -> tuple[str, str] | None:
    """Key and field of a member name by WebDataset's rule: ``("dir/img", "seg.png")`` from ``"dir/img.seg.PNG"``.

    The name is cut at the first dot of its last component, the field is lower-cased. ``None`` when there is no key or no field:
    ``README``, ``img.``, ``dir/.hidden.jpg``.
    """
    dot = path.find(".", path.rfind("/") + 1)
    if dot <= 0 or path[dot - 1] == "/" or dot + 1 == len(path):
        return None
    return path[:dot], path[dot + 1 :].lower()


def is_meta(path: str) -> bool:
    """Whether WebDataset readers skip a member of this name (``__meta__/…``), whatever its extension."""
    return path.startswith("__") and _META.match(path) is not None


def member_name(key: str, field: str) -> str:
    """The name under which the sample ``key`` keeps ``field`` in a shard; ``split_name`` gives both back.

    Raises ``KeyNotAllowed``, showing key and field, for what ``docs/format.md`` 2.2 refuses.
    """
    name = f"{key}.{field}"
    if is_plain(key, field):
        return name
    if not key or key.endswith("/"):
        raise _not_allowed(name, "its key has no name in front of the first dot")
    if "." in key.rpartition("/")[2]:
        raise _not_allowed(name, f"the key {key!r} has a dot in its last component, so a reader would find another key; replace the dot")
    check_member(name)
    return name


def is_plain(key: str, field: str) -> bool:
    """Whether nothing about key and field needs a closer look: the quick way to know most of what is allowed.

    Raises ``KeyNotAllowed`` for a field that is no field name.
    """
    check_field(field)
    return len(key) + len(field) < NAME_BYTES and field.isascii() and _PLAIN_KEY.fullmatch(key) is not None


def member_names(keys: Sequence[str], field: str) -> list[str]:
    """``member_name`` for each of ``keys``, most often with one look at all of them together."""
    check_field(field)
    lines = "\n".join(keys)
    plain = (
        field.isascii()
        and len(field) + max(map(len, keys), default=0) < NAME_BYTES
        and lines.count("\n") == len(keys) - 1
        and _PLAIN_KEYS.fullmatch(lines) is not None
    )
    return [f"{key}.{field}" for key in keys] if plain else [member_name(key, field) for key in keys]


@lru_cache(maxsize=1024)
def check_field(field: str) -> None:
    """Raise ``KeyNotAllowed`` when ``field`` is no field name: empty, not lower-case, with a ``/``, or reserved (``__…``)."""
    if not field:
        raise KeyNotAllowed("an empty text is no field name; a field is an extension such as 'jpg' or 'seg.png'")
    if field.startswith("__"):
        raise KeyNotAllowed(f"{field!r} is no field name: names that start with two underscores belong to the sample itself; rename it")
    if field != field.lower():
        raise KeyNotAllowed(f"{field!r} is no field name: readers lower-case extensions; write {field.lower()!r}")
    if "/" in field or "\0" in field or "\n" in field:
        raise KeyNotAllowed(f"{field!r} is no field name: it holds a '/', a NUL or a newline; rename it")
    _encoded(field)


def check_member(name: str) -> None:
    """Raise ``KeyNotAllowed``, showing ``name``, when a shard cannot hold a member of that name.

    Refused are names that USTAR has no room for, that are not UTF-8, with a NUL or a newline, absolute ones, those with empty, ``.``
    or ``..`` components, and those that WebDataset readers skip.
    """
    encoded = _encoded(name)
    if "\0" in name:
        raise _not_allowed(name, "it holds a NUL byte, where tar ends a name")
    if "\n" in name:
        raise _not_allowed(name, "it holds a newline, at which WebDataset's pattern for keys stops")
    if name.startswith("/"):
        raise _not_allowed(name, "it is absolute")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise _not_allowed(name, "it has an empty, '.' or '..' component")
    if is_meta(name):
        raise _not_allowed(name, "WebDataset readers skip names whose first component starts and ends with two underscores")
    if cut_name(encoded) is None:
        raise _not_allowed(
            name,
            f"it has {len(encoded)} bytes, and USTAR holds {NAME_BYTES}, or up to {PREFIX_BYTES} more in front of a '/'",
        )


def cut_name(encoded: bytes) -> tuple[bytes, bytes] | None:
    """Prefix and name as USTAR stores ``encoded``: cut at the first ``/`` that leaves at most 100 bytes. ``None`` when there is none."""
    if len(encoded) <= NAME_BYTES:
        return b"", encoded
    slash = encoded.find(b"/", len(encoded) - NAME_BYTES - 1)
    if 0 < slash <= PREFIX_BYTES and slash + 1 < len(encoded):
        return encoded[:slash], encoded[slash + 1 :]
    return None


def _encoded(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        # os.fsdecode marks bytes that are not UTF-8 with lone surrogates; a person wants to see the bytes.
        shown = name.encode(errors="surrogateescape").decode(errors="backslashreplace") if _is_escaped(name) else ascii(name)
        raise _not_allowed(shown, "it is not UTF-8, so readers would disagree about the key") from None


def _is_escaped(name: str) -> bool:
    return all(not "\ud800" <= char <= "\udfff" or "\udc80" <= char <= "\udcff" for char in name)


def _not_allowed(name: str, reason: str) -> KeyNotAllowed:
    return KeyNotAllowed(f"a shard cannot hold {name!r}: {reason}. Rename it, or leave it out")


TEXT_FIELDS = frozenset({"txt", "text", "transcript"})
NUMBER_FIELDS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
JSON_FIELDS = frozenset({"json", "jsn"})
_IMAGE = {"png": "PNG", "jpg": "JPEG", "jpeg": "JPEG", "webp": "WEBP", "bmp": "BMP", "tif": "TIFF", "tiff": "TIFF", "ppm": "PPM"}


def encode_field(field: str, value: object, *, key: str = "") -> bytes:
    """The bytes of ``value`` as the last extension of ``field`` asks for.

    ==========================================  ============================================================================
    any                                         ``bytes``, ``bytearray``, ``memoryview``: as they are
    ``txt text transcript``                     ``str`` in UTF-8, or a number in decimal
    ``cls cls2 class count index inx id``       ``int`` or ``bool`` in decimal, or a ``str`` of such a number
    ``json jsn``                                whatever JSON knows; a ``str`` becomes a JSON string
    ``npy``                                     an array or a tensor
    ``npz``                                     a dictionary of arrays
    ``png jpg jpeg webp bmp tif tiff ppm``      a PIL image, or a ``uint8`` array of height × width (× channels)
    other extensions                            ``str`` in UTF-8
    ==========================================  ============================================================================

    Raises ``ShardError``, naming ``key`` and field, for any other value. Nothing is pickled: a reader would have to run it.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    last = field.rpartition(".")[2]
    try:
        encoded = _encode(last, value)
    except MissingExtra:
        raise
    except (TypeError, ValueError, OSError) as error:
        raise _not_encoded(key, field, value, str(error)) from error
    if encoded is None:
        raise _not_encoded(key, field, value, "")
    return encoded


def _encode(last: str, value: Any) -> bytes | None:
    """``value`` encoded for the extension ``last``; ``None`` when they do not fit."""
    if last in JSON_FIELDS:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain).encode()
    if last == "npy":
        return _npy(value)
    if last == "npz":
        return _npz(value)
    if last in _IMAGE:
        return _image(_IMAGE[last], value)
    if isinstance(value, str):
        if last in NUMBER_FIELDS and not _is_number(value):
            raise ValueError(f"{value!r} is no number, which readers make of it")
        return value.encode()
    if last in NUMBER_FIELDS or last in TEXT_FIELDS:
        if isinstance(value, float):
            return repr(value).encode() if last in TEXT_FIELDS else None
        return str(operator.index(_plain(value))).encode()
    return None


def _is_number(text: str) -> bool:
    try:
        int(text.encode("ascii"))
    except ValueError:
        return False
    return True


def _plain(value: Any) -> Any:
    """A numpy or torch scalar as a Python number, an array as nested lists. ``TypeError`` for anything else that is no number."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return operator.index(value)


def _npy(value: Any) -> bytes | None:
    if not hasattr(value, "__array__"):
        return None
    import numpy as np

    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(value), allow_pickle=False)
    return out.getvalue()


def _npz(value: Any) -> bytes | None:
    if not isinstance(value, dict) or not all(isinstance(name, str) and hasattr(array, "__array__") for name, array in value.items()):
        return None
    import numpy as np

    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in value.items()}
    if any(array.dtype.hasobject for array in arrays.values()):
        raise ValueError("arrays of Python objects would have to be pickled")
    out = io.BytesIO()
    # savez dates every entry 1980-01-01, so equal arrays give equal bytes.
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def _image(kind: str, value: Any) -> bytes | None:
    is_array = hasattr(value, "__array_interface__") and hasattr(value, "dtype")
    if not is_array and not ("PIL.Image" in sys.modules and isinstance(value, sys.modules["PIL.Image"].Image)):
        return None
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra.of("torch", "pillow", f"encoding an array as {kind}") from None
    if is_array:
        if value.dtype != "uint8":
            raise ValueError(f"an image is an array of uint8, not of {value.dtype}")
        value = Image.fromarray(value)
    out = io.BytesIO()
    value.save(out, format=kind, **({"quality": 95} if kind == "JPEG" else {}))
    return out.getvalue()


def _not_encoded(key: str, field: str, value: object, reason: str) -> ShardError:
    where = f"the field {field!r} of the sample {key!r}" if key else f"the field {field!r}"
    return ShardError(
        f"{where} cannot hold a value of the type {type(value).__name__}{': ' + reason if reason else ''}; "
        "give bytes, or a value that the extension stands for"
    )
