"""Names that a manifest or a listing made up, looked at before a byte is written under one of them. Pure, but for one look at a disk."""

from __future__ import annotations

import os
import unicodedata
import uuid
from collections.abc import Iterable
from pathlib import Path

from ..errors import UsageError

_LONGEST = 255


def check_names(paths: Iterable[str], source: str, *, folds_case: bool = False) -> None:
    """Nothing when all ``paths`` (slashes, relative) can be files of one directory together. Raises ``UsageError`` naming the first that
    cannot: absolute, with ``..`` or an empty part, too long for a file system, there twice, or a file and a folder at once.

    ``folds_case``: the file system takes ``a`` and ``A`` for the same name, so they collide, as do two ways to write one accent.
    """
    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        if path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in path:
            raise UsageError(f"copying {source}: it holds an object named {path!r}, which is no name of a file here; nothing was written")
        try:
            longest = max(len(os.fsencode(part)) for part in parts)
        except UnicodeEncodeError:
            raise UsageError(f"copying {source}: the name {path!a} cannot be written in this locale; use a UTF-8 one") from None
        if longest > _LONGEST:
            raise UsageError(f"copying {source}: the name {path[:60]!r}… is longer than a file system allows ({longest} bytes)")
        name = _folded(path) if folds_case else path
        if name in files:
            same = "twice" if files[name] == path else f"and {files[name]!r}, which are one file on this disk"
            raise UsageError(f"copying {source}: it holds {path!r} {same}; nothing was written")
        files[name] = path
        for number in range(1, len(parts)):
            folder = "/".join(parts[:number])
            folders.setdefault(_folded(folder) if folds_case else folder, folder)
    both = sorted(files.keys() & folders.keys())
    if both:
        raise UsageError(
            f"copying {source}: {files[both[0]]!r} is an object there and a folder of others, and cannot be both on a disk; "
            "copy the folder and the object apart"
        )


def folds_case(directory: Path) -> bool:
    """Whether the file system of ``directory`` takes ``a`` and ``A`` for the same name, found out with a file that is removed again."""
    probe = directory / f".stagekit-case-{uuid.uuid4().hex}-a"
    probe.touch()
    try:
        return os.path.lexists(f"{str(probe)[:-1]}A")
    finally:
        probe.unlink()


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
