"""The claim: one small object that keeps two different runs from mixing their shards in one destination.

``.claim.json`` is created before the first shard and removed after the manifest. It names the plan (which sample goes to which shard)
and the process that works on it. The rule:

- a claim of the **same plan** is joined: both runs write the same bytes under the same names, so the second is harmless, and a run
  that died is simply continued;
- a claim of **another plan** refuses. If its process is alive, wait or choose another destination. If it is dead, or on a machine that
  cannot be asked, ``takeover`` removes the shards it left and starts afresh.

Where the store has no conditional create, two runs that start within the same moment can both believe they hold the claim. Neither
can publish over the other: before the manifest is written, the claim and every object are looked at once more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal

from ..config import StoreConfig
from ..errors import Conflict, NotFound, PublishError, StoreError
from ..location import Location
from ..processes import Process
from ..store import open_store
from ..store.base import Store

CLAIM = ".claim.json"
_LEAVING_S = 5.0  # for the last words to a store that may be gone


@dataclass(frozen=True, slots=True)
class Claim:
    """Who writes here, and what. ``running`` is false once its run ended without publishing; its shards may still be continued."""

    plan: str
    process: Process
    running: bool = True

    @classmethod
    def mine(cls, plan: str) -> Claim:
        """The claim of this process on ``plan``."""
        return cls(plan, Process.current())

    @classmethod
    def from_bytes(cls, data: bytes) -> Claim:
        """The claim in ``data``. Whatever this version cannot read is a claim of no known plan, by nobody who can be asked."""
        try:
            values = json.loads(data)
            taken = [values[name] for name in ("plan", "running", "host", "boot_id", "pid_namespace", "pid", "started")]
        except (ValueError, KeyError, TypeError):
            return _UNREADABLE
        if [type(value) for value in taken] != [str, bool, str, str, str, int, str]:
            return _UNREADABLE
        plan, running, *process = taken
        return cls(plan, Process(*process), running)

    def to_bytes(self) -> bytes:
        return json.dumps({"plan": self.plan, "running": self.running, **asdict(self.process)}, indent=1).encode() + b"\n"

    def state(self) -> Literal["running", "dead", "unknown"]:
        """Whether its process still works. A process on another machine, or in another container of this one, cannot be asked."""
        if not self.running:
            return "dead"
        if not self.process.can_be_asked():
            return "unknown"
        return "dead" if self.process.is_dead() else "running"

    def is_of_this_process(self) -> bool:
        return self.process == Process.current()

    def __str__(self) -> str:
        return str(self.process) if self.process.pid else "somebody whose claim cannot be read"


_UNREADABLE = Claim("", Process("", "", "", 0, ""))


def read_claim(store: Store) -> Claim | None:
    """The claim at the destination, if there is one."""
    try:
        return Claim.from_bytes(bytes(store.get(CLAIM)))
    except NotFound:
        return None


def take_claim(store: Store, plan: str) -> bool:
    """Write this process's claim where there is none. Returns false when another one came first; read it then.

    Claims are not written as verified uploads: a run of the same plan may put its own in the place of one that was just written.
    """
    mine = Claim.mine(plan)
    if store.conditional_create():
        try:
            store.put(CLAIM, mine.to_bytes(), if_absent=True)
        except Conflict:
            return read_claim(store) == mine  # a repeated request finds its own first try
        return True
    store.put(CLAIM, mine.to_bytes())
    return read_claim(store) == mine


def replace_claim(store: Store, plan: str) -> None:
    """Put this process's claim in the place of one that may be replaced: the same plan's, or a dead one's."""
    store.put(CLAIM, Claim.mine(plan).to_bytes())


def confirm_claim(store: Store, plan: str) -> None:
    """Raise ``PublishError`` when the destination has been claimed for another plan meanwhile. A missing claim of a run with the same plan
    that has finished is fine; the manifest decides then."""
    found = read_claim(store)
    if found is not None and found.plan != plan:
        raise PublishError(
            f"publishing to {store.location}: {found} has claimed this destination for other data while this run was writing; "
            "nothing was published. Wait until it has ended, or choose another destination"
        )


def release_claim(store: Store) -> None:
    """Remove the claim: the manifest is there, or nothing was left behind."""
    store.delete(CLAIM)


@contextmanager
def claimed(where: Location | Store, config: StoreConfig | None, plan: str) -> Iterator[None]:
    """In the block the destination is claimed for ``plan``. When it raises, this process's claim is marked as ended without publishing.

    Somebody else's claim is left as it is.
    """
    try:
        yield
    except BaseException:
        with suppress(StoreError):
            store = open_store(where, config, retry_s=_LEAVING_S)
            found = read_claim(store)
            if found is not None and found.plan == plan and found.is_of_this_process():
                store.put(CLAIM, replace(found, running=False).to_bytes())
        raise
