"""One training's durable record: save, restore, and know what is safe. Torch-free."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal, Self

from ..config import StoreConfig, home_directory, process_rank, wrapped_by
from ..errors import OutOfSpace, StagekitError, StoreError, UsageError
from ..location import Location
from ..outages import Outages
from ..progress import Event, Message, Subscriber
from ..shards.manifest import MANIFEST
from ..store import Where, open_store
from ..store.base import Store, exists
from ..units import format_duration, format_size, parse_duration, parse_size
from . import catalog, ending, identity, lease, traffic
from .heartbeat import Pulse
from .home import remember
from .layout import RUN_JSON, Checkpoint, Metrics, Selector, check_step
from .restore import refuse_target, restore
from .retention import Policy
from .spool import Entry, Spool, default_dir, is_alive, pending
from .sync import RunStatus, SyncSettings, Upload, Uploader, about

_LOG = logging.getLogger("stagekit")
_OUTAGES = Outages()
_STOPPING_S = 2.0  # for the file that is being sent when there is no more time
_FULL_BYTES = 64 * 2**10  # what a full disk may have left: too little for the next block of a writer
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def log(event: Event) -> None:
    """The default subscriber of a run: sentences go to the logger ``stagekit``, warnings to standard error when logging is not set up."""
    told = _OUTAGES.told(event)
    if isinstance(told, Message):
        _LOG.log(_LEVELS[told.level], "%s", told.text)


def refuse_whole_bucket(where: str | os.PathLike[str] | Location) -> None:
    """Nothing for a place that a run can have. Raises ``UsageError`` for the root of a bucket: all that lies in it would be the run's."""
    location = Location.parse(where)
    if location.path in ("", "/") and location.scheme not in ("file", "memory"):
        raise UsageError(
            f"{location}: a whole bucket cannot be a run, as nothing else could lie beside it; give the run a name: {location / 'NAME'}"
        )


class Run:
    """The durable record of one training at ``where``, such as ``s3://bucket/runs/first``.

    Making it does no I/O. Reading calls (``latest``, ``checkpoints``, ``restore``, ``status``) write nothing anywhere; the first save, or
    ``drain()``, takes the run over for this process and finishes what a killed process left on this disk.

    A save is handed over in milliseconds and sent in the background: files, verified, then the manifest that makes it a checkpoint. Until
    then its local copies are pinned in ``spool_dir``. A process that ends drains first, for at most ``drain_s``.

    ``keep_last``, ``keep_every``, ``keep_best=(metric, "min" | "max", count)``: which checkpoints stay in the bucket; without any of them
    all do. ``backlog``: when saves come faster than the network takes them, drop intermediate ones that nothing asks to keep
    (``"coalesce"``, beyond 4 pending or over ``disk``), or ``"wait"``. ``base_model``: name and revision; a restore refuses another one.
    ``rank`` and ``world_size`` come from ``RANK`` and ``WORLD_SIZE``: only rank 0 commits.

    Failures in the background are sticky: what does not heal by itself is raised at the next save, and everything that did not reach the
    bucket at ``drain()`` and ``close()``.

    Example::

        run = stagekit.Run("s3://my-bucket/runs/first")
        run.submit("out/checkpoint-500", step=500, metrics={"loss": 0.3})
        run.close()
    """

    def __init__(
        self,
        where: Where,
        *,
        store: StoreConfig | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, str, int] | None = None,
        backlog: Literal["coalesce", "wait"] = "coalesce",
        spool_dir: str | os.PathLike[str] | None = None,
        disk: str | int | None = None,
        base_model: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        drain_s: str | float = "10min",
        grace_s: str | float = 25.0,
        on_event: Subscriber = log,
        clock: Callable[[], float] = time.time,
        settings: SyncSettings | None = None,
    ) -> None:
        if backlog not in ("coalesce", "wait"):
            raise UsageError(f"backlog: {backlog!r} is neither 'coalesce' nor 'wait'")
        from_launcher = process_rank()
        self.rank = from_launcher[0] if rank is None else rank
        self.world_size = from_launcher[1] if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of {self.world_size}: ranks count from 0 to world_size - 1")
        self._where = where if isinstance(where, str | os.PathLike | Location) else None
        if self._where is not None:
            refuse_whole_bucket(self._where)
        self._opened: Store | None = None if self._where is not None else open_store(where)
        self._config = store
        self._policy = Policy(keep_last, keep_every, tuple(keep_best) if keep_best is not None else None)  # type: ignore[arg-type]  # checked there
        self._base_model = base_model
        self._drain_s = parse_duration(drain_s, name="drain_s")
        self.grace_s = parse_duration(grace_s, name="grace_s")
        self._on_event = on_event
        self._clock = clock
        self._spool_dir = Path(spool_dir).expanduser().absolute() if spool_dir is not None else None
        self._location = Location.parse(self._where) if self._where is not None else self._store.location
        base = settings or SyncSettings()
        self._settings = SyncSettings(
            policy=self._policy,
            backlog=backlog,
            disk_bytes=parse_size(disk, name="disk") if disk is not None else None,
            rank=self.rank,
            world_size=self.world_size,
            parts_timeout_s=base.parts_timeout_s,
            retry_after_s=base.retry_after_s,
            clock=clock,
            monotonic=base.monotonic,
            sleep=base.sleep,
            threads=base.threads,
        )
        self._pid: int | None = None
        self._spool: Spool | None = None
        self._uploader: Uploader | None = None
        self._watched: set[Path] = set()
        self._submitted: set[Path] = set()
        self._resumed: Checkpoint | None = None
        self._seen = 0
        self._dataset: str | None = None
        self._datasets: dict[str, str] = {}
        self._pulse: Pulse | None = None
        self._working: Path | None = None
        self._closed = False
        self._traffic = traffic.Traffic(self.url)
        self._looked = False
        self._misplaced: UsageError | None = None
        self._home_told = False

    @property
    def url(self) -> str:
        """Where the run lies."""
        return str(self._location)

    # -------------------------------------------------------------------------------------------------------- saving

    @contextmanager
    def checkpoint(
        self, *, step: int, epoch: int | None = None, metrics: Mapping[str, float] | None = None, final: bool = False
    ) -> Iterator[Path]:
        """A new local directory to save into; leaving the block hands it over without a copy. An exception inside saves nothing.

        ``metrics`` may be filled inside the block. At its end, *after* this save was pinned, it raises what ``submit`` raises.
        """
        with self._checkpoint(step, epoch, metrics, final) as directory:
            yield directory
        if self._uploader is not None:
            self._raise_sticky(self._uploader)

    @contextmanager
    def _checkpoint(
        self, step: int, epoch: int | None, metrics: Mapping[str, float] | None, final: bool, *, passing: bool = False
    ) -> Iterator[Path]:
        check_step(step)
        spool, uploader = self._begin()
        reserved = self._reserve()
        try:
            yield reserved
            with self._spooling():
                entry = spool.accept(reserved, self._entry(uploader, step, epoch, metrics, final, passing=passing))
            if not entry.files:
                spool.remove(entry)
                raise UsageError(f"step {step}: nothing was written into the checkpoint's directory, so there is nothing to save")
        except BaseException as error:
            full = _is_full(error, reserved)  # told before what was written is removed
            spool.release(reserved)
            if full:
                refused = OutOfSpace(
                    f"saving step {step} of {self.url} to {spool.directory}: the disk is full; free some space, or give spool_dir= on "
                    "another disk"
                )
                uploader.lose(step, refused)
                raise refused from error
            raise
        self._hand_over(uploader, entry)

    def _reserve(self) -> Path:
        """A new directory in the spool. Raises ``UsageError`` naming the spool when it cannot be written, ``OutOfSpace`` when full."""
        spool, _ = self._begin()
        with self._spooling():
            return spool.reserve()

    @contextmanager
    def _spooling(self) -> Iterator[None]:
        """Say what is wrong with the spool where Python would name a path that nobody gave."""
        directory = self._spool_dir or default_dir()
        try:
            yield
        except OSError as error:
            if isinstance(error, StagekitError):
                raise
            what = f"saving to {self.url}: {directory}, where saves are kept until they are in the bucket, cannot be written"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(f"{what}: the disk is full; free some space, or give spool_dir= on another disk") from error
            raise UsageError(
                f"{what} ({error.strerror or error}); set STAGEKIT_HOME, or give spool_dir=, to a directory that can be"
            ) from error

    def submit(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
        final: bool = False,
        holding: Mapping[str, int] | None = None,
        made_with: Mapping[str, str | int | None] = MappingProxyType({}),
    ) -> Upload:
        """Hand over a finished directory (or one file). Returns before the bytes are safe: ask ``Upload.wait`` or ``drain``.

        The files are pinned first, so the directory may be rotated or removed at once. Raises ``UsageError`` and ``SourceError`` for what
        cannot be saved, ``OutOfSpace`` when the spool's disk is full; and, *after* this save was pinned, what went wrong with earlier ones
        and will not heal by itself (``UploadFailed``, ``Fenced``).

        ``holding``: the files and sizes that the caller found complete; when the directory holds anything else by now, as when its trainer
        has begun to rotate it away, ``SourceError`` is raised and nothing is saved. ``made_with``: what to note about how it was made,
        besides or instead of what this process knows; ``None`` for what is not known.
        """
        check_step(step)
        source = Path(directory).expanduser().absolute()
        spool, uploader = self._begin()
        if source not in self._watched:
            self._submitted.add(source)
        self.watch(source)
        entry = self._entry(uploader, step, epoch, metrics, final)
        entry.identity = {name: value for name, value in {**entry.identity, **made_with}.items() if value is not None}
        try:
            with self._spooling():
                entry = spool.pin(source, entry, holding=holding)
        except OutOfSpace as error:
            uploader.lose(step, error)
            raise
        upload = self._hand_over(uploader, entry)
        self._raise_sticky(uploader)
        return upload

    def watch(self, directory: str | os.PathLike[str]) -> None:
        """Note that ``directory`` belongs to this run, so that ``stagekit teardown`` looks at it."""
        path = Path(directory).expanduser().absolute()
        self._refuse_wrapper()
        self._note_working_directory()
        real = path.resolve()
        if path not in self._watched:
            # What was rotated away meanwhile is no longer looked at: a long training must not remember every checkpoint it ever had.
            self._watched = {one for one in self._watched if one.exists() or one not in self._submitted} | {path, real}
            if path in self._submitted:
                self._submitted.add(real)  # a link may lead elsewhere later
            if self._spool is not None:
                self._remember()

    def made_with(self, *, base_model: str | None = None, dataset: str | None = None, dataset_url: str | None = None) -> None:
        """Say which base model and data set this training uses, when that is known only after the run was made.

        Every checkpoint names them from then on. A restore refuses another base model. What was said before and is ``None`` here stays.
        ``dataset_url`` is where the data set with the digest ``dataset`` lies: ``stagekit teardown`` looks whether it is still there.
        """
        self._base_model = base_model or self._base_model
        self._dataset = dataset or self._dataset
        if dataset is not None and dataset_url is not None and self._datasets.get(dataset) != dataset_url:
            self._datasets[dataset] = dataset_url
            if self._spool is not None:
                self._remember()

    def heartbeat(self, step: int) -> None:
        """Say that ``step`` steps are trained, so that ``stagekit teardown`` can tell what would be lost. May be called after each step.

        ``Run.epochs`` and ``StagekitCallback`` do it by themselves. It takes a note on this machine every few seconds; nothing is sent.
        """
        if self._pulse is None:
            self._pulse = Pulse(self.url, clock=self._clock)
            self._note_working_directory()
        self._pulse.beat(step)

    def _entry(
        self,
        uploader: Uploader,
        step: int,
        epoch: int | None,
        metrics: Mapping[str, float] | None,
        final: bool,
        *,
        passing: bool = False,
    ) -> Entry:
        self._note_working_directory()
        return Entry(
            run=self.url,
            store=StoreConfig.in_force(self._config, self.url),
            step=step,
            counter=uploader.next_counter(),
            name=uploader.name_for(step),
            epoch=epoch,
            metrics=_numbers(metrics or {}),
            identity=self._identity(),
            best=self._policy.best,
            saved_s=self._clock(),
            final=final,
            passing=passing,
            rank=self.rank,
            world_size=self.world_size if uploader.joined else 1,
            base=uploader.generation or self._base(),
        )

    def _base(self) -> int:
        """The generation that this training continues, as long as it has none of its own: the newest that it has seen, or that was saved
        to from this disk."""
        here = self._spool.known_generation(self.url) if self._spool is not None else 0
        return max(here, self._seen)

    def _raise_sticky(self, uploader: Uploader) -> None:
        try:
            uploader.raise_sticky()
        finally:  # found out meanwhile or before: this sentence says what to do
            if self._misplaced is not None:
                raise self._misplaced

    def _hand_over(self, uploader: Uploader, entry: Entry) -> Upload:
        uploader.pinned(entry)
        return uploader.add(entry)

    def session(self) -> str:
        """Take the run over now and return what the other ranks must ``join``, so that every rank's files go into the same checkpoints.

        Only for trainings in which each rank saves files of its own. Every rank then saves the same steps in the same order.
        """
        _, uploader = self._begin()
        if self.rank != 0:
            raise UsageError(f"rank {self.rank} asked for a session; rank 0 takes the run over and hands its session to the others")
        generation, owner = uploader.session()
        return f"{generation:06d}-{owner}"

    def join(self, session: str) -> None:
        """Save under rank 0's ``session``. Rank 0 commits a step when every rank has delivered."""
        generation, _, owner = session.partition("-")
        self._begin(join=(int(generation), owner))

    def _identity(self) -> identity.Identity:
        return identity.current(world_size=self.world_size, base_model=self._base_model, dataset=self._dataset)

    # -------------------------------------------------------------------------------------------------------- reading

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose manifest parses and whose files have the right sizes; ``None`` for a run that provably has none.

        A damaged one is passed over with a warning. "Cannot tell" (refused, no answer, no such bucket) raises.
        """
        found = catalog.latest(self._store, on_event=self._on_event)
        self._see(found)
        return found

    def checkpoints(self) -> list[Checkpoint]:
        """All committed checkpoints with a readable manifest, newest first."""
        found = list(catalog.read_all(self._store).checkpoints)
        self._see(next(iter(found), None))
        return found

    def _see(self, newest: Checkpoint | None) -> None:
        if newest is not None:
            self._seen = max(self._seen, newest.name.generation)

    def restore(
        self,
        directory: str | os.PathLike[str],
        step: Selector | None = None,
        *,
        strict: bool = False,
        allow_fresh: bool = False,
    ) -> Checkpoint | None:
        """Put the newest whole checkpoint (or ``step``, or ``"best"``) into ``directory``, which must be empty or missing.

        Every hash is checked; a damaged checkpoint is passed over with a warning that names file and hashes, or raises with ``strict``.
        Returns ``None`` for a new run. Raises when it cannot be told what the run has, or nothing of it is whole: training from scratch
        would be the wrong answer. ``allow_fresh`` accepts that answer, with a warning. A data set at the run's URL is a ``UsageError``.

        What a killed process left on this disk may be the newest checkpoint there is: unless a step is asked for, that is sent first.
        """
        target = Path(directory).expanduser().absolute()
        refuse_target(target)
        selector: Selector = "latest" if step is None else step
        if isinstance(selector, int):
            check_step(selector)
        if selector == "latest" and self._has_backlog():
            self._finish_backlog()
        try:
            found = restore(self._store, target, selector, strict=strict, best=self._policy.best, on_event=self._on_event)
        except StagekitError as error:
            if not allow_fresh or isinstance(error, UsageError):
                raise
            self._on_event(Message(f"starting from scratch, as allow_fresh says, although {error}", "warning"))
            return None
        if found is None:
            self._refuse_misplaced()
        else:
            try:
                self.go_on_with(found)
            except StagekitError:
                shutil.rmtree(target)
                raise
        return found

    def go_on_with(self, found: Checkpoint) -> None:
        """Say that training continues from ``found``, whose files are on this machine already. ``restore`` says so by itself.

        What it was made with is compared with what this training uses; differences are told, and another base model raises
        ``CheckpointError``. From then on it is never pruned.
        """
        for sentence in identity.differences(found.manifest.identity, self._identity()):
            self._on_event(Message(f"step {found.step} of {self.url}: {sentence}", "warning"))
        self._resumed = found
        self._see(found)
        if self._uploader is not None:
            self._uploader.protect(found.name)

    def status(self) -> RunStatus:
        """What this process knows: what is pending, what failed, what is verified. Asks nobody."""
        if self._uploader is None or self._pid != os.getpid():
            return RunStatus(self.url, None, None, (), 0, None, (), (), ())
        return self._uploader.status()

    # -------------------------------------------------------------------------------------------------------- ending

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until everything handed over is in the bucket, also what a killed process left on this disk.

        Raises ``UploadFailed`` when something is not, after ``timeout_s`` or when it was refused; it stays pinned.
        """
        self._drain(timeout_s)
        self._raise_unsynced()

    def _drain(self, timeout_s: float | None, left_s: Callable[[], float] = lambda: math.inf) -> None:
        _, uploader = self._begin()
        uploader.drain(timeout_s, left_s=left_s)

    def _raise_unsynced(self) -> None:
        _, uploader = self._begin()
        if (error := self._misplaced or uploader.unsynced()) is not None:
            raise error

    def close(self) -> None:
        """Drain for at most ``drain_s``, then say in the bucket that this process has finished. Closing twice is no error.

        Raises like ``drain``; what is pending then stays pinned on disk. SIGTERM meanwhile ends the process with 143 within ``grace_s``,
        the newest sent first.
        """
        if self._closed or self._uploader is None:
            self._close()
        else:
            with self._ending(self._uploader) as left_s:
                self._close(left_s)

    @contextmanager
    def _ending(self, uploader: Uploader) -> Iterator[Callable[[], float]]:
        """Wait for what is pending in the block, as long as what it gets tells. SIGTERM meanwhile: the newest first, and then 143."""
        termination = ending.Termination(self.grace_s, uploader.hurry)
        try:
            yield lambda: termination.left_s
        except StagekitError as error:
            if not termination.requested:
                raise
            sys.stderr.write(f"stagekit: {error}\n")
        finally:
            termination.close()
        if termination.requested:
            self._drain_s = 0.0
            ending.note_exit_code(ending.TERMINATED)
            raise SystemExit(ending.TERMINATED)

    def _drain_at_end(self) -> None:
        """What a trainer's hook does when the training has ended: ``drain`` for at most ``drain_s``."""
        with self._ending(self._begin()[1]) as left_s:
            self._drain(self._drain_s, left_s)
            self._raise_unsynced()

    def _close(self, left_s: Callable[[], float] = lambda: math.inf) -> None:
        if self._pulse is not None and not self._closed:
            self._pulse.last()
        if self._closed or self._uploader is None or self._spool is None or self._pid != os.getpid():
            self._closed = True
            return
        self._closed = True
        ending.forget(self)
        self._forget_rotated()
        uploader, spool = self._uploader, self._spool
        try:
            uploader.drain(self._drain_s, left_s=left_s)
        finally:
            uploader.stop(min(_STOPPING_S, self.grace_s / 4))
            if uploader.held is not None and uploader.status().synced:
                with suppress(StagekitError):  # the next writer is warned without need, no more
                    lease.close(self._store, uploader.held, traffic.to_bytes(self._traffic.collected()))
            spool.close()
        if (error := self._misplaced or uploader.unsynced()) is not None:
            raise error

    def finish_for_termination(self, left_s: float) -> None:
        """Send the newest save first for at most ``left_s``, and nothing more when the process ends after that."""
        self._drain_s = 0.0
        if self._uploader is not None:
            self._uploader.drain(left_s, newest_first=True)

    def finish_at_exit(self) -> str | None:
        """What ``ending`` calls when the process ends without ``close``."""
        if self._uploader is None or self._pid != os.getpid():
            return None
        status = self._uploader.status()
        termination = ending.Termination(self.grace_s, self._uploader.hurry)
        try:
            if status.pending and self._drain_s:  # within the try: the second ctrl-C may come as soon as this is read
                self._on_event(
                    Message(
                        f"{about(status.pending, 'is', 'are')} not in {self.url} yet ({format_size(status.pending_bytes)}); "
                        f"sending for at most {format_duration(self._drain_s)}, ctrl-C leaves at once",
                        "warning",
                    )
                )
            self._close(lambda: termination.left_s)
        except StagekitError as error:
            return str(error)
        except KeyboardInterrupt:
            left = self._uploader.unsynced()
            if left is None:
                raise
            return f"interrupted: {left}"
        finally:
            termination.close()
            if termination.requested:
                ending.note_exit_code(ending.TERMINATED)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except StagekitError as failure:
            error.add_note(str(failure))

    # -------------------------------------------------------------------------------------------------------- beginning

    @property
    def _store(self) -> Store:
        if self._opened is None:
            assert self._where is not None  # else it was opened when the run was made
            self._opened = open_store(self._where, self._config, on_event=self._on_event)
        return self._opened

    def _store_to_write(self) -> Store:
        """The store, after a look that a run may lie there."""
        if not self._looked:
            self._refuse_misplaced()
            self._looked = True
        return self._store

    def _refuse_misplaced(self) -> None:
        """Nothing when no data set lies here, and a new run is in no other run or data set. Raises ``UsageError``: what lay there would
        be shown by no command."""
        location = self._location
        if exists(self._store, MANIFEST):
            other = (location if location.path in ("", "/") else location.parent) / "runs" / "first"
            self._misplaced = UsageError(
                f"saving to {self.url}: it is a data set, as it holds {MANIFEST}; give the run a URL of its own, such as {other}"
            )
        elif not exists(self._store, RUN_JSON) and (around := self._around()) is not None:
            what, place = around
            other = place.parent / f"{place.name}-{location.name}"
            self._misplaced = UsageError(
                f"saving to {self.url}: it lies inside the {what} {place}, where no command would show it; give it a URL of its own, such "
                f"as {other}"
            )
        if self._misplaced is not None:
            raise self._misplaced

    def _refuse_wrapper(self) -> None:
        """Nothing unless a ``stagekit run`` around this process saves into the same run: one would take it over from the other."""
        if wrapped_by() == self.url:
            raise UsageError(
                f"saving to {self.url}: the stagekit run around this training saves into that run already. Leave out one of the two: start "
                "the script without stagekit run, or let it save into the watched directory only"
            )

    def _around(self) -> tuple[str, Location] | None:
        """The run or data set that this location lies inside of. What the key may not look at is not told."""
        above = self._location
        while self._where is not None and above != above.parent and above.parent.path not in ("", "/"):
            above = above.parent
            with suppress(StoreError):
                store = open_store(above, self._config)
                for name, what in ((RUN_JSON, "run"), (MANIFEST, "data set")):
                    if exists(store, name):
                        return what, above
        return None

    def _begin(self, *, join: tuple[int, str] | None = None) -> tuple[Spool, Uploader]:
        """Become a writer: a session in the spool, a note in the machine's home, and the backlog of dead processes."""
        if self._closed:
            raise UsageError(f"the run {self.url} was closed; make a new Run to save to it")
        if self._misplaced is not None:
            raise self._misplaced
        if self._uploader is not None and self._spool is not None:
            if self._pid != os.getpid():
                raise UsageError(f"the run {self.url} is used in a forked child; only the process that made it may save")
        else:
            self._refuse_wrapper()
            self._pid = os.getpid()
            self._spool = Spool(self._spool_dir or default_dir())
            self._spool.prepare()
            self._uploader = Uploader(self._spool, self.url, self._store_to_write, self._settings, self._on_event)
            if self._resumed is not None:
                self._uploader.protect(self._resumed.name)
            self._remember()
            ending.watch(self)
            self._adopt(self._spool, self._uploader)
        if join is not None:
            self._uploader.join(join)
        if self.rank != 0 and not self._uploader.joined:
            raise UsageError(
                f"rank {self.rank} of {self.world_size} saves to {self.url}; only rank 0 commits. Save on rank 0, or join() its session()"
            )
        return self._spool, self._uploader

    def _has_backlog(self) -> bool:
        """Whether a dead process left saves of this run on this disk, and this one has not begun to send them."""
        if self.rank != 0 or self._uploader is not None or self._closed:
            return False
        left = pending(self._spool_dir or default_dir())
        return any(entry.run == self.url and entry.dropped is None and not is_alive(entry) for entry in left)

    def _finish_backlog(self) -> None:
        """Send what a killed process left pinned on this disk: it may be the newest checkpoint there is."""
        _, uploader = self._begin()
        if uploader.status().pending:
            uploader.drain(self._drain_s)

    def _adopt(self, spool: Spool, uploader: Uploader) -> None:
        if self.rank != 0:
            return
        with self._spooling():
            left = spool.adopt(self.url)
        waiting = [entry.step for entry in left if entry.dropped is None]
        if waiting:
            self._on_event(
                Message(f"the last process here ended before {about(waiting, 'was', 'were')} in {self.url}; sending that now", "warning")
            )
        # What the other ranks had to deliver first: the commit waits for it.
        uploader.adopt(sorted(left, key=lambda one: one.rank == 0))

    def _note_working_directory(self) -> None:
        """Note where this training was started: its code lies there, and what trackers write. Finishing others' uploads notes nothing."""
        if self._working is None:
            with suppress(FileNotFoundError):  # somebody removed it under this process
                self._working = Path.cwd()
            if self._working is not None and self._spool is not None:
                self._remember()

    def _forget_rotated(self) -> None:
        """What was handed over and has been removed since is in the bucket, or pinned: nobody need wonder where it is."""
        rotated = {path for path in self._submitted if not path.exists()}
        if rotated & self._watched:
            self._watched -= rotated
            self._remember()

    def _remember(self) -> None:
        try:
            remember(
                self.url,
                StoreConfig.in_force(self._config, self.url),
                self._spool.directory if self._spool else self._spool_dir or default_dir(),
                self._watched,
                handed=self._submitted,
                working=self._working,
                datasets=self._datasets,
                session=self._spool.session if self._spool else None,
            )
        except OSError as error:
            if not self._home_told:
                self._home_told = True
                text = (
                    f"{home_directory()} cannot be written ({error.strerror or error}), so this machine cannot note that it writes to "
                    f"{self.url}; free some space or set STAGEKIT_HOME, or name the run at the end: stagekit teardown --run {self.url}"
                )
                self._on_event(Message(text, "warning"))


def _is_full(error: BaseException, directory: Path) -> bool:
    """Whether ``error`` was raised because the disk of ``directory`` is full. Not every writer says so: ``torch.save`` hides the reason."""
    if not isinstance(error, Exception) or isinstance(error, StagekitError):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if os.strerror(errno.ENOSPC) in str(error):
        return True
    with suppress(OSError):
        return shutil.disk_usage(directory).free < _FULL_BYTES
    return False


def _numbers(metrics: Mapping[str, float]) -> Metrics:
    result = {}
    for name, value in metrics.items():
        try:
            result[str(name)] = float(value)
        except (TypeError, ValueError):
            raise UsageError(f"the metric {name!r} is {value!r}, which is no number; leave it out or give its mean") from None
    return result
