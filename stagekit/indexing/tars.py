"""Which tars are meant, where they lie, and what they are called in the data set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..config import StoreConfig
from ..errors import KeyNotAllowed, NotFound, SourceError, UsageError
from ..location import Location
from ..mounts import refuse_mount
from ..parallel import each
from ..progress import Message, Subscriber, ignore
from ..shards.braces import expand
from ..shards.manifest import is_shard_name, is_shard_url
from ..store import Where, open_store
from ..store.base import ObjectInfo, Store
from ..stream.cache import ON_THIS_MACHINE
from ..units import format_count, format_size

_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.lz4")


@dataclass(frozen=True, slots=True)
class Tar:
    """One tar as it was when it was looked up. ``url`` is set when it does not lie below the data set that names it ``name``."""

    name: str
    url: str | None
    location: Location
    store: Store
    key: str
    info: ObjectInfo


@dataclass(frozen=True, slots=True)
class Missing:
    """A tar that a pattern names and that is not there."""

    url: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Named:
    location: Location
    store: Store
    key: str


def find(
    patterns: Iterable[Where],
    dest: Location,
    *,
    config: StoreConfig | None = None,
    allow_mount: bool = False,
    threads: int = 16,
    on_event: Subscriber = ignore,
) -> tuple[list[Tar], list[Missing]]:
    """The tars that ``patterns`` mean, in order, each looked up.

    A text is expanded (``shards.braces``); what ends in ``.tar`` then is a tar, and everything else a prefix, all tars below which are
    meant. Raises ``UsageError`` for what cannot be indexed and ``SourceError`` for a prefix without a tar.
    """
    named: list[_Named] = []
    for found in _Opener(config, allow_mount, on_event).named(patterns):
        _check_place(found.location, dest)
        named.append(found)
    if not named:
        raise UsageError("indexing: no tar is named; give a pattern such as s3://bucket/shard-{000000..000099}.tar, or a prefix")
    names = _names([one.location for one in named], dest)
    tars: list[Tar] = []
    missing: list[Missing] = []
    infos = each(_look, named, threads=min(threads, len(named)))
    for one, name, info in zip(named, names, infos, strict=True):
        if isinstance(info, NotFound):
            missing.append(Missing(str(one.location), str(info)))
        else:
            url = None if _relative(one.location, dest) == name else str(one.location)
            tars.append(Tar(name, url, one.location, one.store, one.key, info))
    return tars, missing


class _Opener:
    """Patterns to objects, with one store for each place."""

    def __init__(self, config: StoreConfig | None, allow_mount: bool, on_event: Subscriber) -> None:
        self._config, self._allow_mount, self._on_event = config, allow_mount, on_event
        self._stores: dict[Location, Store] = {}

    def named(self, patterns: Iterable[Where]) -> Iterator[_Named]:
        for pattern in patterns:
            if isinstance(pattern, str):
                if pattern.startswith("pipe:"):
                    raise UsageError(f"indexing {pattern!r}: a command's output has no ranges to read later; name the tar's own URL")
                for text in expand(pattern):
                    yield from self._text(text)
            elif isinstance(pattern, os.PathLike):
                yield from self._text(os.fspath(pattern))
            elif isinstance(pattern, Location):
                yield from self._text(str(pattern))
            else:
                yield from self._below(open_store(pattern))  # which refuses what is no place

    def _text(self, text: str) -> Iterator[_Named]:
        location = Location.parse(text)
        lowered = location.path.lower()
        if lowered.endswith(_COMPRESSED):
            raise UsageError(f"indexing {text}: ranges of a compressed tar cannot be read; decompress it first")
        if text.endswith("/") or not lowered.endswith(".tar"):
            yield from self._below(self._open(location))
            return
        if "*" in text:
            raise UsageError(f"indexing {text}: '*' is no brace notation; write {{000000..000099}}, or give the prefix {location.parent}/")
        yield _Named(location, self._open(location.parent), location.name)

    def _open(self, location: Location) -> Store:
        if location not in self._stores:
            if location.is_directory:
                judged = refuse_mount(location.local_path, "indexing tars in", allow_mount=self._allow_mount)
                if judged.warning:
                    self._on_event(Message(judged.warning, "warning"))
            self._stores[location] = open_store(location, self._config, on_event=self._on_event)
        return self._stores[location]

    def _below(self, store: Store) -> Iterator[_Named]:
        tars, size, others, compressed = [], 0, 0, 0
        for info in store.list():
            if info.key.endswith(".tar"):
                tars.append(info.key)
                size += info.size
            elif info.key.lower().endswith(_COMPRESSED):
                compressed += 1
            else:
                others += 1
        note = f"; {format_count(compressed)} more are compressed, and are left out" if compressed else ""
        if not tars:
            raise SourceError(
                f"indexing {store.location}: there is no .tar below it, and {format_count(others)} other objects{note}; "
                f"stagekit ls {store.location} tells what is there"
            )
        self._on_event(Message(f"{format_count(len(tars))} tars, {format_size(size)}, below {store.location}{note}"))
        for key in tars:
            yield _Named(store.location / key, store, key)


def _look(one: _Named) -> ObjectInfo | NotFound:
    try:
        return one.store.head(one.key)
    except NotFound as error:
        return error


def _check_place(location: Location, dest: Location) -> None:
    if location.scheme in ON_THIS_MACHINE and dest.scheme not in ON_THIS_MACHINE:
        raise UsageError(
            f"indexing {location} to {dest}: a data set in a bucket cannot name a path on this machine, which means nothing on another "
            "one; copy the tars to the bucket first, or index them to a directory"
        )


def _relative(location: Location, dest: Location) -> str | None:
    """What ``location`` is called below ``dest``, if it lies there."""
    if location == dest or not dest.contains(location):
        return None
    return location.path[len(dest.path.rstrip("/")) :].lstrip("/")


def _names(locations: list[Location], dest: Location) -> list[str]:
    """A tar below the data set has its own name; those elsewhere are called ``shards/`` and what differs in their paths."""
    apart = [_parts(location) for location in locations if _relative(location, dest) is None]
    common = _common([parts[:-1] for parts in apart])
    names: list[str] = []
    seen: dict[str, Location] = {}
    for location in locations:
        name = _relative(location, dest)
        if name is None:
            name = "/".join(["shards", *_parts(location)[common:]])
            if not is_shard_url(str(location)):
                raise KeyNotAllowed(f"indexing {location}: a manifest cannot hold this URL; copy the tar to another name")
        if not is_shard_name(name):
            raise KeyNotAllowed(f"indexing {location}: a shard cannot be called {name!r}; rename the tar, or index it to another place")
        before = seen.setdefault(name, location)
        if len(seen) == len(names):
            what = "is named twice" if before == location else f"and {before} would both be called {name}"
            raise UsageError(f"indexing {location}: it {what}; name each tar once, or choose another destination")
        names.append(name)
    return names


def _common(paths: list[list[str]]) -> int:
    """How many components all ``paths`` begin with."""
    return next((at for at, column in enumerate(zip(*paths, strict=False)) if len(set(column)) > 1), min(map(len, paths), default=0))


def _parts(location: Location) -> list[str]:
    return [location.scheme, location.bucket or "local", *location.path.strip("/").split("/")]
