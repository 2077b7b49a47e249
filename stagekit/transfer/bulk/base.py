"""The contract of an engine that copies many objects to a local disk, or many files out.

An engine is not believed. It *claims* that something arrived, and whoever asked it looks: at the size, and at every byte where there is
something to compare with. What it does not claim, or claims wrongly, is copied by the built-in engine. So an engine may die, lie, or
leave half a file, and nothing follows from it but time. It never sees a name that a manifest or listing made up: what it fetches goes
into a fresh directory, under names or keys that were checked before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...config import StoreConfig
from ...location import Location
from ...processes import ending_with_us
from ...shards.index import BlockTable
from ...store.base import Store, WrappedStore
from ...store.paced import PacedStore
from ...store.retry import RetryStore
from ..checksum import Expected


@dataclass(frozen=True, slots=True)
class Item:
    """One object, called ``key`` in the store, and ``path`` at the other end (slashes, relative); and what is known of its bytes."""

    key: str
    path: str
    size: int
    etag: str | None = None
    sha256: str | None = None
    blocks: BlockTable | None = None

    @property
    def expected(self) -> Expected:
        return Expected(self.size, self.sha256, self.etag, self.blocks)


@dataclass(frozen=True, slots=True)
class Claim:
    """An engine says that ``item`` is where it belongs; for a download, in the file ``path``."""

    item: Item
    path: Path


class Engine(Protocol):
    """A program that copies. ``complaint`` holds, after an iteration has ended, why the program says that it failed, else ``None``."""

    name: str
    complaint: str | None

    def fetch(self, place: Place, items: Sequence[Item], into: Path) -> Generator[Claim, None, None]:
        """Copy ``items`` to files in ``into``, an empty directory, and yield each as soon as it is said to be there, in any order.

        Leaving the iteration ends the program. It never outlives this process.
        """

    def send(self, place: Place, items: Sequence[Item], source: Path, scratch: Path) -> Generator[Claim, None, None]:
        """Copy the files ``items`` from ``source`` to the store, and yield each as ``fetch`` does. ``scratch`` takes what it must write."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a program needs to know to reach a store by itself: its location, and the settings with which it was opened."""

    location: Location
    config: StoreConfig


def place_of(store: Store) -> Place | None:
    """Where a program would find what ``store`` holds; ``None`` for a store that only this process can read, or that leads elsewhere."""
    while isinstance(store, RetryStore | PacedStore):
        store = store.inner
    config = getattr(store, "config", None)
    if isinstance(store, WrappedStore) or not isinstance(config, StoreConfig):
        return None
    return Place(store.location, config)


class Tool:
    """A program that reports line by line. ``lines`` yields what it prints; then ``code`` is what it ended with."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._argv, self._env = argv, env
        self.code: int | None = None

    def lines(self) -> Generator[str, None, None]:
        process = subprocess.Popen(
            ending_with_us(self._argv),
            env=dict(self._env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            yield from process.stdout
            self.code = process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.stdout.close()
            process.wait()


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what would send a program elsewhere than it is told, and with ``more``."""
    foreign = ("AWS_", "RCLONE_", "S3_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(foreign)}, **more}


def emptied(directory: Path) -> Path:
    """``directory``, there and with nothing in it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory
