"""What lies in a folder of this machine's records."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path


def paths_in(folder: Path, pattern: str = "*") -> list[Path]:
    """The paths in ``folder`` whose names fit ``pattern``, sorted; none when there is no such folder.

    Raises ``OSError`` naming a folder that may not be read. ``Path.glob`` takes one for empty, and what lies there would count as gone.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if fnmatch.fnmatchcase(name, pattern)]
