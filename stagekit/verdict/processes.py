"""The rows about processes: who has a file below a watched directory open for writing."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config import RUN_VARIABLE
from ..processes import started_with
from .findings import Finding

PROC = Path("/proc")
_GONE = (FileNotFoundError, ProcessLookupError)  # the latter for a process that ends while its file is read
_WRITES = os.O_WRONLY | os.O_RDWR
_MAPPED = re.compile(r"\S+ .w.s \S+ \S+ \S+\s+(/.*)")  # shared and writable


@dataclass(frozen=True, slots=True)
class Writer:
    """A process with a file open for writing."""

    pid: int
    command: str
    path: str


def judge(roots: Sequence[Path], *, proc: Path = PROC) -> list[Finding]:
    """One finding per process, other than this one, that may still write below ``roots``."""
    if not roots:
        return []
    if not (proc / "self").exists():
        return [Finding("note", "process", "this system does not tell which processes have files open", str(proc))]
    findings = []
    real = [os.path.realpath(root) for root in roots]
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        if pid == os.getpid():
            continue
        try:
            writer = _writer(proc / str(pid), pid, real)
        except _GONE:
            continue  # it has ended
        except PermissionError:
            finding = _hidden(proc / str(pid), pid, roots)
            if finding is not None:
                findings.append(finding)
            continue
        if writer is not None:
            what = f"process {pid} ({writer.command}) has {writer.path} open for writing"
            fix = f"wait until it ends, or stop it: kill {pid}"
            findings.append(Finding("NO", "process", what, _root_of(writer.path, roots, real), fix=fix))
    return findings


def survivors(urls: Collection[str], *, proc: Path = PROC) -> list[Finding]:
    """One finding per process that a ``stagekit run`` for one of ``urls`` has started, and that lives on without it; and one per
    ``stagekit run`` that lives, and of which this home knows nothing.

    The environment tells. This process and those above it do not count: the shell that asks waits for the answer.
    """
    above = _above(os.getpid(), proc)
    findings = []
    elsewhere: set[int] = set()
    # One of another user cannot be told: whether that one could write is asked for each watched directory.
    for pid, setting in started_with([f"{RUN_VARIABLE}={url}" for url in urls], proc=proc).items():
        with suppress(*_GONE):  # it has ended meanwhile
            if pid in above:
                continue
            if (wrapper := _wrapper_above(pid, proc)) is not None:
                if wrapper in elsewhere:
                    continue
                elsewhere.add(wrapper)
                what = f"process {wrapper} ({_command(proc / str(wrapper))}) trains here, with another home or for another user"
                findings.append(Finding("NO", "process", what, setting.partition("=")[2], fix="wait until it ends"))
                continue
            what = f"process {pid} ({_command(proc / str(pid))}) was started by a stagekit run for it, and lives on without that"
            fix = f"wait until it ends, or stop it: kill {pid}"
            findings.append(Finding("NO", "process", what, setting.partition("=")[2], fix=fix))
    return findings


def _above(pid: int, proc: Path) -> set[int]:
    """``pid`` and its parents."""
    found: set[int] = set()
    with suppress(OSError, ValueError, IndexError):
        while pid and pid not in found:
            found.add(pid)
            pid = int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return found


def _wrapper_above(pid: int, proc: Path) -> int | None:
    """The ``stagekit run`` that lives above ``pid``, if there is one."""
    for one in _above(pid, proc) - {pid}:
        with suppress(OSError):
            words = _words(proc / str(one))
            if any(os.path.basename(word) == "stagekit" for word in words[:8]) and "run" in words:
                return one
    return None


def _writer(folder: Path, pid: int, roots: Sequence[str]) -> Writer | None:
    for name in os.listdir(folder / "fd"):
        try:
            path = os.readlink(folder / "fd" / name)
            if not any(path == root or path.startswith(f"{root}/") for root in roots):
                continue
            flags = re.search(r"^flags:\s*([0-7]+)", (folder / "fdinfo" / name).read_text(), re.MULTILINE)
        except _GONE:
            continue  # it was closed meanwhile
        if flags and int(flags[1], 8) & _WRITES and not path.endswith(" (deleted)"):
            return Writer(pid, _command(folder), path)
    # An array on disk stays mapped after its file was closed, as numpy's memmap does.
    for line in (folder / "maps").read_text(errors="surrogateescape").splitlines():
        mapped = _MAPPED.fullmatch(line)
        if mapped and not mapped[1].endswith(" (deleted)") and any(mapped[1].startswith(f"{root}/") for root in roots):
            return Writer(pid, _command(folder), mapped[1])
    return None


def _words(folder: Path) -> list[str]:
    return [os.fsdecode(word) for word in (folder / "cmdline").read_bytes().split(b"\0") if word]


def _command(folder: Path) -> str:
    text = " ".join(_words(folder))
    return text if len(text) <= 60 else f"{text[:57]}…"


def _hidden(folder: Path, pid: int, roots: Iterable[Path]) -> Finding | None:
    """A process that may not be looked at counts only when its user could write below a root."""
    try:
        user = folder.stat().st_uid
    except _GONE:
        return None
    if user == 0:
        return None  # the system's own services, which could write anywhere and do not
    for root in roots:
        info = root.stat()
        if info.st_uid == user or info.st_mode & 0o002:
            what = f"process {pid} of user {user} may not be looked at, and that user could write here"
            return Finding("CANNOT TELL", "process", what, str(root), fix="run stagekit teardown as root, or as that user")
    return None


def _root_of(path: str, roots: Sequence[Path], real: Sequence[str]) -> str:
    return next(str(root) for root, there in zip(roots, real, strict=True) if path == there or path.startswith(f"{there}/"))
