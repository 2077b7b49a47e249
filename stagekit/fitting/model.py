"""What a transformer is made of: parameters, layers, widths. From a parameter count, from the values of a ``config.json``, or from the
names and shapes in a safetensors header. Pure: nothing is read here.

A count alone leaves the shape open, so a ``Model`` has two: one that takes little memory beside the weights, and one that takes much.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..units import format_count

_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMBT]?)", re.IGNORECASE)
_COUNT_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MIXTURE = re.compile(r"[0-9]+x[0-9.]+\s*B", re.IGNORECASE)

# What models that are only known by their count may have: Llama's proportions, 128 wide for each layer, 12 × width² parameters a layer.
_WIDTH_A_LAYER = 128
_HEAD = 128
_FEW_KV_HEADS = 8
_SMALL_VOCABULARY, _LARGE_VOCABULARY = 32_000, 152_000

# By model_type: those with a table of positions, and all that have two matrices in the feed-forward part instead of three, biases
# everywhere, and LayerNorm.
_LEARNED_POSITIONS = frozenset(
    ("bert", "camembert", "distilbert", "electra", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "roberta", "xlm-roberta")
)
_PLAIN = _LEARNED_POSITIONS | {"bloom", "codegen", "falcon", "gpt_neox", "gptj", "mpt", "phi", "starcoder2"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths and counts of one transformer. ``mlp`` is the width inside the feed-forward part of one layer, of all its experts together."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    mlp_matrices: int = 3
    tied: bool = False

    @property
    def query_width(self) -> int:
        """What the query projection puts out."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """What the key projection puts out, and the value projection as well."""
        return self.kv_heads * self.head_dim

    @property
    def unquantized(self) -> int:
        """Parameters that stay in 16 bits when the rest is quantized: the embedding, and the output layer where it has its own."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True, slots=True)
class Model:
    """``frugal`` and ``lavish`` are the same shape where it is known. ``stored_bytes`` is the size of its files, where they were seen.

    ``said`` is what the user named, ``known_by`` how the shape was found, for people.
    """

    said: str
    parameters: int
    frugal: Shape
    lavish: Shape
    known_by: str
    stored_bytes: int | None = None

    @property
    def assumed(self) -> bool:
        """Whether the shape is assumed from the parameter count."""
        return self.frugal != self.lavish

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        shape = self.lavish
        return {
            "name": self.said,
            "parameters": self.parameters,
            "assumed": self.assumed,
            "known_by": self.known_by,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "stored_bytes": self.stored_bytes,
        }


def parse_count(text: str) -> int | None:
    """``7B``, ``350M`` or ``7000000000`` as a number; ``None`` for what is no count. Raises ``UsageError`` for ``8x7B``."""
    if _MIXTURE.fullmatch(text.strip()):
        raise UsageError(
            f"model: {text} names the experts of a mixture, which share their other layers; give the parameters of the whole model (46.7B "
            "for a Mixtral 8x7B) or its config.json"
        )
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return None
    number = round(float(match[1]) * _COUNT_UNITS[match[2].upper()])
    if number < 1_000_000:
        raise UsageError(f"model: {text!r} is {format_count(number)} parameters; a model such as 7B or 350M is meant")
    return number


def of_count(parameters: int, *, said: str, stored_bytes: int | None = None) -> Model:
    """A model of which only the count is known."""
    layers = max(1, round(math.cbrt(parameters / (12 * _WIDTH_A_LAYER**2))))
    hidden = _WIDTH_A_LAYER * layers
    heads = layers * _WIDTH_A_LAYER // _HEAD
    frugal = Shape(layers, hidden, heads, min(_FEW_KV_HEADS, heads), _HEAD, round(hidden * 8 / 3), _SMALL_VOCABULARY)
    lavish = Shape(layers, hidden, heads, heads, _HEAD, 4 * hidden, _LARGE_VOCABULARY)
    known_by = (
        f"the shape is assumed: {layers} layers, {format_count(hidden)} wide, {frugal.kv_heads} to {heads} key-value heads, a vocabulary "
        f"of {format_count(_SMALL_VOCABULARY)} to {format_count(_LARGE_VOCABULARY)}; a config.json tells it"
    )
    return Model(said, parameters, frugal, lavish, known_by, stored_bytes)


_EXPERTS = frozenset({"num_local_experts", "n_routed_experts", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"})


def _beyond(values: Mapping[str, Any]) -> str | None:
    """A key by which a model is larger than it would be counted, or of another kind: experts under another name, state-space layers among
    the others, a shape that is kept in parts. What is not understood must not make a model look small."""
    for key, value in values.items():
        if "expert" in key and key not in _EXPERTS and isinstance(value, int) and not isinstance(value, bool) and value > 1:
            return key
        if key.startswith(("mamba_", "ssm_", "linear_")) and value:
            return key
        if key in ("layers_block_type", "hybrid_override_pattern") and value:
            return key
        if isinstance(value, Mapping) and value.keys() & {"ffn_hidden_size", "kv_n_heads"}:
            return key
    return None


def of_config(values: Mapping[str, Any], *, said: str) -> Model:
    """A model by the values of its ``config.json``. Raises ``UsageError`` naming what is missing, what is no number, or what cannot be
    computed."""
    part = ""
    for name in ("text_config", "llm_config", "language_config"):
        if "num_hidden_layers" not in values and isinstance(values.get(name), dict):
            values, part = values[name], ", of its text part alone"
    for key, what in (("kv_lora_rank", "latent attention"), ("ssm_cfg", "state-space layers"), ("state_size", "state-space layers")):
        if values.get(key):
            raise UsageError(f"model: {said} has {what}, which these formulas do not cover; give its parameter count, such as 7B")
    if (unknown := _beyond(values)) is not None:
        raise UsageError(f"model: {said} says {unknown}, which these formulas do not cover; give its parameter count, such as 7B")
    if values.get("is_encoder_decoder"):
        raise UsageError(
            f"model: {said} has an encoder and a decoder, which these formulas do not cover; give its parameter count, such as 7B"
        )

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = values.get(name)
            if value is None or (default is not None and value == 0):  # 0 experts, say, is how some tell that they have none
                continue
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            raise UsageError(
                f"model: {said} says {name}: {reprlib.repr(value)}, which is no positive whole number; mend it there, or give a parameter "
                "count, such as 7B"
            )
        if default is None:
            raise UsageError(
                f"model: {said} does not say {names[0]}, so it is no transformer's config.json; give a parameter count, such as 7B"
            )
        return default

    kind = str(values.get("model_type", ""))
    plain = kind in _PLAIN
    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "n_heads", "num_heads")
    several = not values.get("multi_query", False)
    experts = number("num_local_experts", "n_routed_experts", "num_experts", default=1)
    inner = number("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", default=4 * hidden)
    if experts > 1:
        inner = experts * number("moe_intermediate_size", default=inner) + number("shared_expert_intermediate_size", default=0)
    shape = Shape(
        layers=number("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads if several else 1),
        head_dim=number("head_dim", default=max(1, hidden // heads)),
        mlp=inner,
        vocabulary=number("vocab_size"),
        mlp_matrices=2 if plain else 3,
        tied=bool(values.get("tie_word_embeddings", True)),
    )
    positions = number("n_positions", "max_position_embeddings", default=0) * hidden if kind in _LEARNED_POSITIONS else 0
    biased = plain or bool(values.get("attention_bias")) or kind.startswith("qwen2")
    parameters = _parameters(shape, biased=biased, plain=plain, router=hidden * experts if experts > 1 else 0) + positions
    return Model(said, parameters, shape, shape, f"{shape.layers} layers, {format_count(hidden)} wide{part}")


def _parameters(shape: Shape, *, biased: bool, plain: bool, router: int) -> int:
    """How many parameters a model of this shape has."""
    attention = 2 * shape.hidden * shape.query_width + 2 * shape.hidden * shape.kv_width
    feed_forward = shape.mlp_matrices * shape.hidden * shape.mlp
    norm = shape.hidden * (2 if plain else 1)
    biases = shape.query_width + 2 * shape.kv_width if biased else 0
    if plain:
        biases += 2 * shape.hidden + shape.mlp
    return shape.unquantized + shape.layers * (attention + feed_forward + 2 * norm + biases + router) + norm


# ------------------------------------------------------------------------------------------------------------ safetensors headers

_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_PACKED = frozenset({"U8", "I32", "U32"})
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight", "embed_in.weight")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a safetensors header."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Its bytes. What is narrower than a byte counts as one."""
        return self.elements * _WIDTHS.get(self.kind, 1)


def of_tensors(tensors: Sequence[Tensor], *, said: str, config: Model | None = None) -> Model:
    """A model by the tensors of its files, and by its ``config.json`` where there is one.

    The count is that of the tensors, unless they are packed: then only ``config`` knows it. Raises ``UsageError`` when nobody does.
    """
    stored = sum(one.size for one in tensors)
    packed = sum(one.size for one in tensors if one.kind in _PACKED)
    if packed > stored // 4:
        if config is None:
            raise UsageError(
                f"model: {said} is quantized, and its header does not tell how many parameters it packs; put its config.json beside it, or "
                "give a parameter count, such as 7B"
            )
        return _with_files(config, config.parameters, stored)
    count = sum(one.elements for one in tensors)
    if config is not None:
        return _with_files(config, count, stored)
    shape = _shape(tensors)
    if shape is None:
        return of_count(count, said=said, stored_bytes=stored)
    return Model(
        said, count, shape, shape, f"{shape.layers} layers, {format_count(shape.hidden)} wide, by the names of its tensors", stored
    )


def _with_files(model: Model, parameters: int, stored: int) -> Model:
    return Model(model.said, parameters, model.frugal, model.lavish, model.known_by, stored)


def _shape(tensors: Sequence[Tensor]) -> Shape | None:
    """The shape that the names tell; ``None`` when they are not those of a transformer with separate projections."""
    matrices = [one for one in tensors if len(one.shape) == 2]
    layers = {int(found[1]) for one in matrices if (found := _LAYER.search(one.name))}

    def first(*endings: str) -> tuple[int, ...] | None:
        return next((one.shape for one in matrices if one.name.endswith(endings)), None)

    embedding, query, key = first(*_EMBEDDINGS), first("q_proj.weight", "wq.weight"), first("k_proj.weight", "wk.weight")
    up = first("up_proj.weight", "w3.weight", "fc1.weight")
    if not layers or embedding is None or query is None or key is None or up is None:
        return None
    experts = len({one.name for one in matrices if one.name.endswith(("up_proj.weight", "w3.weight")) and ".experts." in one.name})
    return Shape(
        layers=max(layers) + 1,
        hidden=embedding[1],
        heads=max(1, query[0] // _HEAD),
        kv_heads=max(1, key[0] // _HEAD),
        head_dim=min(_HEAD, key[0]),
        mlp=up[0] * max(1, experts // (max(layers) + 1)),
        vocabulary=embedding[0],
        mlp_matrices=2 if first("fc1.weight") else 3,
        tied=first("lm_head.weight", "output.weight") is None,
    )
