"""What ``push`` and ``copy`` are about to change in a store, found out, refused or told before the first byte goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..parallel import each
from ..progress import Message, Subscriber
from ..runs.layout import MANIFEST as CHECKPOINT_MANIFEST
from ..shards.manifest import MANIFEST
from ..store.base import ObjectInfo, Store
from ..transfer.bulk.base import Item
from ..units import counted, format_count, format_size


@dataclass(frozen=True, slots=True)
class Plan:
    """``due`` is to be sent, ``replaced`` of it under a key that is taken, ``same`` is there already, ``removed`` is to go at the end."""

    due: tuple[Item, ...]
    replaced: frozenset[str]
    same: tuple[Item, ...]
    removed: tuple[str, ...]

    @property
    def phases(self) -> tuple[list[Item], list[Item]]:
        """What may go in any order, then what makes it count: whoever reads a manifest finds what it speaks of."""
        commits = [item for item in self.due if is_commit(item.path)]
        return [item for item in self.due if not is_commit(item.path)], commits


def is_commit(key: str) -> bool:
    """Whether ``key`` is a manifest's."""
    return key.rpartition("/")[2] in (MANIFEST, CHECKPOINT_MANIFEST)


def make_plan(
    there: Mapping[str, ObjectInfo],
    items: Sequence[Item],
    same: Callable[[Item, ObjectInfo], bool],
    *,
    doing: str,
    where: str,
    delete: bool,
    threads: int,
    on_event: Subscriber,
) -> Plan:
    """Compare ``items``, each to be called by its ``path``, with the objects that are ``there``.

    ``same`` is asked about those whose size is the object's, in ``threads`` threads.

    An object with other bytes raises ``UsageError`` naming it, unless ``delete``; with it, what will be replaced or removed is told.
    """

    def compare(item: Item) -> bool | None:
        info = there.get(item.path)
        return None if info is None else info.size == item.size and same(item, info)

    judged = list(zip(items, each(compare, items, threads=threads), strict=True))
    replaced = sorted(item.path for item, held in judged if held is False)
    if replaced and not delete:
        raise UsageError(
            f"{doing}: {replaced[0]} is there with other bytes{f', and so are {len(replaced) - 1:,} more' if replaced[1:] else ''}; "
            "nothing was changed. Give another place, or have them replaced with --delete"
        )
    removed = sorted(there.keys() - {item.path for item in items}) if delete else []
    announce(removed, replaced, where, on_event)
    return Plan(
        tuple(item for item, held in judged if not held),
        frozenset(replaced),
        tuple(item for item, held in judged if held),
        tuple(removed),
    )


def announce(removed: Sequence[str], replaced: Sequence[str], where: str, on_event: Subscriber) -> None:
    """Tell what ``--delete`` is about to do in ``where``, before it does anything."""
    for paths, verb in ((removed, "removes"), (replaced, "replaces")):
        if paths:
            on_event(Message(f"--delete {verb} {format_count(len(paths))} in {where}: {', '.join(paths)}", "warning"))


def remove(store: Store, keys: Iterable[str], *, threads: int) -> None:
    """Remove objects, manifests first: nobody finds one that speaks of what is gone."""
    first: list[str] = []
    rest: list[str] = []
    for key in keys:
        (first if is_commit(key) else rest).append(key)
    for phase in (first, rest):
        for _ in each(store.delete, phase, threads=threads):
            pass


def aside(size: int, sent_bytes: int, replaced: int, removed: int) -> str:
    """What a result line says after its figures: what was there already, replaced and removed, where there was any."""
    there = "" if sent_bytes == size else f", {format_size(size - sent_bytes)} of it was there already"
    return (
        there + (f", {format_count(replaced)} replaced" if replaced else "") + (f", {counted(removed, 'other')} removed" if removed else "")
    )
