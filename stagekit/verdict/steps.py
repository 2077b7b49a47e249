"""The row about progress: the newest step that is safe against the newest one that this machine has, saved or only trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..processes import Process
from ..runs.heartbeat import Heartbeat
from ..runs.spool import Entry
from ..units import counted, format_count, format_duration
from .bucket import RunState
from .findings import Finding


def judge(states: Mapping[str, RunState], entries: Iterable[Entry], beats: Iterable[Heartbeat] = ()) -> list[Finding]:
    """What would be lost of each run, in steps and in time. Only runs whose bucket could be seen are judged."""
    newest: dict[str, Entry] = {}
    for entry in entries:
        if entry.dropped is None and (entry.run not in newest or entry.step > newest[entry.run].step):
            newest[entry.run] = entry
    findings = []
    for run, entry in newest.items():
        state = states.get(run)
        if state is None or not state.seen or not _is_ahead(entry.step, state):
            continue
        what = f"step {format_count(entry.step)} is here and {_loss(entry.step, entry.saved_s, state)}"
        findings.append(Finding("NO", "steps", what, run, fix=f"stagekit teardown --run {run}"))
    for beat in beats:
        state = states.get(beat.url)
        saved = newest[beat.url].step if beat.url in newest else -1
        if state is not None and state.seen and beat.step > saved and _is_ahead(beat.step, state):
            findings.append(_unsaved(beat, state))
    return findings


def _unsaved(beat: Heartbeat, state: RunState) -> Finding:
    """What a process has trained and not saved. With the process it is gone, whatever becomes of this server."""
    loss = _loss(beat.step, beat.time_s, state)
    here = Process.current()
    if beat.process == here or (beat.process.can_be_asked(seen_from=here) and not beat.process.is_dead(seen_from=here)):
        what = f"{beat.process} has trained step {format_count(beat.step)} and {loss}"
        fix = f"let it save and end, then: stagekit teardown --run {beat.url}"
        return Finding("NO", "steps", what, beat.url, fix=fix)
    if here.boot_id and beat.process.boot_id == here.boot_id and not beat.process.is_dead(seen_from=here):
        what = (
            f"{beat.process} had trained step {format_count(beat.step)} in another container, and whether it goes on cannot be seen; {loss}"
        )
        fix = "look in that container, or end the training there"
        return Finding("CANNOT TELL", "steps", what, beat.url, fix=fix)
    what = f"{beat.process} had trained step {format_count(beat.step)} when it ended, and what it did not save is gone already; {loss}"
    return Finding("note", "steps", what, beat.url)


def _is_ahead(step: int, state: RunState) -> bool:
    return state.newest is None or step > state.newest.step


def _loss(step: int, at_s: float, state: RunState) -> str:
    safe = state.newest
    if safe is None:
        return "no checkpoint is safe: you lose everything since the start"
    lost = f"step {format_count(safe.step)} is the newest that is safe: you lose {counted(step - safe.step, 'step')}"
    if safe.manifest.saved_s is not None and at_s > safe.manifest.saved_s:
        lost += f", {format_duration(at_s - safe.manifest.saved_s)}"
    return lost
