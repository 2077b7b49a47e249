"""Blocks of many small members, read as a grid of 512-byte records: all headers are checked at once.

``archive.samples`` takes one header after another, which is what small records spend their time in. Here numpy looks at all of them
together (without Python's lock), and what is left for Python is one dict a sample and one ``bytes`` a field, made when the sample is
taken. Only plain members are understood: one regular file after another, as Stagekit and most others write them. Everything else is
left to ``archive.samples``, which has the whole grammar and the words for what is wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .archive import RECORD, Data, plain_tail
from .sample import split_name

# Where things are in a header: bytes, and 64-bit words.
_SIZE, _CHECKSUM, _TYPE, _BEHIND_TYPE = 124, 148, 156, 160
_WORDS = RECORD // 8
_NAME_WORDS, _TYPE_WORDS, _MAGIC_WORD = 13, 20, 32  # the last word of a name holds the first half of the mode as well
_NAME_BYTES = 100
_LANES, _GATHER = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0001000100010001)
_BYTE, _TOP = np.uint64(8), np.uint64(48)
_OCTAL = {digits: 8 ** np.arange(digits - 1, -1, -1, dtype=np.int64) for digits in (6, 11)}
# For each number of bytes in a last word, the others.
_REST = np.array([0, *(2**64 - 2 ** (8 * count) for count in range(1, 8))], np.uint64)

_fields: dict[str, str] = {}  # extensions that were seen before, and the fields they mean
_MOST = 16384

Words = NDArray[np.uint64]


Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A block whose samples all have the same ``fields``: ``starts`` and ``stops`` tell where in ``data``, a row for each of ``keys``."""

    data: memoryview
    keys: list[str]
    fields: tuple[str, ...]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockSamples(Sequence[Sample]):
    """The ``total`` samples of one block. ``make`` gives one by its number; where there is a ``table``, it tells the same of all."""

    total: int
    make: Callable[[int], Sample]
    table: Table | None = None

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> list[Sample]: ...
    def __getitem__(self, number: int | slice) -> Sample | list[Sample]:
        if isinstance(number, slice):
            return [self.make(one) for one in range(*number.indices(self.total))]
        return self.make(range(self.total)[number])


def grid_samples(buffer: Data) -> BlockSamples | None:
    """What ``archive.samples`` yields for ``buffer``, which was compared with its digest; ``None`` when it is to be asked instead.

    A sample is made, and its bytes are copied, when it is taken. So a window of blocks is held as the bytes that were fetched, and what
    was handed out does not depend on them.
    """
    data = memoryview(buffer).cast("B")
    if not len(data) or len(data) % RECORD:
        return None
    found = _members(np.frombuffer(data, "<u8").reshape(-1, _WORDS))
    if found is None:
        return None
    names, starts, sizes = found
    stops = starts + sizes
    one = _of_one_field(names, len(starts))
    if one is not None:
        keys, field = one
        table = Table(data, keys, (field,), starts[:, None], stops[:, None])
        return BlockSamples(len(keys), _maker(data, keys, [field] * len(keys), range(len(keys) + 1), starts, stops), table)
    many = _of_many_fields(names.split("\n"))
    if many is None:
        return None
    keys, fields, firsts = many
    each = len(starts) // len(keys)
    uniform = firsts == list(range(0, len(starts) + 1, each)) and fields == fields[:each] * len(keys)
    shape = (-1, each)
    same = Table(data, keys, tuple(fields[:each]), starts.reshape(shape), stops.reshape(shape)) if uniform else None
    return BlockSamples(len(keys), _maker(data, keys, fields, firsts, starts, stops), same)


def _maker(
    data: memoryview, keys: list[str], fields: list[str], firsts: Sequence[int], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> Callable[[int], Sample]:
    """What makes a sample by its number. Most blocks are taken by their table, so places are only listed when they are asked for."""
    places: tuple[list[int], list[int]] | None = None

    def make(number: int) -> Sample:
        nonlocal places
        if places is None:
            places = starts.tolist(), stops.tolist()
        begins, ends = places
        sample: Sample = {"__key__": keys[number]}
        for member in range(firsts[number], firsts[number + 1]):
            sample[fields[member]] = data[begins[member] : ends[member]].tobytes()
        return sample

    return make


def _of_one_field(names: str, count: int) -> tuple[list[str], str] | None:
    """The samples' keys and their field, when all have the same one, seen before, and nothing else."""
    extension = names[names.rfind(".") :]
    field = _fields.get(extension[1:])
    if field is None or names.count(".") != count:
        return None
    keys = f"{names}\n".split(f"{extension}\n")
    if len(keys) != count + 1 or any(map(operator.eq, keys, keys[1:])):
        return None
    del keys[-1]
    return keys, field


def _of_many_fields(names: list[str]) -> tuple[list[str], list[str], list[int]] | None:
    """The samples' keys, the members' fields, and the first member of each sample, with one more where the last one ends."""
    keys: list[str] = []
    fields: list[str] = []
    firsts: list[int] = []
    current = None
    known = _fields
    for name in names:
        key, _, extension = name.partition(".")
        field = known.get(extension)
        if field is None:
            parts = split_name(name)
            if parts is None or parts[1].startswith("__"):
                return None
            key, field = parts
            if "/" not in extension and len(known) < _MOST:
                known[extension] = field
        if key != current:
            current = key
            keys.append(key)
            firsts.append(len(fields))
        elif field in fields[firsts[-1] :]:
            return None  # twice
        fields.append(field)
    firsts.append(len(fields))
    return keys, fields, firsts


def _members(words: Words) -> tuple[str, NDArray[np.int64], NDArray[np.int64]] | None:
    """The names (as lines), first bytes and sizes of all members, when all are plain."""
    extra = plain_tail(words[0].tobytes()[_TYPE:])
    if extra is None:
        return None
    # Whatever looks like the first header in its magic is taken for a header, and the sizes must lead from each to the next. Then they are
    # what one would have found by going from one to the next.
    rows = np.flatnonzero(words[:, _MAGIC_WORD] == words[0, _MAGIC_WORD])
    heads = words[rows]
    texts = heads.view(np.uint8).reshape(len(rows), RECORD)
    if (heads[:, _TYPE_WORDS:] != heads[0, _TYPE_WORDS:]).any() or (texts[:, _TYPE:_BEHIND_TYPE] != texts[0, _TYPE:_BEHIND_TYPE]).any():
        return None
    sizes = _octal(texts[:, _SIZE : _SIZE + 12], 11, b"\0")
    sums = _octal(texts[:, _CHECKSUM : _CHECKSUM + 8], 6, b"\0 ")
    if sizes is None or sums is None:
        return None
    following = rows + 1 + -(-sizes // RECORD)
    if (following[:-1] != rows[1:]).any() or following[-1] != len(words):
        return None
    used = np.bitwise_or.reduce(heads[:, :_TYPE_WORDS], axis=0) != 0
    counted = _sums(heads[:, :_TYPE_WORDS][:, used]) - texts[:, _CHECKSUM:_BEHIND_TYPE].sum(axis=1, dtype=np.int64)
    if (counted + 8 * 0x20 + extra != sums).any() or not _padded(words, following, sizes % RECORD):
        return None
    # No longer than the longest name, since each is looked at from its end.
    width = min(_NAME_BYTES, 8 * (int(np.flatnonzero(used[:_NAME_WORDS])[-1:].sum()) + 1))
    names = _names(texts[:, :width])
    return None if names is None else (names, (rows + 1) * RECORD, sizes)


def _octal(fields: NDArray[np.uint8], digits: int, end: bytes) -> NDArray[np.int64] | None:
    values = fields[:, :digits] - np.uint8(ord("0"))  # what is below wraps around, and is above seven
    if (values > 7).any() or (fields[:, digits:] != np.frombuffer(end, np.uint8)).any():
        return None
    found: NDArray[np.int64] = values @ _OCTAL[digits]
    return found


def _sums(words: Words) -> NDArray[np.int64]:
    """The sum of the bytes of each row, of up to 128 words."""
    lanes = (words & _LANES) + (words >> _BYTE & _LANES)
    total: NDArray[np.int64] = (lanes.sum(axis=1) * _GATHER >> _TOP).astype(np.int64)
    return total


def _padded(words: Words, following: NDArray[np.int64], over: NDArray[np.int64]) -> bool:
    """Whether NULs are all that is behind the last ``over`` bytes of each member, up to the next one."""
    flat = words.ravel()
    ends = following[over > 0] * _WORDS
    over = over[over > 0]
    whole = _WORDS - -(-over // 8)  # words of padding
    firsts = ends - whole
    if (flat[firsts - 1] & _REST[over % 8]).any():
        return False
    places = np.repeat(firsts - np.cumsum(whole) + whole, whole) + np.arange(whole.sum())
    return not flat[places].any()


def _names(texts: NDArray[np.uint8]) -> str | None:
    """The names, one a line; ``None`` when one is cut by a NUL, has a newline, or belongs to a member that is part of no sample."""
    raw = np.ascontiguousarray(texts).view(f"S{texts.shape[1]}")[:, 0]
    try:
        names = b"\n".join(raw.tolist()).decode()
    except UnicodeDecodeError:
        return None
    lines = f"\n{names}\n"
    odd = "\0" in names or lines.count("\n") != len(raw) + 1 or any(part in lines for part in ("/.", "\n.", "\n__", "/\n"))
    return None if odd else names
