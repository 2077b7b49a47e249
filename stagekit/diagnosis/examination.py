"""``doctor``: this machine, its disks and any number of stores looked at beside each other, within a bounded time."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..advice import stream_or_copy
from ..config import StoreConfig, cache_directory, home_directory
from ..errors import LocationError, MissingExtra, StagekitError
from ..facts import Fact
from ..location import Location
from ..parallel import Beside
from ..progress import Message, Subscriber, ignore
from ..shards.manifest import MANIFEST, Manifest
from ..store import open_store
from ..store.base import Store
from ..units import format_duration
from .disks import look_at_disk, remarkable_mounts
from .findings import disk_fact, machine_facts, mounts_fact, same_disk
from .machine import Machine, look_at_machine

ANSWER_S = 8.0
"""An endpoint that has said nothing by then is called dead."""
PROBE_S = 45.0
_CONNECT_S, _READ_S = 3.0, 5.0
_GRACE_S = 30.0
_MARKS = {"ok": "ok", "note": "note", "bad": "FAIL", "unknown": "?"}


@dataclass(frozen=True, slots=True)
class Section:
    """The facts about one thing: ``""`` is this machine, else a URL."""

    about: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found. ``healthy`` is false when something will fail. ``changes`` says what to do, the failures first."""

    sections: tuple[Section, ...]

    @property
    def facts(self) -> list[Fact]:
        """All of them, in order."""
        return [fact for section in self.sections for fact in section.facts]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that will fail. What could not be told is no failure."""
        return all(fact.state != "bad" for fact in self.facts)

    @property
    def changes(self) -> list[str]:
        """What to change, each once, what will fail first."""
        ordered = [fact for state in ("bad", "note", "unknown", "ok") for fact in self.facts if fact.state == state]
        return list(dict.fromkeys(fact.advice for fact in ordered if fact.advice))

    @property
    def lines(self) -> list[str]:
        """One screen, for people and bug reports."""
        width = max((len(fact.name) for fact in self.facts), default=0)
        lines = []
        for section in self.sections:
            if section.about:
                lines.append(section.about)
            lines.extend(f"{_MARKS[fact.state]:<4}  {fact.name:<{width}}  {fact.text}" for fact in section.facts)
        changes = self.changes
        lines.append("to change" if changes else "nothing to change")
        lines.extend(f"{number:>3}. {change}" for number, change in enumerate(changes, 1))
        return lines

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        sections = [{"about": one.about or "machine", "facts": [fact.record for fact in one.facts]} for one in self.sections]
        return {"healthy": self.healthy, "sections": sections, "changes": self.changes}


def doctor(
    places: Iterable[str | os.PathLike[str]] = (),
    *,
    read_only: bool = False,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
    machine: Callable[[], Machine] = look_at_machine,
    answer_s: float = ANSWER_S,
    clock: Callable[[], float] = time.monotonic,
) -> Diagnosis:
    """Look at this machine and at ``places``, directories and URLs, and tell what works, what will fail, and what to change.

    Each store is asked for everything that Stagekit adapts to: ranges, conditions, checksums, listings, rights, clock, speed. Scratch
    objects called ``.stagekit-doctor-…`` are written below each URL and removed again; one that cannot be removed is told.
    ``read_only`` writes nothing. A dead endpoint is told within ten seconds, a slow one in about a minute. No secret is shown.

    Whatever goes wrong is a fact, of the place that it is about; the others are looked at all the same.

    :param answer_s: seconds after which a store that has said nothing is called dead
    """
    locations, unreadable = _parsed(places)
    looking = Beside(machine)
    disks = Beside(lambda: list(_disks([Path(one.path) for one in locations if one.scheme == "file"], read_only=read_only)))
    stores = [one for one in locations if one.scheme != "file"]
    for one in stores:
        on_event(Message(f"asking {one}"))
    asked = [Beside(lambda one=one: _store_facts(one, store or StoreConfig(), read_only, answer_s, clock)) for one in stores]  # type: ignore[misc]
    probed = [Section(str(one), tuple(facts.get())) for one, facts in zip(stores, asked, strict=True)]
    return Diagnosis((Section("", (*machine_facts(looking.get()), *disks.get())), *unreadable, *probed))


def _parsed(places: Iterable[str | os.PathLike[str]]) -> tuple[list[Location], list[Section]]:
    """The locations among ``places``, and a failure for each that is none."""
    locations, unreadable = [], []
    for number, place in enumerate(places, 1):
        try:
            locations.append(Location.parse(place))
        except LocationError as error:
            # The place itself may hold a password, and then the message does not.
            fact = Fact("location", "bad", str(error), f"mend place {number}: {error}", {"error": "LocationError"})
            unreadable.append(Section(f"place {number}", (fact,)))
    return locations, unreadable


def _disks(named: Sequence[Path], *, read_only: bool) -> Iterator[Fact]:
    yield mounts_fact(remarkable_mounts())
    own = [("state", home_directory()), ("cache", cache_directory())]
    for path, purpose in same_disk([("here", Path.cwd()), *own, *(("path", path) for path in named)]).items():
        wanted = path in named
        fact = disk_fact(look_at_disk(path), purpose, must_write=not read_only and (wanted or purpose != "here"), named=wanted)
        # Nobody said that the current directory is wanted for anything.
        yield replace(fact, state="note") if purpose == "here" and fact.state == "bad" else fact


def _store_facts(location: Location, config: StoreConfig, read_only: bool, answer_s: float, clock: Callable[[], float]) -> list[Fact]:
    """The facts about one store. What asks is a thread that nobody waits for when its time is over."""
    patience = replace(
        config,
        connect_timeout_s=min(config.connect_timeout_s, _CONNECT_S),
        read_timeout_s=min(config.read_timeout_s, _READ_S),
        retry_s=0.0,
    )
    arrived: queue.SimpleQueue[Fact | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            for fact in _asked(location, patience, read_only):
                arrived.put(fact)
        except StagekitError as error:
            arrived.put(Fact("endpoint", "bad", str(error), str(error), {"error": type(error).__name__}))
        except Exception as error:  # of ours or of a package: nothing was found out, and that is not good health
            text = f"examining {location} ended with {type(error).__name__}: {error}"
            arrived.put(Fact("endpoint", "bad", text, text, {"error": type(error).__name__}))
        finally:
            arrived.put(None)

    began = clock()
    Beside(ask)
    facts: list[Fact] = []
    while True:
        limit_s = PROBE_S + _GRACE_S if facts else answer_s
        try:
            fact = arrived.get(timeout=max(0.0, limit_s - (clock() - began)))
        except queue.Empty:
            facts.append(_silent(location, facts, limit_s))
            return facts
        if fact is None:
            return facts
        facts.append(fact)


def _silent(location: Location, facts: list[Fact], limit_s: float) -> Fact:
    if facts:
        text = f"the store stopped answering; objects called .stagekit-doctor-… may be left in {location}"
        return Fact("probe", "bad", text, f"ask {location} again later, and remove .stagekit-doctor-… there")
    text = f"{location} did not answer within {format_duration(limit_s)}"
    return Fact("endpoint", "bad", text, f"{text}: check the endpoint's name, this machine's network and DNS, and a firewall")


def _asked(location: Location, config: StoreConfig, read_only: bool) -> Iterator[Fact]:
    if location.scheme == "s3" and config.engine != "fsspec":
        from ..store.s3 import S3Store
        from ..store.s3_probe import S3Probe

        opened = S3Store(location, config)
        down: float | None = None
        for fact in S3Probe(opened, read_only=read_only, budget_s=PROBE_S).facts():
            down = fact.values.get("down_bytes_per_s", down)
            yield fact
        if down is not None and (found := _data_set(opened, down)) is not None:
            yield found
        return
    try:
        store = open_store(location, config)
    except MissingExtra as error:
        yield Fact("endpoint", "bad", str(error), str(error))
        return
    yield _looked(store)


def _data_set(store: Store, down: float) -> Fact | None:
    """Stream or copy, where a data set lies at the place itself and its link was measured."""
    try:
        manifest = Manifest.from_bytes(bytes(store.get(MANIFEST)), source=f"{store.location}/{MANIFEST}")
    except StagekitError:
        return None
    if not manifest.bytes:
        return None
    advice = stream_or_copy(size_bytes=manifest.bytes, link_bytes_per_s=down, free_bytes=look_at_disk(Path.cwd()).free_bytes)
    return Fact("data set", "ok", advice.text, values={"bytes": manifest.bytes, "choice": advice.choice, "copy_s": advice.copy_s})


def _looked(store: Store) -> Fact:
    began = time.monotonic()
    children = store.children()
    took_s = time.monotonic() - began
    count = len(children.objects) + len(children.folders)
    text = f"answers in {1000 * took_s:.0f} ms, {count} entries; what else it can do is asked of S3 alone"
    return Fact("endpoint", "ok", text, values={"latency_s": took_s})


__all__ = ["Diagnosis", "Machine", "Section", "doctor"]
