"""Which checkpoints a run keeps, and removing the others: mark and sweep over all manifests, only when asked.

Never removed: the newest whole checkpoint and anything newer, the one a training resumed from, a file that another manifest refers to, and
anything outside the run. Each dropped step leaves a record (``superseded/``) before its manifest goes, and its manifest goes before its
data, so that a crash at any point leaves whole checkpoints and rubbish that the next sweep removes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import CheckpointError, DamagedCheckpoint, UsageError
from ..parallel import each
from ..progress import Message, Stage, Subscriber, ignore
from ..store.base import OpenUpload, Store, exists, uploads_if_told
from ..transfer.put import put_object
from . import catalog, lease
from .layout import BESIDE, CHECKPOINTS, SAVED_IN, Checkpoint, CheckpointName, SupersededRecord

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep; a checkpoint that any of them wants is kept. Without any, everything is.

    ``keep_last``: so many newest ones. ``keep_every``: steps that are a multiple of it. ``keep_best``: a metric's name, ``"min"`` or
    ``"max"``, and how many.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: tuple[str, str, int] | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}: {value!r} is no whole number above 0")
        if self.keep_best is not None:
            best = self.keep_best
            valid = isinstance(best, tuple | list) and len(best) == 3 and isinstance(best[0], str) and best[1] in ("min", "max")
            if not valid or isinstance(best[2], bool) or not isinstance(best[2], int) or best[2] < 1:
                raise UsageError(f'keep_best: {best!r} is not (metric, "min" or "max", how many), such as ("val_loss", "min", 2)')

    @property
    def asked(self) -> bool:
        """Whether anything may be dropped at all."""
        return not (self.keep_last is None and self.keep_every is None and self.keep_best is None)

    @property
    def best(self) -> tuple[str, str] | None:
        """The metric that decides what is best, and whether small or large is good."""
        return (self.keep_best[0], self.keep_best[1]) if self.keep_best is not None else None

    def undecided(self, checkpoints: Sequence[Checkpoint]) -> str | None:
        """Why what is best cannot be told, in words: ``checkpoints`` have other metrics than the one that decides, or it is no finite
        number in any of them. Nothing is dropped then."""
        if self.keep_best is None or not checkpoints or catalog.rank(tuple(checkpoints), self.keep_best[:2]):
            return None
        if any(self.keep_best[0] in one.metrics for one in checkpoints):
            metric = self.keep_best[0]
            return f"the metric {metric!r}, by which keep_best is to decide, is no finite number in any checkpoint, so nothing is removed"
        names = sorted({name for one in checkpoints for name in one.metrics})
        there = f"the metrics there are: {', '.join(names)}" if names else "they have no metrics"
        return f"no checkpoint has the metric {self.keep_best[0]!r}, by which keep_best is to decide, so nothing is removed; {there}"

    def dropped(
        self, checkpoints: Sequence[Checkpoint], *, protected: Collection[CheckpointName], by_line: bool = True
    ) -> list[Checkpoint]:
        """Those of ``checkpoints`` that nothing keeps, oldest first. A pure function; the newest is always kept.

        Where several directories save into one run, each has the policy for its own. So has what each machine had left that the run went on
        without, unless ``by_line`` is false: nobody is sure yet that it is not wanted.
        """
        if not self.asked:
            return []
        lines: dict[tuple[str, str], list[Checkpoint]] = {}
        for one in sorted(checkpoints, key=lambda one: one.name):
            identity = one.manifest.identity
            beside = one.name.owner if by_line and identity.get(BESIDE) else ""
            lines.setdefault((str(identity.get(SAVED_IN, "")), beside), []).append(one)
        return sorted((one for own in lines.values() for one in self._dropped(own, protected)), key=lambda one: one.name)

    def _dropped(self, ordered: Sequence[Checkpoint], protected: Collection[CheckpointName]) -> list[Checkpoint]:
        if self.undecided(ordered) is not None:
            return []
        kept = {ordered[-1].name, *protected}
        if self.keep_last is not None:
            kept.update(one.name for one in ordered[-self.keep_last :])
        if self.keep_every is not None:
            kept.update(one.name for one in ordered if one.step % self.keep_every == 0)
        if self.keep_best is not None:
            metric, mode, count = self.keep_best
            kept.update(one.name for one in catalog.rank(tuple(ordered), (metric, mode))[:count])
        return [one for one in ordered if one.name not in kept]


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What a prune removes: whole checkpoints, the data objects that go with them, rubbish of dead writers, unfinished uploads.

    ``uploads`` is ``None`` where the keys may not list them. ``undecided`` is that of ``Policy``.
    """

    checkpoints: tuple[Checkpoint, ...]
    objects: tuple[tuple[str, int], ...]
    uploads: tuple[OpenUpload, ...] | None
    undecided: str | None = None

    @property
    def freed_bytes(self) -> int:
        """The data objects' sizes. Parts of unfinished uploads come on top; stores do not tell how large they are."""
        return sum(size for _, size in self.objects)

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.objects or self.uploads)


def plan(
    store: Store,
    policy: Policy,
    *,
    protected: Collection[CheckpointName] = (),
    leftovers_before_s: float | None = None,
    known: Mapping[CheckpointName, Checkpoint] = MappingProxyType({}),
    whole: Collection[CheckpointName] = (),
    over: bool = False,
    by_line: bool = True,
) -> PrunePlan:
    """What ``execute`` would remove now. Only reads; manifests in ``known`` are not read again, files of those in ``whole`` not asked for.

    Data of steps that were dropped before is rubbish at once. With ``leftovers_before_s`` (the store's clock) so are attempts that were
    never committed, and unfinished uploads, of a generation that has been taken over (or of any, when the last writer is ``over``), when
    nothing of them is younger than that. ``by_line`` as in ``Policy.dropped``.

    Raises ``CheckpointError`` when a manifest is damaged: it may refer to any file, so nothing can be told to be unneeded.
    """
    found = catalog.read_all(store, known=known)
    if found.damaged:
        raise CheckpointError(
            f"pruning {store.location}: nothing is removed, since a manifest is damaged and may refer to any file: {found.damaged[0][1]}. "
            "Remove that checkpoint's folder by hand first"
        )
    drop = policy.dropped(found.checkpoints, protected={*protected, *_newest_whole(store, found.checkpoints, whole)}, by_line=by_line)
    names = {one.name for one in drop}
    kept = [one for one in found.checkpoints if one.name not in names]
    referenced = {record.key(one.name) for one in kept for record in one.files}
    objects: dict[str, int] = {}
    for checkpoint in drop:
        objects.update({record.key(checkpoint.name): record.bytes for record in checkpoint.files if record.object is None})
        objects.update(_below(store, checkpoint.name.folder))
        objects.pop(checkpoint.name.manifest_key, None)
    # Data that the last of the dropped manifests referred to, in folders whose own manifest went in an earlier prune.
    current = sys.maxsize if over else lease.look(store).highest  # the generation that may still be at work
    for name in found.uncommitted:
        left = list(store.list(name.folder))
        if exists(store, name.superseded_key) or (
            leftovers_before_s is not None
            and name.generation < current
            and all(info.modified_s is not None and info.modified_s < leftovers_before_s for info in left)
        ):
            objects.update((info.key, info.size) for info in left)
    uploads: tuple[OpenUpload, ...] | None = ()
    if leftovers_before_s is not None:
        uploads = uploads_if_told(store, CHECKPOINTS)
        if uploads is not None:
            uploads = tuple(upload for upload in uploads if _is_abandoned(upload, current, leftovers_before_s))
    sized = tuple((key, size) for key, size in sorted(objects.items()) if key not in referenced)
    return PrunePlan(tuple(drop), sized, uploads, policy.undecided(found.checkpoints))


def execute(store: Store, plan: PrunePlan, *, check: Callable[[], None], on_event: Subscriber = ignore) -> None:
    """Remove exactly what ``plan`` names. ``check`` is called before each removal of a manifest and may raise ``Fenced``.

    After a failure every checkpoint that still has its manifest is whole.
    """
    for checkpoint in plan.checkpoints:
        check()
        record = SupersededRecord(checkpoint.step, "retention", tuple((one.path, one.bytes, one.sha256) for one in checkpoint.files))
        put_object(store, checkpoint.name.superseded_key, record.to_bytes())
        on_event(Stage("prune.recorded", str(checkpoint.step)))
        store.delete(checkpoint.name.manifest_key)
        on_event(Stage("prune.manifest-deleted", str(checkpoint.step)))
    keys = [key for key, _ in plan.objects]
    for key, _ in zip(keys, each(store.delete, keys), strict=True):
        on_event(Stage("prune.object-deleted", key))
    for upload in plan.uploads or ():
        store.abort_upload(upload)
        on_event(Stage("prune.upload-aborted", upload.key))
    if plan.checkpoints:
        steps = ", ".join(str(one.step) for one in plan.checkpoints)
        on_event(Message(f"removed from {store.location}, as asked by keep_*: step {steps}"))


def _newest_whole(store: Store, checkpoints: Sequence[Checkpoint], whole: Collection[CheckpointName]) -> list[CheckpointName]:
    """The newest checkpoint that is whole by its sizes, and everything newer than it."""
    found: list[CheckpointName] = []
    for checkpoint in sorted(checkpoints, key=lambda one: one.name, reverse=True):
        found.append(checkpoint.name)
        if checkpoint.name in whole:
            break
        try:
            catalog.confirm(store, checkpoint)
            break
        except DamagedCheckpoint:
            continue
    return found


def _below(store: Store, folder: str) -> dict[str, int]:
    return {info.key: info.size for info in store.list(folder)}


def _is_abandoned(upload: OpenUpload, current: int, before_s: float) -> bool:
    name = CheckpointName.parse(upload.key.removeprefix(CHECKPOINTS).partition("/")[0])
    return name is not None and name.generation < current and upload.started_s is not None and upload.started_s < before_s
