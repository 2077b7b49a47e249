"""The newest commit, found without trusting a listing.

::

    commits/000004-1a2b3c4d/000001      what owner 1a2b3c4d of generation 4 has committed: one small object for each commit, numbered from 1

Each holds the name of the newest checkpoint committed by then. A store's listing may lag behind, while an object that was written can be
asked for by name at once. A reader takes what the listing shows, and then asks for the next number, and for the next generation's claim
(``runs.lease``), until there is none: a checkpoint that the listing hides comes to light.
"""

from __future__ import annotations

from collections.abc import Collection

from ..errors import ManifestError, NotFound
from ..store.base import Store
from . import lease
from .layout import COMMITS, CheckpointName


def key(generation: int, owner: str, number: int) -> str:
    """Where an owner's commit number ``number`` (from 1) is noted."""
    return f"{COMMITS}{generation:06d}-{owner}/{number:06d}"


def newest(store: Store, listed: Collection[CheckpointName]) -> CheckpointName | None:
    """The newest checkpoint that was noted as committed, looked for among the owners that may be newer than ``listed``.

    ``None`` when nothing is noted. Raises ``ManifestError`` for a note that cannot be read, and the store's errors.
    """
    found: CheckpointName | None = None
    floor = max((name.generation for name in listed), default=0)
    owners = lease.owners(store) | {(name.generation, name.owner) for name in listed}
    for generation, owner in sorted(owners, reverse=True):
        if generation < floor:
            break
        noted = _last(store, generation, owner)
        if noted is not None:
            found = max(noted, found or noted)
            floor = max(floor, found.generation)
    return found


def _last(store: Store, generation: int, owner: str) -> CheckpointName | None:
    folder = f"{COMMITS}{generation:06d}-{owner}/"
    numbers = (info.key.removeprefix(folder) for info in store.list(folder))
    number = max((int(text) for text in numbers if text.isascii() and text.isdecimal()), default=0)
    last = _read(store, generation, owner, number) if number else None
    while (after := _read(store, generation, owner, number + 1)) is not None:
        last, number = after, number + 1
    return last


def _read(store: Store, generation: int, owner: str, number: int) -> CheckpointName | None:
    place = key(generation, owner, number)
    try:
        text = bytes(store.get(place)).decode(errors="replace")
    except NotFound:
        return None
    name = CheckpointName.parse(text)
    if name is None:
        raise ManifestError(f"{store.location / place} is damaged: {text[:80]!r} is no checkpoint's name")
    return name
