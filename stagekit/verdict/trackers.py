"""The rows about experiment trackers: wandb runs that were made offline, and TensorBoard's event files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ..mounts import MountTable
from .caches import is_cache
from .findings import Finding

_DEPTH = 4
MOST_ENTRIES = 20_000
_EVENTS = ".tfevents."


def is_events(name: str) -> bool:
    """Whether a file of this name is one of TensorBoard's."""
    return _EVENTS in name


def is_wandb(folder: Path, names: Collection[str]) -> bool:
    """Whether ``folder`` is where wandb keeps its runs."""
    return folder.name == "wandb" and any(name.startswith(("offline-run-", "run-")) for name in names)


def judge(folders: Iterable[Path], ignores: Callable[[str], bool], now_s: float) -> list[Finding]:
    """One finding per offline run in wandb's ``folders`` that was not synced. wandb notes that it was beside the run's file."""
    findings = []
    for folder in sorted(set(folders)):
        for name in sorted(_names(folder)):
            run = folder / name
            if not name.startswith("offline-run-") or ignores(name) or ignores(f"wandb/{name}"):
                continue
            held = _names(run)
            if any(one.endswith(".wandb.synced") for one in held):
                continue
            paths = [path for path in run.rglob("*") if path.is_file()]
            newest_s = max((path.stat().st_mtime for path in paths), default=None)
            age_s = now_s - newest_s if newest_s is not None else None
            size = sum(path.stat().st_size for path in paths)
            fix = f"wandb sync {shlex.quote(str(run))}"
            findings.append(Finding("NO", "tracker", "a wandb run that was made offline and not synced", str(run), size, age_s, fix))
    return findings


def look(directory: Path) -> tuple[list[Path], list[Path], bool]:
    """Wandb's folders and TensorBoard's files a few levels below a working directory, and whether all of that was looked through.

    Hidden folders, caches and other file systems are left out.
    """
    wandb: list[Path] = []
    events: list[Path] = []
    device = os.stat(directory).st_dev
    mounted = MountTable.read()
    folders = [(directory, 0)]
    seen = 0
    while folders:
        folder, depth = folders.pop()
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except OSError:
            continue  # what may not be read is not what this user's training wrote
        seen += len(entries)
        if seen > MOST_ENTRIES:
            return wandb, events, False
        names = [entry.name for entry in entries]
        if is_cache(folder, names):
            continue
        if is_wandb(folder, names):
            wandb.append(folder)
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if mounted is not None and mounted.is_point(entry.path):
                    continue  # before it is touched: a mount that hangs would hang this process as well
                if depth < _DEPTH and not entry.name.startswith(".") and entry.stat(follow_symlinks=False).st_dev == device:
                    folders.append((folder / entry.name, depth + 1))
            elif is_events(entry.name) and entry.is_file():
                events.append(folder / entry.name)
    return wandb, events, True


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
