"""Removing by hand what a run or a whole prefix holds and nobody needs: told first, object by object, then removed.

In a run: checkpoints that the given rules do not keep; attempts that were never committed; uploads that a dead machine left open, which are
billed and in no listing. In a data set: shards that its manifest no longer names. Elsewhere below a prefix: open uploads. Everywhere:
scratch objects of a process that was killed while it found out what the server can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .config import StoreConfig
from .contents import kind_of
from .errors import CheckpointError, ManifestError, PublishError, UsageError
from .progress import Event, Message, Progress, Stage, Subscriber, ignore
from .publishing.claim import read_claim
from .publishing.destination import is_probe
from .publishing.destination import look as look_at_destination
from .runs import lease, retention
from .runs.layout import RUN_JSON
from .runs.retention import Policy, PrunePlan
from .shards.manifest import MANIFEST
from .store import Where, open_store
from .store.base import OpenUpload, Store, uploads_if_told
from .store.below import Below
from .units import format_duration, format_size, parse_duration

_REMOVED = frozenset({"prune.manifest-deleted", "prune.object-deleted", "prune.upload-aborted"})


@dataclass(frozen=True, slots=True)
class Place:
    """What is removed from one run, one data set, or one place that is neither."""

    url: str
    kind: Literal["run", "dataset", "folder"]
    steps: tuple[int, ...]
    objects: tuple[tuple[str, int | None], ...]
    uploads: tuple[OpenUpload, ...]

    @property
    def bytes(self) -> int:
        """What is freed. Parts of open uploads come on top: stores do not tell how large they are."""
        return sum(size or 0 for _, size in self.objects)

    @property
    def lines(self) -> list[str]:
        """The same for people: a sum, then every single object."""
        what = [f"{len(self.objects)} objects"]
        if self.steps:
            what.append(f"step {', '.join(map(str, self.steps))}")
        if self.uploads:
            what.append(f"{len(self.uploads)} unfinished uploads")
        lines = [f"{self.url}: {format_size(self.bytes)} ({'; '.join(what)})"]
        lines += [f"delete {self.url}/{key}" + ("" if size is None else f" ({format_size(size)})") for key, size in self.objects]
        lines += [f"abort  {self.url}/{upload.key} (upload {upload.upload_id})" for upload in self.uploads]
        return lines

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "url": self.url,
            "kind": self.kind,
            "steps": list(self.steps),
            "bytes": self.bytes,
            "objects": [key for key, _ in self.objects],
            "uploads": [{"key": upload.key, "upload_id": upload.upload_id} for upload in self.uploads],
        }


class Pruning:
    """What is to be removed, place by place. Nothing is, before ``carry_out``."""

    def __init__(self, where: str, *, dry_run: bool) -> None:
        self.url = where
        self.dry_run = dry_run
        self.places: list[Place] = []
        self._work: list[Callable[[Subscriber], None]] = []

    @property
    def bytes(self) -> int:
        """What is freed in all."""
        return sum(place.bytes for place in self.places)

    @property
    def line(self) -> str:
        """The sum, in words."""
        if not self.places:
            return f"{self.url}: nothing to remove"
        return f"{self.url}: {format_size(self.bytes)} to free" + (" (a dry run: nothing is removed)" if self.dry_run else "")

    def add(self, place: Place, work: Callable[[Subscriber], None]) -> None:
        """Note what is to be removed, and how."""
        if place.objects or place.uploads:
            self.places.append(place)
            self._work.append(work)

    def carry_out(self, on_event: Subscriber = ignore) -> None:
        """Remove exactly what ``places`` names; nothing in a dry run. After a failure, what is left is whole."""
        if self.dry_run or not self._work:
            return
        total, done = sum(len(place.objects) + len(place.uploads) for place in self.places), 0

        def counted(event: Event) -> None:
            nonlocal done
            on_event(event)
            if isinstance(event, Stage) and event.name in _REMOVED:
                done += 1
                on_event(Progress("prune", done, total, unit="objects"))

        for work in self._work:
            work(counted)
        on_event(Progress("prune", done, total, unit="objects", finished=True))


def prune(
    where: Where,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: tuple[str, str, int] | None = None,
    older_than: str | float = "1d",
    dry_run: bool | None = None,
    allow_live: bool = False,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
) -> Pruning:
    """Remove what a run, a data set, or everything below a prefix holds and nobody needs. Returns what was, or would be, removed.

    Checkpoints go only by ``keep_last``, ``keep_every`` and ``keep_best``, as with ``Run``; the newest whole one never does. Leftovers of
    dead machines (attempts without a commit, unfinished uploads, shards of a replaced data set) go when they are older than ``older_than``.
    ``dry_run`` only tells; it is the default for a prefix, and names exactly what the real run removes.

    A run that a living process may be writing is refused with ``CheckpointError`` when rules are given, unless ``allow_live``: give the
    rules to its ``Run`` instead. Raises the store's errors when it cannot be seen what there is; nothing is removed then.

    Example: ``stagekit.prune("s3://bucket/runs/first", keep_last=3)``.
    """
    pruning = survey(
        where,
        policy=Policy(keep_last, keep_every, tuple(keep_best) if keep_best is not None else None),  # type: ignore[arg-type]  # checked there
        older_than=older_than,
        dry_run=dry_run,
        allow_live=allow_live,
        store=store,
        on_event=on_event,
    )
    pruning.carry_out(on_event)
    return pruning


def survey(
    where: Where,
    *,
    policy: Policy,
    older_than: str | float = "1d",
    dry_run: bool | None = None,
    allow_live: bool = False,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
    clock: Callable[[], float] = time.time,
) -> Pruning:
    """What ``prune`` would remove now. Only reads."""
    age_s = parse_duration(older_than, name="older_than")
    if age_s < 3600:
        raise UsageError(
            f"older_than: {format_duration(age_s)} is less than an hour; something younger may be on its way. Give an hour or more"
        )
    opened = open_store(where, store, on_event=on_event)
    before_s = clock() - age_s
    kind = kind_of(opened)
    pruning = Pruning(str(opened.location), dry_run=kind is None if dry_run is None else dry_run)
    handled: list[str] = []
    for folder, found in _walk(opened, "", kind):
        place = Below(opened, folder) if folder else opened
        _add_probes(pruning, place, before_s)
        if found is None:
            continue
        handled.append(folder)
        if found == "run":
            _add_run(pruning, place, policy, before_s, allow_live, on_event)
        else:
            _add_dataset(pruning, place, before_s, on_event)
    if kind is None:
        told = uploads_if_told(opened)
        if not told and not any(opened.list()):
            raise UsageError(f"pruning {opened.location}: there is nothing at this URL; look for it: stagekit ls {opened.location.parent}")
        uploads = tuple(
            upload
            for upload in _uploads(opened, told, on_event)
            if _is_older(upload.started_s, before_s) and not any(upload.key.startswith(folder) for folder in handled)
        )
        pruning.add(Place(pruning.url, "folder", (), (), uploads), lambda on_event: _abort(opened, uploads, on_event))
    return pruning


def _walk(store: Store, folder: str, kind: Literal["run", "dataset"] | None) -> Iterator[tuple[str, Literal["run", "dataset"] | None]]:
    """Every run and data set at or below ``folder``, and the folders on the way, as (folder, what it is)."""
    yield folder, kind
    if kind is not None:
        return
    for below in store.children(folder).folders:
        inside = {info.key for info in store.children(below).objects}
        found = kind_of(Below(store, below)) if {below + MANIFEST, below + RUN_JSON} & inside else None
        yield from _walk(store, below, found)


def _add_probes(pruning: Pruning, store: Store, before_s: float) -> None:
    old = [info for info in store.children().objects if is_probe(info.key) and _is_older(info.modified_s, before_s)]

    def work(on_event: Subscriber) -> None:
        _delete(store, [info.key for info in old], on_event)

    pruning.add(Place(str(store.location), "folder", (), tuple((info.key, info.size) for info in old), ()), work)


def _add_run(pruning: Pruning, store: Store, policy: Policy, before_s: float, allow_live: bool, on_event: Subscriber) -> None:
    owners = lease.look(store)
    over, who = _is_over(store, owners, before_s)
    if policy.asked and not over and not allow_live:
        raise CheckpointError(
            f"pruning {store.location}: {who} may still be writing to this run; nothing is removed. Give keep_last= and the like to its "
            "Run, or pass --allow-live"
        )
    plan = retention.plan(store, policy, leftovers_before_s=before_s, over=over, by_line=False)
    if plan.undecided is not None:
        raise UsageError(f"pruning {store.location}: {plan.undecided}")
    manifests = [(one.name.manifest_key, None) for one in plan.checkpoints]
    steps = tuple(one.step for one in plan.checkpoints)

    def work(on_event: Subscriber) -> None:
        retention.execute(store, plan, check=lambda: _check_unchanged(store, owners), on_event=on_event)

    uploads = _uploads(store, plan.uploads, on_event)
    pruning.add(Place(str(store.location), "run", steps, (*manifests, *_sized(plan)), uploads), work)


def _uploads(store: Store, told: tuple[OpenUpload, ...] | None, on_event: Subscriber) -> tuple[OpenUpload, ...]:
    """Those that were ``told``. Not to see them costs space and no checkpoint, so that everything else is removed all the same."""
    if told is None:
        what = f"unfinished uploads in {store.location} are not looked at: these keys may not list them (s3:ListBucketMultipartUploads)"
        on_event(Message(what, "warning"))
    return told or ()


def _sized(plan: PrunePlan) -> list[tuple[str, int | None]]:
    return [(key, size) for key, size in plan.objects]


def _is_over(store: Store, owners: lease.Owners, before_s: float) -> tuple[bool, str]:
    """Whether the run's last writer has finished, died on this machine, or given no sign of life since ``before_s``; and who it is."""
    if owners.newest is None or owners.closed:
        return True, ""
    try:
        process = lease.read_lease(store, *owners.newest).process
    except ManifestError:
        return False, f"owner {owners.newest[1]}"
    silent = all(_is_older(info.modified_s, before_s) for info in store.list())
    return process.is_dead() or silent, str(process)


def _check_unchanged(store: Store, owners: lease.Owners) -> None:
    if (now := lease.look(store).newest) != owners.newest:
        raise CheckpointError(
            f"pruning {store.location}: another process took the run over meanwhile (generation {now[0] if now else 0}); stopped here, "
            "every checkpoint that is left is whole. Run the same command again"
        )


def _add_dataset(pruning: Pruning, store: Store, before_s: float, on_event: Subscriber) -> None:
    if read_claim(store) is not None:
        on_event(Message(f"{store.location} is being written, or its writer died: left alone. stagekit shard finishes it", "warning"))
        return
    try:
        found = look_at_destination(store)
    except PublishError as error:
        on_event(Message(f"{store.location} is left alone, as it holds what no data set does: {error}", "warning"))
        return
    replaced_s = store.head(MANIFEST).modified_s
    stale = [key for key in found.leftovers if _is_older(found.objects[key].modified_s, before_s) and _is_older(replaced_s, before_s)]
    uploads = tuple(upload for upload in _uploads(store, uploads_if_told(store), on_event) if _is_older(upload.started_s, before_s))

    def work(on_event: Subscriber) -> None:
        _delete(store, stale, on_event)
        _abort(store, uploads, on_event)

    objects = tuple((key, found.objects[key].size) for key in stale)
    pruning.add(Place(str(store.location), "dataset", (), objects, uploads), work)


def _delete(store: Store, keys: Iterable[str], on_event: Subscriber) -> None:
    for key in keys:
        store.delete(key)
        on_event(Stage("prune.object-deleted", key))


def _abort(store: Store, uploads: tuple[OpenUpload, ...], on_event: Subscriber) -> None:
    for upload in uploads:
        store.abort_upload(upload)
        on_event(Stage("prune.upload-aborted", upload.key))


def _is_older(time_s: float | None, before_s: float) -> bool:
    return time_s is not None and time_s < before_s
