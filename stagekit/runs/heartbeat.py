"""How far a training on this machine is: the step of its last sign of life, one small file per run in the machine's home.

What was trained since the newest safe checkpoint is in the memory of a process and nowhere else. Only the process can tell how much that
is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config import home_directory
from ..errors import ManifestError
from ..processes import Process
from .home import record_path
from .layout import seal, unseal

EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """``process`` had trained ``step`` steps of the run ``url`` at ``time_s``, by its clock."""

    url: str
    step: int
    time_s: float
    process: Process


class Pulse:
    """Writes the heartbeat of one run, at most every ``EVERY_S`` seconds, so that it may be told of every step."""

    def __init__(
        self, url: str, *, home: Path | None = None, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._home = home
        self._clock = clock
        self._monotonic = monotonic
        self._next_s: float | None = None
        self._untold: int | None = None
        self._process: Process | None = None

    def beat(self, step: int) -> None:
        """Note ``step``. A home that cannot be written costs the note and nothing else."""
        now_s = self._monotonic()
        if self._next_s is not None and now_s < self._next_s:
            self._untold = step
            return
        self._next_s = now_s + EVERY_S
        self._write(step)

    def last(self) -> None:
        """Note the step that was told last, when that is not noted yet: the training ends."""
        if self._untold is not None:
            self._write(self._untold)

    def _write(self, step: int) -> None:
        self._untold = None
        self._process = self._process or Process.current()
        path = _path(self._url, self._home)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        values = {
            "format": "stagekit-heartbeat",
            "version": 1,
            "url": self._url,
            "step": step,
            "time_s": round(self._clock(), 3),
            "process": asdict(self._process),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(seal(values))
            temporary.replace(path)
        except OSError:
            return


def last_heartbeat(url: str, home: Path | None = None) -> Heartbeat | None:
    """The last sign of life of a training of ``url`` on this machine. ``None`` when there was none, or it cannot be read: it only adds to
    what leases and pending saves tell."""
    path = _path(url, home)
    try:
        values = unseal(path.read_bytes(), "stagekit-heartbeat", 1, source=str(path))
        return Heartbeat(str(values["url"]), int(values["step"]), float(values["time_s"]), Process(**values["process"]))
    except (OSError, ManifestError, KeyError, TypeError, ValueError):
        return None


def _path(url: str, home: Path | None) -> Path:
    return record_path(url, home or home_directory()).with_suffix(".heartbeat")
