"""Which base model an adapter continues: its name and revision, the same on every machine.

An adapter's checkpoint is worthless on another base. A model of the Hub is told by its commit, a local directory by what is in it, since
it may lie elsewhere on the next machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from ..config import hub_cache_directory

_CONFIG = "adapter_config.json"
_PIECES, _PIECE = 17, 4096
_KEPT = ("*.safetensors", "*.bin", "config.json")


def base_of_files(folder: Path) -> str | None:
    """``NAME@REVISION`` of the base model that the PEFT adapter in ``folder`` names; ``None`` when there is no adapter, or it names none.

    A name is looked up as the trainer did it: a directory, from the current one, else a model of the Hub, whose commit its cache tells.
    """
    try:
        config = next((path for path in (folder / _CONFIG, *sorted(folder.glob(f"*/{_CONFIG}"))) if path.is_file()), None)
        values = json.loads(config.read_bytes()) if config is not None else None
        name = values.get("base_model_name_or_path") if isinstance(values, dict) else None
        if not isinstance(values, dict) or not isinstance(name, str) or not name:
            return None
        if Path(name).is_dir():
            return base_in(Path(name))
        revision = str(values.get("revision") or "main")
        return f"{name}@{_cached_commit(name, revision) or revision}"
    except (OSError, ValueError):
        return None


def base_in(directory: Path) -> str:
    """``NAME@REVISION`` of the base model in a local directory."""
    return f"{directory.resolve().name}@content-{content_revision(directory)}"


def content_revision(directory: Path) -> str:
    """A digest of the weights and the configuration in ``directory``: sizes, and 17 pieces of 4 KiB spread over each file.

    Two models that differ in a few numbers between the pieces have the same one. That is the price of not reading 140 GB at each start.
    """
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _KEPT for path in directory.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        for piece in _pieces(path, size):
            digest.update(piece)
    return digest.hexdigest()[:16]


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for piece in range(_PIECES):
            file.seek(min(size * piece // (_PIECES - 1), max(0, size - _PIECE)))
            yield file.read(_PIECE)


def _cached_commit(name: str, revision: str) -> str | None:
    ref = hub_cache_directory() / f"models--{name.replace('/', '--')}" / "refs" / revision
    return ref.read_text().strip() if ref.is_file() else None
