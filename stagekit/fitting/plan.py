"""What is to be done with a model: serve it, tune adapters beside it, or train all of it; and in which numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import UsageError
from ..units import check_whole, format_count
from .span import Span

Kind = Literal["inference", "lora", "qlora", "full"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# The first of each is the default.
PRECISIONS: dict[Kind, tuple[str, ...]] = {
    "inference": ("fp16", "bf16", "fp32", "fp8", "int8", "int4"),
    "lora": ("bf16", "fp16", "fp32", "int8"),
    "qlora": ("int4",),
    "full": ("bf16", "fp16", "fp32", "pure-bf16"),
}
ALL_PRECISIONS = tuple(dict.fromkeys(precision for kind in KINDS for precision in PRECISIONS[kind]))

# Bytes a trained parameter that the optimizer keeps: with states in 32 bits, and with states in the parameters' 16 (pure-bf16).
OPTIMIZERS: dict[str, tuple[Span, Span]] = {
    "adamw": (Span(8, 8), Span(4, 4)),
    "adamw8bit": (Span(2, 2.1), Span(2, 2.1)),
    "adafactor": (Span(0.01, 4), Span(0.01, 2)),
    "lion": (Span(4, 4), Span(2, 2)),
    "momentum": (Span(4, 4), Span(2, 2)),
    "sgd": (Span(0, 0), Span(0, 0)),
}
OPTIMIZER_SOURCES = {
    "adamw": "AdamW: two moments",
    "adamw8bit": "8-bit optimizers (Dettmers et al., 2021): two moments in 8 bits, and a scale for each block",
    "adafactor": "Adafactor (Shazeer and Stern, 2018): row and column sums; a moment as well where it is asked for",
    "lion": "Lion (Chen et al., 2023): one moment",
    "momentum": "SGD with momentum: one moment",
    "sgd": "SGD: no state",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One plan, checked when it is made. ``checkpointing`` is that of gradients: activations are computed again instead of kept.

    Raises ``UsageError`` for what does not go together.
    """

    kind: Kind
    precision: str
    optimizer: str
    batch: int
    seq: int
    checkpointing: bool
    rank: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"plan: {self.kind!r} is none of {', '.join(KINDS)}")
        if self.precision not in PRECISIONS[self.kind]:
            hint = "; for a base model in 4 bits give the plan qlora" if self.precision == "int4" else ""
            raise UsageError(f"precision: {self.kind} has {', '.join(PRECISIONS[self.kind])}, and not {self.precision}{hint}")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizer: {self.optimizer!r} is none of {', '.join(OPTIMIZERS)}")
        for name in ("batch", "seq", "rank"):
            check_whole(getattr(self, name), name=name, minimum=1)

    @property
    def trains(self) -> bool:
        """Whether anything is trained."""
        return self.kind != "inference"

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number while it is computed with."""
        return 4 if self.precision == "fp32" else 2

    @property
    def needs_bf16(self) -> bool:
        """Whether the GPU must have bf16."""
        return self.precision in ("bf16", "pure-bf16")

    @property
    def state_bytes(self) -> Span:
        """Bytes a trained parameter that the optimizer keeps."""
        return OPTIMIZERS[self.optimizer][self.precision == "pure-bf16"]

    @property
    def line(self) -> str:
        """The same for people."""
        words = [self.kind, self.precision, f"batch {self.batch}", f"{format_count(self.seq)} tokens"]
        if self.trains:
            words += [self.optimizer, f"{'with' if self.checkpointing else 'without'} gradient checkpointing"]
        if self.kind in ("lora", "qlora"):
            words.append(f"rank {self.rank}")
        return ", ".join(words)

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values; what the plan has no use for is ``None``."""
        return {
            "plan": self.kind,
            "precision": self.precision,
            "batch": self.batch,
            "seq": self.seq,
            "optimizer": self.optimizer if self.trains else None,
            "checkpointing": self.checkpointing if self.trains else None,
            "rank": self.rank if self.kind in ("lora", "qlora") else None,
        }
