"""From what the user names to a ``Model``: a count, a ``config.json``, a safetensors file, or a directory of them. Weights are not read."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .model import Model, Tensor, of_config, of_count, of_tensors, parse_count

_CONFIG = "config.json"
_MOST_HEADER = 100_000_000
"""As the safetensors library has it."""
_HUB = re.compile(r"(?:hf://(?:models/)?|https?://huggingface\.co/)?(?P<org>\w[\w.-]*)/(?P<model>\w[\w.-]*)(?:/.*)?")
_NUMBERED = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<all>\d{5})\.safetensors")
_SIZE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[BM](?![a-z0-9])", re.IGNORECASE)


def read_model(what: str | os.PathLike[str]) -> Model:
    """The model that ``what`` means. Raises ``UsageError`` for what means none, a file that cannot be read included."""
    said = os.fspath(what)
    if not said.strip():
        raise UsageError("model: it is empty; give a parameter count, such as 7B, or a config.json, safetensors file or directory of them")
    count = parse_count(said)
    if count is not None:
        return of_count(count, said=said)
    path = Path(said).expanduser()
    if path.is_dir():
        return _directory(path, said)
    if path.is_file():
        return of_tensors(_tensors(path), said=said) if path.suffix == ".safetensors" else of_config(_config(path), said=said)
    raise UsageError(f"model: {said} is no parameter count such as 7B, and no file or directory here; {_instead(said)}")


def _instead(said: str) -> str:
    """What to give where ``said`` is no model here: its count, or its config.json brought from where it seems to lie."""
    hub = _HUB.fullmatch(said)
    if hub is None:
        place = "URL" if "://" not in said else said.rstrip("/")
        return f"give the count, or bring its config.json, which is enough: stagekit cp {place}/{_CONFIG} model/, then stagekit fit model"
    size = next(iter(_SIZE.findall(hub["model"])), "8B")
    bring = f"stagekit cp hf://{hub['org']}/{hub['model']}/{_CONFIG} model/"
    return f"names of the Hugging Face Hub are not looked up: give the count, such as {size}, or {bring}, then stagekit fit model"


def _directory(path: Path, said: str) -> Model:
    config = of_config(_config(path / _CONFIG), said=said) if (path / _CONFIG).is_file() else None
    files = sorted(path.glob("*.safetensors"))
    if missing := sorted(_named(path, files) - {file.name for file in files}):
        raise UsageError(f"model: {said} lacks {missing[0]}, so that it would be counted too small; fetch it, or give a parameter count")
    if files:
        return of_tensors([tensor for file in files for tensor in _tensors(file)], said=said, config=config)
    if config is None:
        raise UsageError(f"model: {said} holds neither {_CONFIG} nor a safetensors file; give a parameter count, such as 7B")
    return config


def _named(path: Path, files: Iterable[Path]) -> set[str]:
    """All files of safetensors that those of ``path`` say there are: by their numbers, or by the index."""
    numbered = [match for file in files if (match := _NUMBERED.fullmatch(file.name)) is not None]
    named = {f"{one['stem']}-{number:05d}-of-{one['all']}.safetensors" for one in numbered for number in range(1, int(one["all"]) + 1)}
    for index in path.glob("*.safetensors.index.json"):
        weights = _config(index).get("weight_map")
        named |= {str(name) for name in weights.values()} if isinstance(weights, dict) else set()
    return named


def _config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"model: {path} cannot be read as a model's {_CONFIG} ({reason}); give a parameter count, such as 7B") from None
    if not isinstance(values, dict):
        raise UsageError(f"model: {path} is no JSON object, so no model's {_CONFIG}; give a parameter count, such as 7B")
    return values


def _tensors(path: Path) -> list[Tensor]:
    """The tensors that the header of the safetensors file ``path`` names."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= _MOST_HEADER:
                raise ValueError("it does not begin with the length of a header")
            header = json.loads(file.read(length))
        return [
            Tensor(name, str(one["dtype"]), tuple(int(side) for side in one["shape"]))
            for name, one in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"model: the header of {path} cannot be read, so it is no safetensors file ({reason}); fetch it again, or give a parameter "
            "count, such as 7B"
        ) from None
