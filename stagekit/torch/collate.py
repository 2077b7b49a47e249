"""From a list of samples to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..stream.window import Rows


def collate(samples: Sequence[Any]) -> Any:
    """A batch of ``samples``: a dict of the same names, each with the samples' values together.

    Tensors and numpy arrays of one shape and type are stacked; numbers become one tensor; dicts of such values with the same names are
    put together name by name. Everything else (bytes, text, ragged arrays, parsed JSON) stays a list, with ``None`` where a sample has
    no such field. Samples that are tuples give a tuple of columns; other values are put together as one column.
    """
    if isinstance(samples, Rows):
        return samples.columns()
    first = samples[0]
    if isinstance(first, Mapping):
        if len(set().union(*samples)) == len(first) and set(map(len, samples)) == {len(first)}:
            return {name: _column([sample[name] for sample in samples]) for name in first}
        names = dict.fromkeys(name for sample in samples for name in sample)
        return {name: _column([sample.get(name) for sample in samples]) for name in names}
    if isinstance(first, tuple):
        return tuple(_column(list(column)) for column in zip(*samples, strict=True))
    return _column(list(samples))


def _column(values: list[Any]) -> Any:
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is not None and issubclass(kind, torch.Tensor):
        return torch.stack(values) if len({(value.shape, value.dtype) for value in values}) == 1 else values
    if kind is not None and issubclass(kind, np.ndarray | np.generic):
        return _arrays(values)
    if kind in (bool, int, float):
        try:
            return torch.tensor(values)
        except (OverflowError, ValueError, RuntimeError):  # an int above 64 bits
            return values
    if kind is dict and _alike(values):
        return {name: _column([value[name] for value in values]) for name in values[0]}
    return values


def _arrays(values: list[Any]) -> Any:
    if len({(value.shape, value.dtype) for value in values}) != 1:
        return values
    try:
        return torch.from_numpy(np.stack(values))
    except TypeError:  # a type that torch does not have
        return values


def _alike(values: list[dict[Any, Any]]) -> bool:
    """Whether the dicts have the same names and only arrays in them. JSON objects, whose names vary, stay a list."""
    names = values[0].keys()
    return bool(names) and all(
        value.keys() == names and all(isinstance(item, torch.Tensor | np.ndarray) for item in value.values()) for value in values
    )
