"""Whether a server has what a plan needs. Judged on the high end of each estimate, so that "fits" can be counted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..diagnosis.machine import Gpu
from ..facts import Fact, State
from ..units import format_size
from .plan import Plan
from .span import Span
from .vram import Vram

_MOST_GPUS = 1024
_ANY_NUMBER = 10**12
# In GB, as they are sold.
_SOLD = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180)


@dataclass(frozen=True, slots=True)
class Server:
    """What is known of a server; ``None`` for what is not."""

    gpus: tuple[Gpu, ...] = ()
    ram_bytes: int | None = None
    disk_bytes: int | None = None


def one_gpu(needed: Span) -> str:
    """Which single GPU is enough, for people."""
    enough = _enough(needed)
    return f"enough from {enough} GB on" if enough is not None else f"none is enough, as they have up to {_SOLD[-1]} GB"


def shared(vram: Vram, each_bytes: int) -> str:
    """How many GPUs of ``each_bytes`` are enough when they share the model, for people."""
    size, number = format_size(each_bytes), gpus_needed(vram, each_bytes)
    if number is not None:
        return f"{number} of {size} share it"
    if vram.on_each_of(_ANY_NUMBER).high > each_bytes:
        return f"no number of {size} is enough, as what each computes of its own batch does not fit"
    return f"{_MOST_GPUS:,} of {size} are not enough to share it"


def _enough(needed: Span) -> int | None:
    return next((size for size in _SOLD if size * 1e9 >= needed.high), None)


def gpus_needed(vram: Vram, each_bytes: int) -> int | None:
    """How many GPUs of ``each_bytes`` hold it when they share the model; ``None`` where no number of them does."""
    return next((number for number in range(1, _MOST_GPUS + 1) if vram.on_each_of(number).high <= each_bytes), None)


def compare(vram: Vram, ram: Span, disk: Span, plan: Plan, server: Server) -> list[Fact]:
    """One fact for each part of ``server``. ``bad`` does not fit, ``unknown`` could not be compared."""
    facts = [_gpu(vram, plan, server.gpus)]
    if plan.needs_bf16 and server.gpus:
        facts.append(_bf16(server.gpus))
    if server.ram_bytes is not None:  # less of it than VRAM takes care, and works; a full disk does not
        facts.append(_room("RAM", ram, server.ram_bytes, lacking="note"))
    if server.disk_bytes is not None:
        facts.append(_room("disk", disk, server.disk_bytes, lacking="bad"))
    return facts


def _gpu(vram: Vram, plan: Plan, gpus: Sequence[Gpu]) -> Fact:
    needed = vram.total
    sizes = [gpu.bytes for gpu in gpus if gpu.bytes]
    if not sizes:
        why = "none was found here and none was named" if not gpus else f"{gpus[0].name} does not tell its memory"
        return Fact("GPU", "unknown", why, "name one: --gpu 24GB, or --gpu 8x80GB", {"gpus": len(gpus), "gpu_bytes": None})
    largest, smallest = max(sizes), min(sizes)
    values = {"gpus": len(sizes), "gpu_bytes": largest}
    if needed.high <= largest:
        return Fact("GPU", "ok", f"one is enough: {needed.size} of {format_size(largest)}", values=values)
    sharing = "tensor parallelism" if plan.kind == "inference" else "FSDP or ZeRO 3"
    number = gpus_needed(vram, smallest)
    if number is not None and number <= len(sizes):
        each = f"{vram.on_each_of(len(sizes)).size} on each, of {format_size(smallest)}"
        return Fact("GPU", "ok", f"one is not enough; {len(sizes)} are, with {sharing}: {each}", values=values)
    room = f"{len(sizes)} × {format_size(smallest)}" if len(sizes) > 1 else format_size(largest)
    low_fits = needed.low <= largest
    text = f"{needed.size} may fit into {room}, and may not" if low_fits else f"{needed.size} do not fit into {room}"
    enough = _enough(needed)
    ways = [f"one GPU of {enough} GB"] if enough is not None else []
    ways += [f"{number} of {format_size(smallest)} with {sharing}"] if number is not None else []
    advice = f"take {', or '.join(ways)}" if ways else f"{shared(vram, smallest)}: take larger GPUs, a smaller model or batch"
    return Fact("GPU", "bad", text, advice, values)


def _bf16(gpus: Sequence[Gpu]) -> Fact:
    old = next((gpu for gpu in gpus if gpu.bf16 is False), None)
    if old is not None:
        text = f"{old.name} has no bf16 units; they come with Ampere (compute capability 8.0)"
        return Fact("bf16", "bad", text, "give fp16 as the precision", {"bf16": False})
    if any(gpu.bf16 is None for gpu in gpus):
        return Fact("bf16", "note", "it needs Ampere or newer (compute capability 8.0)", values={"bf16": None})
    return Fact("bf16", "ok", "these GPUs have it", values={"bf16": True})


def _room(name: str, needed: Span, has: int, *, lacking: State) -> Fact:
    values = {"bytes": has}
    if needed.high <= has:
        return Fact(name, "ok", f"{needed.size} of {format_size(has)}", values=values)
    if needed.low <= has:
        return Fact(name, "note", f"{needed.size} of {format_size(has)}: the low end fits", f"more {name} makes it sure", values)
    return Fact(name, lacking, f"{needed.size} of {format_size(has)}", f"take more {name}", values)
