"""May this server be destroyed? The rows brought together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ..config import StoreConfig
from ..errors import StagekitError
from ..parallel import each
from ..progress import Message, Subscriber
from ..progress import ignore as nobody
from ..runs import catalog, spool
from ..runs.spool import Entry
from ..store import Where
from . import files, processes, steps, uploads
from .bucket import RunState, look_at_run, unseen
from .findings import Finding, Verdict, decide
from .finishing import finish
from .scope import Judged, Target, find_scope


def teardown(
    watch: Iterable[str | os.PathLike[str]] = (),
    runs: Iterable[Where] = (),
    *,
    check: bool = False,
    ignore: Iterable[str] = (),
    store: StoreConfig | None = None,
    on_event: Subscriber = nobody,
    clock: Callable[[], float] = time.time,
) -> Verdict:
    """Finish the uploads, then tell whether this server may be destroyed: YES, NO or CANNOT TELL, with reasons and fixes.

    YES means that every file below the watched directories is, by its content, in a checkpoint whose objects the bucket shows with the
    right size, or matches one of ``ignore`` (a path below its directory, or a name); that nothing waits in the spool; and that nobody
    writes any more. What could not be looked at makes it CANNOT TELL, never YES: a store that is down or refuses, and a scope with nothing
    in it. NO beats CANNOT TELL.

    Without ``watch`` and ``runs`` the scope is what runs recorded on this machine. ``check`` only reads, here and in the bucket;
    without it, saves that a dead process left behind are sent first. ``store`` is how to reach the runs, where it is not as recorded.

    Example::

        verdict = stagekit.teardown(watch=["out"], runs=["s3://bucket/run"])
        print(verdict.answer, [finding.line for finding in verdict.findings])
    """
    judged = find_scope(watch, runs, ignore, store=store)
    on_event(Message("\n".join(judged.scope.lines)))
    return judge(judged, check=check, on_event=on_event, clock=clock)


def judge(judged: Judged, *, check: bool = False, on_event: Subscriber = nobody, clock: Callable[[], float] = time.time) -> Verdict:
    """The verdict on a scope that ``find_scope`` found. See ``teardown``."""
    findings = list(judged.findings)
    spools = [Path(path) for path in judged.scope.spools]
    entries, broken = uploads.pending(spools)
    states: dict[str, RunState] = {}
    if not check:
        states = _finish(judged.targets, entries, on_event)
        entries, broken = uploads.pending(spools)
    findings.extend(broken)
    findings.extend(uploads.judge(entries, clock))
    to_see = [target for target in judged.targets if target.url not in states]
    for state in each(lambda target: look_at_run(target.open(), clock), to_see, threads=8):
        states[state.url] = state
    for state in states.values():
        findings.extend(state.findings)
    findings.extend(steps.judge(states, entries))
    findings.extend(
        files.judge(judged.roots, judged.scope.ignored, states.values(), explicit=judged.explicit, clock=clock, on_event=on_event)
    )
    findings.extend(processes.judge(list(files.existing(judged.roots))))
    if not (judged.roots or judged.targets or entries or findings):
        fix = "name what to judge: stagekit teardown --watch DIR --run RUN"
        findings.append(Finding("CANNOT TELL", "scope", "nothing is watched and no run is recorded", "this machine", fix=fix))
    return decide(findings, judged.scope)


def _finish(targets: Iterable[Target], entries: list[Entry], on_event: Subscriber) -> dict[str, RunState]:
    """Send what dead processes left. Returns the state of those runs whose store cannot be reached, which are not asked again."""
    states: dict[str, RunState] = {}
    by_url = {target.url: target for target in targets}
    left: dict[str, list[Entry]] = {}
    for entry in entries:
        if not spool.is_alive(entry):
            left.setdefault(entry.run, []).append(entry)
    for url, waiting in left.items():
        # A run that nobody named is sent all the same: its saves would be lost with this server.
        target = by_url.get(url) or Target(url, url, waiting[0].store)
        try:
            catalog.attempts(target.open())
        except StagekitError as error:
            states[url] = unseen(url, error)
            continue
        finish(target, waiting, on_event)
    return states
