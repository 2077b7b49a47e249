"""Volumes that outlive the server, as somebody says: what lies there is no loss."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..mounts import judge as judge_mount
from ..mounts import mount_of
from .findings import Finding


class Durable:
    """The paths that were named with ``durable``. Links count by where they lead."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self.paths = tuple(paths)
        self._real = tuple(os.path.realpath(path) for path in self.paths)

    def holds(self, path: str | os.PathLike[str]) -> bool:
        """Whether ``path`` lies on one of them."""
        real = os.path.realpath(path)
        return any(real == there or real.startswith(f"{there.rstrip('/')}/") for there in self._real)

    def excuse(self, finding: Finding, path: str | os.PathLike[str]) -> Finding:
        """``finding`` as it is, or as a note when what it is about lies at a ``path`` that outlives the server."""
        if finding.weight == "note" or not self.holds(path):
            return finding
        return replace(finding, weight="note", what=f"{finding.what}; it lies on a volume that outlives this server", fix="")

    def judge(self) -> list[Finding]:
        """What is wrong with the paths themselves."""
        findings = []
        for path in self.paths:
            if judge_mount(path).kind != "refused" and not path.is_dir():
                fix = f"check the path: ls {path.parent}"
                findings.append(Finding("CANNOT TELL", "durable", "there is no such directory", str(path), fix=fix))
            elif (mount := mount_of(path)) is not None and mount.point == "/":
                what = "it is no volume of its own but lies on the root file system, which rented servers lose"
                findings.append(Finding("note", "durable", what, str(path), fix=f"see where it lies: df {path}"))
        return findings
