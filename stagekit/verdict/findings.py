"""What was found, how much it weighs, and what the answer is then."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..units import format_duration, format_size

Answer = Literal["YES", "NO", "CANNOT TELL"]
Weight = Literal["NO", "CANNOT TELL", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that speaks against destroying this server, or that is worth knowing.

    ``row`` is the line of the table in docs/teardown.md. ``fix`` is a command, or a sentence where no command helps. ``bytes`` and
    ``age_s`` are ``None`` where they say nothing.
    """

    weight: Weight
    row: str
    what: str
    subject: str
    bytes: int | None = None
    age_s: float | None = None
    fix: str = ""

    @property
    def line(self) -> str:
        """Two lines for people: what it is, and the command that fixes it."""
        text = f"{self.weight:<11}  {self.text}"
        return f"{text}\n{'':<13}fix: {shown(self.fix)}" if self.fix else text

    @property
    def text(self) -> str:
        """What was found, and about what."""
        facts = [format_size(self.bytes)] if self.bytes is not None else []
        if self.age_s is not None:
            facts.append(f"{format_duration(max(0.0, self.age_s))} old")
        return shown(f"{self.subject}: {self.what}") + (f" ({', '.join(facts)})" if facts else "")

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


def owner(path: str | os.PathLike[str]) -> str:
    """What helps where ``path`` may not be read."""
    return f"whose it is: ls -ld {quoted(os.fspath(path))}; then run stagekit teardown as that user, or as root"


def shown(text: str) -> str:
    """``text`` on one line: what cannot be printed of a name in it is written as its escape."""
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def quoted(word: str) -> str:
    """``word`` as a shell takes it, on one line: a name that cannot be printed in the way that bash and zsh read escapes."""
    if word.isprintable():
        return shlex.quote(word)
    written = word.replace("\\", r"\\").replace("'", r"\'")
    return "$'" + "".join(one if one.isprintable() else _bytes(one) for one in written) + "'"


def _bytes(letter: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))


def _escaped(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # a byte of a name that is no text
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode()


@dataclass(frozen=True, slots=True)
class Scope:
    """What is judged: directories, runs, and the spools that hold what is not sent yet.

    ``ignored`` are the patterns that are no loss, ``working`` the directories where trainings were started (their git and their trackers),
    ``publications`` the data sets that were begun here, ``durable`` the volumes that outlive the server.
    """

    watched: tuple[str, ...]
    runs: tuple[str, ...]
    spools: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    working: tuple[str, ...] = ()
    publications: tuple[str, ...] = ()
    durable: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The same for people; printed before anything is judged."""
        lines = [
            *(f"watching  {path}" for path in self.watched),
            *(f"started   {path}" for path in self.working),
            *(f"run       {url}" for url in self.runs),
            *(f"data set  {url}" for url in self.publications),
            *(f"spool     {path}" for path in self.spools),
            *(f"durable   {path}" for path in self.durable),
            *(f"ignoring  {pattern}" for pattern in self.ignored),
        ]
        return [shown(line) for line in lines] or ["nothing to judge"]

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: list(getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Verdict:
    """May this server be destroyed? ``findings`` are sorted by weight: what makes it NO comes first."""

    answer: Answer
    findings: tuple[Finding, ...]
    scope: Scope

    @property
    def line(self) -> str:
        """The answer as one sentence."""
        return {
            "YES": "YES: nothing in this scope would be lost with this server",
            "NO": "NO: destroying this server loses what is listed above",
            "CANNOT TELL": "CANNOT TELL: something could not be looked at, so treat it as NO",
        }[self.answer]


def decide(findings: Iterable[Finding], scope: Scope) -> Verdict:
    """The verdict for these findings: NO before CANNOT TELL before YES; notes change nothing."""
    order: dict[Weight, int] = {"NO": 0, "CANNOT TELL": 1, "note": 2}
    ordered = tuple(sorted(findings, key=lambda finding: order[finding.weight]))
    first = ordered[0].weight if ordered else "note"
    return Verdict("YES" if first == "note" else first, ordered, scope)
