"""What was found out by looking: one fact a line, with what it means and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "bad", "unknown"]


@dataclass(frozen=True, slots=True)
class Fact:
    """``name`` is what was looked at and ``text`` what was found.

    ``ok`` is as it should be; ``note`` works, in another way; ``bad`` will fail; ``unknown`` could not be told, which is never one of the
    others. ``advice`` is what to change, a sentence that stands alone. ``values`` is the same for programs.
    """

    name: str
    state: State
    text: str
    advice: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"name": self.name, "state": self.state, "text": self.text, "advice": self.advice, **self.values}
