"""GPU memory of a model and a plan, line by line. Arithmetic alone: a line names its formula's origin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..units import format_count
from .model import Model, Shape
from .plan import OPTIMIZER_SOURCES, Plan
from .span import Item, Span, total

_CONTEXT = Span(0.3e9, 1.3e9)
_ALLOWANCE = 0.1
"""Of everything else: freed blocks that the allocator holds and cannot join."""
_WORKSPACE = 0.2

# Bits of a parameter that is quantized: at least and at most.
_NF4 = Span(4.127, 4.5)
_INT4 = Span(4.127, 4.85)
_WHOLE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}

_KORTHIKANTI = "Korthikanti et al., 2022 (Reducing Activation Recomputation)"
_BY_PRECISION = "parameters × bytes of the precision"
_ZERO = "Rajbhandari et al., 2020 (ZeRO): 16 bytes a parameter with Adam"


@dataclass(frozen=True, slots=True)
class Vram:
    """The lines, and what the allocator takes on top of their sum."""

    items: tuple[Item, ...]
    allowance: Item

    @property
    def total(self) -> Span:
        """What one GPU must hold."""
        return self.on_each_of(1)

    @property
    def lines(self) -> tuple[Item, ...]:
        """All of them, the allowance last."""
        return (*self.items, self.allowance)

    def on_each_of(self, gpus: int) -> Span:
        """What each of ``gpus`` holds that share one model (FSDP or ZeRO 3; tensor parallelism for inference), a batch on each."""
        whole = sum((one.bytes * (1 / gpus if one.divided else 1) for one in self.items), Span(0, 0))
        return _allowed(whole)


def vram(model: Model, plan: Plan) -> Vram:
    """The GPU memory that ``plan`` takes with ``model``."""
    if plan.kind == "inference":
        items = [_weights(model, plan), _kv_cache(model, plan), _workspace(model, plan)]
    elif plan.kind == "full":
        items = [*_trained(model, plan), *_activations(model, plan)]
    else:
        items = [_weights(model, plan), _adapters(model, plan), *_activations(model, plan)]
        if plan.kind == "qlora":
            items.append(_dequantized(model))
    context = "kernels and handles of a process: transformers' documentation measured 1.3 GB; 0.3 GB where kernels are loaded when used"
    items.append(Item("CUDA context", _CONTEXT, "fixed", context))
    lines = tuple(items)
    whole = total(lines)
    reserve = Span(0, _allowed(whole).high - whole.high)
    return Vram(lines, Item("allocator", reserve, f"0 to {_ALLOWANCE:.0%} of the above", "an allowance for fragments, not a formula"))


def _allowed(whole: Span) -> Span:
    return Span(whole.low, whole.high * (1 + _ALLOWANCE))


def _of_shapes(model: Model, formula: Callable[[Shape], float]) -> Span:
    one, other = formula(model.frugal), formula(model.lavish)
    return Span(min(one, other), max(one, other))


def _weights(model: Model, plan: Plan) -> Item:
    name = "weights" if plan.kind == "inference" else "base weights"
    count = format_count(model.parameters)
    if plan.precision in _WHOLE_BYTES:
        size = _WHOLE_BYTES[plan.precision]
        return Item(
            name, Span(1, 1) * (model.parameters * size), f"{count} × {_bytes(size)} ({plan.precision})", _BY_PRECISION, divided=True
        )
    bits = _NF4 if plan.kind == "qlora" else _INT4
    whole = max(model.frugal.unquantized, model.lavish.unquantized)
    kept = min(whole, model.parameters)
    high = (model.parameters - kept) * bits.high / 8 + kept * 2
    arithmetic = f"{count} × {bits.low} bits; at most {bits.high} bits, and {format_count(kept)} of embedding and output at 2 bytes"
    other = "" if plan.kind == "qlora" else "; 4.85 bits as llama.cpp's Q4_K_M"
    source = f"Dettmers et al., 2023 (QLoRA): NF4 with its scales, quantized twice or once{other}"
    return Item(name, Span(model.parameters * bits.low / 8, high), arithmetic, source, divided=True)


def _kv_cache(model: Model, plan: Plan) -> Item:
    tokens = plan.batch * plan.seq
    size = plan.compute_bytes

    def formula(shape: Shape) -> float:
        return 2 * shape.layers * shape.kv_width * tokens * size

    widths = sorted({model.frugal.kv_width, model.lavish.kv_width})
    wide = " to ".join(map(format_count, widths))
    arithmetic = f"2 × {model.lavish.layers} layers × {wide} × {format_count(tokens)} tokens × {_bytes(size)}"
    source = "keys and values of every layer and token; Pope et al., 2022 (Efficiently Scaling Transformer Inference)"
    return Item("KV cache", _of_shapes(model, formula), arithmetic, source, divided=True)


def _workspace(model: Model, plan: Plan) -> Item:
    weights = _weights(model, plan).bytes
    source = "EleutherAI, Transformer Math 101: at most 1.2 × the weights in all"
    return Item("workspace", Span(0, weights.high * _WORKSPACE), f"0 to {_WORKSPACE:.0%} of the weights", source, divided=True)


def adapter_parameters(model: Model, rank: int) -> Span:
    """Parameters of LoRA's two matrices: on query and value alone, as PEFT does it for Llama, and on every linear layer."""

    def narrow(shape: Shape) -> float:
        return rank * shape.layers * ((shape.hidden + shape.query_width) + (shape.hidden + shape.kv_width))

    def everywhere(shape: Shape) -> float:
        attention = 2 * (shape.hidden + shape.query_width) + 2 * (shape.hidden + shape.kv_width)
        return rank * shape.layers * (attention + shape.mlp_matrices * (shape.hidden + shape.mlp))

    return Span(narrow(model.frugal), everywhere(model.lavish))


def _adapters(model: Model, plan: Plan) -> Item:
    count = adapter_parameters(model, plan.rank)
    state = plan.state_bytes
    each = Span(8 + state.low, 8 + state.high)
    arithmetic = (
        f"{format_count(round(count.low))} (query, value) to {format_count(round(count.high))} (all linear layers) × {_span(each)}: "
        f"weight and gradient in fp32, {plan.optimizer}"
    )
    source = f"Hu et al., 2021 (LoRA): rank × (in + out) a matrix; {OPTIMIZER_SOURCES[plan.optimizer]}"
    return Item("adapters", Span(count.low * each.low, count.high * each.high), arithmetic, source, divided=True)


def _trained(model: Model, plan: Plan) -> list[Item]:
    """Weights, gradients and optimizer states when everything is trained."""
    count = format_count(model.parameters)
    weights, gradients = {
        "fp32": (Span(4, 4), Span(4, 4)),
        "pure-bf16": (Span(2, 2), Span(2, 2)),
    }.get(plan.precision, (Span(6, 6), Span(2, 4)))
    mixed = plan.precision in ("bf16", "fp16")
    copy = f" ({plan.precision}, and fp32 to update)" if mixed else f" ({plan.precision.removeprefix('pure-')})"
    autocast = "; PyTorch's autocast has gradients in fp32" if mixed else ""
    state = plan.state_bytes
    return [
        Item("weights", weights * model.parameters, f"{count} × {_span(weights)}{copy}", _ZERO if mixed else _BY_PRECISION, divided=True),
        Item("gradients", gradients * model.parameters, f"{count} × {_span(gradients)}", f"one each{autocast}", divided=True),
        Item("optimizer", state * model.parameters, f"{count} × {_span(state)}", OPTIMIZER_SOURCES[plan.optimizer], divided=True),
    ]


def _activations(model: Model, plan: Plan) -> list[Item]:
    tokens = plan.batch * plan.seq
    scale = plan.compute_bytes / 2

    def kept(shape: Shape) -> float:
        return 34 * tokens * shape.hidden * scale

    def scores(shape: Shape) -> float:
        return 5 * shape.heads * plan.seq * tokens * scale

    shape = model.lavish
    wide, layers = format_count(shape.hidden), shape.layers
    grown = "" if scale == 1 else " × 2 (fp32)"
    once = Span(_of_shapes(model, kept).low, _of_shapes(model, lambda one: kept(one) + scores(one)).high)
    each = f"(34 × {wide}, at most + 5 × {shape.heads} heads × {format_count(plan.seq)})"
    flash = f"{_KORTHIKANTI}: the second term is scores of attention, which FlashAttention does not keep"
    if plan.checkpointing:
        inputs = _of_shapes(model, lambda one: 2 * tokens * one.hidden * one.layers * scale)
        items = [
            Item(
                "activations",
                inputs,
                f"{layers} layers × 2 × {format_count(tokens)} tokens × {wide}{grown}",
                f"{_KORTHIKANTI}: inputs of each layer",
            ),
            Item("one layer again", once, f"{format_count(tokens)} tokens × {each}{grown}", flash),
        ]
    else:
        items = [Item("activations", once * layers, f"{layers} layers × {format_count(tokens)} tokens × {each}{grown}", flash)]
    return [*items, _logits(model, plan)]


def _logits(model: Model, plan: Plan) -> Item:
    tokens = plan.batch * plan.seq
    least, most = plan.compute_bytes + 4, 2 * plan.compute_bytes + 8
    vocabularies = sorted({model.frugal.vocabulary, model.lavish.vocabulary})
    size = Span(tokens * vocabularies[0] * least, tokens * vocabularies[-1] * most)
    arithmetic = f"{format_count(tokens)} tokens × {' to '.join(map(format_count, vocabularies))} words × {least} to {most} bytes"
    return Item("logits", size, arithmetic, "as computed and in fp32 for the loss, without and with a gradient of each")


def _dequantized(model: Model) -> Item:
    """Weights that were unpacked to be multiplied with."""

    def matrix(shape: Shape) -> float:
        return 2 * shape.hidden * shape.mlp

    def layer(shape: Shape) -> float:
        return shape.mlp_matrices * matrix(shape) + 4 * shape.hidden * (shape.query_width + shape.kv_width)

    size = Span(matrix(model.frugal), layer(model.lavish))
    return Item(
        "unpacked weights", size, "one matrix, at most one layer, at 2 bytes", "Dettmers et al., 2023 (QLoRA): computed with in bf16"
    )


def _bytes(number: float) -> str:
    return f"{number:g} byte{'' if number == 1 else 's'}"


def _span(span: Span) -> str:
    return _bytes(span.low) if span.low == span.high else f"{span.low:g} to {_bytes(span.high)}"
