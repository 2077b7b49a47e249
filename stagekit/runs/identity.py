"""What a checkpoint was made with, and what a resume says when that differs now."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from ..errors import CheckpointError

Identity = Mapping[str, str | int]

_TOLD = {
    "dataset": "it was trained on the data set {saved}, now it is {now}",
    "world_size": "it was saved by {saved} ranks, now there are {now}",
    "torch": "it was saved with torch {saved}, now it is {now}",
    "numpy": "it was saved with numpy {saved}, now it is {now}",
    "code": "it was saved by the code at commit {saved}, now it is {now}",
}


def current(*, world_size: int = 1, base_model: str | None = None, dataset: str | None = None, directory: Path | None = None) -> Identity:
    """What this process trains with. Versions are read from what is installed; nothing is imported."""
    values: dict[str, str | int] = {"world_size": world_size}
    for package in ("torch", "numpy"):
        try:
            values[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    optional = {"base_model": base_model, "dataset": dataset, "code": code_commit(directory or Path.cwd())}
    values.update({name: value for name, value in optional.items() if value is not None})
    return values


def differences(saved: Identity, now: Identity) -> list[str]:
    """One sentence for everything that is known on both sides and differs. Raises ``CheckpointError`` for another base model."""
    if "base_model" in saved and "base_model" in now and saved["base_model"] != now["base_model"]:
        raise CheckpointError(
            f"the checkpoint continues the base model {saved['base_model']}, and this training says {now['base_model']}; "
            "give the right base_model=, or use another run"
        )
    return [
        sentence.format(saved=saved[name], now=now[name])
        for name, sentence in _TOLD.items()
        if name in saved and name in now and saved[name] != now[name]
    ]


def code_commit(directory: Path) -> str | None:
    """The commit that is checked out around ``directory``, read from the files of git; ``None`` when there is none or it cannot be told."""
    try:
        git = next((parent / ".git" for parent in (directory, *directory.parents) if (parent / ".git").exists()), None)
        if git is None:
            return None
        if git.is_file():  # a worktree or a submodule
            git = (git.parent / git.read_text().removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        reference = head.removeprefix("ref:").strip()
        common = git / "commondir"
        root = (git / common.read_text().strip()).resolve() if common.exists() else git
        loose = root / reference
        if loose.exists():
            return loose.read_text().strip()
        for line in (root / "packed-refs").read_text().splitlines():
            if line.endswith(f" {reference}"):
                return line.split()[0]
    except OSError:
        return None
    return None
