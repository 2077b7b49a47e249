"""The rows about ``stagekit run`` on this machine: a command that is running, and what one that was killed left behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ..config import home_directory
from ..errors import ManifestError
from ..wrapping.note import Note, notes
from .findings import Finding, owner


def noted(home: Path | None = None) -> tuple[list[Note], list[Finding]]:
    """All notes, and what cannot be read."""
    try:
        found = notes(home)
        for note in found:
            note.is_over()  # asked again below, where nobody expects that it cannot be told
        return found, []
    except ManifestError as error:
        fix, what = "look at it before you remove it", f"the note of a stagekit run cannot be read: {error}"
    except OSError as error:
        fix = f"see {owner(error.filename or home or home_directory())}"
        what = f"whether a stagekit run lives, or has left something, cannot be told: {error.filename} cannot be read ({error.strerror})"
    return [], [Finding("CANNOT TELL", "wrapped", what, "this machine", fix=fix)]


def judge(found: Iterable[Note], reasons: Mapping[str, str]) -> list[Finding]:
    """One finding for each command that runs, and for each that has ended and is not finished; ``reasons`` are by attempt."""
    findings = []
    for note in found:
        places = ", ".join(map(str, note.watched.values()))
        if note.is_over():
            what = f"stagekit run has ended here before everything was sent; what {note.command!r} left below {places} may be in no bucket"
            again, why = f"stagekit teardown --run {note.url}", reasons.get(note.attempt)
            fix = f"mend that, then: {again}" if why else again
            findings.append(Finding("NO", "wrapped", f"{what}: {why}" if why else what, note.url, fix=fix))
        elif note.process.is_dead():
            what = f"stagekit run was killed here, and what {note.command!r} started lives on: nobody sends what it saves below {places}"
            findings.append(
                Finding("NO", "wrapped", what, note.url, fix="stop the process that another row names, then: stagekit teardown")
            )
        else:
            what = f"process {note.process.pid} runs {note.command!r}, which saves below {places}"
            findings.append(Finding("NO", "wrapped", what, note.url, fix=f"wait until it ends, or stop it: kill {note.process.pid}"))
    return findings
