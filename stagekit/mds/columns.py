"""Fields as columns of MosaicML's format: which encoding a field has, and what of its bytes ``MDSWriter`` is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import SourceError, UsageError
from ..shards.sample import JSON_FIELDS, NUMBER_FIELDS, TEXT_FIELDS

KEY = "__key__"
"""The column that holds a sample's key."""

Columns = Mapping[str, str]
"""The encoding of each column, by name."""


def _text(data: bytes) -> str:
    return data.decode()


def _whole(low: int, high: int) -> Callable[[bytes], int]:
    def value(data: bytes) -> int:
        number = int(data)
        if not low <= number <= high:
            raise ValueError(f"{number} is not between {low} and {high}")
        return number

    return value


def _number(data: bytes) -> float:
    return float(data)


def _json(data: bytes) -> Any:
    return json.loads(data, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is a number of no JSON reader but Python's")


# What each encoding is made from, by its name in the format.
ENCODINGS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": _text,
    "json": _json,
    "int": _whole(-(2**63), 2**63 - 1),
    "str_int": lambda data: int(data),
    "str_float": _number,
    **{f"int{bits}": _whole(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": _whole(0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": _number for bits in (16, 32, 64)},
}


def encoding_of(field: str) -> str:
    """The encoding that a field has when nobody says another: by its last extension."""
    last = field.rpartition(".")[2]
    if last in NUMBER_FIELDS:
        return "int"
    if last in TEXT_FIELDS:
        return "str"
    return "json" if last in JSON_FIELDS else "bytes"


def chosen(options: Iterable[str] | Mapping[str, str]) -> dict[str, str]:
    """``["cls:int64"]`` as a mapping. Raises ``UsageError`` for what cannot be meant."""
    pairs: Sequence[tuple[str, str]]
    if isinstance(options, Mapping):
        pairs = list(options.items())
    elif isinstance(options, str):
        raise UsageError("columns: give a list of NAME:ENCODING, or a mapping, not one text")
    else:
        pairs = [(name, encoding) for name, _, encoding in (option.rpartition(":") for option in options)]
    for name, encoding in pairs:
        if not name or encoding not in ENCODINGS:
            raise UsageError(f"column {name or encoding!r}: write NAME:ENCODING with one of {', '.join(ENCODINGS)}")
    return dict(pairs)


def columns_of(fields: Mapping[str, int], samples: int, options: Mapping[str, str], *, source: str) -> dict[str, str]:
    """The columns for ``fields``, each with how many of all ``samples`` have it.

    Raises ``UsageError`` for an option about a field that there is not, ``SourceError`` when a sample lacks a field: in this format every
    sample has every column.
    """
    unknown = sorted(options.keys() - fields.keys())
    if unknown:
        raise UsageError(f"column {unknown[0]!r}: no sample of {source} has that field; it has {', '.join(sorted(fields))}")
    for name, count in sorted(fields.items()):
        if count != samples:
            raise SourceError(
                f"reading {source}: {count:,} of {samples:,} samples have the field {name!r}, and in MosaicML's format every sample has "
                f"every column; leave the field out with --exclude '*.{name}', or complete the samples"
            )
    return {KEY: "str", **{name: options.get(name) or encoding_of(name) for name in sorted(fields)}}


def value_of(field: str, encoding: str, data: bytes, *, key: str) -> Any:
    """What ``MDSWriter`` stores under ``encoding``. Raises ``SourceError`` naming ``key`` when the bytes are nothing of that kind."""
    try:
        return ENCODINGS[encoding](data)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"the field {field!r} of the sample {key!r} is no {encoding}: {str(error) or type(error).__name__}; mend it, or store it under "
            f"another encoding, such as --column {field}:bytes"
        ) from None
