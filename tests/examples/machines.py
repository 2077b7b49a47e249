"""A bucket with what the examples read, and machines that have nothing but its address."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagekit.runs import catalog
from stagekit.runs.layout import Checkpoint
from stagekit.store import open_store

from ..rigs.servers import S3Server

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Machine:
    """How its programs ended, what they said, and where they worked."""

    codes: list[int]
    said: list[str]
    directory: Path


class Cloud:
    """A bucket on a real server, and a process of which machines are forked."""

    def __init__(self, server: S3Server, directory: Path) -> None:
        self.url = f"s3://{server.create_bucket()}"
        self.directory = directory
        self._server = server
        self._forks: subprocess.Popen[str] | None = None

    def __enter__(self) -> Cloud:
        self._forks = subprocess.Popen(
            [sys.executable, "-m", "tests.examples.forks"],
            cwd=ROOT,
            env=self.environ("forks"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exit: object) -> None:
        assert self._forks is not None
        self._forks.communicate(timeout=60)

    def environ(self, name: str, **more: object) -> dict[str, str]:
        """That of a new machine called ``name``: it knows the bucket and the keys, and has an empty home."""
        home = self.directory / name / "home"
        home.mkdir(parents=True, exist_ok=True)
        return {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "BUCKET": self.url,
            "AWS_ENDPOINT_URL": self._server.endpoint_url,
            "AWS_ACCESS_KEY_ID": self._server.access_key,
            "AWS_SECRET_ACCESS_KEY": self._server.secret_key,
            "OMP_NUM_THREADS": "1",  # two for a tiny model wait for each other
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "ACCELERATE_USE_CPU": "true",
            **{name: str(value) for name, value in more.items()},
        }

    def run(self, name: str, program: Path, *, ranks: int = 1, **environ: Any) -> Machine:
        """``python PROGRAM`` on the machine ``name``, in an empty directory unless it was there; with ``ranks`` as torchrun starts it."""
        assert self._forks is not None
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        place = self.directory / name
        orders, files = [], []
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            group = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken.getsockname()[1]}
        for rank in range(ranks):
            of_rank = {"RANK": rank, "LOCAL_RANK": rank, **group} if ranks > 1 else {}
            env = self.environ(name, **environ, **of_rank)
            files.append(place / f"said-{rank}.txt")
            orders.append({"program": str(program), "cwd": str(place), "env": env, "out": str(files[-1])})
        print(json.dumps(orders), file=self._forks.stdin, flush=True)
        codes = json.loads(self._forks.stdout.readline())
        return Machine(codes, [file.read_text() for file in files], place)

    def cut(self, run: str, text: str, *, checkpoints: int = 1, signal: int = 9, held: Path | None = None) -> str:
        """For ``POWER_CUT``: the machine is lost at a line with ``text``, once ``run`` holds so many checkpoints."""
        return json.dumps(
            {"run": f"{self.url}/{run}", "text": text, "checkpoints": checkpoints, "number": signal, "held": str(held) if held else ""}
        )

    def checkpoints(self, run: str) -> tuple[Checkpoint, ...]:
        """What ``run`` holds, newest first."""
        return catalog.read_all(open_store(f"{self.url}/{run}")).checkpoints

    def digests(self, run: str, *names: str) -> dict[str, str]:
        """The sha-256 of files of the newest checkpoint of ``run``."""
        found = {record.path: record.sha256 for record in self.checkpoints(run)[0].files}
        return {name: found[name] for name in names}
