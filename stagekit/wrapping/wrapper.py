"""``stagekit run``: a command as it is, with a checkpoint before it, saves and logs sent while it runs, and a drain after it."""

from __future__ import annotations

import errno
import math
import os
import shlex
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from ..config import RUN_VARIABLE, StoreConfig
from ..errors import CheckpointError, OutOfSpace, StagekitError, UsageError, WorkerDied
from ..location import Location
from ..mounts import refuse_mount
from ..processes import Process
from ..progress import Event, Message, Progress, Subscriber
from ..runs.layout import RUN_JSON, Checkpoint, parse_reference
from ..runs.run import Run, log, refuse_whole_bucket
from ..runs.spool import default_dir
from ..runs.sync import create
from ..saves.find import names_a_step
from ..shards.manifest import MANIFEST
from ..store import Where, open_store
from ..store.base import exists
from ..units import counted, format_duration
from . import record, survivors
from .child import Child, exit_code_of
from .collect import Collector, named, sessions_here, waiting_for
from .finish import finish_left
from .logs import EVERY_S, LOGS, Logs
from .note import Note, log_directory, notes
from .redaction import redacted_command, secret_values
from .resuming import Resume, Start, clear_way, start_from
from .world import world_size_of

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_CHILDS_SHARE = 0.6  # of the grace after SIGTERM; the rest is for sending what it saved
_WAIT_S = 0.2
_CLOSING_S = 3.0  # beyond the drain, for ending the thread that sends and a last word to the store
_CLOSINGS_SHARE = 0.15  # of the grace, at most: after SIGTERM that is not beyond it; a little more is for the interpreter's own end
_EXITS_SHARE = 0.05
_REACH_S, _ANSWER_S = 45.0, 10.0  # for a store that does not answer before the command starts, and for one request then
_ENDING_S = 15.0  # what a killed command's last processes may take beyond the grace
_ASKED_OF = 4  # folders below a new run, for whether another run lies there
_LOOK_EVERY_S = 1.0
_LOOKS_SHARE = 20  # looking takes at most this part of the time

Reason = Literal["ended", "stalled", "overtime", "terminated"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a command is watched. Durations are seconds; ``options`` are the words of the command line that say all this, for the record."""

    watch: tuple[str | os.PathLike[str], ...]
    patterns: tuple[str, ...] = ()
    quiet_s: float = 30.0
    resume: Resume = "auto"
    allow_fresh: bool = False
    stall_s: float | None = None
    limit_s: float | None = None
    grace_s: float = 25.0
    drain_s: float = 600.0
    world_size: int | None = None
    record: bool = True
    logs: bool = True
    allow_mount: bool = False
    stdout: int = 1
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended: the command's exit code as a shell would tell it, why it ended, and what is not in the bucket, in words."""

    url: str
    attempt: str
    code: int
    reason: Reason
    resumed: int | None
    verified: int | None
    problem: str | None = None

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


def run_command(
    command: Sequence[str],
    to: Where,
    settings: Settings,
    *,
    store: StoreConfig | None = None,
    on_event: Subscriber = log,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> Ended:
    """Run ``command`` to its end, from the newest checkpoint of the run at ``to``, with what it saves sent there.

    Must be called in the main thread, since signals are passed on: each once, to the command's process group. ``options`` are those of
    ``Run`` (``keep_last=…``, ``spool_dir=…``). Raises before the command starts when the run cannot be read or what it holds cannot be
    continued, ``UsageError`` for arguments that cannot be meant or a command that is not there. After that nothing is raised: what could
    not be sent is told in ``Ended.problem``, stays on this machine, and is finished by the next start or ``stagekit teardown``.
    """
    if not command:
        raise UsageError("stagekit run: no command; put it behind two dashes: stagekit run --to RUN --watch DIR -- python train.py")
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("run_command passes signals on, so it must be called in the main thread")
    if isinstance(to, str) and (named_run := parse_reference(to)[0]) != to:
        raise UsageError(
            f"--to {to}: that names one checkpoint of {named_run}, and a run cannot be called so; give the run: --to {named_run}"
        )
    if isinstance(to, str) and to != to.strip():
        raise UsageError(f"--to {to!r}: it begins or ends with a space, which would be a run of its own; leave it out")
    if isinstance(to, str | os.PathLike | Location):
        refuse_whole_bucket(to)
    if settings.stall_s is not None and settings.stall_s <= 0:
        raise UsageError("--stall 0: the command would be ended at once; give a time such as 30m")
    if settings.stall_s is not None and not settings.logs:
        raise UsageError("--stall needs to see what the command prints, and --no-logs leaves that to the terminal; leave one of them out")
    environ = dict(os.environ if environ is None else environ)
    world_size = world_size_of(command, environ, settings.world_size)
    quietly = _Quietly(on_event)
    made: list[Path] = []
    roots = named(directories(settings, quietly, made))
    options["spool_dir"] = options.get("spool_dir") or spool_for(list(roots.values()))
    training = Run(
        to,
        store=store,
        rank=0,
        world_size=world_size or 1,
        drain_s=settings.drain_s,
        grace_s=settings.grace_s,
        on_event=quietly,
        **options,
    )
    if isinstance(to, str) and training._location.is_directory and not to.startswith(("/", ".", "~", "file:")):
        quietly(Message(f"--to {to} is the directory {training.url} of this machine; a bucket is written s3://{to}", "warning"))
    wrapper = _Wrapper(command, training, roots, settings, store, world_size, quietly, clock, monotonic, sleep, environ)
    try:
        return wrapper.run()
    except BaseException:
        training._drain_s = 0.0
        with suppress(StagekitError):
            training.close()
        for path in made:
            with suppress(OSError):
                path.rmdir()  # unless something lies there by now
        raise


def directories(settings: Settings, on_event: Subscriber, made: list[Path]) -> list[Path]:
    """The watched directories, made where they are missing, which is noted in ``made``. Raises ``UsageError`` and ``MountRefused`` for what
    cannot be watched."""
    if not settings.watch:
        raise UsageError("stagekit run: nothing is watched; name the directory that the command saves into: --watch DIR")
    found = []
    for given in settings.watch:
        if not os.fspath(given):
            raise UsageError("--watch: an empty text names no directory; give the one that the command saves into")
        directory = Path(os.path.abspath(os.path.expanduser(os.fspath(given))))
        if directory in (Path.home(), *Path.home().parents):
            raise UsageError(f"--watch {given}: that is all of {directory}; name the directory that the command saves its checkpoints into")
        judged = refuse_mount(directory, "watching", allow_mount=settings.allow_mount)
        if judged.warning:
            on_event(Message(judged.warning, "warning"))
        if not directory.exists():
            made.append(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--watch {given}: it is no directory, and none can be made there ({error.strerror})") from None
        found.append(directory)
    return list(dict.fromkeys(found))


def spool_for(roots: Sequence[Path], default: Path | None = None) -> Path:
    """Where saves are pinned: the machine's spool, or a hidden folder of the first watched directory when that is on another disk.

    On the same disk pinning takes neither time nor space; on another one each save would be copied first.
    """
    usual = default or default_dir()
    there = next(folder for folder in (usual, *usual.parents) if folder.is_dir())
    return usual if there.stat().st_dev == roots[0].stat().st_dev else roots[0] / ".stagekit-spool"


def overdue(settings: Settings, ran_s: float, silent_s: float) -> tuple[Reason, str] | None:
    """Why a command that has run for ``ran_s``, and was silent for the last ``silent_s``, must end, if it must."""
    if settings.limit_s is not None and ran_s >= settings.limit_s:
        return "overtime", f"the command has run for {format_duration(ran_s)}, and --max-hours allows no more"
    if settings.stall_s is not None and silent_s >= settings.stall_s:
        return "stalled", f"the command has printed nothing and written nothing below --watch for {format_duration(silent_s)}"
    return None


@dataclass(slots=True)
class _Quietly:
    """A subscriber that a closed terminal does not turn into an error, and that is not told of work with nothing to do."""

    subscriber: Subscriber
    lost: bool = False

    def __call__(self, event: Event) -> None:
        if not self.lost and not (isinstance(event, Progress) and event.total == 0):
            try:
                self.subscriber(event)
            except (OSError, ValueError):
                self.lost = True


def _overlap(some: Iterable[Path], others: Iterable[Path]) -> bool:
    """Whether one of the directories is, or lies below, one of the others."""
    return any(one.is_relative_to(other) or other.is_relative_to(one) for one, other in product(some, others))


class _Leave(KeyboardInterrupt):
    """Ctrl-C while the drain is running: leave at once."""


class _Hurry(KeyboardInterrupt):
    """SIGTERM while the drain is running: the machine goes away."""


@dataclass
class _Wrapper:
    command: Sequence[str]
    training: Run
    roots: Mapping[str, Path]
    settings: Settings
    store: StoreConfig | None
    world_size: int | None
    on_event: Subscriber
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    sleep: Callable[[float], None]
    environ: Mapping[str, str]
    deadline: float | None = None
    child: Child | None = None
    draining: bool = False
    reason: Reason = "ended"
    early: list[int] = field(default_factory=list)
    sender: threading.Thread | None = None
    ended: bool = False
    cut_ns: int | None = None
    recorder: threading.Thread | None = None
    unrecorded: str | None = None
    last: threading.Thread | None = None
    sent_last: bool = False
    held: int = -1
    stop_logs: threading.Event = field(default_factory=threading.Event)

    def run(self) -> Ended:
        settings = self.settings
        roots = self.roots
        self._refuse_second(roots)
        held = self._held()
        if held is not None:
            self._finish_left()
            held = self._held()
        attempt = self._attempt(look=held is not None)
        logs = Logs(lambda: self.training._store, attempt, self.on_event, self.monotonic) if settings.logs else None
        printed = log_directory(attempt)
        self.collector = Collector(
            self.training,
            roots,
            patterns=settings.patterns,
            quiet_s=settings.quiet_s,
            world_size=self.world_size,
            logs=logs,
            printed=[printed / "stdout.log", printed / "stderr.log"] if settings.logs else [],
            on_event=self.on_event,
            monotonic=self.monotonic,
            clock=self.clock,
            left_s=self._left_to_look,
        )
        clear_way(self.collector, self.on_event)
        here, ahead = self.collector.before(held or [], waiting_for(self.training), sessions_here(self.training))
        newest = self.training.latest() if held else None
        if self.world_size is None and newest is not None:
            saved = newest.manifest.identity.get("world_size")
            self.training.world_size = saved if isinstance(saved, int) else 1  # unknown now, so that there is no difference to tell
        start = start_from(
            self.training,
            self.collector,
            newest,
            ahead,
            held or [],
            settings.resume,
            world_size=self.world_size,
            allow_fresh=settings.allow_fresh,
            on_event=self.on_event,
        )
        self.collector.settle(here if held is not None else ())  # what the run may hold already must not become its newest
        for root in roots.values():
            self.training.watch(root)
        note = Note(
            attempt=attempt,
            url=self.training.url,
            store=StoreConfig.in_force(self.store, self.training.url),
            watched=roots,
            patterns=settings.patterns,
            quiet_s=settings.quiet_s,
            world_size=self.world_size,
            logs=printed if settings.logs else None,
            command=shlex.join(redacted_command(self.command, secret_values(self.environ)))[:200],
            process=Process.current(),
            grace_s=settings.grace_s,
            spool=self.training._spool_dir,
        )
        self._note(note)
        try:
            spool, _ = self.training._begin()  # teardown must find this run also when nothing is ever saved
            spool.over = lambda: self._left_to_look() <= 0
            if held is not None:
                self.recorder = self._record(attempt)
        except BaseException:
            note.remove()
            raise
        code = self._run_child(note, start, logs, printed)
        return self._finish(note, start, logs, code)

    # -------------------------------------------------------------------------------------------------------- before

    def _refuse_second(self, roots: Mapping[str, Path]) -> None:
        """Nothing when no other ``stagekit run`` is at work here. The command of one that was killed is waited for: it is being ended."""
        for note in notes():
            if note.url != self.training.url and not _overlap(note.watched.values(), roots.values()):
                continue
            if note.process.is_dead() and not note.is_over():
                text = (
                    f"the last stagekit run here was killed, and its command is being ended; waiting for that, at most {note.grace_s:.0f} s"
                )
                self.on_event(Message(text, "warning"))
                end_s = self.monotonic() + note.grace_s + _ENDING_S
                while note.is_guarded() and self.monotonic() < end_s:
                    self.sleep(_WAIT_S)
                if not note.is_guarded():
                    survivors.end(note.attempt, note.grace_s, sleep=self.sleep)  # nobody else ends what is left
            if not note.is_over():
                pids = note.alive or [note.process.pid]
                which = f"process {pids[0]} runs" if len(pids) == 1 else f"processes {', '.join(map(str, pids))} run"
                what = f"{which} {note.command!r} with {', '.join(map(str, note.watched.values()))} for {note.url}"
                raise UsageError(f"stagekit run: {what}; wait until it ends, or stop it: kill {' '.join(map(str, pids))}")

    def _held(self) -> list[Checkpoint] | None:
        """The run's checkpoints; ``None`` when it cannot be told and that is accepted."""
        try:
            self._reach()
            if self.training.latest() is None:
                self.training._refuse_misplaced()
                self._refuse_parent()
                return []
            return self.training.checkpoints()
        except StagekitError as error:
            if not self.settings.allow_fresh or isinstance(error, UsageError):
                raise
            self.on_event(Message(f"starting from what is here, as --allow-fresh says, although {error}", "warning"))
            return None

    def _reach(self) -> None:
        """Nothing when the store answers. It is not waited for as during a training: a wrong address would cost minutes of a GPU."""
        if self.training._where is not None:
            hurried = (self.store or StoreConfig()).hurried(_REACH_S, _ANSWER_S)
            exists(open_store(self.training._where, hurried, on_event=self.on_event), RUN_JSON)

    def _refuse_parent(self) -> None:
        """Nothing for a place below which no other run and no data set lies. Raises ``UsageError``: a listing would show only this run."""
        store = self.training._store
        there = store.children()
        if any(info.key == RUN_JSON for info in there.objects):
            return
        strange = [folder.rstrip("/") for folder in there.folders if names_a_step(folder.rstrip("/"))]
        if strange and self.settings.resume != "never":
            out = shlex.quote(str(next(iter(self.roots.values()))))
            raise UsageError(
                f"--to {self.training.url}: no run lies there, but {strange[-1]}, which the training would neither go on from nor show. "
                f"Fetch what is there (stagekit cp {self.training.url} {out}), and give the run a place of its own, such as "
                f"{self.training.url}-run; or begin anew beside it with --resume never"
            )
        for folder, (name, what) in product(there.folders[:_ASKED_OF], ((RUN_JSON, "run"), (MANIFEST, "data set"))):
            if exists(store, f"{folder}{name}"):
                raise UsageError(
                    f"--to {self.training.url}: the {what} {str(store.location / folder).rstrip('/')} lies below it and would be seen by "
                    f"nobody; give this run a name of its own: {store.location / 'NAME'}"
                )

    def _finish_left(self) -> None:
        """What a killed process left on this disk comes first: it may be the newest checkpoint there is."""
        left = [note for note in notes() if note.url == self.training.url and note.is_over()]
        if not left and not waiting_for(self.training):
            return  # a start that is refused after this has left nothing for teardown to wonder about
        _, uploader = self.training._begin()
        if uploader.status().pending:
            uploader.drain(self.settings.drain_s)
        for note in left:
            finish_left(note, self.training, on_event=self.on_event, clock=self.clock, monotonic=self.monotonic)

    def _attempt(self, *, look: bool) -> str:
        """A name for this start, after all that are known here and, with a ``look``, in the bucket."""
        names = [note.attempt for note in notes()]
        if look:
            with suppress(StagekitError, OSError):  # without one the number may have been used; the name is another all the same
                store = self.training._store
                names += record.attempts(store)
                names += [folder.removeprefix(LOGS) for folder in store.children(LOGS).folders]
        numbers = [int(name.partition("-")[0]) for name in names if name.partition("-")[0].isdecimal()]
        return f"{max(numbers, default=0) + 1:06d}-{uuid.uuid4().hex[:8]}"

    def _note(self, note: Note) -> None:
        """Note on this machine what runs here. Raises ``OutOfSpace`` and ``UsageError`` where that cannot be; nothing is left of it."""
        try:
            self.held = note.hold()
            if note.logs is not None:
                note.logs.mkdir(parents=True, exist_ok=True)
            note.write()
        except OSError as error:
            with suppress(OSError):
                note.remove()
            what = f"stagekit run: {note.home}, where this machine notes what runs on it, cannot be written"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(
                    f"{what}: the disk is full; free some space, or set STAGEKIT_HOME to a directory on another disk"
                ) from error
            raise UsageError(f"{what} ({error.strerror or error}); set STAGEKIT_HOME to a directory that can be") from error

    def _record(self, attempt: str) -> threading.Thread:
        """Note in the run how it was started, as things are now, beside the training: a store that takes nothing must not hold it back."""
        from .. import __version__

        described = None
        if self.settings.record:
            described = record.describe(
                attempt,
                self.command,
                self.settings.options,
                directory=Path.cwd(),
                started_s=self.clock(),
                world_size=self.world_size,
                secrets=secret_values(self.environ),
                stagekit=__version__,
            )

        def send() -> None:
            try:
                create(self.training._store, self.clock)
                if described is not None:
                    record.save(self.training._store, described)
            except (StagekitError, OSError) as error:
                self._tell_unrecorded(str(error))  # now: the first save may be hours away
            self.unrecorded = None

        self.unrecorded = "the store has not taken it yet"
        recorder = threading.Thread(target=send, name="stagekit-record", daemon=True)
        recorder.start()
        return recorder

    def _tell_unrecorded(self, why: str) -> None:
        text = f"how this attempt was started is not noted in {self.training.url}: {why}"
        self.on_event(Message(text, "warning"))

    # -------------------------------------------------------------------------------------------------------- while it runs

    def _run_child(self, note: Note, start: Start, logs: Logs | None, printed: Path) -> int:
        """Start the command and see it to its end. Returns its exit code, negative for a signal."""
        environ = {
            "PYTHONUNBUFFERED": "1",
            **self.environ,
            **start.variables,
            RUN_VARIABLE: self.training.url,
            survivors.VARIABLE: note.attempt,
        }
        files = None
        if self.settings.logs:
            files = printed / "stdout.log", printed / "stderr.log"
        try:
            with self._passing_signals_on():
                self.child = Child(
                    self.command, environ=environ, grace_s=self.settings.grace_s, logs=files, stdout=self.settings.stdout, keep=(self.held,)
                )
                for number in self.early:
                    self._pass_on(self.child, number)
                if logs is not None:
                    self.sender = threading.Thread(target=self._send_logs, args=(logs,), name="stagekit-logs", daemon=True)
                    self.sender.start()
                try:
                    return self._watch(self.child, files or (), note)
                finally:
                    self.stop_logs.set()
        except UsageError:
            note.remove()
            raise

    def _watch(self, child: Child, printed: Sequence[Path], note: Note) -> int:
        begun_s = alive_s = self.monotonic()
        look_at_s = 0.0
        seen: object = None
        ending = False
        while True:
            try:
                code = child.wait(_WAIT_S)
            except WorkerDied as error:
                self.on_event(Message(str(error), "error"))
                child.close()
                survivors.end(note.attempt, self.settings.grace_s, sleep=self.sleep)
                self.cut_ns = time.time_ns()
                return -signal.SIGTERM
            if code is not None:
                self.cut_ns = child.cut_ns
                return code
            now_s = self.monotonic()
            if now_s < look_at_s:
                continue
            self.collector.scan()
            sizes = [path.stat().st_size if path.exists() else 0 for path in printed]
            if (activity := (sizes, self.collector.activity())) != seen:
                seen, alive_s = activity, now_s
            looked_s = self.monotonic()
            look_at_s = looked_s + max(_LOOK_EVERY_S, _LOOKS_SHARE * (looked_s - now_s))
            why = overdue(self.settings, looked_s - begun_s, looked_s - alive_s)
            if why is not None and not ending and self.deadline is None:
                ending = True
                self.reason = why[0]
                text = f"{why[1]}; it gets SIGTERM, and SIGKILL in {format_duration(self.settings.grace_s)}"
                self.on_event(Message(text, "warning"))
                child.end(self.settings.grace_s)

    def _pass_on(self, child: Child, number: int) -> None:
        """Send a signal, and after SIGTERM also say when the command's time is over: nothing here may be late then."""
        child.send(number)
        if self.deadline is not None:
            child.kill(self._left_to_look())

    def _left_to_look(self) -> float:
        """Seconds that looking and pinning may take: no end before SIGTERM, then the command's share of the grace while it lives, and
        all that is left of it afterwards."""
        if self.deadline is None:
            return math.inf
        kept_s = 0.0 if self.ended else (1 - _CHILDS_SHARE) * self.settings.grace_s
        return max(0.0, self.deadline - kept_s - self.monotonic())

    def _send_logs(self, logs: Logs) -> None:
        while not self.stop_logs.wait(EVERY_S):
            logs.bring()

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """Signals go to the command's group, each once: a terminal's ctrl-C reaches only us. What was ignored before stays ignored."""
        before = {}
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            self.handlers = before

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGHUP) and self.deadline is None:
            self.deadline = self.monotonic() + self.settings.grace_s
            self.reason = "terminated"
            if self.training._uploader is not None:
                self.training._uploader.hurry()
            if self.draining:
                raise _Hurry
        if self.draining:
            if number == signal.SIGINT:
                raise _Leave
            return
        if self.child is not None:
            self._pass_on(self.child, number)
        else:
            self.early.append(number)  # it is just being started

    # -------------------------------------------------------------------------------------------------------- after it

    def _finish(self, note: Note, start: Start, logs: Logs | None, code: int) -> Ended:
        self.ended = True
        cut_ns = self.cut_ns
        try:
            note = replace(note, killed=cut_ns is not None, ended=True)
            with suppress(OSError):  # a full disk: the one that is there says that it was killed, and less is believed then
                note.write()
            self.collector.scan(still=True, cut_ns=cut_ns)
            for root in self.collector.empty:
                text = f"{root} stayed empty: nothing was saved below it; is it the directory that the command saves into?"
                self.on_event(Message(text, "warning"))
            unfinished = [found.why_not() for found in self.collector.unfinished()] if self._left_to_look() else []
            if start.path is None and not self.collector.submitted and (weights := self.collector.weights):
                pattern = shlex.quote(f"*{weights[0].suffix}")
                text = f"no checkpoint was found, and {weights[0]} went to the logs, from where nothing is fetched at the next start"
                self.on_event(Message(f"{text}; if it is what the training goes on from: --pattern {pattern}", "warning"))
            elif start.path is None and not self.collector.submitted and not unfinished and not self.collector.empty:
                places = ", ".join(map(str, note.watched.values()))
                self.on_event(Message(f"no checkpoint was found below {places}; is it where the command saves?", "warning"))
            for text in unfinished[1:]:
                self.on_event(Message(text, "warning"))
            problem = self._drain(logs, cut_ns)
        finally:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)
            os.close(self.held)
        if problem is None:
            note.remove()
        elif not (self.collector.unsaved or self.collector.blind):
            with suppress(OSError):  # all was judged: what was set aside and is there again later, somebody has vouched for
                replace(note, killed=False).write()
        aside = [f"{path} may be cut and is only here" for path in self.collector.aside]
        problem = "; ".join([*unfinished[:1], *aside[:1], *([problem] if problem is not None else [])]) or None
        return Ended(
            self.training.url,
            note.attempt,
            exit_code_of(code),
            self.reason,
            start.step,
            self.training.status().verified,
            problem,
        )

    def _drain(self, logs: Logs | None, cut_ns: int | None) -> str | None:
        """Wait until everything is in the bucket. Returns what is not, in words."""
        problems: list[str] = []
        status = self.training.status()
        if status.pending and self.deadline is None:
            allowed = format_duration(self.settings.drain_s)
            text = (
                f"the command has ended; sending {counted(len(status.pending), 'checkpoint')} for at most {allowed}, ctrl-C leaves at once"
            )
            self.on_event(Message(text))
        end_s = self.monotonic() + self.settings.drain_s
        sent_logs = logs is None
        while True:
            try:
                self.draining = True
                with suppress(CheckpointError):
                    self.training.drain(self._left(end_s))
                if self._pinned_more(end_s, cut_ns):
                    continue
                if logs is not None:
                    sent_logs = self._last_logs(logs, end_s)
                if self.recorder is not None:
                    self.recorder.join(self._left(end_s))
                self.draining = False
                break
            except _Hurry:
                continue  # with the time that is left
            except _Leave:
                self.draining = False
                problems.append("interrupted")
                break
        if self.unrecorded is not None:
            self._tell_unrecorded(self.unrecorded)
        if (failed := self._close(end_s)) is not None:
            problems.append(failed)
        if unsaved := self.collector.unsaved:
            path, why = next(iter(unsaved.items()))
            problems.append(f"{counted(len(unsaved), 'finished save')} not pinned and only here, such as {path}: {why}")
        problems.extend(self.collector.blind)
        if logs is not None:
            problems.extend(logs.refused.values())
        if not sent_logs:
            problems.append(f"logs are not all in {self.training.url}; the next start, or `stagekit teardown`, sends them")
        return "; ".join(problems) or None

    def _close(self, end_s: float) -> str | None:
        """End the run, and say what is not in the bucket. A store that hangs while it is told of the end is not waited for."""
        self.training._drain_s = 0.0
        told: list[str] = []

        def close() -> None:
            try:
                self.training.close()
            except (StagekitError, OSError) as error:
                told.append(str(error))

        closing = threading.Thread(target=close, name="stagekit-close", daemon=True)
        closing.start()
        closing.join(self._left(end_s) + self._closing_s())
        if closing.is_alive() and self.training._uploader is not None and (left := self.training._uploader.unsynced()) is not None:
            told.append(str(left))
        return next(iter(told), None)

    def _pinned_more(self, end_s: float, cut_ns: int | None) -> bool:
        """Whether saves that could not be pinned before are pinned now: what was sent meanwhile has made room."""
        if not self.collector.unsaved or self._left(end_s) <= 0:
            return False
        self.draining = False  # a signal must not end the pinning in its middle
        before = self.collector.submitted
        self.collector.scan(still=True, cut_ns=cut_ns)
        self.draining = True
        return self.collector.submitted > before

    def _left(self, end_s: float) -> float:
        """Seconds for sending: until ``end_s``, and after SIGTERM so long that closing ends within the grace as well."""
        if self.deadline is not None:
            end_s = min(end_s, self.deadline - self._closing_s() - _EXITS_SHARE * self.settings.grace_s)
        return max(0.0, end_s - self.monotonic())

    def _closing_s(self) -> float:
        return _CLOSING_S if self.deadline is None else min(_CLOSING_S, _CLOSINGS_SHARE * self.settings.grace_s)

    def _last_logs(self, logs: Logs, end_s: float) -> bool:
        """Send what the logs still lack, and wait for that while there is time. What is on its way then is left to the next start."""
        if self.sender is not None:
            self.sender.join(self._left(end_s))
            if self.sender.is_alive():
                return False  # a store that hangs
        if self.last is None:
            if self._left(end_s) <= 0:
                return False
            self.last = threading.Thread(target=self._send_last, args=(logs,), name="stagekit-last-logs", daemon=True)
            self.last.start()
        self.last.join(self._left(end_s))
        return self.sent_last

    def _send_last(self, logs: Logs) -> None:
        self.sent_last = logs.bring(last=True)
