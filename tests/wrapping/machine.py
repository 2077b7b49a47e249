"""A rented server on which ``stagekit run`` is started: a home and a directory of its own, and a run's URL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from stagekit.runs import catalog
from stagekit.store import open_store
from stagekit.store.directory import DirectoryStore
from stagekit.wrapping.logs import manifests

from .test_child import eventually

ROOT = Path(__file__).parents[2]
TOY = str(Path(__file__).with_name("toy.py"))
STAGEKIT = [sys.executable, "-W", "ignore", "-m", "stagekit"]


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass
class Machine:
    """``directory`` is where one works; ``url`` is where the run lies; ``before`` starts the command line."""

    directory: Path
    url: str
    environ: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ("--no-record",)
    before: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.directory.mkdir()

    @property
    def out(self) -> Path:
        return self.directory / "out"

    @property
    def durable(self) -> tuple[str, str]:
        """For ``stagekit teardown``: the bucket is a directory here, and outlives the machine."""
        return "--durable", str(Path(self.url).parent)

    def stagekit(self, *arguments: str) -> Done:
        """Any command, to its end."""
        process = self.begin(*arguments)
        out, err = process.communicate(timeout=120)
        return Done(process.returncode, out, err)

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "HOME": str(self.directory), "STAGEKIT_HOME": str(self.directory / "home"), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [*self.before, *STAGEKIT, *arguments],
            cwd=self.directory,
            env=environ | self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self, command: list[str], *options: str) -> list[str]:
        return ["run", "--to", self.url, "--watch", "out", *self.options, *options, "--", *command]

    def run(self, *toy: str, options: tuple[str, ...] = ()) -> Done:
        """``stagekit run`` around the toy trainer."""
        return self.stagekit(*self.line([sys.executable, TOY, "out", *toy], *options))

    def running(self, *toy: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        return self.begin(*self.line([sys.executable, TOY, "out", *toy], *options))

    def steps(self) -> list[int]:
        """What the run holds, newest first."""
        return [one.step for one in catalog.read_all(open_store(self.url)).checkpoints]

    def until_step(self, step: int) -> None:
        eventually(lambda: step in self.steps(), f"step {step} never came")

    def logs(self, path: str) -> list[str]:
        """The text of one file of the logs, for each attempt, oldest first."""
        store = DirectoryStore(self.url)
        return [
            b"".join(bytes(store.get(key)) for key, _ in file.objects).decode()
            for _, files in manifests(store)
            for file in files
            if file.path == path
        ]

    def lose_the_disk(self) -> None:
        shutil.rmtree(self.directory)
        self.directory.mkdir()
