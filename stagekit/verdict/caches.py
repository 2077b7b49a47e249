"""Folders that somebody's program makes again: package and model caches, and virtual environments. They are never a loss."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from pathlib import Path

_TAG = "CACHEDIR.TAG"
_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"  # bford.info/cachedir: pytest, ruff, uv, cargo, huggingface_hub write it
_HUB = ("models--*", "datasets--*", "spaces--*")
_HUB_FOLDERS = {"blobs", "refs", "snapshots"}
_PIP_FOLDERS = {"http", "http-v2", "wheels"}


def is_cache(folder: Path, names: Collection[str]) -> bool:
    """Whether ``folder``, which holds ``names``, is a virtual environment (also conda's), a folder of a Hugging Face cache, pip's cache, or
    tagged as a cache."""
    held = set(names)
    if "pyvenv.cfg" in held or {"conda-meta", "bin"} <= held:
        return True
    if any(fnmatch.fnmatchcase(folder.name, pattern) for pattern in _HUB) and len(held & _HUB_FOLDERS) > 1:
        return True
    if "selfcheck" in held and held & _PIP_FOLDERS:
        return True
    return _TAG in held and _is_tagged(folder / _TAG)


def _is_tagged(tag: Path) -> bool:
    try:
        with tag.open("rb") as file:
            return file.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return False
