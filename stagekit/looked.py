"""What an interrupted deep look at a data set has read already, so that the next one goes on there. Kept on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .store.base import ObjectInfo

_VALID_S = 24 * 3600.0


class Looked:
    """The shards of one data set that were read to their end and were whole, each with the etag it had then.

    An object that was replaced since has another etag and is read again; so is one without an etag, and everything after a day. A look
    that comes to its end calls ``finish``, and the next one reads everything. What cannot be written down is read again, nothing worse.
    """

    def __init__(self, directory: Path, url: str, digest: str, *, clock: Callable[[], float] = time.time) -> None:
        name = hashlib.sha256(f"{url}\n{digest}".encode()).hexdigest()[:32]
        self._path = directory / "verify" / f"{name}.jsonl"
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: set[tuple[str, int, str]] = set()
        with suppress(OSError):
            for line in self._path.read_text().splitlines():
                with suppress(ValueError, TypeError):  # the last line of a killed process may be cut
                    key, size, etag, at_s = json.loads(line)
                    if 0 <= clock() - at_s <= _VALID_S:
                        self._seen.add((key, size, etag))

    def has(self, info: ObjectInfo) -> bool:
        """Whether this very object was read and was whole."""
        return info.etag is not None and (info.key, info.size, info.etag) in self._seen

    def add(self, info: ObjectInfo) -> None:
        """``info`` was read to its end and is whole."""
        if info.etag is None:
            return
        line = json.dumps([info.key, info.size, info.etag, self._clock()]) + "\n"
        with self._lock, suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line)

    def finish(self) -> None:
        """Everything was looked at: the next look starts afresh."""
        with suppress(OSError):
            self._path.unlink()
