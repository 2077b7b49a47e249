"""Which engine copies: what was asked for, or a measured rule."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Literal, get_args

from ...config import StoreConfig
from ...errors import UsageError
from .base import Engine, Item, Place
from .rclone import Rclone
from .s5cmd import S5cmd, s5cmd_binary

EngineName = Literal["auto", "builtin", "s5cmd", "rclone"]
ENGINES: tuple[str, ...] = get_args(EngineName)

MANY = 500
SMALL = 2**20


def choose(
    name: EngineName, place: Place | None, items: Sequence[Item], *, doing: str, threads: int, bytes_per_s: float | None
) -> Engine | None:
    """The engine for ``items``; ``None`` is the built-in one. Raises ``UsageError`` when the one that was asked for cannot do it.

    ``auto`` takes rclone for rclone's own remotes, and the built-in engine for everything else but one case: many small objects (more than
    ``MANY``, of less than ``SMALL`` bytes on average) where obstore is not there to read them. Those are s5cmd's, unless a limit on the
    rate forbids it.
    """
    if name not in ENGINES:
        raise UsageError(f"engine: {name!r} is none of {', '.join(ENGINES)}")
    if name == "rclone" or (name == "auto" and place is not None and place.location.scheme == "rclone"):
        _refuse(name, Rclone.refusal(place), doing)
        config = place.config if place is not None else StoreConfig()
        rates = [rate for rate in (bytes_per_s, config.max_bytes_per_s) if rate is not None]
        return Rclone(threads=threads, bytes_per_s=min(rates, default=None), requests_per_s=config.max_requests_per_s)
    if name == "s5cmd":
        _refuse(name, S5cmd.refusal(place) or ("it has no limit on the rate" if bytes_per_s is not None else None), doing)
        return S5cmd()
    if place is None or not prefers_s5cmd(items, place.config) or bytes_per_s is not None:
        return None
    return S5cmd() if name == "auto" and S5cmd.refusal(place) is None and s5cmd_binary() is not None else None


def prefers_s5cmd(items: Sequence[Item], config: StoreConfig) -> bool:
    """Whether there are so many small objects that the requests cost more than the bytes, and nothing here that makes many cheaply."""
    if len(items) <= MANY or sum(item.size for item in items) >= SMALL * len(items):
        return False
    return config.engine != "auto" or importlib.util.find_spec("obstore") is None


def _refuse(name: str, reason: str | None, doing: str) -> None:
    if reason is not None:
        raise UsageError(f"{doing} with --engine {name}: {reason}; leave the option out, or give --engine builtin")


__all__ = ["ENGINES", "EngineName", "choose", "prefers_s5cmd", "s5cmd_binary"]
