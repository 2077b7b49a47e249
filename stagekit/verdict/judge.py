"""May this server be destroyed? The rows brought together."""

from __future__ import annotations

import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from ..config import StoreConfig, home_directory
from ..errors import StagekitError, StoreError
from ..location import Location
from ..mounts import judge as judge_mount
from ..parallel import Beside, each
from ..progress import Message, Subscriber
from ..progress import ignore as nobody
from ..runs import catalog, spool
from ..runs.heartbeat import last_heartbeat
from ..runs.spool import Entry
from ..store import Where
from ..transfer.put import put_object
from ..wrapping.note import Note
from . import files, git, origins, processes, publications, steps, trackers, uploads, wrapped
from .bucket import RunState, look_at_run, mute, unseen
from .durable import Durable
from .files import Found
from .findings import Finding, Verdict, decide
from .finishing import Once, finish, finish_own, finish_wrapped, own_runs
from .last import remember_verdict
from .scope import Judged, Target, find_scope, open_briefly

_AT_ONCE = 32  # stores that do not answer are waited for together


def teardown(
    watch: Iterable[str | os.PathLike[str]] = (),
    runs: Iterable[Where] = (),
    *,
    check: bool = False,
    deep: bool = False,
    ignore: Iterable[str] = (),
    durable: Iterable[str | os.PathLike[str]] = (),
    store: StoreConfig | None = None,
    on_event: Subscriber = nobody,
    clock: Callable[[], float] = time.time,
) -> Verdict:
    """Finish the uploads, then tell whether this server may be destroyed: YES, NO or CANNOT TELL, with reasons and fixes.

    YES means that every file below the watched directories is, by its content, in a checkpoint whose objects the bucket shows with the
    right size, or in a pushed git checkout, or matches one of ``ignore`` (a path below its directory, or a name); that nothing waits in
    the spool; that the checkouts and trackers where trainings were started have nothing of their own; and that nobody writes any more.
    What could not be looked at makes it CANNOT TELL, never YES: a store that is down or refuses, and a scope with nothing in it. NO beats
    CANNOT TELL.

    Without ``watch`` and ``runs`` the scope is what runs recorded on this machine. ``check`` only reads, here and in the bucket;
    without it, saves that a dead process left behind are sent first, and so are those of this process, whose runs stay open. ``deep``
    reads every object again. ``durable`` names volumes that outlive the server: what lies there is no loss. ``store`` is how to reach the
    runs, where it is not as recorded.

    Example::

        verdict = stagekit.teardown(watch=["out"], runs=["s3://bucket/run"])
        print(verdict.answer, [finding.line for finding in verdict.findings])
    """
    judged = find_scope(watch, runs, ignore, durable=durable, store=store)
    on_event(Message("\n".join(judged.scope.lines)))
    return judge(judged, check=check, deep=deep, on_event=on_event, clock=clock)


def judge(
    judged: Judged,
    *,
    check: bool = False,
    deep: bool = False,
    on_event: Subscriber = nobody,
    clock: Callable[[], float] = time.time,
) -> Verdict:
    """The verdict on a scope that ``find_scope`` found. See ``teardown``."""
    findings = list(judged.findings)
    states: dict[str, RunState] = {}
    try:
        _gather(judged, findings, states, check, deep, on_event, clock)
    except OSError as error:
        if isinstance(error, StagekitError) or error.filename is None:
            raise  # it is not about what lies here
        findings.append(files.unreadable(Path(os.fsdecode(error.filename)), error))
    verdict = decide(findings, judged.scope)
    if not check:  # which writes nothing
        remember_verdict(verdict, states, clock(), judged.home)
    return verdict


def _gather(
    judged: Judged,
    findings: list[Finding],
    states: dict[str, RunState],
    check: bool,
    deep: bool,
    on_event: Subscriber,
    clock: Callable[[], float],
) -> None:
    """Finish what waits, then put what is found into ``findings`` and what the runs hold into ``states``, as it is found."""
    durable = judged.durable
    # What hangs (a store, git, a name server) hangs beside the others, so that the answer comes within ten seconds.
    local = Beside(partial(_look_around, judged))
    begun = Beside(partial(_publications, judged))
    spools = [Path(path) for path in judged.scope.spools]
    entries, broken = uploads.pending(spools)
    running, unread = wrapped.noted(judged.home)
    reasons: dict[str, str] = {}
    if not check:
        reached, once = _Reached(states), Once(on_event)
        waited = _finish(judged.targets, entries, reached, once)
        reasons = _finish_wrapped(judged.targets, running, reached, once)
        findings.extend(reached.mute.values())
        entries, broken = uploads.pending(spools)
        waited = waited or bool(running)
        running, unread = wrapped.noted(judged.home)
        if waited:  # for minutes, it may be
            local, begun = Beside(partial(_look_around, judged)), Beside(partial(_publications, judged))
    findings.extend([*unread, *wrapped.judge(running, reasons)])
    findings.extend(durable.excuse(finding, finding.subject) for finding in broken)
    for entry, finding in zip(entries, uploads.judge(entries, clock), strict=True):
        findings.append(durable.excuse(finding, entry.directory))
    to_see = [target for target in judged.targets if target.url not in states]
    for state in each(lambda target: look_at_run(target.open(), clock, deep=deep, on_event=on_event), to_see, threads=_AT_ONCE):
        states[state.url] = state
    for state in states.values():
        findings.extend(state.findings)
    for target in judged.targets:
        findings.extend(_on_this_machine(target, durable))
    beats = [beat for url in states if (beat := last_heartbeat(url, judged.home)) is not None]
    findings.extend(steps.judge(states, [entry for entry in entries if not durable.holds(entry.directory)], beats))
    findings.extend(_local(judged, local.get(), states, clock, on_event))
    for target in judged.targets:
        findings.extend(_never_saved(target, states, judged))
    findings.extend(begun.get())
    findings.extend(_origins(judged, states))
    findings.extend(processes.judge(list(files.existing(judged.roots))))
    living = {note.url for note in running if not (note.is_over() or note.process.is_dead())}  # what they have started is no news
    findings.extend(processes.survivors({target.url for target in judged.targets} - living))
    nothing_told = all(finding.weight == "note" for finding in findings)
    if nothing_told and not (judged.roots or judged.targets or entries):
        fix = "name what to judge: stagekit teardown --watch DIR --run RUN"
        findings.append(Finding("CANNOT TELL", "scope", "nothing is watched and no run is recorded", "this machine", fix=fix))


@dataclass(slots=True)
class _Reached:
    """Which runs something can be sent to, each asked once. Those that cannot be looked at are in ``states``, so that they are not asked
    again; those that take no writes are ``mute``."""

    states: dict[str, RunState]
    mute: dict[str, Finding] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    def __call__(self, targets: Iterable[Target]) -> list[Target]:
        """Those of ``targets`` that answer. A store that does not, or takes nothing, costs the patience of ``open_briefly``."""
        new = [target for target in targets if target.url not in self.asked and target.url not in self.states]
        for target, (unseen_for, mute_for) in zip(new, each(_reach, new, threads=_AT_ONCE), strict=True):
            self.asked.add(target.url)
            if unseen_for is not None:
                self.states[target.url] = unseen(target.url, unseen_for)
            elif mute_for is not None:
                self.mute[target.url] = mute(target.url, mute_for)
        return [target for target in targets if target.url not in self.states and target.url not in self.mute]


def _finish(targets: Iterable[Target], entries: list[Entry], reached: _Reached, on_event: Subscriber) -> bool:
    """Send what dead processes left, and what this one has pending. Returns whether there was something to wait for."""
    by_url = {target.url: target for target in targets}
    left: dict[str, list[Entry]] = {}
    for entry in entries:
        if not spool.is_alive(entry):
            left.setdefault(entry.run, []).append(entry)
    own = {run.url: run for run in own_runs()}
    # A run that nobody named is sent all the same: its saves would be lost with this server.
    to_send = {url: by_url.get(url) or Target(url, url, left[url][0].store if url in left else own[url]._config) for url in {**left, **own}}
    able = reached(list(to_send.values()))
    for target in able:
        if target.url in own:
            finish_own(own[target.url], on_event)
        if target.url in left:
            finish(target, left[target.url], on_event)
    return bool(able)


def _finish_wrapped(targets: Iterable[Target], running: Iterable[Note], reached: _Reached, on_event: Subscriber) -> dict[str, str]:
    """Finish each ``stagekit run`` that was killed, unless its run is out of reach. Returns what kept some of it here, by attempt."""
    reasons: dict[str, str] = {}
    by_url = {target.url: target for target in targets}
    for note in running:
        target = by_url.get(note.url) or Target(note.url, note.url, note.store)
        if note.is_over() and reached([target]):
            reasons[note.attempt] = finish_wrapped(note, target, on_event)
    return reasons


def _reach(target: Target) -> tuple[StagekitError | None, StagekitError | None]:
    """Why a run cannot be looked at, and why nothing can be sent to it, as long as that may pass: a refusal is told by what is refused."""
    try:
        store = target.open()
        catalog.attempts(store)
    except StagekitError as error:
        return error, None
    key = f".stagekit-teardown-{uuid.uuid4().hex}"
    try:
        put_object(store, key, b"")
    except StagekitError as error:
        return None, error if isinstance(error, StoreError) and error.transient else None
    finally:
        with suppress(StagekitError):
            store.delete(key)
    return None, None


def _look_around(judged: Judged) -> Found:
    """What lies on this machine. Reads no bucket."""
    own = [home_directory() if judged.home is None else judged.home, *map(Path, judged.scope.spools)]
    looking = files.Looking(judged.roots, judged.scope.ignored, explicit=judged.explicit, own=own, home=judged.home)
    looking.watched()
    looking.working(judged.working)
    return looking.found


def _local(judged: Judged, found: Found, states: dict[str, RunState], clock: Callable[[], float], on_event: Subscriber) -> list[Finding]:
    """The rows about what lies on this machine: files, checkouts, trackers."""
    durable = judged.durable
    findings = [durable.excuse(finding, finding.subject) for finding in found.findings]
    findings.extend(files.compare(found, states.values(), durable, clock=clock, on_event=on_event))
    for checkout in found.checkouts.values():
        findings.extend(
            durable.excuse(finding, checkout.top) for finding in git.judge(checkout, judged.ignores, clock(), partial(_outlives, durable))
        )
    findings.extend(durable.excuse(finding, finding.subject) for finding in trackers.judge(found.wandb, judged.ignores, clock()))
    return findings


def _publications(judged: Judged) -> list[Finding]:
    """The rows about data sets that were begun here."""
    judge_one = partial(publications.judge, ignores=judged.ignores, open_store=open_briefly, durable=judged.durable)
    return [finding for told in each(judge_one, judged.publications, threads=_AT_ONCE) for finding in told]


def _origins(judged: Judged, states: dict[str, RunState]) -> list[Finding]:
    """The rows about what checkpoints need besides themselves. Asked for together."""
    asked: list[Callable[[], list[Finding]]] = []
    for target in judged.targets:
        state = states.get(target.url)
        if state is not None and state.newest is not None:
            asked.append(partial(origins.judge_base_model, state, judged.ignores, open_briefly, target.store, home=judged.home))
            asked.append(partial(origins.judge_dataset, state, target.datasets, judged.ignores, open_briefly, target.store, judged.durable))
    return [finding for told in each(lambda ask: ask(), asked, threads=_AT_ONCE) for finding in told]


def _never_saved(target: Target, states: dict[str, RunState], judged: Judged) -> list[Finding]:
    """A run without a checkpoint, whose training had a directory to save into: it saved somewhere else, or not at all."""
    state = states.get(target.url)
    there = [path for path in files.existing(target.watched) if str(path) in judged.scope.watched and str(path) not in judged.explicit]
    if state is None or not (state.seen and state.is_empty) or not there or judged.ignores(target.url):
        return []
    seen = "files were" if state.has_logs or any(files.holds_a_file(path) for path in there) else "no file was ever"
    what = f"{seen} seen below it, and its run has no checkpoint: the training may have saved to another directory"
    fix = (
        f"find where it saved, and name that: stagekit teardown --run {target.url} --watch DIR; "
        f"or, if there was nothing to save: stagekit teardown --ignore {target.url}"
    )
    return [Finding("CANNOT TELL", "watched", what, str(there[0]), fix=fix)]


def _outlives(durable: Durable, directory: Path) -> bool:
    """Whether ``directory`` lies on something that may stay when this machine goes: a volume that was named so, or no disk of its own."""
    return durable.holds(directory) or judge_mount(directory).kind != "fine"


def _on_this_machine(target: Target, durable: Durable) -> list[Finding]:
    """A run in a directory of this machine's own disk: what was saved there goes with the server. So may a store that answers here."""
    location = Location.parse(target.url)
    if location.scheme == "s3" and (endpoint := StoreConfig.in_force(target.store, target.url)) is not None:
        host = urlsplit(endpoint.endpoint_url or "").hostname or ""
        if host == "localhost" or host.startswith("127.") or host == "::1":
            what = f"its store answers at {endpoint.endpoint_url}: if that runs on this machine, and is no tunnel, it goes with it"
            return [Finding("note", "disk", what, target.url)]
    if not location.is_directory or durable.holds(location.local_path) or not Path(location.local_path).exists():
        return []
    mount = judge_mount(location.local_path)
    if mount.kind != "fine":
        return [Finding("note", "disk", f"the run lies in a directory, which must outlive this server: {mount.reason}", target.url)]
    fix = f"save to a bucket; or, if its volume outlives this server: stagekit teardown --durable {shlex.quote(str(location.local_path))}"
    return [Finding("NO", "disk", "the run lies on a disk of this machine, which goes with it", target.url, fix=fix)]
