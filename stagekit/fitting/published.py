"""The figures that are passed around for models of four sizes, to be shown beside our own; and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass

from .model import Model
from .plan import Plan

# GB by billions of parameters. Sizes of the larger ones are not told for training: several GPUs.
_INFERENCE_16 = {7: 14, 13: 26, 34: 68, 70: 140}
_INFERENCE_4 = {7: 5, 13: 9, 34: 20, 70: 40}
_ADAPTERS = {7: 16, 13: 28}
_FULL = {7: 56, 13: 104}
_SIZES = (7, 13, 34, 70)
_NEAR = 1.25


@dataclass(frozen=True, slots=True)
class Published:
    """``gigabytes`` is ``None`` where several GPUs are told instead of a figure. ``text`` is the same for people."""

    billions: int
    gigabytes: int | None
    text: str


def published(model: Model, plan: Plan) -> Published | None:
    """The published figure for the size nearest to ``model``'s; ``None`` where none is near, or none is published for this plan."""
    billions = model.parameters / 1e9
    nearest = min(_SIZES, key=lambda size: max(size / billions, billions / size))
    if max(nearest / billions, billions / nearest) > _NEAR:
        return None
    if plan.kind == "inference":
        table = {"fp16": _INFERENCE_16, "bf16": _INFERENCE_16, "int4": _INFERENCE_4}.get(plan.precision)
        what = f"inference in {'4' if plan.precision == 'int4' else '16'} bits"
    else:
        table = _FULL if plan.kind == "full" else _ADAPTERS
        what = "full training" if plan.kind == "full" else "LoRA or QLoRA fine-tuning"
    if table is None:
        return None
    size = table.get(nearest)
    told = f"{nearest}B, {what}: " + (f"{size} GB" if size is not None else "several GPUs")
    if plan.kind == "full" and size is not None:
        told += (
            ". A floor: 8 bytes a parameter, as with weights, gradients and AdamW's states in bf16 (pure-bf16). Mixed-precision AdamW "
            f"takes about 16, {16 * nearest} GB for {nearest}B"
        )
    return Published(nearest, size, told)
