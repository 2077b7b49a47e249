"""Who writes to a run: append-only records under ``owners/``, one per writer and generation.

A writer takes the next generation at its first write, and looks again before each commit: when a higher one is there it is *fenced*,
keeps its local data and writes nothing more. The look closes the gap to the time of one request, not to nothing: what makes two
writers harmless is that their checkpoints never share a folder (``layout.CheckpointName``), and that newest means the highest
generation. Only where the store's conditional create is proven is a generation given to exactly one writer.

A listing may lag behind. So each generation also has a claim under a name that can be guessed, and a look asks for the next one by name.

A lease has no heartbeat and never expires. Whether its owner is gone can be told for a process of this machine only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import CheckpointError, Conflict, Fenced, ManifestError, NotFound
from ..processes import Process
from ..store.base import Store, exists
from ..transfer.put import put_object
from .layout import OWNERS, seal, unseal

_RECORD = re.compile(r"([0-9]{6})-([0-9a-f]{8})\.json")
_CLOSED = re.compile(r"([0-9]{6})-([0-9a-f]{8})\.closed")
_CLAIM = re.compile(r"([0-9]{6})\.claim")
_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Lease:
    """One writer's claim to a run. ``time_s`` is that writer's clock, for people only."""

    generation: int
    owner: str
    process: Process
    time_s: float

    @property
    def key(self) -> str:
        """Where it lies in the run."""
        return _record_key(self.generation, self.owner)

    @property
    def closed_key(self) -> str:
        """The object that says its owner has finished."""
        return f"{OWNERS}{self.generation:06d}-{self.owner}.closed"

    def to_bytes(self) -> bytes:
        """JSON with a checksum over itself."""
        process = self.process
        return seal(
            {
                "format": "stagekit-owner",
                "version": 1,
                "generation": self.generation,
                "owner": self.owner,
                "host": process.host,
                "boot_id": process.boot_id,
                "pid_namespace": process.pid_namespace,
                "pid": process.pid,
                "started": process.started,
                "time_s": round(self.time_s, 3),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> Lease:
        """Parse strictly. Raises ``ManifestError`` naming ``source``."""
        values = unseal(data, "stagekit-owner", 1, source=source)
        try:
            process = Process(
                str(values["host"]), str(values["boot_id"]), str(values["pid_namespace"]), int(values["pid"]), str(values["started"])
            )
            return cls(int(values["generation"]), str(values["owner"]), process, float(values["time_s"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"{source}: it does not say who owns the run ({error})") from None


@dataclass(frozen=True, slots=True)
class Owners:
    """What ``owners/`` shows now: the newest ``(generation, owner)``, whether it has finished, and the highest generation in any name."""

    newest: tuple[int, str] | None
    closed: bool
    highest: int


def look(store: Store) -> Owners:
    """Ask the store who owns the run at ``store``. Raises the store's errors: not seeing is never taken for nobody."""
    records, closed, highest = _survey(store)
    newest = max(records, default=None)
    return Owners(newest, newest in closed, highest)


def owners(store: Store) -> set[tuple[int, str]]:
    """Everyone who ever took the run at ``store``, as ``(generation, owner)``."""
    return _survey(store)[0]


def _survey(store: Store) -> tuple[set[tuple[int, str]], set[tuple[int, str]], int]:
    """Owners, those that have finished, and the highest generation: as listed, and as the claims tell that the listing does not show."""
    records: set[tuple[int, str]] = set()
    closed: set[tuple[int, str]] = set()
    highest = 0
    for info in store.list(OWNERS):
        name = info.key.removeprefix(OWNERS)
        if match := _RECORD.fullmatch(name):
            records.add((int(match[1]), match[2]))
        elif match := _CLOSED.fullmatch(name):
            closed.add((int(match[1]), match[2]))
        else:
            match = _CLAIM.fullmatch(name)
        if match:
            highest = max(highest, int(match[1]))
    while (owner := _claimed(store, highest + 1)) is not None:
        highest += 1
        if exists(store, _record_key(highest, owner)):  # a writer killed in between owns nothing
            records.add((highest, owner))
    return records, closed, highest


def _claimed(store: Store, generation: int) -> str | None:
    try:
        return bytes(store.get(_claim_key(generation))).decode(errors="replace")
    except NotFound:
        return None


def _claim_key(generation: int) -> str:
    return f"{OWNERS}{generation:06d}.claim"


def _record_key(generation: int, owner: str) -> str:
    return f"{OWNERS}{generation:06d}-{owner}.json"


def read_lease(store: Store, generation: int, owner: str) -> Lease:
    """The record of one writer. Raises ``NotFound`` or ``ManifestError``."""
    key = _record_key(generation, owner)
    return Lease.from_bytes(bytes(store.get(key)), source=str(store.location / key))


def take(store: Store, owner: str, process: Process, *, clock: Callable[[], float]) -> tuple[Lease, Lease | None]:
    """Become the newest owner of the run. Returns the lease, and the one that was newest before when its owner had not finished.

    Where conditional create is proven, no two callers get the same generation. Elsewhere, of two that took one at the same time, the
    one that sees the other with a greater name takes another. After a failure there may be a record of a generation nobody uses.
    """
    before: Lease | None = None
    for round in range(_ROUNDS):
        owners = look(store)
        if round == 0 and owners.newest is not None and not owners.closed:
            before = read_lease(store, *owners.newest)
        lease = Lease(owners.highest + 1, owner, process, clock())
        exclusive = store.conditional_create()
        if exclusive:
            try:
                store.put(_claim_key(lease.generation), owner.encode(), if_absent=True)
            except Conflict:
                continue
        put_object(store, lease.key, lease.to_bytes())
        if look(store).newest == (lease.generation, lease.owner):
            if not exclusive:
                store.put(_claim_key(lease.generation), owner.encode())  # proves nothing here, and lets readers find this generation
            return lease, before
    raise CheckpointError(
        f"taking the run {store.location}: other writers took it {_ROUNDS} times in a row; stop the other trainings that use this run's URL"
    )


def check(store: Store, lease: Lease) -> None:
    """Nothing while ``lease`` is the newest. Raises ``Fenced``, naming who has taken over, when it is not."""
    newest = look(store).newest
    if newest is None or newest <= (lease.generation, lease.owner):
        return
    try:
        who = f"{read_lease(store, *newest).process}"
    except ManifestError:
        who = f"owner {newest[1]}"
    raise Fenced(
        f"the run {store.location} was taken over by {who} (generation {newest[0]}, ours is {lease.generation}); nothing more is written "
        "from here and the local copies are kept. Stop one of the two trainings, or give this one a run of its own"
    )


def close(store: Store, lease: Lease, content: bytes = b"") -> None:
    """Say that the owner of ``lease`` has finished, so that the next one is not warned. Failing to say so does no harm but the warning.

    ``content`` is what else there is to say of it (``runs.traffic``): whether the object is there decides.
    """
    put_object(store, lease.closed_key, content)
