"""What lies at a destination, and whether this plan may be written there."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass

from ..errors import Conflict, NotFound, PublishError, StoreError
from ..location import Location
from ..shards.manifest import MANIFEST, WIDS, Manifest, blocks_name, index_name, samples_name, wids_json
from ..store.base import ObjectInfo, Store
from ..store.removing import removal
from ..transfer.fetch import fetch_pieces
from ..transfer.put import Stored, put_object
from ..units import counted
from .claim import CLAIM, Claim, confirm_claim, read_claim, release_claim, replace_claim, take_claim

CLASSES = "classes.json"
SHARDS = "shards/"
_SHARD_OBJECT = re.compile(r"shards/[0-9]{6,}\.(tar|tar\.idx|samples|blocks)")
_READ_BACKS = 3
_SIDE_FILES = frozenset({WIDS, CLASSES})


@dataclass(slots=True)
class Found:
    """A destination as it was when the run began. ``objects`` are those of shards, by key."""

    manifest: Manifest | None
    objects: dict[str, ObjectInfo]
    claimed: bool = False

    @property
    def leftovers(self) -> list[str]:
        """Keys of shard objects that no manifest names, those that commit a shard first."""
        kept = set() if self.manifest is None else {name for record in self.manifest.shards for name in _objects_of(record.name)}
        return sorted(self.objects.keys() - kept, key=lambda key: (not key.endswith(".blocks"), key))


def _objects_of(name: str) -> tuple[str, ...]:
    return name, index_name(name), samples_name(name), blocks_name(name)


def refuse_overlap(source: Location | None, destination: Location) -> None:
    """Raise ``PublishError`` when one lies inside the other: a rerun would pack its own shards, or look like foreign objects."""
    if source is None:
        return
    inner, outer = _real(source), _real(destination)
    if inner == outer:
        raise PublishError(f"publishing {source} to {destination}: source and destination are the same place; choose another destination")
    if inner.contains(outer):
        raise PublishError(
            f"publishing {source} to {destination}: the destination lies inside the source, so the next run would pack its shards; "
            "choose a destination beside the source"
        )
    if outer.contains(inner):
        raise PublishError(
            f"publishing {source} to {destination}: the source lies inside the destination, whose objects would be mixed with raw data; "
            "choose another destination"
        )


def _real(location: Location) -> Location:
    return Location.parse(os.path.realpath(location.path)) if location.is_directory else location


def look(store: Store) -> Found:
    """List the destination. Raises ``PublishError`` naming the first object that no publication made, before reading on."""
    objects: dict[str, ObjectInfo] = {}
    complete = claimed = False
    for info in store.list():
        if info.key == MANIFEST:
            complete = True
        elif info.key == CLAIM:
            claimed = True
        elif _SHARD_OBJECT.fullmatch(info.key):
            objects[info.key] = info
        elif info.key not in _SIDE_FILES and not is_probe(info.key):
            raise PublishError(
                f"publishing to {store.location}: it holds {info.key!r}, which is no part of a data set; nothing was written. "
                f"Choose an empty destination, such as {store.location / 'dataset'}"
            )
    return Found(read_manifest(store) if complete else None, objects, claimed)


def is_probe(key: str) -> bool:
    """Whether ``key`` is a scratch object with which a store finds out what its server can do; it is removed in a moment."""
    return key.rpartition("/")[2].startswith(".stagekit-")


def content(store: Store, key: str) -> bytes | None:
    """What lies under ``key``; ``None`` when nothing does."""
    try:
        return bytes(store.get(key))
    except NotFound:
        return None


def read_manifest(store: Store) -> Manifest | None:
    """The manifest at the destination, if there is one."""
    data = content(store, MANIFEST)
    return None if data is None else Manifest.from_bytes(data, source=str(store.location / MANIFEST))


def enter(
    store: Store,
    plan: str,
    found: Found,
    *,
    takeover: bool,
    again: Callable[[Store], Found] = look,
    uploads: str = SHARDS,
) -> bool:
    """Claim the destination for ``plan``. Returns whether objects of the same plan may be there already.

    Raises ``PublishError`` when somebody else's claim or leftovers are there; with ``takeover``, leftovers of a run that is not provably
    alive are removed first. ``again`` looks at the destination once more; below ``uploads`` lies what killed runs may have left on its way.
    """
    for _ in range(3):
        claim = read_claim(store)
        if claim is None:
            if found.leftovers:
                if not takeover:
                    raise _leftovers(store, "shards without a manifest, left by a run that nobody can name")
                _clear(store, found)
            if take_claim(store, plan):
                return False
            continue  # somebody was faster: look at what they wrote
        if claim.plan == plan:
            if claim.state() == "dead":
                drop_open_uploads(store, uploads)
            replace_claim(store, plan)
            return True
        if claim.state() == "running":
            raise PublishError(
                f"publishing to {store.location}: {claim} is publishing other data (or with other options) there right now; "
                "wait until it has ended, or choose another destination"
            )
        # Killed behind its manifest, or before its first shard: there is nothing that would be lost.
        harmless = not found.leftovers and claim.state() == "dead"
        if not takeover and not harmless:
            raise _leftovers(store, _describe(claim))
        drop_open_uploads(store, uploads)
        _clear(store, again(store))
        replace_claim(store, plan)
        confirm_claim(store, plan)
        return False
    raise PublishError(f"publishing to {store.location}: other runs keep claiming this destination; choose another one")


def _describe(claim: Claim) -> str:
    if claim.state() == "dead":
        return f"the unfinished shards of other data (or of other options), left by {claim}, which has ended"
    return f"the unfinished shards of other data (or of other options), claimed by {claim}, which cannot be asked from here"


def _leftovers(store: Store, what: str) -> PublishError:
    return PublishError(
        f"publishing to {store.location}: it holds {what}. Repeat the command that wrote them to finish them, "
        "choose another destination, or remove them and start afresh with --takeover (takeover=True)"
    )


def _clear(store: Store, found: Found) -> None:
    """Remove leftovers: what commits first, so that nothing ever looks more complete than it is. A published data set stays whole."""
    for key in found.leftovers:
        store.delete(key)
    if found.manifest is None:
        for key in sorted(_SIDE_FILES):
            store.delete(key)


def drop_open_uploads(store: Store, prefix: str, *, among: Container[str] | None = None) -> None:
    """Abort what killed runs were in the middle of sending: it is billed and never becomes visible. With ``among``, only these keys."""
    with suppress(StoreError):  # a server that cannot list uploads has nothing to drop; the shards do not depend on it
        for upload in list(store.open_uploads(prefix)):
            if among is None or upload.key in among:
                store.abort_upload(upload)


def confirm_objects(store: Store, expected: Iterable[Stored], *, prefix: str = SHARDS) -> None:
    """Raise ``PublishError`` unless the store holds exactly what was sent: another run may have replaced a shard meanwhile.

    One listing answers for all; whatever it does not confirm is asked for by itself, since listings may lag. An object that was replaced
    is read back: a run of the same plan replaces by the same bytes.
    """
    listed = {info.key: info for info in store.list(prefix)}
    for wanted in expected:
        if _agrees(wanted, listed.get(wanted.key)):
            continue
        try:
            same = _agrees(wanted, store.head(wanted.key)) or stored_sha256(store, wanted.key) == wanted.sha256
        except NotFound:
            same = False
        if not same:
            raise PublishError(
                f"publishing to {store.location}: {wanted.key} is not what was stored there, so another run or person writes here too; "
                "nothing was published. Stop the other one and run the same command again"
            )


def _agrees(wanted: Stored, now: ObjectInfo | None) -> bool:
    if now is None or now.size != wanted.size:
        return False
    return wanted.etag is None or now.etag is None or wanted.etag == now.etag


def stored_sha256(store: Store, key: str) -> str:
    """The sha-256 of what the store holds, all of it read back."""
    for attempt in range(_READ_BACKS):
        found = hashlib.sha256()
        try:
            for piece in fetch_pieces(store, key):
                found.update(piece)
        except Conflict:  # replaced while it was read
            if attempt + 1 == _READ_BACKS:
                raise
            continue
        break
    return found.hexdigest()


def commit(store: Store, manifest: Manifest, classes: tuple[str, ...], *, grown_from: Manifest | None = None) -> None:
    """Side files, then the manifest, then the claim goes. The data set exists from the manifest on; a kill before it leaves none.

    ``grown_from`` is the manifest whose shards are all in the new one: it is replaced, and who read it goes on reading. Raises
    ``PublishError`` when another data set was published here meanwhile.
    """
    if grown_from is not None:
        before = read_manifest(store)
        if before is None or before.digest != grown_from.digest:
            raise PublishError(
                f"updating {store.location}: its manifest was replaced or removed while this run was writing; nothing was published. "
                "Run the same command again"
            )
        put_object(store, WIDS, wids_json(manifest))
        if classes:
            put_object(store, CLASSES, classes_json(classes))
        put_object(store, MANIFEST, manifest.to_bytes())
        release_claim(store)
        return
    put_object(store, WIDS, wids_json(manifest))
    if classes:
        put_object(store, CLASSES, classes_json(classes))
    data = manifest.to_bytes()
    exclusive = store.conditional_create()
    before = None if exclusive else read_manifest(store)
    if before is None:
        try:
            put_object(store, MANIFEST, data, if_absent=exclusive)
        except Conflict:
            before = read_manifest(store)
    if before is not None and before.to_bytes() != data:
        raise holds_another(store, before, "it was published while this run was writing")
    release_claim(store)


def classes_json(classes: tuple[str, ...]) -> bytes:
    """Class names in the order of their indices."""
    return json.dumps(list(classes), ensure_ascii=False, indent=1).encode() + b"\n"


def published_classes(store: Store) -> tuple[str, ...]:
    """What ``classes_json`` wrote beside a data set; empty where there is no such list."""
    try:
        names = json.loads(content(store, CLASSES) or b"[]")
    except ValueError:
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def holds_another(store: Store, manifest: Manifest, why: str) -> PublishError:
    return PublishError(
        f"publishing to {store.location}: it holds another data set ({counted(manifest.samples, 'sample')} in "
        f"{counted(len(manifest.shards), 'shard')}, digest {manifest.digest[:12]}…): {why}. Nothing of it was changed. "
        f"Choose another destination, or put this one in its place: {removal(store, MANIFEST)}, then the same with --takeover "
        "(takeover=True)"
    )
