"""The uploader: one background thread that brings pending saves into the bucket, files first, the manifest last.

A save counts as *verified* when every file was compared with what the store holds and the manifest was, too. Until then its local copies
stay pinned, across any number of failures, processes and reboots.

What is passing (no answer, 5xx, slow down) is tried again by itself, later and later. What is not (refused, no such bucket) is tried again
when there is a reason to: a new save, or somebody waiting. Another machine that took the run over ends it: nothing more is written.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..errors import CheckpointError, Conflict, Fenced, NotFound, NoValidCheckpoint, SourceError, StagekitError, StoreError, UploadFailed
from ..parallel import each
from ..processes import Process
from ..progress import Event, Message, Progress, Stage, Subscriber, ignore
from ..store.base import Store, exists
from ..transfer.put import PART_SIZE, file_sha256, put_file, put_object
from ..units import format_duration, format_size
from . import catalog, commits, lease, retention
from .backlog import BACKLOG, giving_way, is_over
from .layout import BESIDE, RUN_JSON, Checkpoint, CheckpointManifest, CheckpointName, FileRecord, PartRecord, RunRecord, SupersededRecord
from .spool import Entry, PinnedFile, Spool

AT_ONCE = 8  # small files of one checkpoint on their way together
_PRUNE_AT_LEAST = 8  # commits: a backlog that never ends must not fill the bucket with what the policy drops
LARGE = 64 * 2**20
_LISTED = 8  # steps in one sentence

UploadState = Literal["pending", "sending", "verified", "superseded", "unsaved"]


class Upload:
    """One save on its way. It is safe once ``state`` is ``"verified"``, not before."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.state: UploadState = "pending"
        self.error: Exception | None = None
        self._done = threading.Event()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until this save is verified (true), or was dropped by policy or lost, or ``timeout_s`` has passed (false)."""
        self._done.wait(timeout_s)
        return self.state == "verified"

    def _settle(self, state: UploadState, error: Exception | None = None) -> None:
        self.state, self.error = state, error
        self._done.set()

    def __repr__(self) -> str:
        return f"<Upload of step {self.step}: {self.state}>"


@dataclass(slots=True, eq=False)
class _Job:
    entry: Entry
    upload: Upload
    adopted: bool
    failures: int = 0
    blocked: bool = False
    error: Exception | None = None
    sent_bytes: int = 0
    told: str = ""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What one process knows about its run. ``pending`` are steps that are not in the bucket yet, oldest first; ``sent_bytes`` is what of
    them is there."""

    url: str
    generation: int | None
    verified: int | None
    pending: tuple[int, ...]
    pending_bytes: int
    sending: int | None
    superseded: tuple[int, ...]
    unsaved: tuple[tuple[int, str], ...]
    errors: tuple[tuple[int, str], ...]
    sent_bytes: int = 0

    @property
    def synced(self) -> bool:
        """Whether the bucket has everything that was handed over and was to be kept."""
        return not self.pending and not self.unsaved


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """How pending saves are treated. ``retry_after_s`` tells the pause after so many passing failures in a row."""

    policy: retention.Policy = field(default_factory=retention.Policy)
    backlog: Literal["coalesce", "wait"] = "coalesce"
    disk_bytes: int | None = None
    rank: int = 0
    world_size: int = 1
    parts_timeout_s: float = 600.0
    retry_after_s: Callable[[int], float] = lambda failures: min(300.0, 5.0 * 2 ** (failures - 1))
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    threads: int = 4


class Uploader:
    """Sends the entries of one spool to one run. Making it starts nothing; the first ``add`` starts the thread, a daemon."""

    def __init__(
        self, spool: Spool, url: str, open_store: Callable[[], Store], settings: SyncSettings, on_event: Subscriber = ignore
    ) -> None:
        self._spool = spool
        self._url = url
        self._open_store = open_store
        self._settings = settings
        self._subscriber = on_event
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._sending: _Job | None = None
        self._dropping: list[Entry] = []
        self._dropped: list[Entry] = []
        self._superseded: list[int] = []
        self._unsaved: list[tuple[int, Exception]] = []
        self._changed_ones: list[Entry] = []  # of dead processes, whose files are not what was handed over
        self._sticky: list[tuple[int | None, Exception]] = []  # with the step it is about
        self._fenced: Fenced | None = None
        self._lease: lease.Lease | None = None
        self._joined: tuple[int, str] | None = None
        self._counter = 0
        self._saves: Counter[int] = Counter()  # by step
        self._verified: CheckpointName | None = None
        self._has_own = False
        self._safe_since_s: float = settings.clock()
        self._sent_s: float | None = None
        self._noted: CheckpointName | None = None
        self._commits = 0
        self._unpruned = 0
        self._recording = threading.Lock()
        self._known: dict[CheckpointName, Checkpoint] | None = None
        self._protected: set[CheckpointName] = set()
        self._retry_at: float | None = None
        self._records_blocked = False
        self._newest_first = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()

    # -------------------------------------------------------------------------------------------------------- handing over

    def next_counter(self) -> int:
        """A number for the next save, unique within this process."""
        with self._changed:
            self._counter += 1
            return self._counter

    def add(self, entry: Entry, *, adopted: bool = False) -> Upload:
        """Queue a pinned save. Returns at once, or with ``backlog="wait"`` when no more than ``BACKLOG`` others are pending."""
        upload = Upload(entry.step)
        dropped: list[Entry] = []
        news: list[Message] = []
        with self._changed:
            if entry.dropped is not None:
                upload._settle("superseded")
                self._superseded.append(entry.step)
                dropped = [entry]
            else:
                self._jobs.append(_Job(entry, upload, adopted))
                if self._settings.backlog == "coalesce" and not adopted:
                    dropped, news = self._coalesce()
            self._dropping.extend(dropped)
            self._wake()
            self._start()
        for message in news:
            self._on_event(message)
        if dropped:
            try:
                threading.Thread(target=self._drop, args=(dropped,), name="stagekit-drop", daemon=True).start()
            except RuntimeError:  # the interpreter ends (Python 3.12 and later)
                self._drop(dropped)
        if self._settings.backlog == "wait" and not adopted:
            self._wait_for_room()
        return upload

    def lose(self, step: int, error: Exception) -> None:
        """Note that ``step`` could not be pinned, for ``unsynced`` to tell, until a later one is safe."""
        with self._changed:
            self._unsaved.append((step, error))

    def adopt(self, entries: Iterable[Entry]) -> None:
        """Queue what dead processes left. All of it is known before the first is sent, since its place depends on the others."""
        with self._changed:  # which the thread needs to begin
            for entry in entries:
                self.add(entry, adopted=True)

    def _coalesce(self) -> tuple[list[Entry], list[Message]]:
        """Drop what is to give way (``backlog``), and say so. A fenced process keeps all that its disk may hold: nothing of it is sent."""
        disk, bound = self._settings.disk_bytes, BACKLOG if self._fenced is None else None
        sending = self._sending.entry if self._sending is not None else None
        # What a dead process left is not ahead of the network, and the last process here has promised that it is sent.
        own = [job.entry for job in self._jobs if not job.adopted]
        room = disk if disk is None else max(0, disk - sum(job.entry.size_bytes for job in self._jobs if job.adopted))
        dropped = giving_way(own, sending, self._settings.policy, room, bound=bound)
        news: list[Message] = []
        for job in [job for job in self._jobs if any(job.entry is entry for entry in dropped)]:
            self._jobs.remove(job)
            job.entry.dropped = "dropped before it was sent, since newer saves were waiting"
            self._spool.save(job.entry, durable=False)
            job.upload._settle("superseded")
            self._superseded.append(job.entry.step)
        if disk is not None and is_over(self._entries, disk, bound=None) and "disk" not in self._told:
            self._told.add("disk")
            held = format_size(sum(entry.size_bytes for entry in self._entries))
            news.append(
                Message(f"pending saves hold {held}, over the budget of {format_size(disk)}; all of them are to be kept", "warning")
            )
        if dropped:
            what = about([entry.step for entry in dropped], "is", "are")
            why = (
                f"more than {BACKLOG} saves wait to be sent"
                if bound is not None and len(own) > bound
                else f"pending saves hold more than {format_size(disk or 0)}"
            )
            news.append(Message(f"{why}: {what} dropped, the newer ones are kept", "warning"))
        return dropped, news

    @property
    def _entries(self) -> list[Entry]:
        return [job.entry for job in self._jobs]

    def _wait_for_room(self) -> None:
        with self._changed:
            waiting = len(self._jobs)
            full = is_over(self._entries, self._settings.disk_bytes) and waiting > 1
        if full:
            disk = f", or {format_size(self._settings.disk_bytes)}" if self._settings.disk_bytes is not None else ""
            self._on_event(Message(f"waiting for the network: {waiting} saves are pending, the bound is {BACKLOG}{disk}", "warning"))
            with self._changed:
                self._changed.wait_for(
                    lambda: not is_over(self._entries, self._settings.disk_bytes) or len(self._jobs) == 1 or self._is_stuck()
                )

    def _drop(self, entries: list[Entry]) -> None:
        """Hash what policy dropped, so that its other local copies can be told to be no loss, then let go of the pinned files."""
        for entry in entries:
            for file in entry.files:
                if file.sha256 is None:
                    with suppress(OSError, SourceError):
                        entry.check(file)
                        file.sha256 = file_sha256(entry.file_path(file))
            self._spool.save(entry)
            self._spool.strip(entry)
            self._on_event(Stage("checkpoint.dropped", str(entry.step)))
            with self._changed:
                self._dropping.remove(entry)
                self._dropped.append(entry)
                self._changed.notify_all()

    # -------------------------------------------------------------------------------------------------------- waiting

    def drain(self, timeout_s: float | None = None, *, newest_first: bool = False, left_s: Callable[[], float] = lambda: math.inf) -> bool:
        """Wait until nothing is pending, nothing that is pending can be sent, or the time is over. True when nothing is pending.

        What was refused before is tried again once. ``left_s`` tells how much time there is by now, as a signal may change that.
        """
        deadline = None if timeout_s is None else self._settings.monotonic() + timeout_s
        with self._changed:
            self._newest_first = self._newest_first or newest_first
            self._wake()
            if self._jobs or self._dropped or self._dropping:
                self._start()
            total = left = len(self._jobs)
        shown = -1
        while True:
            if left != shown and (left or total):  # nothing to send is nothing to tell
                shown = left
                self._on_event(Progress("sending checkpoints", max(total - left, 0), total, unit="checkpoints", finished=not left))
            with self._changed:
                pause = min(1.0, left_s(), math.inf if deadline is None else deadline - self._settings.monotonic())
                if self._is_idle() or self._is_stuck() or pause <= 0:
                    return not self._jobs
                self._changed.wait(pause)
                left = len(self._jobs)

    def hurry(self) -> None:
        """Send the newest save first from now on, the smallest file first; there may not be time for the others."""
        self._newest_first = True

    def stop(self, timeout_s: float) -> None:
        """End the thread after the file it is sending; what is pending stays on disk."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _is_idle(self) -> bool:
        records = bool(self._dropping) or (bool(self._dropped) and not self._records_blocked and self._fenced is None)
        return not self._jobs and not records and self._sending is None  # it may still be removing what the policy drops

    def _is_stuck(self) -> bool:
        """Whether waiting is useless: all that is pending was refused since somebody asked for it."""
        return self._sending is None and bool(self._jobs) and all(job.blocked or self._fenced is not None for job in self._jobs)

    def _wake(self) -> None:
        self._retry_at = None
        self._records_blocked = False
        for job in self._jobs:
            job.blocked = False
        self._changed.notify_all()

    # -------------------------------------------------------------------------------------------------------- telling

    def raise_sticky(self) -> None:
        """Raise what went wrong in the background and will not heal by itself, once for each thing that went wrong."""
        with self._changed:
            step, error = (None, self._fenced) if self._fenced is not None else next(iter(self._sticky), (None, None))
            self._sticky = []
            dropped = step in self._superseded
        if error is not None:
            raise error if step is None else _raised(error, step, self._url, dropped=dropped)

    def unsynced(self) -> UploadFailed | None:
        """The error that says which steps are not in the bucket, why, and where their local copies are; ``None`` when all are."""
        with self._changed:
            parts = []
            waiting = [job for job in self._jobs if not isinstance(job.error, _Undelivered)]
            kept = {job.entry.directory for job in waiting if job.entry.directory.is_dir()}
            if left := [job for job in waiting if job.entry.directory in kept]:
                reason = self._fenced or next((job.error for job in left if job.error is not None), None)
                what = about([job.entry.step for job in left], "is", "are")
                parts.append(
                    f"{what} not in {self._url} yet; the local copies are kept in {self._spool.directory} and the next start, or "
                    f"`stagekit teardown`, sends them" + (f". Reason: {reason}" if reason is not None else "")
                )
            if gone := [job for job in waiting if job.entry.directory not in kept]:
                what = about([job.entry.step for job in gone], "is", "are")
                parts.append(f"{what} not in {self._url}, and what was kept of that in {self._spool.directory} is not there any more")
            parts.extend(
                f"{job.error}; what is here of it is kept in {job.entry.directory}. It is committed once that rank's part is there "
                "(`stagekit teardown` on its machine, then here), and given up when a later step is safe"
                for job in self._jobs
                if isinstance(job.error, _Undelivered)
            )
            parts.extend(str(error) for _, error in self._lost())
            return UploadFailed("; ".join(parts)) if parts else None

    def _lost(self) -> list[tuple[int, Exception]]:
        """Saves that changed under our hands and that no newer verified one has made up for."""
        return [(step, error) for step, error in self._unsaved if self._verified is None or self._verified.step < step]

    def status(self) -> RunStatus:
        """A snapshot."""
        with self._changed:
            return RunStatus(
                url=self._url,
                generation=self._lease.generation if self._lease is not None else None,
                verified=self._verified.step if self._verified is not None else None,
                pending=tuple(job.entry.step for job in self._jobs),
                pending_bytes=sum(job.entry.size_bytes for job in self._jobs),
                sending=self._sending.entry.step if self._sending is not None else None,
                superseded=tuple(self._superseded),
                unsaved=tuple((step, str(error)) for step, error in self._lost()),
                errors=tuple((job.entry.step, str(job.error)) for job in self._jobs if job.error is not None),
                sent_bytes=sum(job.sent_bytes for job in self._jobs),
            )

    def at_risk(self) -> str:
        """What the loss of this machine would cost now, in words."""
        return f"a crash now loses {format_duration(max(0.0, self._settings.clock() - self._safe_since_s))}"

    @property
    def sent_s(self) -> float | None:
        """How long it took to send the last save and to verify it; ``None`` before the first."""
        return self._sent_s

    @property
    def held(self) -> lease.Lease | None:
        """The lease this process holds, if it has written."""
        return self._lease

    def prune_no_more(self) -> None:
        """Remove nothing from now on, whatever the policy asks for."""
        self._settings = replace(self._settings, policy=retention.Policy())

    def protect(self, name: CheckpointName) -> None:
        """Never prune ``name``: a training resumed from it."""
        self._protected.add(name)

    def _on_event(self, event: Event) -> None:
        """Tell the subscriber. One that raises must not cost a checkpoint: it is called no more, and its error raised at the next save."""
        try:
            self._subscriber(event)
        except Exception as error:
            with self._changed:
                self._subscriber = ignore
                self._sticky.append((None, error))

    # -------------------------------------------------------------------------------------------------------- owning

    def session(self) -> tuple[int, str]:
        """This process's generation and owner, taken now when it has none: what the other ranks of this training must ``join``."""
        with self._changed:
            held = self._joined or ((self._lease.generation, self._lease.owner) if self._lease is not None else None)
        if held is None:
            owned = self._take(self._open_store())
            held = (owned.generation, owned.owner)
        self._joined = held
        return held

    @property
    def generation(self) -> int:
        """The generation that was taken or joined; 0 before."""
        if self._joined is not None:
            return self._joined[0]
        return self._lease.generation if self._lease is not None else 0

    @property
    def joined(self) -> bool:
        """Whether several ranks save under one session."""
        return self._joined is not None

    def name_for(self, step: int) -> CheckpointName | None:
        """The name of a save of several ranks, which is the same for all of them; others get theirs when they are sent.

        It counts the saves of this step alone, so that a rank that left out another step still meets the others here. It is in the record
        from the first moment: whoever finishes what a killed rank 0 left must look where the others have delivered.
        """
        if self._joined is None:
            return None
        with self._changed:
            self._saves[step] += 1
            return CheckpointName(self._joined[0], step, self._saves[step], self._joined[1])

    def pinned(self, entry: Entry) -> None:
        """Tell that an entry is pinned: from now on a killed process loses nothing of it."""
        self._on_event(Stage("checkpoint.pinned", str(entry.step)))

    def join(self, session: tuple[int, str]) -> None:
        """Save under the generation and owner that rank 0 has taken."""
        self._joined = session

    def _own(self, store: Store, job: _Job) -> lease.Lease:
        if self._lease is not None:
            return self._lease
        if job.adopted:
            self._refuse_to_disturb(store, job.entry)
        return self._take(store)

    def _take(self, store: Store) -> lease.Lease:
        taken, before = lease.take(store, self._spool.session, Process.current(), clock=self._settings.clock)
        with self._changed:
            self._lease = taken
            for job in self._jobs:
                job.blocked = job.blocked and not job.adopted  # what was no reason to take the run over may be sent now
        if before is not None and not before.process.is_dead():
            self._on_event(
                Message(
                    f"{self._url} was last written by {before.process} (generation {before.generation}), which did not say that it has "
                    "finished. This process takes over; if the other one still trains, its next checkpoint will be refused",
                    "warning",
                )
            )
        create(store, self._settings.clock)
        self._on_event(Stage("checkpoint.leased", str(taken.generation)))
        return taken

    def _refuse_to_disturb(self, store: Store, entry: Entry) -> None:
        """A save left by a dead process is no reason to take a run away from a machine that may be training."""
        owners = lease.look(store)
        if owners.newest is None or owners.closed or owners.newest[1] in (entry.origin, entry.name.owner if entry.name else None):
            return
        other = lease.read_lease(store, *owners.newest)
        if not other.process.is_dead():
            raise Fenced(
                f"step {entry.step} was left by a process that ended here; since then {other.process} (generation {other.generation}) "
                f"writes to {self._url}, so it is not sent. Its local copy is kept in {entry.directory}"
            )

    def _next(self, held: lease.Lease, entry: Entry) -> CheckpointName:
        return CheckpointName(held.generation, entry.step, entry.counter, held.owner)

    def _place(self, store: Store, held: lease.Lease) -> None:
        """Name all saves of dead processes at once, and durably, before the first of them is sent.

        So the next process, should this one be killed in between, goes on as was decided here: the later ones continue the earlier ones,
        although those come into the bucket under this process's generation.
        """
        with self._changed:
            left = [job.entry for job in self._jobs if job.adopted and job.entry.rank == 0]
        entries = [entry for entry in left if entry.name is None]
        if not entries:
            return
        begun = [entry.name for entry in left if entry.name is not None]
        try:
            latest = catalog.latest(store)
            newest = latest.name if latest is not None else None
        except NoValidCheckpoint:
            newest = None  # whatever is there is damaged, so that this is the best there is
        taken: dict[str, int] | None = None
        beside: list[int] = []
        for entry in entries:
            if (later := _later_of_its_own(entry, begun)) is not None:
                name = CheckpointName(later.generation, entry.step, entry.counter, entry.origin)
            elif _continues(entry, newest, None if self._has_own else held.owner):
                entry.counter = self.next_counter()
                name = newest = self._next(held, entry)
            else:
                # A leftover must not become newer than what another machine has trained since, nor than a later step of its own process.
                if taken is None:
                    taken = {owner: generation for generation, owner in sorted(lease.owners(store))}
                name = CheckpointName(taken.get(entry.origin, entry.base), entry.step, entry.counter, entry.origin)
                beside.append(entry.step)
                entry.identity = {**entry.identity, BESIDE: 1}
            with self._changed:  # `_coalesce` may drop one meanwhile, and writes the same record
                entry.name = name
                self._spool.save(entry)
        if beside:
            assert newest is not None  # else there is nothing to lie beside
            self._on_event(
                Message(
                    f"{about(beside, 'was', 'were')} left by a process that ended here, and {self._url} has gone on to step {newest.step} "
                    f"without; what was left is kept there beside it, and step {newest.step} stays the newest",
                    "warning",
                )
            )

    # -------------------------------------------------------------------------------------------------------- the thread

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._loop, name="stagekit-upload", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._sending = None
                self._changed.notify_all()
                while not self._closed and not self._is_work():
                    self._changed.wait(self._pause())
                if self._closed:
                    return
                job = self._sending = self._pick()
                if job is not None:
                    job.upload.state = "sending"
            if job is not None:
                began_s = self._settings.monotonic()
                try:
                    self._send(job)
                    self._sent_s = self._settings.monotonic() - began_s
                except _Preempted:
                    continue  # a newer save goes first; what was sent of this one stays
                except Exception as error:  # whatever it is, it must surface at the next call and not die with this thread
                    self._failed(job, error)
                    continue
                self._unpruned += 1
                if not self._is_work() or self._unpruned >= _PRUNE_AT_LEAST:  # what waits to be sent goes first
                    self._prune()
                    self._unpruned = 0
            self._record_dropped()

    def _is_work(self) -> bool:
        if self._fenced is not None or (self._retry_at is not None and self._settings.monotonic() < self._retry_at):
            return False
        return any(not job.blocked for job in self._jobs) or (bool(self._dropped) and not self._jobs and not self._records_blocked)

    def _pause(self) -> float | None:
        """How long to sleep unless woken: to the next try, or for ever when there is none."""
        left = (self._retry_at or 0.0) - self._settings.monotonic()
        return left if left > 0 else None

    def _pick(self) -> _Job | None:
        ready = [job for job in self._jobs if not job.blocked]
        if self._newest_first or not ready:
            return ready[-1] if ready else None
        return min(ready, key=lambda job: job.entry.passing)  # the oldest from an epoch's end, while there is one

    def _failed(self, job: _Job, error: Exception) -> None:
        entry = job.entry
        text = f"step {entry.step} is not in the bucket yet: {_words(error)}"
        with self._changed:
            job.failures += 1
            job.error, job.upload.error, job.upload.state = error, error, "pending"
            if isinstance(error, Fenced) and self._lease is not None:
                self._fenced = error
            if isinstance(error, SourceError):
                self._jobs.remove(job)
                self._unsaved.append((entry.step, error))
                self._spool.note_rewritten(entry)
                job.upload._settle("unsaved", error)
                # What a dead process left may be all there is of it, whatever has become of its files.
                keep = job.adopted and (self._verified is None or self._verified.step < entry.step)
                if keep:
                    self._changed_ones.append(entry)
                else:
                    self._spool.remove(entry)
                news = Message(f"{error}. What is left of it is kept in {entry.directory}" if keep else str(error), "error")
            elif isinstance(error, StoreError) and error.transient:
                pause_s = self._settings.retry_after_s(job.failures)
                self._retry_at = self._settings.monotonic() + pause_s
                news = Message(f"{text}. It is tried again in {format_duration(pause_s)}; {self._kept(entry)}", "warning")
            else:
                job.blocked = True
                if isinstance(error, _Undelivered):  # told, and no reason to end a training: a later step makes up for it
                    again = f"until a later step is in the bucket, {self._kept(entry)}"
                elif job.adopted:
                    again = self._kept(entry)
                else:
                    self._sticky.append((entry.step, error))
                    again = f"it is tried again with the next save; {self._kept(entry)}"
                news = Message(text if self._fenced is not None else f"{text}. {again[0].upper()}{again[1:]}", "error")
            self._changed.notify_all()
        if not isinstance(error, SourceError) or entry in self._changed_ones:
            entry.error = _words(error)
            with suppress(OSError):
                self._spool.save(entry, durable=False)
        if not job.blocked or news.text != job.told:  # a refusal is the same with each save that follows
            job.told = news.text
            self._on_event(news)

    @staticmethod
    def _kept(entry: Entry) -> str:
        return "the local copy is kept" if entry.directory.is_dir() else f"its local copy is not there any more: {entry.directory}"

    # -------------------------------------------------------------------------------------------------------- one save

    def _send(self, job: _Job) -> None:
        entry, store = job.entry, self._open_store()
        held = self._own(store, job) if entry.rank == 0 else None
        if job.adopted and held is not None:
            self._place(store, held)  # also when this one has a name: whoever gave it may have been killed before the others had theirs
        if entry.name is None:
            if held is None:
                raise CheckpointError(f"step {entry.step}: rank {entry.rank} has not joined rank 0's session, so nobody would commit it")
            entry.name = self._next(held, entry)
        name = entry.name
        self._spool.save(entry)
        self._on_event(Stage("checkpoint.recorded", str(entry.step)))
        if job.adopted:
            self._abort_leftovers(store, name)
        job.sent_bytes = 0
        self._send_files(store, job, name)
        self._on_event(Progress(f"sending step {entry.step}", entry.size_bytes, entry.size_bytes, finished=True))
        self._on_event(Stage("checkpoint.files-sent", str(entry.step)))
        records = [FileRecord(file.path, file.size, _known(file.sha256), file.object, file.sample) for file in entry.files]
        if held is None:
            put_object(store, name.part_key(entry.rank), PartRecord(entry.rank, tuple(records)).to_bytes())
            self._on_event(Stage("checkpoint.part-sent", str(entry.step)))
            self._finish(job, None)
            return
        records.extend(self._collect(store, job))
        self._commit(store, held, job, name, records)

    def _send_files(self, store: Store, job: _Job, name: CheckpointName) -> None:
        """Small files several at once, since each is two round trips and little else; then the large ones, whose parts go at once."""
        failed = threading.Event()

        def attempt(file: PinnedFile) -> Exception | None:
            try:
                if not failed.is_set():
                    self._send_file(store, job, name, file)
            except Exception as error:
                failed.set()  # one refusal is enough
                return error
            return None

        small = sorted((file for file in job.entry.files if file.size <= PART_SIZE), key=lambda file: file.size)
        # All are waited for: a request that is still under way must not meet the next try.
        failures = [error for error in each(attempt, small, threads=min(AT_ONCE, len(small))) if error is not None] if small else []
        if failures:
            raise next((error for error in failures if not isinstance(error, StoreError)), failures[0])
        for file in sorted((file for file in job.entry.files if file.size > PART_SIZE), key=lambda file: file.size):
            self._send_file(store, job, name, file)

    def _send_file(self, store: Store, job: _Job, name: CheckpointName, file: PinnedFile) -> None:
        entry = job.entry
        if file.sha256 is not None and self._is_there(store, name, file):
            with self._recording:
                job.sent_bytes += file.size
            return
        file.sha256 = file.object = None
        entry.check(file)
        path = entry.file_path(file)
        if file.size >= LARGE:
            file.sample = _sample(path, file.size)
            self._reuse(store, entry, file)
        if file.sha256 is None:

            def count(sent: int) -> None:
                if self._newest_first and job is not self._jobs[-1]:
                    raise _Preempted
                with self._recording:
                    job.sent_bytes += sent
                    done = job.sent_bytes
                self._on_event(Progress(f"sending step {entry.step}", done, entry.size_bytes, note=self.at_risk()))

            stored = put_file(
                store, name.file_key(file.path), path, threads=self._settings.threads, on_bytes=count, check=lambda: entry.check(file)
            )
            file.sha256 = stored.sha256
        with self._recording:
            self._spool.save(entry, durable=False)
        self._on_event(Stage("checkpoint.file-sent", f"{entry.step}/{file.path}"))

    def _is_there(self, store: Store, name: CheckpointName, file: PinnedFile) -> bool:
        try:
            return store.head(file.object or name.file_key(file.path)).size == file.size
        except NotFound:
            return False

    def _reuse(self, store: Store, entry: Entry, file: PinnedFile) -> None:
        """Refer to a large file that an earlier checkpoint of this run has already, instead of sending it again."""
        if self._known is None:
            self._known = {one.name: one for one in catalog.read_all(store).checkpoints}
        similar = {
            (record.sha256, record.key(checkpoint.name))
            for checkpoint in self._known.values()
            for record in checkpoint.files
            if record.bytes == file.size and record.sample == file.sample
        }
        if not similar:
            return
        found = file_sha256(entry.file_path(file))
        entry.check(file)
        for key in sorted(key for sha256, key in similar if sha256 == found):
            with suppress(NotFound):
                if store.head(key).size == file.size:
                    file.sha256, file.object = found, key
                    return

    def _collect(self, store: Store, job: _Job) -> Iterator[FileRecord]:
        """What the other ranks have delivered for this attempt; waits for them, and never commits without one.

        A rank that has delivered a later step will not deliver this one. Neither will those of a training that is dead: what they had left
        here was sent before.
        """
        entry, name = job.entry, job.entry.name
        assert name is not None
        timeout_s = 0.0 if job.adopted else self._settings.parts_timeout_s
        deadline = self._settings.monotonic() + timeout_s
        missing = set(range(1, entry.world_size))
        while missing:
            for rank in sorted(missing):
                key = name.part_key(rank)
                with suppress(NotFound):
                    part = PartRecord.from_bytes(bytes(store.get(key)), source=str(store.location / key))
                    missing.discard(rank)
                    yield from part.files
            if not missing:
                return
            why = ""
            if ahead := self._delivered_later(store, job, missing):
                if any(exists(store, name.part_key(rank)) for rank in ahead):
                    continue  # both came since the look at this one
                missing, why = ahead, "did not deliver it, and has delivered a later one"
            elif self._settings.monotonic() >= deadline:
                why = "never delivered it" if job.adopted else f"did not deliver within {format_duration(timeout_s)}"
            if why:
                ranks = ", ".join(map(str, sorted(missing)))
                raise _Undelivered(f"step {entry.step} stays uncommitted: rank {ranks} of {entry.world_size} {why}")
            self._settings.sleep(0.5)

    def _delivered_later(self, store: Store, job: _Job, ranks: Collection[int]) -> set[int]:
        """Those of ``ranks`` whose part of a later save of this training is there, so that they will not deliver this one. In a hurry the
        newest goes first, and that tells nothing."""
        if self._newest_first:
            return set()
        with self._changed:
            behind = self._jobs[self._jobs.index(job) + 1 :]
        names = [one.entry.name for one in behind if one.entry.rank == 0 and one.entry.origin == job.entry.origin]
        return {rank for rank in ranks if any(exists(store, name.part_key(rank)) for name in names if name is not None)}

    def _commit(self, store: Store, held: lease.Lease, job: _Job, name: CheckpointName, records: list[FileRecord]) -> None:
        entry = job.entry
        manifest = CheckpointManifest(
            name=name,
            files=tuple(sorted(records, key=lambda record: record.path)),
            epoch=entry.epoch,
            metrics=entry.metrics,
            identity=entry.identity,
            best=entry.best,
            saved_s=entry.saved_s,
        )
        checkpoint = Checkpoint(manifest, str(store.location / name.folder))
        if job.adopted or any(record.object for record in records):
            catalog.confirm(store, checkpoint)  # others may have pruned meanwhile
        lease.check(store, held)
        data = manifest.to_bytes()
        try:
            # Whoever has taken over may have removed it at once, as a step that is not to be kept.
            put_object(store, name.manifest_key, data, if_absent=store.conditional_create(), gone=lambda: lease.check(store, held))
        except Conflict:
            # Our own, sent before an answer or a process got lost: the folder's name belongs to this save alone.
            if bytes(store.get(name.manifest_key)) != data:
                raise
        self._on_event(Stage("checkpoint.manifest-sent", str(entry.step)))
        # Readers whose listing lags find the commit by this note; it names the newest one, as a save of an earlier process may come late.
        noted = max(name, self._noted or name)
        store.put(commits.key(held.generation, held.owner, self._commits + 1), str(noted).encode())
        self._noted, self._commits = noted, self._commits + 1
        self._on_event(Stage("checkpoint.noted", str(entry.step)))
        self._finish(job, checkpoint)

    def _finish(self, job: _Job, checkpoint: Checkpoint | None) -> None:
        with self._changed:
            if checkpoint is not None:
                self._has_own = self._has_own or not job.adopted
                self._verified = max(checkpoint.name, self._verified or checkpoint.name)
                self._safe_since_s = max(job.entry.saved_s, self._safe_since_s)
                if self._known is not None:
                    self._known[checkpoint.name] = checkpoint
        self._on_event(Stage("checkpoint.verified", str(job.entry.step)))
        if checkpoint is not None:
            self._spool.note_generation(self._url, checkpoint.name.generation)
        self._spool.remove(job.entry)
        for made_up in [one for one in self._changed_ones if one.step <= job.entry.step] if checkpoint is not None else []:
            self._changed_ones.remove(made_up)
            self._spool.remove(made_up)
        self._on_event(Stage("checkpoint.unpinned", str(job.entry.step)))
        with self._changed:
            self._jobs.remove(job)
            hurrying = self._newest_first  # then older ones come after newer ones
            given_up = [one for one in self._jobs if checkpoint is not None and not hurrying and self._is_passed(one, checkpoint.name)]
        for one in given_up:
            if self._is_delivered(one):
                one.blocked = False  # late, and whole
            else:
                self._give_up(one)
        with self._changed:
            self._sticky = [(step, error) for step, error in self._sticky if step is None]  # the others have healed
            job.upload._settle("verified")
            self._changed.notify_all()

    @staticmethod
    def _is_passed(job: _Job, safe: CheckpointName) -> bool:
        """Whether a rank never delivered its part of ``job``, and a later step is ``safe``; a training that began anew has earlier ones."""
        name = job.entry.name
        return isinstance(job.error, _Undelivered) and name is not None and name < safe and name.step <= safe.step

    def _is_delivered(self, job: _Job) -> bool:
        """Whether all ranks have delivered their parts of ``job`` by now, or that cannot be told."""
        name = job.entry.name
        assert name is not None
        try:
            store = self._open_store()
            return all(exists(store, name.part_key(rank)) for rank in range(1, job.entry.world_size))
        except StoreError:
            return True

    def _give_up(self, job: _Job) -> None:
        """Let go of a save that nobody can commit."""
        assert job.error is not None
        self._spool.remove(job.entry)
        with self._changed:
            self._jobs.remove(job)
            self._unsaved.append((job.entry.step, job.error))
            job.upload._settle("unsaved", job.error)

    def _abort_leftovers(self, store: Store, name: CheckpointName) -> None:
        """Drop the multipart uploads that the dead process had open for this attempt: the folder is nobody else's."""
        with suppress(StoreError):
            for upload in list(store.open_uploads(name.folder)):
                store.abort_upload(upload)

    def _record_dropped(self) -> None:
        """Tell the bucket which steps policy dropped: some of them, so that checkpoints which wait meanwhile come in between.

        A record that cannot be written is no checkpoint lost: it waits for the next save. Of a backlog a quarter is written each time. It
        stays bounded, therefore, however much faster than the network the saves come.
        """
        with self._changed:
            entries = self._dropped[: max(AT_ONCE, len(self._dropped) // 4)]
        if not entries:
            return
        store = self._open_store()

        def attempt(entry: Entry) -> Exception | None:
            name = entry.name or CheckpointName(0, entry.step, entry.counter, entry.origin)
            files = tuple((file.path, file.size, file.sha256) for file in entry.files if file.sha256 is not None)
            record = SupersededRecord(entry.step, entry.dropped or "dropped", files)
            try:
                put_object(store, name.superseded_key, record.to_bytes())
            except (StoreError, OSError) as error:
                return error
            self._spool.remove(entry)
            with self._changed:
                self._dropped.remove(entry)
                self._changed.notify_all()
            return None

        errors = list(each(attempt, entries, threads=min(AT_ONCE, len(entries))))
        entry, error = next(((entry, error) for entry, error in zip(entries, errors, strict=True) if error is not None), (None, None))
        if entry is not None:
            with self._changed:
                self._records_blocked = True
                self._changed.notify_all()
            self._on_event(Message(f"the record that step {entry.step} was dropped is not in the bucket yet: {error}", "warning"))

    def _prune(self) -> None:
        """Remove what the policy drops. Failing to costs space and no checkpoint, so it is told once and tried after the next save."""
        policy, held = self._settings.policy, self._lease
        if not policy.asked or held is None:
            return
        store = self._open_store()
        try:
            whole = (self._verified,) if self._verified is not None else ()
            plan = retention.plan(store, policy, protected=self._protected, whole=whole, known=self._known or {})
            if plan.undecided is not None and "best" not in self._told:
                self._told.add("best")
                self._on_event(Message(plan.undecided, "warning"))
            retention.execute(store, plan, check=lambda: lease.check(store, held), on_event=self._on_event)
        except Fenced as error:
            with self._changed:
                self._fenced = error
                self._changed.notify_all()
            self._on_event(Message(str(error), "error"))
        except (StagekitError, OSError) as error:
            if "prune" not in self._told:
                self._told.add("prune")
                self._on_event(Message(f"old checkpoints are not removed: {error}", "warning"))
        else:
            for checkpoint in plan.checkpoints:
                if self._known is not None:
                    self._known.pop(checkpoint.name, None)


def _later_of_its_own(entry: Entry, begun: Iterable[CheckpointName]) -> CheckpointName | None:
    """A later save that the process of ``entry`` had begun to send, the newest first, and that comes under that process's generation."""
    later = (name for name in begun if name.owner == entry.origin and (name.step, name.counter) > (entry.step, entry.counter))
    return max(later, default=None)


def _continues(entry: Entry, newest: CheckpointName | None, owner: str | None) -> bool:
    """Whether a dead process's save goes to the head of a run whose newest checkpoint is ``newest``; else beside it. ``owner`` is who sends
    it, as long as that one has nothing of its own in the run: then all that is there of it are earlier saves of dead processes."""
    if newest is None or newest.owner == owner:
        return True
    return (newest.owner == entry.origin or newest.generation <= entry.base) and newest.step <= entry.step


def create(store: Store, clock: Callable[[], float] = time.time) -> None:
    """Say that there is a run at ``store``, once and for all."""
    try:
        store.head(RUN_JSON)
    except NotFound:
        with suppress(Conflict):
            put_object(store, RUN_JSON, RunRecord(clock(), _version()).to_bytes(), if_absent=store.conditional_create())


def about(steps: Sequence[int], one: str, many: str) -> str:
    """``step 7 is``, ``steps 7, 8 are``, ``20 steps from 7 to 90 are``: the subject of a sentence and its verb. A step counts once, however
    many ranks have saved it."""
    steps = sorted(set(steps))
    if len(steps) > _LISTED:
        return f"{len(steps)} steps from {min(steps)} to {max(steps)} {many}"
    return f"step {steps[0]} {one}" if len(steps) == 1 else f"steps {', '.join(map(str, steps))} {many}"


class _Undelivered(CheckpointError):
    """A rank has not delivered its part of a save."""


class _Preempted(Exception):
    """A newer save goes first."""


def _raised(error: Exception, step: int, url: str, *, dropped: bool) -> Exception:
    """The error to raise at the next call: ours as it is, with the step in front when it does not say. ``dropped``: by policy, since."""
    if isinstance(error, CheckpointError):
        return error
    state = "did not get into {}, and has given way to newer saves" if dropped else "is not in {} yet, its local copy is kept"
    raised = UploadFailed(f"step {step} {state.format(url)}: {_words(error)}")
    raised.__cause__ = error
    return raised


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, StagekitError) else f"{type(error).__name__}: {error}"


def _known(sha256: str | None) -> str:
    if sha256 is None:
        raise CheckpointError("a file was to be committed that was not sent")
    return sha256


def _sample(path: Path, size: int) -> str:
    """A digest of 17 pieces of 4 KiB spread over the file."""
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for piece in range(17):
            file.seek(min(size * piece // 16, max(0, size - 4096)))
            digest.update(file.read(4096))
    return digest.hexdigest()[:32]


def _version() -> str:
    from .. import __version__

    return __version__
