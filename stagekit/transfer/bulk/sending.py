"""Many files to a store: an engine's claims checked one by one, and what it did not send sent by the built-in one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ...errors import NotFound, SourceError
from ...parallel import each
from ...progress import Message, Subscriber
from ...store.base import Store
from ...store.usage import Usage, count_at, meter_of
from ...units import format_count
from ..checksum import Expected
from ..put import put_file
from .base import Claim, Engine, Item, emptied, place_of
from .builtin import Trust, file_checksum
from .fetching import Checkers


def send_items(
    store: Store,
    items: Sequence[Item],
    source: Path,
    scratch: Path,
    *,
    engine: Engine | None = None,
    threads: int = 8,
    on_bytes: Callable[[int], None] = lambda _: None,
    on_event: Subscriber,
) -> None:
    """Send the files ``items`` of ``source``, each verified in the store.

    Raises ``SourceError`` for a file that changes while it is read or is gone, ``BadDigest``, and the store's errors. ``scratch`` is a
    directory that may be written to, for an engine.
    """
    left = list(items)
    if engine is not None and items:
        left = _by_engine(engine, store, items, source, scratch, on_bytes, on_event)
    at_once = max(1, min(len(left), threads))

    def send(item: Item) -> None:
        path = source / item.path
        with telling_if_gone(path):
            before = path.stat()
            put_file(
                store,
                item.key,
                path,
                threads=max(1, threads // at_once),
                on_bytes=on_bytes,
                check=lambda: _unchanged(path, before),
            )

    for _ in each(send, left, threads=at_once):
        pass


@contextmanager
def telling_if_gone(path: Path) -> Iterator[None]:
    """Raise ``SourceError`` where the block finds that the local file ``path``, which is to be sent, is not there any more."""
    try:
        yield
    except NotFound:
        raise  # it is a FileNotFoundError, and the store's
    except FileNotFoundError as error:
        raise SourceError(f"sending {path}: it is gone; repeat the command") from error


def _unchanged(path: Path, before: os.stat_result) -> None:
    now = path.stat()
    if (now.st_size, now.st_mtime_ns, now.st_ino) != (before.st_size, before.st_mtime_ns, before.st_ino):
        raise SourceError(f"sending {path}: it changed while it was read, and was not stored; repeat once nobody writes to it")


def _by_engine(
    engine: Engine,
    store: Store,
    items: Sequence[Item],
    source: Path,
    scratch: Path,
    on_bytes: Callable[[int], None],
    on_event: Subscriber,
) -> list[Item]:
    """What ``engine`` did not send, or what cannot be proven to be there."""
    place = place_of(store)
    assert place is not None
    done: set[str] = set()
    claimed: set[str] = set()
    trust = Trust()

    def check(claim: Claim) -> None:
        item = claim.item
        claimed.add(item.key)
        count_at(meter_of(place.location), Usage(1, item.size, 0))
        try:
            info = store.head(item.key)
        except NotFound:
            return
        path = claim.path.resolve()
        if info.size == item.size and file_checksum(path, Expected(info.size, info.sha256, info.etag), trust).finding == "proven":
            done.add(item.key)
            on_bytes(item.size)

    with Checkers(check) as checkers, closing(engine.send(place, items, source, emptied(scratch))) as claims:
        for claim in claims:
            checkers.give(claim)
    left = [item for item in items if item.key not in done]
    if left:
        unproven = sum(item.key in claimed for item in left)
        told = f", and of {format_count(unproven)} of them the store does not prove that they are whole" if unproven else ""
        reason = engine.complaint or "it reported success"
        on_event(
            Message(
                f"{engine.name} left {format_count(len(left))} of {format_count(len(items))} files{told}: {reason}; "
                "the built-in engine sends them",
                "warning",
            )
        )
    return left
