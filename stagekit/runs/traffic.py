"""What a training asked of object storage, as it is recorded with its run when it has finished.

::

    HOME/traffic/<run>/<training>-<id>      one process's counts, a line at a time, while the training goes on

The record is the content of ``owners/….closed``, which is written once, at the end, with the counts of the processes that the training has
forked (``DataLoader``'s workers), and of trainings of this run that were killed on this machine. What is lost is the last seconds of a
killed process, workers that were not forked, and a training that was killed with its machine. So it was at least what is recorded.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing.util
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ..config import home_directory
from ..errors import ManifestError
from ..location import Location
from ..processes import Process
from ..store.base import Store
from ..store.usage import Usage, follow, follow_no_more, usages
from .layout import OWNERS, seal, unseal

_FORMAT = "stagekit-traffic"
_NOTE_S = 10.0


class Traffic:
    """What this process, and those that it forks, have asked of each place since this was made. It is noted on this machine as it goes.

    :param run: the run's URL, whose killed trainings ``collected`` takes in as well
    """

    def __init__(self, run: str, *, every_s: float = _NOTE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = home_directory() / "traffic" / hashlib.sha256(run.encode()).hexdigest()[:32]
        self._training = uuid.uuid4().hex[:16]
        self._every_s, self._clock = every_s, clock
        self._over = False
        self._begin(usages())
        if _followed_in != os.getpid():
            _follow_here()
        follow(self.counted)

    def _begin(self, before: Mapping[Location, Usage]) -> None:
        self._pid = os.getpid()
        self._noted = dict(before)
        self._due_s = self._clock() + self._every_s
        self._lock = threading.Lock()
        self._path = self._folder / f"{self._training}-{uuid.uuid4().hex[:16]}"

    def counted(self) -> None:
        """Something was counted: note it from time to time."""
        if self._over:
            return
        if self._pid != os.getpid():  # forked: what was counted before is the parent's
            self._begin({})
            multiprocessing.util.Finalize(None, self.note, exitpriority=0)
        if self._clock() >= self._due_s and self._lock.acquire(blocking=False):
            try:
                self._due_s = self._clock() + self._every_s
                self._write()
            finally:
                self._lock.release()

    def note(self) -> None:
        """Note what was counted so far. A disk that takes no notes changes nothing but the count."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        now = usages()
        new = {str(place): asdict(more) for place, more in self._since(now).items()}
        if not new:
            return
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                lines = [json.dumps(new)]
                if not file.tell():
                    lines.insert(0, json.dumps(asdict(Process.current())))
                file.write("".join(f"{line}\n" for line in lines).encode())
            self._noted = now

    def _since(self, now: Mapping[Location, Usage]) -> dict[Location, Usage]:
        more = {place: usage - self._noted.get(place, Usage()) for place, usage in now.items()}
        return {place: usage for place, usage in more.items() if usage != Usage()}

    def collected(self) -> dict[str, Usage]:
        """All that is noted, by URL, of this training and of those that were killed, each note taken in once. The training is over then."""
        self._over = True
        self.note()
        total = {str(place): usage for place, usage in self._since(usages()).items()}  # what could not be noted
        with suppress(OSError):
            for path in sorted(self._folder.iterdir()):
                with suppress(OSError):
                    if path.name.startswith(f"{self._training}-") or _is_over(path):
                        for url, usage in _taken(path):
                            total[url] = total.get(url, Usage()) + usage
            self._folder.rmdir()
        return dict(sorted(total.items()))


_followed_in = os.getpid()


def _follow_here() -> None:
    """This process was forked and counts for a training of its own now."""
    global _followed_in
    _followed_in = os.getpid()
    follow_no_more()


def _is_over(path: Path) -> bool:
    with suppress(ValueError, TypeError, KeyError):
        return Process(**json.loads(path.read_bytes().split(b"\n", 1)[0])).is_dead()
    return False


def _taken(path: Path) -> list[tuple[str, Usage]]:
    """The notes in ``path``, which is removed: whoever renames it first has them. A line that a killed process left half is none."""
    mine = path.with_name(f".{uuid.uuid4().hex}")
    path.rename(mine)
    found = []
    for line in mine.read_bytes().split(b"\n")[1:]:
        with suppress(ValueError, TypeError, AttributeError):
            found += [(str(Location.parse(place)), Usage(**counts)) for place, counts in json.loads(line).items()]
    mine.unlink()
    return found


def to_bytes(traffic: Mapping[str, Usage]) -> bytes:
    """The record; empty when nothing was counted, as for a run in a directory."""
    if not traffic:
        return b""
    return seal({"format": _FORMAT, "version": 1, "places": {place: asdict(usage) for place, usage in sorted(traffic.items())}})


def from_bytes(data: bytes, *, source: str) -> dict[str, Usage]:
    """Parse strictly. Raises ``ManifestError`` naming ``source``."""
    if not data:
        return {}
    values = unseal(data, _FORMAT, 1, source=source)
    try:
        return {
            str(Location.parse(place)): Usage(**{name: int(count) for name, count in one.items()})
            for place, one in values["places"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError(f"{source}: it does not say what a training asked of storage ({error})") from None


def recorded(store: Store) -> tuple[dict[str, Usage], int]:
    """What the finished trainings of the run at ``store`` counted, by URL, and how many of them counted anything.

    A record that cannot be read is passed over: it tells of money, and decides nothing.
    """
    total: dict[str, Usage] = {}
    trainings = 0
    for info in list(store.list(OWNERS)):
        if not info.key.endswith(".closed") or not info.size:
            continue
        try:
            found = from_bytes(bytes(store.get(info.key)), source=f"{store.location}/{info.key}")
        except ManifestError:
            continue
        trainings += 1
        for place, usage in found.items():
            total[place] = total.get(place, Usage()) + usage
    return dict(sorted(total.items())), trainings
