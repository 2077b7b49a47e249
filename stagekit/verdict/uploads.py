"""The rows about saves that are not in the bucket yet: queued, on their way, failed; of this process, a living one, or a dead one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import CheckpointError, SourceError
from ..runs import spool
from ..runs.spool import Entry
from ..units import format_count
from .findings import Finding, owner, quoted


def pending(directories: Iterable[Path]) -> tuple[list[Entry], list[Finding]]:
    """Every pending save in these spools, and what cannot be read there."""
    entries: list[Entry] = []
    findings: list[Finding] = []
    for directory in directories:
        try:
            for entry in spool.pending(directory):
                spool.is_alive(entry)  # asked again below, where nobody expects that it cannot be told
                entries.append(entry)
        except CheckpointError as error:
            fix = f"look at its files below {directory}/entries before you remove it"
            findings.append(Finding("NO", "spool", f"a pending save cannot be read: {error}", str(directory), fix=fix))
        except OSError as error:
            what = f"{error.filename or directory} cannot be read ({error.strerror}), and saves that are in no bucket may wait there"
            findings.append(Finding("CANNOT TELL", "spool", what, str(directory), fix=f"see {owner(error.filename or directory)}"))
    return entries, findings


def judge(entries: Iterable[Entry], clock: Callable[[], float]) -> list[Finding]:
    """One finding per pending save."""
    return [_finding(entry, clock()) for entry in entries]


def _changed(entry: Entry) -> SourceError | None:
    """What of the pinned copies is not what was handed over."""
    try:
        for file in entry.files:
            entry.check(file)
    except SourceError as error:
        return error
    return None


def _finding(entry: Entry, now_s: float) -> Finding:
    subject = f"{entry.run}@{entry.step}"
    age_s = now_s - entry.saved_s if entry.saved_s else None
    again = f"stagekit teardown --run {entry.run}"
    if entry.dropped is not None:
        return Finding("note", "superseded", f"policy dropped this step: {entry.dropped}", subject, age_s=age_s)
    files = f"{format_count(len(entry.files))} {'file' if len(entry.files) == 1 else 'files'}"
    if spool.is_alive(entry):
        what = f"{files} on the way, sent by a process that is alive" + (f"; its last try failed: {entry.error}" if entry.error else "")
        return Finding("NO", "in flight", what, subject, entry.size_bytes, age_s, f"wait for it, then: {again}")
    if (changed := _changed(entry)) is not None:
        kept = quoted(str(entry.directory))
        fix = f"copy what is of use of {kept}/files, then let go of it: rm -r {kept}"
        return Finding("NO", "failed", f"{files} cannot be sent as they were saved: {changed}", subject, entry.size_bytes, age_s, fix)
    if entry.error is not None:
        what = f"{files} did not reach the bucket: {entry.error}"
        if entry.world_size > 1:
            again += f"; or, if the others never deliver theirs, let go of it: rm -r {quoted(str(entry.directory))}"
        return Finding("NO", "failed", what, subject, entry.size_bytes, age_s, again)
    return Finding("NO", "queued", f"{files} to be sent; the process that saved them is gone", subject, entry.size_bytes, age_s, again)
