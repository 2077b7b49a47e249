"""Writing a page: there whole or not at all, and never over somebody else's file."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from ..errors import OutOfSpace, UsageError
from .document import GENERATOR

_BEGINNING = 400


def check_target(path: str | os.PathLike[str]) -> Path:
    """``path``, where a page may be written. Raises ``UsageError`` when something else lies there, or its folder is missing."""
    if not os.fspath(path).strip():
        raise UsageError("html: the file's name is empty; name one, such as page.html")
    if os.fspath(path) == "-" or "://" in os.fspath(path):
        raise UsageError(f"html: {os.fspath(path)} is no file of this machine; name one, such as page.html, and copy it from there")
    target = Path(path).expanduser()
    if target.is_dir():
        raise UsageError(f"html: {target} is a directory; name a file in it, such as {target / 'page.html'}")
    if not target.parent.is_dir():
        raise UsageError(f"html: {target.parent} is no directory, so {target.name} cannot be written there; make it first")
    if target.exists() and not _is_ours(target):
        raise UsageError(f"html: {target} exists and is no page that stagekit info wrote; name another file, or remove it")
    return target


def write(target: Path, page: str) -> None:
    """Put ``page`` at ``target``, in place of an older one. After a failure the older one is there.

    Raises ``UsageError`` where nothing can be written, and ``OutOfSpace`` where no space is left.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"html: no space is left to write {target}; free some, or name a file on another disk") from error
        raise UsageError(f"html: {target} cannot be written ({error.strerror}); name a file in another directory") from error
    finally:
        with suppress(OSError):  # where none could be made, removing it may be refused as well
            temporary.unlink()


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(_BEGINNING)
