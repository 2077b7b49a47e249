"""What a training left where it was started, beside what is watched: what trackers wrote, and files that look like its saves."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..mounts import MountTable
from ..mounts import judge as judge_mount
from ..saves.adapter import content_revision
from ..saves.pulled import pulled_model
from . import trackers
from .caches import is_cache

PATIENCE_S = 3.0
_WEIGHTS = re.compile(r".+\.(pt|pth|ckpt|safetensors|distcp|gguf|keras)|(pytorch_model|adapter_model|optimizer|model)\S*\.bin")
_STEP = re.compile(r"(global_?step|checkpoint|ckpt|step|epoch|iter)[-_=]?\d+")
_DOWNLOADED = Path(".cache", "huggingface", "download")  # what huggingface_hub leaves in a --local-dir


@dataclass(slots=True)
class Nearby:
    """What was found: wandb's folders, files of other trackers, and files that look like saves.

    ``cut`` says what was not all searched when the time was over: what lies ``below`` the directory, or only what ``links`` lead to.
    """

    wandb: list[Path] = field(default_factory=list)
    tracked: list[Path] = field(default_factory=list)
    saves: list[Path] = field(default_factory=list)
    cut: Literal["below", "links"] | None = None


def look(
    directory: Path,
    since_s: float | None = None,
    *,
    skips: Callable[[Path, str], bool] = lambda *_: False,
    home: Path | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Nearby:
    """Search ``directory``, what is near first, and what links lead to last. Files that look like saves count when they were written after
    ``since_s``.

    Caches, hidden folders that are no tracker's, models that were brought here from elsewhere, and folders that ``skips`` names (by their
    path, and by the one below ``directory``) are left out.
    """
    found = Nearby()
    table = MountTable.read()
    folders, linked = deque([(str(directory), "", False)]), deque[tuple[str, str, bool]]()
    seen: set[str] = set()
    end_s = monotonic() + PATIENCE_S
    while folders or linked:
        if monotonic() > end_s:
            found.cut = "below" if folders else "links"
            return found
        folder, prefix, saved = (folders or linked).popleft()
        try:
            with os.scandir(folder) as listed:
                entries = list(listed)
        except OSError:
            continue  # what may not be read is not what this user's training wrote
        names = [entry.name for entry in entries]
        if is_cache(Path(folder), names):
            continue
        if trackers.is_wandb(Path(folder), names):
            found.wandb.append(Path(folder))
            continue
        candidates: list[Path] = []
        for entry in entries:
            name, relative = entry.name, f"{prefix}{entry.name}"
            if _is_folder(entry, table):
                if (name.startswith(".") and name not in trackers.HIDDEN) or skips(Path(entry.path), relative):
                    continue
                real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                if real not in seen:
                    seen.add(real)
                    later = linked if real != entry.path else folders
                    later.append((entry.path, f"{relative}/", saved or _STEP.fullmatch(name) is not None))
            elif trackers.whose(relative) and entry.is_file():
                found.tracked.append(Path(entry.path))
            elif since_s is not None and (saved or _WEIGHTS.fullmatch(name)) and _is_written(entry, since_s):
                candidates.append(Path(entry.path))
        if candidates and not _is_from_elsewhere(Path(folder), home):
            found.saves += candidates
    return found


def _is_folder(entry: os.DirEntry[str], table: MountTable | None) -> bool:
    """Whether ``entry`` is a folder, or a link to one. A mount that hangs would hang this process as well, so it is looked up first."""
    if table is not None and (entry.is_symlink() or table.is_point(entry.path)) and judge_mount(entry.path, table=table).kind == "refused":
        return False
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link that leads in a circle


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
