from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def as_nobody(tmp_path: Path) -> Callable[[Callable[[], str]], str]:
    """A function that runs another one in a child process without root's rights, and returns its text. Permissions bind nobody else."""
    # pytest's own directories are closed to others, all the way up.
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o005 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)

    def run(function: Callable[[], str]) -> str:
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads of other tests' servers may run; this child calls nothing that could need them
            child = os.fork()
        if not child:
            try:
                if os.getuid() == 0:
                    os.setgid(65534)
                    os.setuid(65534)
                os.write(writer, function().encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            text = pipe.read().decode()
        os.waitpid(child, 0)
        return text

    return run
