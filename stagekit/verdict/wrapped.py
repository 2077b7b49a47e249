"""The rows about ``stagekit run`` on this machine: a command that is running, and what one that was killed left behind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import ManifestError
from ..wrapping.note import Note, notes
from .findings import Finding


def noted(home: Path | None = None) -> tuple[list[Note], list[Finding]]:
    """All notes, and what cannot be read."""
    try:
        return notes(home), []
    except (ManifestError, OSError) as error:
        fix = "look at it before you remove it"
        return [], [Finding("CANNOT TELL", "wrapped", f"the note of a stagekit run cannot be read: {error}", "this machine", fix=fix)]


def judge(found: Iterable[Note]) -> list[Finding]:
    """One finding for each command that runs, and for each that has ended and is not finished."""
    findings = []
    for note in found:
        places = ", ".join(map(str, note.watched.values()))
        if note.is_over():
            what = f"stagekit run has ended here before everything was sent; what {note.command!r} left below {places} may be in no bucket"
            findings.append(Finding("NO", "wrapped", what, note.url, fix=f"stagekit teardown --run {note.url}"))
        else:
            what = f"process {note.process.pid} runs {note.command!r}, which saves below {places}"
            findings.append(Finding("NO", "wrapped", what, note.url, fix=f"wait until it ends, or stop it: kill {note.process.pid}"))
    return findings
