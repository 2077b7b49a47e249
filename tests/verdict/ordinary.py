"""What every rented server has: caches, a virtual environment, and a checkout that is pushed. Nothing of it is a loss."""

from __future__ import annotations

import subprocess
from pathlib import Path

WHO = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false")


def git(directory: Path, *arguments: str) -> None:
    """Run git, and fail with what it says."""
    done = subprocess.run(["git", *WHO, "-C", str(directory), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def make_checkout(work: Path, remote: Path, ignored: str = "data/\n") -> None:
    """A checkout in ``work`` with one commit, which is pushed to ``remote``. Afterwards its remote is on another machine."""
    git(remote, "init", "-q", "--bare")
    git(work, "init", "-q")
    (work / "train.py").write_text("print(1)\n")
    (work / ".gitignore").write_text(ignored)
    git(work, "add", ".")
    git(work, "commit", "-qm", "first")
    git(work, "remote", "add", "origin", str(remote))
    git(work, "push", "-q", "--set-upstream", "origin", "main")
    git(work, "remote", "set-url", "origin", "https://git.example.org/somebody/training")


def make_caches(home: Path, work: Path) -> None:
    """A Hub cache and pip's in ``home``; a virtual environment, a tagged cache and Python's own in ``work``, which git is not told of."""
    snapshot = home / ".cache" / "huggingface" / "hub" / "models--org--tiny" / "snapshots" / "0123"
    wheel = home / ".cache" / "pip" / "http-v2" / "a"
    for folder in (snapshot, wheel, work / ".venv" / "lib", work / "__pycache__", work / ".pytest_cache"):
        folder.mkdir(parents=True)
        (folder / "file.bin").write_bytes(b"cached")
    (work / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (work / ".pytest_cache" / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
