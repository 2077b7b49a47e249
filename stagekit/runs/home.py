"""What this machine remembers of its runs: which URLs it wrote to, where their pending saves lie, which directories they came from, and
where their trainings were started.

One small file per run under the machine's home (``config.home_directory``). ``stagekit teardown`` looks there when it is not told what to
look at.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from ..config import StoreConfig, home_directory
from ..errors import ManifestError
from ..folders import paths_in
from .layout import seal, unseal

_SESSIONS = 100  # of the latest processes


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run that was written from this machine, with the spools, the watched and the working directories of all its trainings, sorted.

    ``datasets`` are those that they streamed, by digest. ``disks`` says on which device (``st_dev``) each watched directory was.
    ``sessions`` are the latest processes that wrote to it, the owners in the names of its checkpoints. ``handed`` are those of the watched
    directories that were handed over as saves: what was in one is pinned or in the bucket when it is gone. ``since_s`` is when the first
    training of it began here.
    """

    url: str
    store: StoreConfig | None
    spools: tuple[Path, ...]
    watched: tuple[Path, ...]
    working: tuple[Path, ...] = ()
    datasets: Mapping[str, str] = field(default_factory=dict)
    disks: Mapping[Path, int] = field(default_factory=dict)
    sessions: tuple[str, ...] = ()
    handed: tuple[Path, ...] = ()
    since_s: float | None = None


def known_runs(home: Path | None = None) -> list[KnownRun]:
    """Every run this machine wrote to, sorted by URL. Raises ``ManifestError`` or ``OSError`` naming a record that cannot be read."""
    folder = (home or home_directory()) / "runs"
    return sorted((_read(path) for path in paths_in(folder, "*.json")), key=lambda known: known.url)


def unfinished_records(home: Path | None = None) -> list[Path]:
    """What is left of records that could not be written to their end. Raises ``OSError`` where that may not be looked at."""
    return sorted(path for path in paths_in((home or home_directory()) / "runs", ".*.json.*") if not _lives(path))


def known_run(url: str, home: Path | None = None) -> KnownRun | None:
    """The run at ``url``, if this machine wrote to it. Raises like ``known_runs``."""
    path = record_path(url, home or home_directory())
    return _read(path) if path.exists() else None


def remember(
    url: str,
    store: StoreConfig | None,
    spool: Path,
    watched: Iterable[Path] = (),
    *,
    handed: Iterable[Path] = (),
    working: Path | None = None,
    datasets: Mapping[str, str] = MappingProxyType({}),
    session: str | None = None,
    home: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Note that this machine writes to ``url``; what was noted before stays. Raises ``OSError`` when the home cannot be written."""
    path = record_path(url, home or home_directory())
    before: KnownRun | None = None
    path.parent.mkdir(parents=True, exist_ok=True)
    spools, directories = {spool.absolute()}, {directory.absolute() for directory in watched}
    places = {working.absolute()} if working is not None else set()
    sessions = [session] if session is not None else []
    saves = {directory.absolute() for directory in handed}
    since_s: float | None = clock()
    if path.exists():
        before = _read(path)
        spools.update(before.spools)
        since_s = before.since_s
        saves.update(set(before.handed) - directories)
        # Rotated checkpoints do not pile up. Another directory that is gone may have been moved.
        directories.update(directory for directory in before.watched if directory not in before.handed or directory.exists())
        places.update(before.working)
        datasets = {**before.datasets, **datasets}
        sessions = [*(one for one in before.sessions if one != session), *sessions][-_SESSIONS:]
    disks = {directory: device for directory in sorted(directories) if (device := _device(directory)) is not None}
    saves &= directories
    known = KnownRun(
        url,
        store,
        tuple(sorted(spools)),
        tuple(sorted(directories)),
        tuple(sorted(places)),
        datasets,
        disks,
        tuple(sessions),
        tuple(sorted(saves)),
        since_s,
    )
    if before == known:
        return
    values = {
        "format": "stagekit-known-run",
        "version": 1,
        "url": url,
        "store": asdict(store) if store is not None else None,
        "spools": sorted(map(str, spools)),
        "watched": sorted(map(str, directories)),
        "working": sorted(map(str, places)),
        "datasets": dict(sorted(datasets.items())),
        "disks": {str(directory): device for directory, device in disks.items()},
        "sessions": sessions,
        "handed": sorted(map(str, saves)),
        "since_s": since_s,
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(seal(values))
    temporary.replace(path)
    for left in paths_in(path.parent, f".{path.name}.*"):
        if not _lives(left):
            left.unlink(missing_ok=True)  # it was about this run, which is noted now


def record_path(url: str, home: Path) -> Path:
    """Where ``home`` keeps what it knows of the run at ``url``."""
    return home / "runs" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"


def _lives(temporary: Path) -> bool:
    """Whether the process that writes ``temporary`` lives."""
    try:
        os.kill(int(temporary.name.rpartition(".")[2]), 0)
    except (ProcessLookupError, ValueError):
        return False
    except OSError:
        return True
    return True


def _device(directory: Path) -> int | None:
    try:
        return directory.stat().st_dev
    except OSError:
        return None


def _read(path: Path) -> KnownRun:
    values = unseal(path.read_bytes(), "stagekit-known-run", 1, source=str(path))
    try:
        return KnownRun(
            url=str(values["url"]),
            store=StoreConfig.from_record(values["store"]),
            spools=tuple(Path(item) for item in values["spools"]),
            watched=tuple(Path(item) for item in values["watched"]),
            working=tuple(Path(item) for item in values.get("working", ())),
            datasets={str(digest): str(place) for digest, place in values.get("datasets", {}).items()},
            sessions=tuple(str(session) for session in values.get("sessions", ())),
            since_s=values.get("since_s"),
            handed=tuple(Path(item) for item in values.get("handed", ())),
            disks={Path(directory): int(device) for directory, device in values.get("disks", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError(f"{path}: it is no record of a run ({error})") from None
