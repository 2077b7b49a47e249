"""How a run was started before, and what is different here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import StoreConfig
from ..errors import CheckpointError, UsageError
from ..progress import Subscriber, ignore
from ..store import Where, open_store
from ..units import counted
from . import record
from .record import Attempt, Code
from .redaction import REDACTED

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Again:
    """One recorded attempt, and this machine: its Python, its packages, and the checkout around the current directory."""

    url: str
    attempt: Attempt
    python: str
    packages: Mapping[str, str]
    code: Code | None

    @property
    def missing(self) -> list[str]:
        """Packages that were there and are not here, as ``NAME==VERSION``."""
        here = {_normal(name) for name in self.packages}
        return [f"{name}=={version}" for name, version in self.attempt.packages.items() if _normal(name) not in here]

    @property
    def different(self) -> list[tuple[str, str, str]]:
        """Packages with another version here: name, then, now."""
        here = {_normal(name): version for name, version in self.packages.items()}
        return [
            (name, version, here[_normal(name)])
            for name, version in self.attempt.packages.items()
            if _normal(name) in here and here[_normal(name)] != version
        ]

    @property
    def has_secrets(self) -> bool:
        """Whether something was taken out of the recorded command, so that it cannot be started as it is."""
        return any(REDACTED in word for word in (*self.attempt.options, *self.attempt.command))

    @property
    def differences(self) -> list[str]:
        """One sentence for each kind of thing that differs here."""
        found = []
        if self.python.split(".")[:2] != self.attempt.python.split(".")[:2]:
            found.append(f"it ran on Python {self.attempt.python}, here it is {self.python}")
        then = self.attempt.code
        if then is not None:
            if self.code is None or self.code.commit != then.commit:
                found.append(f"the code was at {then.commit}, here it is {self.code.commit if self.code else 'no checkout of git'}")
            if then.changes and (self.code is None or self.code.changes != then.changes):
                cut = ", cut at 1 MiB" if then.cut else ""
                found.append(f"it had changes that were not committed{cut}: stagekit resume {self.url} --diff prints them for git apply")
            if then.untracked:
                found.append(f"not in git and not recorded: {counted(len(then.untracked), 'file')}, such as {then.untracked[0]}")
        if self.has_secrets:
            found.append(f"secrets were taken out of the recorded command: put them where it says {REDACTED}")
        if self.missing:
            found.append(f"missing packages: {_first(self.missing)}")
        if self.different:
            found.append(f"packages of another version: {_first([f'{name} {now} (was {then})' for name, then, now in self.different])}")
        return found

    @property
    def lines(self) -> list[str]:
        """The same for people: comments, then what to paste."""
        then = self.attempt.code
        lines = [f"# attempt {self.attempt.number} of {self.url}, in {self.attempt.directory}"]
        lines += [f"# {text}" for text in self.differences]
        if then is not None and (self.code is None or self.code.commit != then.commit):
            if then.remote and self.code is None:
                name = then.remote.rstrip("/").removesuffix(".git").replace(":", "/").rpartition("/")[2] or "code"
                lines.append(f"git clone {shlex.quote(then.remote)} {shlex.quote(name)} && cd {shlex.quote(name)}")
            lines.append(f"git checkout {then.commit}")
        return [*lines, self.attempt.line]

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        attempt, code = self.attempt, self.attempt.code
        return {
            "url": self.url,
            "attempt": attempt.name,
            "command": list(attempt.command),
            "options": list(attempt.options),
            "directory": attempt.directory,
            "started_s": attempt.started_s,
            "world_size": attempt.world_size,
            "commit": code.commit if code else None,
            "remote": code.remote if code else None,
            "changed": bool(code and code.changes),
            "missing": self.missing,
            "different": [list(one) for one in self.different],
            "differences": self.differences,
        }

    def options_at(self, run: str) -> list[str]:
        """The recorded options with ``run`` as the place of the run, which may have moved."""
        return [*self.attempt.options, "--to", run]

    def to_start(self) -> list[str]:
        """The recorded command. Raises ``UsageError`` when secrets were taken out of it."""
        if self.has_secrets:
            raise UsageError(
                f"resuming {self.url}: secrets were taken out of the recorded command, so it cannot be started as it is; fill them in: "
                f"{self.attempt.line}"
            )
        return list(self.attempt.command)


def again(
    run: Where,
    number: int | None = None,
    *,
    store: StoreConfig | None = None,
    directory: Path | None = None,
    on_event: Subscriber = ignore,
) -> Again:
    """How the run at ``run`` was started the last time, or as attempt ``number``, and what differs on this machine.

    Raises ``CheckpointError`` when nothing was recorded, and the store's errors when that cannot be told.
    """
    opened = open_store(run, store, on_event=on_event)
    names = record.attempts(opened)
    chosen = next((name for name in names if number is None or int(name.partition("-")[0]) == number), None)
    if chosen is None:
        known = f"; it has {', '.join(str(int(name.partition('-')[0])) for name in names)}" if names else ""
        what = "no start of stagekit run is recorded there" if number is None else f"no attempt {number} is recorded there{known}"
        raise CheckpointError(f"resuming {opened.location}: {what}; its checkpoints: stagekit info {opened.location}")
    attempt = record.load(opened, chosen)
    python, packages = record.freeze(attempt.command)
    return Again(str(opened.location), attempt, python, packages, record.code_at(directory or Path.cwd()))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _first(items: list[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
