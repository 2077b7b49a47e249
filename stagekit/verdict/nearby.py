"""What a training left where it was started, beside what is watched: what trackers wrote, and files that look like its saves."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..mounts import MountTable
from ..saves.adapter import content_revision
from ..saves.pulled import pulled_model
from . import trackers
from .caches import is_cache

MOST_ENTRIES = 100_000
PATIENCE_S = 3.0
_DEPTH = 12
_WEIGHTS = re.compile(r".+\.(pt|pth|ckpt|safetensors|distcp|gguf|keras)|(pytorch_model|adapter_model|optimizer|model)\S*\.bin")
_STEP = re.compile(r"(global_?step|checkpoint|ckpt|step|epoch|iter)[-_=]?\d+")
_DOWNLOADED = Path(".cache", "huggingface", "download")  # what huggingface_hub leaves in a --local-dir


@dataclass(slots=True)
class Nearby:
    """What was found: wandb's folders, files of other trackers, and files that look like saves. ``whole`` says whether all was searched."""

    wandb: list[Path] = field(default_factory=list)
    tracked: list[Path] = field(default_factory=list)
    saves: list[Path] = field(default_factory=list)
    whole: bool = True


def look(
    directory: Path,
    since_s: float | None = None,
    *,
    skips: Callable[[Path], bool] = lambda _: False,
    home: Path | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Nearby:
    """Search ``directory``, what is near first. Files that look like saves count when they were written after ``since_s``.

    Hidden folders, caches, models that were brought here from elsewhere, other file systems and what ``skips`` names are left out.
    """
    found = Nearby()
    device = os.stat(directory).st_dev
    mounted = MountTable.read()
    folders = deque([(directory, 0, False)])
    seen, end_s = 0, monotonic() + PATIENCE_S
    while folders:
        folder, depth, saved = folders.popleft()
        try:
            with os.scandir(folder) as listed:
                entries = list(listed)
        except OSError:
            continue  # what may not be read is not what this user's training wrote
        seen += len(entries)
        if seen > MOST_ENTRIES or monotonic() > end_s:
            found.whole = False
            return found
        names = [entry.name for entry in entries]
        if is_cache(folder, names):
            continue
        if trackers.is_wandb(folder, names):
            found.wandb.append(folder)
            continue
        candidates: list[Path] = []
        for entry in entries:
            path = folder / entry.name
            if entry.is_dir(follow_symlinks=False):
                if mounted is not None and mounted.is_point(entry.path):
                    continue  # before it is touched: a mount that hangs would hang this process as well
                if entry.name.startswith(".") or skips(path) or depth >= _DEPTH:
                    continue
                if entry.stat(follow_symlinks=False).st_dev == device:
                    folders.append((path, depth + 1, saved or _STEP.fullmatch(entry.name) is not None))
            elif trackers.whose(str(path.relative_to(directory))) and entry.is_file():
                found.tracked.append(path)
            elif since_s is not None and (saved or _WEIGHTS.fullmatch(entry.name)) and _is_written(entry, since_s):
                candidates.append(path)
        if candidates and not _is_from_elsewhere(folder, home):
            found.saves += candidates
    return found


def _is_written(entry: os.DirEntry[str], since_s: float) -> bool:
    """Whether ``entry`` is a file that was written after ``since_s``."""
    return entry.is_file(follow_symlinks=False) and entry.stat().st_mtime >= since_s


def _is_from_elsewhere(folder: Path, home: Path | None) -> bool:
    """Whether ``folder`` is a model that was brought here: by ``stagekit pull``, or by huggingface_hub."""
    if (folder / _DOWNLOADED).is_dir():
        return True
    try:
        return (folder / "config.json").is_file() and pulled_model(content_revision(folder), home=home) is not None
    except OSError:
        return False
