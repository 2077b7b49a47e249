"""What long work reports while it runs: plain values, handed to whoever listens.

Library code takes ``on_event: Subscriber = ignore`` and calls it; it never prints. The command line has two printers for these
values, one for people and one for JSON lines. Tests listen too: a subscriber that ends the process at a ``Stage`` is a kill point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one task has come. Values are absolute, so a lost or repeated event does no harm.

    ``total`` is ``None`` while it is unknown. ``finished`` marks the last event of the task.
    """

    task: str
    done: int
    total: int | None = None
    unit: Literal["bytes", "samples", "files", "shards", "steps", "checkpoints", "objects"] = "bytes"
    note: str = ""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One sentence for the person at the terminal.

    ``repeating`` names the store that a failed request goes to once more. There may be many of these; ``outages`` makes few of them.
    """

    text: str
    level: Literal["info", "warning", "error"] = "info"
    repeating: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A named point was passed for ``subject`` (a shard, a checkpoint, an object). What is before it in a promise's order is done."""

    name: str
    subject: str = ""


ANSWERED = "store.answered"
"""The stage at which a store has answered that had to be asked again; its subject is what messages call ``repeating``."""

Event = Progress | Message | Stage
Subscriber = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The subscriber that listens to nothing."""
