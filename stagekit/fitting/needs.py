"""What a plan needs beside the GPU: RAM, the local disk, and the link that checkpoints leave by. Arithmetic alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..units import format_count, format_size
from .model import Model
from .plan import Plan
from .span import Item, Span
from .vram import adapter_parameters

_WINDOW_BLOCKS = 16
_LOADER_BYTES = 1 << 30
_COPY = 1.05
_SHORTEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Data:
    """A data set, by what its manifest says."""

    url: str
    samples: int
    bytes: int
    largest_block: int


def checkpoint(model: Model, plan: Plan) -> Item | None:
    """One checkpoint to resume from; ``None`` where nothing is trained."""
    state = plan.state_bytes
    if plan.kind == "inference":
        return None
    if plan.kind in ("lora", "qlora"):
        count = adapter_parameters(model, plan.rank)
        size = Span(count.low * (4 + state.low), count.high * (4 + state.high))
        numbers = f"{format_count(round(count.low))} to {format_count(round(count.high))} × ({_each(4, state)})"
        return Item("checkpoint", size, numbers, "adapters in fp32 and their optimizer; the base model is not saved")
    weights = {"fp32": Span(4, 4), "pure-bf16": Span(2, 2)}.get(plan.precision, Span(4, 6))
    size = (weights + state) * model.parameters
    copies = f"{weights.low:g}" if weights.low == weights.high else f"{weights.low:g} to {weights.high:g}"
    numbers = f"{format_count(model.parameters)} × ({copies} + {_numbers(state)} bytes)"
    mixed = "; in mixed precision the fp32 weights, at most the 16-bit ones as well" if plan.precision in ("bf16", "fp16") else ""
    return Item("checkpoint", size, numbers, f"weights and optimizer, without gradients{mixed}")


def ram(vram: Span, data: Data | None) -> tuple[Item, ...]:
    """RAM: at least as much as the GPU holds, and what the loader keeps."""
    items = [Item("as much as VRAM", vram, "the sum above", "weights and checkpoints pass through RAM on their way")]
    if data is not None:
        window = min(_WINDOW_BLOCKS * data.largest_block, data.bytes)
        items.append(
            Item(
                "streaming",
                Span(min(window, _LOADER_BYTES), max(window, _LOADER_BYTES)),
                f"a window of {_WINDOW_BLOCKS} × {format_size(data.largest_block)}, at most memory=1GiB",
                "StreamLoader's limit for raw bytes",
            )
        )
    return tuple(items)


def disk(model: Model, one: Item | None, data: Data | None) -> tuple[Item, ...]:
    """The local disk's working set, without the operating system and Python's packages."""
    if model.stored_bytes is not None:
        base = Item("model", Span(model.stored_bytes, model.stored_bytes), "its files", "their headers")
    else:
        size = 2 * model.parameters
        base = Item("model", Span(size, size), f"{format_count(model.parameters)} × 2 bytes", "weights as they are published, in 16 bits")
    items = [base]
    if one is not None:
        items.append(
            Item("checkpoints", one.bytes * 2, "2 × checkpoint", "one that is on its way to the bucket, one that is being written")
        )
    if data is not None:
        copied = f"streamed nothing, copied {format_size(data.bytes)} and {_COPY - 1:.0%}"
        items.append(Item("data", Span(0, data.bytes * _COPY), copied, "the data set's manifest"))
    return tuple(items)


def upload(one: Item | None, rate_bytes_per_s: float | None) -> Span | None:
    """Seconds that one checkpoint takes to the bucket; ``None`` where nothing is saved, or the rate is not known."""
    if one is None or not rate_bytes_per_s:
        return None
    return one.bytes * (1 / rate_bytes_per_s)


def save_interval(uploading: Span | None) -> float | None:
    """The smallest interval between saves that makes sense, in seconds: one upload ends before the next save, to the minute.

    A save that comes sooner waits, and one that waits is dropped for the next.
    """
    if uploading is None:
        return None
    return max(_SHORTEST_S, math.ceil(uploading.high / 60) * 60.0)


def _each(weights: int, state: Span) -> str:
    return f"{weights} + {_numbers(state)} bytes"


def _numbers(span: Span) -> str:
    return f"{span.low:g}" if span.low == span.high else f"{span.low:g} to {span.high:g}"
