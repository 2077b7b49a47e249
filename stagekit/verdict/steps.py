"""The row about progress: the newest step that is safe against the newest one that this machine has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..runs.spool import Entry
from ..units import format_count, format_duration
from .bucket import RunState
from .findings import Finding


def judge(states: Mapping[str, RunState], entries: Iterable[Entry]) -> list[Finding]:
    """What would be lost of each run, in steps and in time. Only runs whose bucket could be seen are judged."""
    newest: dict[str, Entry] = {}
    for entry in entries:
        if entry.dropped is None and (entry.run not in newest or entry.step > newest[entry.run].step):
            newest[entry.run] = entry
    findings = []
    for run, entry in newest.items():
        state = states.get(run)
        if state is None or not state.seen:
            continue
        safe = state.newest
        if safe is None:
            what = f"step {format_count(entry.step)} is here and no checkpoint is safe: you lose everything since the start"
        elif safe.step < entry.step:
            what = (
                f"step {format_count(entry.step)} is here and step {format_count(safe.step)} is the newest that is safe: "
                f"you lose {format_count(entry.step - safe.step)} steps"
            )
            if safe.manifest.saved_s is not None and entry.saved_s > safe.manifest.saved_s:
                what += f", {format_duration(entry.saved_s - safe.manifest.saved_s)}"
        else:
            continue
        findings.append(Finding("NO", "steps", what, run, fix=f"stagekit teardown --run {run}"))
    return findings
