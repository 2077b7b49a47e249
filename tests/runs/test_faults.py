"""A training behind a store that fails in one way after another: nothing that was reported safe is lost, and it heals by itself.

Each kind of fault is injected at random into the requests of a real trainer, so many times on each server; then the store is well again. An
orchestrator starts the trainer until it ends with 0. The oracle of ``trainer`` looks at the bucket after each start.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from stagekit.config import StoreConfig
from stagekit.errors import StagekitError
from stagekit.runs.restore import restore
from stagekit.store import open_store
from stagekit.testing.proxy import Cut, Drop, Fault, FlipBit, Hang, Request, ShortBody, SlowDown, Stall, Status

from .proxied import Proxied
from .trainer import content

PER_CASE = 3
"""Faults of each kind on each server."""

_STARTS = 15
_HASTY_S = 0.8  # as long as a client waits here for an answer that does not come

ANSWERS: dict[str, Fault] = {
    "500 InternalError": Status(500),
    "503 SlowDown with Retry-After": SlowDown(retry_after_s=1),
    "403 AccessDenied for a time": Status(403, "AccessDenied"),
}
CONNECTIONS: dict[str, Fault] = {
    "connection reset, the request not carried out": Drop(),
    "connection reset, the request carried out": Drop(after_request=True),
    "no answer until the time-out, the request not carried out": Hang(),
    "no answer until the time-out, the request carried out": Hang(after_request=True),
}
UPLOADS: dict[str, Fault] = {
    "upload cut": Cut(1000, of="request"),
    "upload shortened on its way": ShortBody(of="request"),
    "bit flipped in an upload": FlipBit(777, 3, of="request"),
}
DOWNLOADS: dict[str, Fault] = {
    "download cut": Cut(1000),
    "download stalled": Stall(1000),
    "download shortened on its way": ShortBody(),
    "bit flipped in a download": FlipBit(777, 3),
}


class Chance:
    """Takes ``PER_CASE`` of the first ``among`` requests of the kind that ``method`` tells (or of all), never two in a row."""

    def __init__(self, seed: str, among: int, method: str | None = None) -> None:
        self._method = method
        self._places = set(random.Random(seed).sample(range(0, among, 2), PER_CASE))
        self._passed = -1

    def __call__(self, request: Request) -> bool:
        if self._method is not None and not (request.method == self._method and request.key.endswith(".bin")):
            return False
        self._passed += 1
        return self._passed in self._places


def injected(proxied: Proxied) -> int:
    return sum(bool(request.faults) for request in proxied.proxy.requests)


@pytest.mark.parametrize("kinds", [ANSWERS, CONNECTIONS, UPLOADS], ids=["answers", "connections", "uploads"])
def test_a_training_whose_store_fails_for_a_time(proxied: Proxied, kinds: dict[str, Fault]) -> None:
    sends = kinds is UPLOADS
    for name, fault in kinds.items():
        chance = Chance(f"{name} {proxied.server.name}", 14 if sends else 50, "PUT" if sends else None)
        proxied.proxy.fault(fault, where=chance)
    wanted = PER_CASE * len(kinds)
    options = proxied.options(6, retry_s=2.0, read_timeout_s=_HASTY_S if kinds is CONNECTIONS else 30.0)
    for _ in range(_STARTS):
        code = proxied.train(options)
        if code == 0 and injected(proxied) == wanted:
            break
        if code == 0:
            options["steps"] += 4
    assert (code, injected(proxied)) == (0, wanted), "it healed, and every fault that is counted was injected"


def restored(config: StoreConfig, url: str, directory: Path) -> int | None:
    """The step that a reader gets, compared with what the trainer wrote."""
    found = restore(open_store(url, config), directory)
    if found is None:
        return None
    for path, data in content(found.step).items():
        assert (directory / path).read_bytes() == data
    shutil.rmtree(directory)
    return found.step


def test_restores_from_a_store_that_spoils_what_it_sends(proxied: Proxied, tmp_path: Path) -> None:
    options = proxied.options(4, read_timeout_s=_HASTY_S)
    assert proxied.train(options) == 0
    config = StoreConfig(**options["store"])
    for name, fault in DOWNLOADS.items():
        proxied.proxy.clear()
        proxied.proxy.fault(fault, where=Chance(f"{name} {proxied.server.name}", 10, "GET"))
        while injected(proxied) < PER_CASE:
            assert restored(config, options["run"], tmp_path / "restored") == 4, "the newest one all the same"
    assert proxied.look(options) == 4


def test_what_stays_spoiled_is_an_error_and_no_new_run(proxied: Proxied, tmp_path: Path) -> None:
    options = proxied.options(1, retry_s=0, read_timeout_s=_HASTY_S)
    assert proxied.train(options) == 0
    config = StoreConfig(**options["store"])
    for fault in DOWNLOADS.values():
        proxied.proxy.clear()
        proxied.proxy.fault(fault, method="GET", key="*.bin")
        with pytest.raises(StagekitError, match=r"model\.bin|optimizer\.bin"):
            restore(open_store(options["run"], config), tmp_path / "restored")
        assert not (tmp_path / "restored").exists()
