"""Machines for the trainers' tests: a process, or two ranks of one, in an empty directory with a home of its own and a run's URL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Machine:
    """How it ended, what it said, and where it worked."""

    codes: list[int]
    said: str
    directory: Path

    @property
    def code(self) -> int:
        (code,) = self.codes
        return code

    def read(self, name: str) -> str:
        return (self.directory / name).read_text()


def machine(tmp_path: Path, name: str, program: str, *arguments: str, ranks: int = 1, run: str | None = None) -> Machine:
    """Run ``python -m tests.hooks.PROGRAM RUN ARGUMENTS…`` on a machine called ``name``."""
    directory = tmp_path / name
    (directory / "home").mkdir(parents=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environ = {**os.environ, "HOME": str(directory / "home"), "STAGEKIT_HOME": str(directory / "home" / "stagekit")}
        environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        if ranks > 1:  # what torchrun sets
            environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
        command = [sys.executable, "-W", "ignore", "-m", f"tests.hooks.{program}", run or str(tmp_path / "run"), *arguments]
        processes.append(subprocess.Popen(command, cwd=directory, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        said = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return Machine([process.returncode for process in processes], "".join(said), directory)


def group(tmp_path: Path, name: str, program: str, *arguments: str) -> Machine:
    """The same with two ranks."""
    return machine(tmp_path, name, program, *arguments, ranks=2)
