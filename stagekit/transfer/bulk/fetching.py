"""Many objects to a local disk: an engine's claims checked one by one, and what it did not bring fetched by the built-in one."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from ...parallel import each
from ...progress import Message, Subscriber
from ...store.base import Store
from ...store.usage import Usage, count_at, meter_of
from ...units import format_count
from ..checksum import Checksum
from .base import Claim, Engine, Item, emptied, place_of
from .builtin import UNBOUNDED, Space, Trust, fetch_item, file_checksum

Accept = Callable[[Item, Path, Checksum], None]
"""Takes a verified file (item, where it lies, what was found) away to its place."""

_CHECKERS = 2


def fetch_items(
    store: Store,
    items: Sequence[Item],
    scratch: Path,
    accept: Accept,
    *,
    engine: Engine | None = None,
    threads: int = 8,
    space: Space = UNBOUNDED,
    on_bytes: Callable[[int], None] = lambda _: None,
    on_event: Subscriber,
) -> None:
    """Bring all ``items``, each to a file in ``scratch`` first, and hand it to ``accept`` once it is what the store says.

    ``accept`` is called from several threads. ``scratch`` is emptied first and may hold rubbish after an error. ``space`` is asked before
    the built-in engine writes; programs ask nobody. Raises ``BadDigest``,
    ``Conflict``, ``NotFound``, ``OutOfSpace`` and the store's other errors.
    """
    emptied(scratch)
    trust = Trust()
    left = list(items)
    if engine is not None:
        left = _by_engine(engine, store, items, scratch / "engine", accept, trust, on_bytes, on_event)
    at_once = max(1, min(len(left), threads))
    inner = max(1, threads // at_once)

    def bring(numbered: tuple[int, Item]) -> None:
        number, item = numbered
        path = scratch / str(number)
        checksum = fetch_item(store, item, path, trust, threads=inner, space=space, on_bytes=on_bytes)
        accept(item, path, checksum)

    for _ in each(bring, enumerate(left), threads=at_once):
        pass


def _by_engine(
    engine: Engine,
    store: Store,
    items: Sequence[Item],
    scratch: Path,
    accept: Accept,
    trust: Trust,
    on_bytes: Callable[[int], None],
    on_event: Subscriber,
) -> list[Item]:
    """What ``engine`` did not bring."""
    place = place_of(store)
    assert place is not None
    scratch.mkdir()
    done: set[str] = set()
    wrong: list[str] = []

    def check(claim: Claim) -> None:
        item = claim.item
        with suppress(FileNotFoundError):
            if claim.path.lstat().st_size == item.size:
                checksum = file_checksum(claim.path, item.expected, trust)
                if checksum.finding != "differs":
                    accept(item, claim.path, checksum)
                    done.add(item.path)
                    count_at(meter_of(place.location), Usage(1, 0, item.size))
                    on_bytes(item.size)
                    return
        wrong.append(item.path)

    with Checkers(check) as checkers, closing(engine.fetch(place, items, scratch)) as claims:
        for claim in claims:
            checkers.give(claim)
    shutil.rmtree(scratch, ignore_errors=True)
    left = [item for item in items if item.path not in done]
    if left:
        reason = engine.complaint or "it reported success"
        bad = f", {format_count(len(wrong))} of them with other bytes than the store has" if wrong else ""
        on_event(
            Message(
                f"{engine.name} left {format_count(len(left))} of {format_count(len(items))} files{bad}: {reason}; "
                "the built-in engine copies them",
                "warning",
            )
        )
    return left


class Checkers:
    """Threads that look at claims while the engine goes on, so that the files' pages are still in memory.

    The first error of ``check`` is raised by the next ``give`` or at the end of the ``with`` block, which waits for what was given.
    """

    def __init__(self, check: Callable[[Claim], None], threads: int = _CHECKERS) -> None:
        self._check = check
        self._claims: queue.Queue[Claim | None] = queue.Queue()
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, name=f"stagekit-check-{i}", daemon=True) for i in range(threads)]

    def give(self, claim: Claim) -> None:
        if self._error is not None:
            raise self._error
        self._claims.put(claim)

    def _run(self) -> None:
        while (claim := self._claims.get()) is not None:
            if self._error is None:
                try:
                    self._check(claim)
                except BaseException as error:
                    self._error = error

    def __enter__(self) -> Checkers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for _thread in self._threads:
            self._claims.put(None)
        if kind is not None:
            return
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
