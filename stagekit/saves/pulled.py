"""Models that were pulled to this machine, and from where: one small file each in the machine's home.

An adapter's checkpoint names its base model by what is in it. A note tells ``stagekit teardown`` in which bucket that lies. A note that
cannot be written stops no pull.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config import home_directory
from ..store.base import Store
from .adapter import content_revision

_FORMAT = "stagekit-pulled-model"


@dataclass(frozen=True, slots=True)
class PulledModel:
    """Where a model came from: ``url``, and the files below it with their sizes."""

    url: str
    files: dict[str, int]

    def missing(self, store: Store) -> list[str]:
        """Names of files that are not at ``url`` as they were, by one listing of the store there."""
        there = {info.key: info.size for info in store.list("")}
        return sorted(name for name, size in self.files.items() if there.get(name) != size)


def note_pulled(directory: Path, url: str, files: dict[str, int], *, home: Path | None = None) -> None:
    """Remember that ``directory`` holds what is at ``url``, if it is a model."""
    if not (directory / "config.json").is_file():
        return
    values = {"format": _FORMAT, "version": 1, "url": url, "files": files}
    with suppress(OSError):
        path = _path(content_revision(directory), home)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(values, indent=1) + "\n")
        temporary.replace(path)


def pulled_model(revision: str, *, home: Path | None = None) -> PulledModel | None:
    """The model with this ``content_revision``, if it was pulled here. A note that cannot be read tells nothing."""
    try:
        values = json.loads(_path(revision, home).read_bytes())
        if values["format"] != _FORMAT or values["version"] != 1:
            return None
        return PulledModel(str(values["url"]), {str(name): int(size) for name, size in values["files"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _path(revision: str, home: Path | None) -> Path:
    return (home or home_directory()) / "pulled" / f"{revision}.json"
