"""What this machine notes of each ``stagekit run``, so that a later start, or ``stagekit teardown``, finishes what one left behind.

One small file per attempt in the machine's home, gone once all of its saves and logs are in the bucket. Beside it lies a lock that is held
as long as ``stagekit run`` or its command lives: the kernel drops it with them, in whichever way they end.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..config import StoreConfig, home_directory
from ..errors import ManifestError
from ..folders import paths_in
from ..locks import hold, is_held
from ..processes import Process
from ..runs.layout import seal, unseal
from .survivors import survivors


@dataclass(frozen=True, slots=True)
class Note:
    """One ``stagekit run``, by ``process``.

    ``watched``: its directories by the names they have in the logs. ``killed``: its command did not end by itself, so that what it wrote
    last may be cut. ``ended``: ``stagekit run`` has seen that end, so that nobody killed it before. ``grace_s``: what the command has after
    SIGTERM.
    """

    attempt: str
    url: str
    store: StoreConfig | None
    watched: Mapping[str, Path]
    patterns: tuple[str, ...]
    quiet_s: float
    world_size: int | None
    logs: Path | None
    command: str
    process: Process
    grace_s: float
    spool: Path | None = None
    killed: bool = True
    ended: bool = False
    home: Path = field(default_factory=home_directory)

    @property
    def path(self) -> Path:
        """Where it lies."""
        return _folder(self.home) / f"{self.attempt}.json"

    def hold(self) -> int:
        """Take the lock, for as long as the file that is returned is open somewhere. Raises ``OSError`` when it cannot be taken."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        return hold(self._lock, os.O_RDWR | os.O_CREAT)

    def is_over(self) -> bool:
        """Whether neither ``stagekit run`` nor anything that its command started lives any more."""
        return not self.is_guarded() and not survivors(self.attempt)

    def is_guarded(self) -> bool:
        """Whether ``stagekit run`` lives, or what ends its command when that was killed."""
        try:
            return is_held(self._lock)
        except FileNotFoundError:
            return False

    @property
    def alive(self) -> list[int]:
        """The processes of it that live: ``stagekit run``, or what its command started when that is gone."""
        return survivors(self.attempt) if self.process.is_dead() or not self.is_guarded() else [self.process.pid]

    @property
    def _lock(self) -> Path:
        return self.path.with_suffix(".lock")

    def write(self) -> None:
        """Keep it on disk: temporary name, rename."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        values = {
            **asdict(self),
            "watched": {name: str(path) for name, path in self.watched.items()},
            "logs": str(self.logs) if self.logs else None,
            "spool": str(self.spool) if self.spool else None,
            "patterns": list(self.patterns),
        }
        del values["home"]
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_bytes(seal({"format": "stagekit-wrapped", "version": 1, **values}))
        temporary.replace(self.path)

    def remove(self) -> None:
        """All of it is in the bucket: let go of the note and of the local copy of what the command printed."""
        if self.logs is not None:
            shutil.rmtree(self.logs, ignore_errors=True)
        self.path.unlink(missing_ok=True)
        self._lock.unlink(missing_ok=True)


def notes(home: Path | None = None) -> list[Note]:
    """All notes on this machine, oldest first. Raises ``ManifestError`` or ``OSError`` naming one that cannot be read."""
    place = home or home_directory()
    return [_read(path, place) for path in paths_in(_folder(place), "*.json")]


def log_directory(attempt: str) -> Path:
    """Where what the command of ``attempt`` prints is kept until it is in the bucket."""
    return _folder(home_directory()) / attempt


def _folder(home: Path) -> Path:
    return home / "wrapped"


def _read(path: Path, home: Path) -> Note:
    values = unseal(path.read_bytes(), "stagekit-wrapped", 1, source=str(path))
    try:
        return Note(
            attempt=str(values["attempt"]),
            url=str(values["url"]),
            store=StoreConfig.from_record(values["store"]),
            watched={str(name): Path(place) for name, place in values["watched"].items()},
            patterns=tuple(values["patterns"]),
            quiet_s=float(values["quiet_s"]),
            world_size=values["world_size"],
            logs=Path(values["logs"]) if values["logs"] else None,
            command=str(values["command"]),
            process=Process(**values["process"]),
            grace_s=float(values["grace_s"]),
            spool=Path(values["spool"]) if values["spool"] else None,
            killed=bool(values["killed"]),
            ended=bool(values.get("ended", False)),
            home=home,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{path}: it is no record of a stagekit run ({error})") from None
