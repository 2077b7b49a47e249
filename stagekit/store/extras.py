"""What some stores can tell beyond the contract: their clock, and the rules by which they remove objects by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .base import ObjectInfo, Store, WrappedStore


@dataclass(frozen=True, slots=True)
class ExpiryRule:
    """One enabled rule of a bucket that removes current objects: those below ``prefix`` (of the bucket, not of the store), ``days`` after
    they were written or all of them at ``at_s``, and only of the sizes ``[above, below)`` where those are given."""

    name: str
    prefix: str
    days: int | None = None
    at_s: float | None = None
    above: int | None = None
    below: int | None = None


@runtime_checkable
class Telling(Protocol):
    """A store that knows more than the contract asks for."""

    def server_time_s(self) -> float | None:
        """The server's clock, by the answer to one small call; ``None`` when it does not tell."""

    def expiry_rules(self) -> tuple[ExpiryRule, ...]:
        """The bucket's rules that remove objects without a tag. Empty where there are none, and for a server that has no such thing."""


@runtime_checkable
class Strict(Protocol):
    """A store whose listing passes over names that no key can have, and that can be asked not to."""

    def list_strictly(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """``list``, but an object whose name is no key raises ``UsageError`` in its place. Folder markers are passed over."""


def list_strictly(store: Store, prefix: str = "") -> Iterator[ObjectInfo]:
    """Every object below ``prefix``, for whoever copies all of them: none is passed over in silence because of its name."""
    return store.list_strictly(prefix) if isinstance(store, Strict) else store.list(prefix)


def clock_skew_s(store: Store, *, clock: Callable[[], float] = time.time) -> float | None:
    """How far the server's clock is ahead of ``clock``, to about a second; ``None`` where it does not tell. One request."""
    inner = _innermost(store)
    if not isinstance(inner, Telling):
        return None
    before_s = clock()
    server_s = inner.server_time_s()
    return None if server_s is None else server_s - (before_s + clock()) / 2


def expiry_rules(store: Store) -> tuple[ExpiryRule, ...]:
    """The rules by which the bucket removes objects by itself. Raises the store's errors; ``Denied`` when they may not be read."""
    inner = _innermost(store)
    return inner.expiry_rules() if isinstance(inner, Telling) else ()


def _innermost(store: Store) -> Store:
    while isinstance(store, WrappedStore):
        store = store.inner
    return store
