"""The rows about experiment trackers: wandb runs that were made offline, and files of those that keep theirs on this machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from .findings import Finding

_EVENTS = ".tfevents."
# The folders that keep a tracker's runs where a training was started. Comet writes there only what could not be sent.
_FOLDERS = {"mlruns": "MLflow", ".aim": "Aim", ".cometml-runs": "Comet"}
_MLFLOW = "mlflow.db"  # what MLflow 3.7 and later make beside the program, where no folder of an earlier one is

HIDDEN = frozenset(name for name in _FOLDERS if name.startswith("."))
"""Hidden folders that are a tracker's."""


def is_events(name: str) -> bool:
    """Whether a file of this name is one of TensorBoard's."""
    return _EVENTS in name


def whose(path: str) -> str | None:
    """The tracker that wrote the file at this relative path, or ``None`` when none of those known here did."""
    folders, _, name = path.rpartition("/")
    if is_events(name):
        return "TensorBoard"
    for folder in folders.split("/"):
        if folder in _FOLDERS:
            return _FOLDERS[folder]
    if name == _MLFLOW:
        return "MLflow"
    if name == "metrics.csv" and folders.rpartition("/")[2].startswith("version_"):
        return "Lightning's CSVLogger"
    return None


def trackio_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where Trackio keeps its runs, a file of SQLite for each project: in the middle of Hugging Face's cache, if nobody says otherwise."""
    cache = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    return Path(environ.get("TRACKIO_DIR") or Path(cache, "trackio"))


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


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
