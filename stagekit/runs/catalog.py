"""Which checkpoints a run has, newest first, as its bucket tells it. Nothing here writes.

"Cannot tell" is never "none": a refusal, a time-out or a missing bucket is raised, and only a listing that succeeded and showed nothing
means a new run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import CheckpointError, DamagedCheckpoint, ManifestError, NotFound, NoValidCheckpoint
from ..progress import Message, Subscriber, ignore
from ..store.base import Store, exists
from . import commits
from .layout import CHECKPOINTS, SUPERSEDED, Checkpoint, CheckpointManifest, CheckpointName, Selector


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything below ``checkpoints/``, newest first: committed ones, manifests that cannot be read, attempts without a manifest."""

    checkpoints: tuple[Checkpoint, ...]
    damaged: tuple[tuple[CheckpointName, ManifestError], ...]
    uncommitted: tuple[CheckpointName, ...]


def addresses(found: Catalog) -> dict[CheckpointName, CheckpointName | int]:
    """What stands behind ``RUN@`` for each of a run's checkpoints and attempts: its step where that means it, else its name.

    A step means the newest that is whole, or else the newest.
    """
    others = [*found.uncommitted, *(name for name, _ in found.damaged)]
    whole = [one.name for one in found.checkpoints]
    meant = {name.step: name for name in [*sorted(others), *sorted(whole)]}
    return {name: name.step if meant[name.step] == name else name for name in [*others, *whole]}


def lending(names: Iterable[CheckpointName], checkpoints: Iterable[Checkpoint]) -> set[CheckpointName]:
    """Those of ``names``, attempts without a manifest, to whose files ``checkpoints`` refer: they were removed, and such files stay."""
    lent = {record.object for checkpoint in checkpoints for record in checkpoint.files if record.object is not None}
    return {name for name in names if any(key.startswith(name.folder) for key in lent)}


def superseded(store: Store) -> set[CheckpointName]:
    """The saves that policy dropped, before or after they were committed."""
    stems = (info.key.removeprefix(SUPERSEDED).removesuffix(".json") for info in store.list(SUPERSEDED))
    return {name for stem in stems if (name := CheckpointName.parse(stem)) is not None}


def dropped(store: Store, names: Collection[CheckpointName]) -> set[CheckpointName]:
    """Those of ``names``, attempts without a manifest, that policy dropped: what is there of them is on its way to nobody."""
    return superseded(store) & set(names) if names else set()


def attempts(store: Store) -> list[CheckpointName]:
    """All attempts, committed or not, newest first; the newest commit also when the store's listing does not show it yet."""
    names = {CheckpointName.parse(folder.removeprefix(CHECKPOINTS)) for folder in store.children(CHECKPOINTS).folders}
    listed = {name for name in names if name is not None}
    noted = commits.newest(store, listed)
    return sorted(listed | ({noted} if noted is not None else set()), reverse=True)


def read(store: Store, name: CheckpointName) -> Checkpoint:
    """The checkpoint called ``name``. Raises ``NotFound`` when it was never committed, ``ManifestError`` when its manifest is damaged."""
    where = str(store.location / name.manifest_key)
    manifest = CheckpointManifest.from_bytes(bytes(store.get(name.manifest_key)), source=where)
    if manifest.name != name:
        raise ManifestError(f"{where} is the manifest of {manifest.name}; it was moved or copied to a wrong place")
    return Checkpoint(manifest, str(store.location / str(name.folder)))


def read_committed(store: Store, name: CheckpointName) -> Checkpoint:
    """As ``read``, for a name whose commit may be going on: raises ``NotFound`` only when it was never committed, and
    ``DamagedCheckpoint`` when a commit is noted and its manifest is gone."""
    try:
        return read(store, name)
    except NotFound:
        if name != commits.newest(store, [name]):
            raise
    # The manifest is written before the note of it, so what was committed between the two looks is there by now.
    try:
        return read(store, name)
    except NotFound:
        raise DamagedCheckpoint(f"step {name.step}: it was committed, and {store.location / name.manifest_key} is missing") from None


def read_all(store: Store, *, known: Mapping[CheckpointName, Checkpoint] = MappingProxyType({})) -> Catalog:
    """Every checkpoint of the run at ``store``. A manifest never changes, so those in ``known`` are not read again, nor doubted when the
    store's listing does not show them yet."""
    checkpoints: list[Checkpoint] = []
    damaged: list[tuple[CheckpointName, ManifestError]] = []
    uncommitted: list[CheckpointName] = []
    for name in sorted({*attempts(store), *known}, reverse=True):
        try:
            checkpoints.append(known[name] if name in known else read(store, name))
        except NotFound:
            uncommitted.append(name)
        except ManifestError as error:
            damaged.append((name, error))
    return Catalog(tuple(checkpoints), tuple(damaged), tuple(uncommitted))


def confirm(store: Store, checkpoint: Checkpoint) -> None:
    """Nothing when every file is there with the size its manifest says. Raises ``DamagedCheckpoint`` naming the first that is not."""
    for record in checkpoint.files:
        key = record.key(checkpoint.name)
        try:
            size = store.head(key).size
        except NotFound:
            raise DamagedCheckpoint(f"step {checkpoint.step}: {store.location / key} is missing") from None
        if size != record.bytes:
            raise DamagedCheckpoint(f"step {checkpoint.step}: {store.location / key} has {size} bytes, its manifest says {record.bytes}")


def latest(store: Store, *, on_event: Subscriber = ignore) -> Checkpoint | None:
    """The newest checkpoint whose manifest parses and whose files have the right sizes; ``None`` for a run that has none.

    A damaged one is told to ``on_event`` and passed over. Raises ``NoValidCheckpoint`` when there are checkpoints and all are damaged.
    """

    def reject(error: Exception) -> None:
        on_event(Message(f"{error}; this checkpoint is passed over, the next older one is looked at", "warning"))

    checkpoint, rejected = first_whole(store, lambda: attempts(store), lambda checkpoint: confirm(store, checkpoint), reject)
    if checkpoint is None and rejected is not None:
        raise NoValidCheckpoint(f"{store.location} has checkpoints and none of them is whole; the last one looked at: {rejected}")
    return checkpoint


def first_whole(
    store: Store, names: Callable[[], list[CheckpointName]], take: Callable[[Checkpoint], None], reject: Callable[[Exception], None]
) -> tuple[Checkpoint | None, Exception | None]:
    """The first checkpoint of ``names()`` that ``take`` accepts, or ``None`` and the last reason why one was not accepted.

    ``take`` raises ``DamagedCheckpoint`` or ``ManifestError``, which ``reject`` is told. While this looks, another machine may commit a
    checkpoint and remove those listed before; so when all were in vain and a commit is noted that was not looked at, it looks again:
    ``(None, None)`` means that nothing was ever committed.
    """
    rejected: dict[CheckpointName, Exception] = {}
    while True:
        found = [name for name in names() if name not in rejected]
        for name in found:
            try:
                checkpoint = read_committed(store, name)
                take(checkpoint)
            except NotFound:
                continue  # an attempt that was never committed, or one that was removed
            except (ManifestError, DamagedCheckpoint) as error:
                rejected[name] = error
                reject(error)
            else:
                return checkpoint, None
        noted = commits.newest(store, found)
        if noted is None or noted in rejected or noted not in names():
            return None, next(reversed(rejected.values()), None)


def candidates(store: Store, selector: Selector, *, best: tuple[str, str] | None = None) -> list[CheckpointName]:
    """What ``selector`` means, first choice first: all attempts for ``"latest"``, those of one step, that of a name, or all by ``best``.

    ``best`` is ``(metric, "min" | "max")``; without it the newest manifest that names one decides. A checkpoint without that metric, or
    with NaN, is never best. Raises ``CheckpointError`` when a step or a metric is asked for that no checkpoint has.
    """
    if selector == "latest":
        return attempts(store)
    if selector == "best":
        return [checkpoint.name for checkpoint in _by_metric(store, best)]
    if isinstance(selector, CheckpointName):
        if selector not in attempts(store):
            raise CheckpointError(f"{store.location} has no checkpoint called {selector}; stagekit ls {store.location} tells what is there")
        return [selector]
    found = [name for name in attempts(store) if name.step == selector]
    if not found:
        steps = sorted({name.step for name in attempts(store)})
        told = f"it has {', '.join(map(str, steps[-10:]))}" if steps else "it has no checkpoint at all"
        raise CheckpointError(f"{store.location} has no checkpoint of step {selector}; {told}")
    return found


def tell_of_others(store: Store, selector: Selector, taken: Checkpoint, on_event: Subscriber) -> None:
    """Where ``selector`` is a step that the run has twice, say which checkpoint was ``taken``, and how the others are called.

    That is after a takeover: what the machine before had not sent comes as a checkpoint of its own generation.
    """
    if not isinstance(selector, int):
        return
    others = [name for name in candidates(store, selector) if name != taken.name and exists(store, name.manifest_key)]
    if others:
        url = store.location
        called = ", ".join(f"{url}@{name} (generation {name.generation})" for name in others)
        on_event(
            Message(
                f"{url} has {len(others) + 1} checkpoints of step {selector}: taken is that of generation {taken.name.generation}, "
                f"{taken.name}; to have another: {called}",
                "warning",
            )
        )


def _by_metric(store: Store, best: tuple[str, str] | None) -> list[Checkpoint]:
    checkpoints = read_all(store).checkpoints
    rule = best or next((one.manifest.best for one in checkpoints if one.manifest.best is not None), None)
    if rule is None:
        known = sorted({name for one in checkpoints for name in one.metrics})
        raise CheckpointError(
            f"{store.location} does not say which metric decides what is best; give the Run keep_best=(metric, 'min' or 'max', how many)"
            + (f". Its metrics are {', '.join(known)}" if known else ". It has no metrics")
        )
    ranked = rank(checkpoints, rule)
    if not ranked:
        raise CheckpointError(f"{store.location} has no checkpoint with a number for the metric {rule[0]!r}")
    return ranked


def rank(checkpoints: tuple[Checkpoint, ...], rule: tuple[str, str]) -> list[Checkpoint]:
    """Checkpoints that have the metric as a finite number, best first; of equals the newer first."""
    metric, mode = rule
    known = [one for one in checkpoints if math.isfinite(one.metrics.get(metric, math.nan))]
    sign = 1 if mode == "min" else -1
    return sorted(sorted(known, key=lambda one: one.name, reverse=True), key=lambda one: sign * one.metrics[metric])
