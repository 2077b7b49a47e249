"""What a run remembers of each attempt: the command line, where it ran, what was installed, and the state of the code.

::

    record/000002-1a2b3c4d.json     the second attempt, by this process

Never the environment variables. Secrets are taken out of the command line and the diff (``redaction``), and the diff is capped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path, PurePath

from ..errors import ManifestError
from ..runs.layout import seal, unseal
from ..store.base import Store
from ..transfer.put import put_object
from .redaction import redacted, redacted_command

RECORDS = "record/"
DIFF_BYTES = 2**20

_KEY = re.compile(r"([0-9]{6})-([0-9a-f]{8})\.json")
_PATIENCE_S = 20.0
_FREEZE = (
    "import importlib.metadata as m, json, sys; print(json.dumps([sys.version.split()[0], {d.name: d.version for d in m.distributions()}]))"
)


@dataclass(frozen=True, slots=True)
class Code:
    """The checkout around the working directory. ``changes`` is the diff against ``commit``; ``cut`` when it was longer than is kept."""

    commit: str
    remote: str = ""
    changes: str = ""
    cut: bool = False
    untracked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of ``stagekit run``. ``options`` are its own, as words; ``started_s`` is that machine's clock, for people."""

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...]
    directory: str
    started_s: float
    python: str
    packages: Mapping[str, str]
    code: Code | None = None
    world_size: int | None = None
    stagekit: str = ""

    @property
    def number(self) -> int:
        """The first attempt is 1."""
        return int(self.name.partition("-")[0])

    @property
    def line(self) -> str:
        """The whole line, to be pasted into a shell."""
        return shlex.join(["stagekit", "run", *self.options, "--", *self.command])

    def to_bytes(self) -> bytes:
        """JSON with a checksum over itself."""
        return seal({"format": "stagekit-attempt", "version": 1, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> Attempt:
        """Parse strictly. Raises ``ManifestError`` naming ``source``."""
        values = unseal(data, "stagekit-attempt", 1, source=source)
        try:
            code = values["code"]
            known = {one.name for one in fields(cls)} - {"code", "command", "options"}
            return cls(
                **{name: values[name] for name in known},
                command=tuple(map(str, values["command"])),
                options=tuple(map(str, values["options"])),
                code=Code(**{**code, "untracked": tuple(code["untracked"])}) if code is not None else None,
            )
        except (KeyError, TypeError) as error:
            raise ManifestError(f"{source}: it is no record of an attempt ({error})") from None


def describe(
    name: str,
    command: Sequence[str],
    options: Sequence[str],
    *,
    directory: Path,
    started_s: float,
    world_size: int | None,
    secrets: Sequence[str],
    stagekit: str,
) -> Attempt:
    """The record of an attempt that is about to start, with everything that is said of it read now and redacted."""
    python, packages = freeze(command)
    return Attempt(
        name=name,
        command=tuple(redacted_command(command, secrets)),
        options=tuple(redacted_command(options, secrets)),
        directory=str(directory),
        started_s=round(started_s, 3),
        python=python,
        packages=packages,
        code=code_at(directory, secrets),
        world_size=world_size,
        stagekit=stagekit,
    )


def attempts(store: Store) -> list[str]:
    """The names of all recorded attempts of a run, newest first."""
    found = [info.key.removeprefix(RECORDS) for info in store.list(RECORDS)]
    return sorted((name.removesuffix(".json") for name in found if _KEY.fullmatch(name)), reverse=True)


def save(store: Store, attempt: Attempt) -> None:
    """Put the record into the run."""
    put_object(store, f"{RECORDS}{attempt.name}.json", attempt.to_bytes())


def load(store: Store, name: str) -> Attempt:
    """The record called ``name``."""
    key = f"{RECORDS}{name}.json"
    return Attempt.from_bytes(bytes(store.get(key)), source=str(store.location / key))


def freeze(command: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The version of Python that ``command`` runs in, and what is installed there: name to version.

    The interpreter is the command itself, or the one that a Python script names on its first line; else this process's own is described.
    """
    interpreter = _interpreter(command)
    if interpreter is not None and os.path.realpath(interpreter) != os.path.realpath(sys.executable):
        asked = _ask([interpreter, "-c", _FREEZE])
        try:
            python, packages = json.loads(asked or "")
            return str(python), {str(name): str(version) for name, version in sorted(packages.items()) if name}
        except (ValueError, TypeError):
            pass  # it cannot say; ours is the best there is
    found = {found.name: found.version for found in metadata.distributions() if found.name}
    return ".".join(map(str, sys.version_info[:3])), dict(sorted(found.items()))


def code_at(directory: Path, secrets: Sequence[str] = ()) -> Code | None:
    """The git checkout around ``directory``; ``None`` when there is none, or git cannot tell."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = redacted(_git(directory, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") or "", secrets)
    untracked = (_git(directory, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    data = changes.encode(errors="replace")
    return Code(
        commit=commit.strip(),
        remote=redacted((_git(directory, "remote", "get-url", "origin") or "").strip(), secrets),
        changes=data[:DIFF_BYTES].decode(errors="ignore"),
        cut=len(data) > DIFF_BYTES,
        untracked=tuple(untracked[:1000]),
    )


def _interpreter(command: Sequence[str]) -> str | None:
    for word in command[:3]:  # python train.py; env python train.py; torchrun train.py
        path = shutil.which(word)
        if path is None:
            continue
        if re.fullmatch(r"python[0-9.]*", PurePath(word).name):
            return path
        try:
            with Path(path).open("rb") as file:
                first = file.readline(256)
        except OSError:
            continue
        if first.startswith(b"#!") and b"python" in first:
            words = first[2:].decode(errors="replace").split()
            found = words[1] if words[0].endswith("/env") and len(words) > 1 else words[0]
            return shutil.which(found)
    return None


def _git(directory: Path, *arguments: str) -> str | None:
    return _ask(["git", "-C", str(directory), *arguments])


def _ask(argv: Sequence[str]) -> str | None:
    """What a program prints; ``None`` when it is not there, fails, or takes too long."""
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(argv, capture_output=True, check=False, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL, env=environ)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
