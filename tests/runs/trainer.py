"""A training that can be killed at any moment, and the oracle that looks at the bucket afterwards.

    python -m tests.runs.trainer '{"run": URL, "journal": FILE, "steps": N, …}'

It drains what a dead process left, looks whether all of it is in the bucket, restores, and saves step after step. What it was told to be
verified it notes in its journal, what it was told to be pinned on its machine's disk, and every stage that was passed in ``stages``, if
given.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from stagekit.config import StoreConfig, home_directory
from stagekit.errors import UploadFailed
from stagekit.progress import Event, Message, Stage
from stagekit.runs import Run, catalog
from stagekit.runs.layout import SUPERSEDED, SupersededRecord
from stagekit.runs.restore import restore
from stagekit.runs.sync import SyncSettings
from stagekit.store import open_store
from stagekit.store.base import Store
from stagekit.testing.faults import FaultStore
from stagekit.testing.kill import KillAt, KillingStore

ROOT = Path(__file__).parents[2]


LARGE_STEP = 3


def content(step: int) -> dict[str, bytes]:
    """What the trainer writes at ``step``: a file that is linked (at one step it takes two parts), one that is copied, one that never
    changes."""
    return {
        "model.bin": random.Random(step).randbytes(17_000_000 if step == LARGE_STEP else 1_200_000),
        "sub/optimizer.bin": random.Random(-step).randbytes(30_000),
        "config.json": b"{}",
    }


def write(directory: Path, step: int) -> None:
    for path, data in content(step).items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    journal = os.open(options["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    stages = os.open(options.get("stages", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    home_directory().mkdir(parents=True, exist_ok=True)
    pinned = home_directory() / "pinned"
    left = {int(step) for step in pinned.read_text().split()} if pinned.exists() else set()
    pins = os.open(pinned, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "checkpoint.pinned":
            os.write(pins, f"{event.subject}\n".encode())
        if isinstance(event, Stage):
            if event.name == "checkpoint.pinned" and int(event.subject) >= options.get("hold", 0):
                released.set()
            os.write(stages, f"{event.name}\n".encode())
        if isinstance(event, Stage) and event.name == "checkpoint.verified":
            os.write(journal, f"{event.subject}\n".encode())
        if isinstance(event, Message):
            sys.stderr.write(f"{event.level}: {event.text}\n")

    released = threading.Event()
    config = StoreConfig(**options["store"]) if options.get("store") else None
    where: Any = options["run"]
    if call := options.get("kill_call"):
        where = KillingStore(open_store(where, config), call["operation"], call["key"], after=call["after"])
    if options.get("hold"):  # nothing gets through before that step was pinned
        where = FaultStore(open_store(where, config))
        where.act("put", lambda _: released.wait(60), "*/files/*")
    stage = options.get("kill_stage")
    run = Run(
        where,
        store=config,
        rank=options.get("rank", 0),
        world_size=options.get("world_size", 1),
        keep_last=options.get("keep_last"),
        on_event=KillAt(stage["name"], skip=stage["skip"], then=note) if stage else note,
        settings=SyncSettings(retry_after_s=lambda _: 0.05),
    )
    scratch = Path(tempfile.mkdtemp(dir=options["scratch"]))
    if "session" in options:
        run.join(options["session"])
        with run.checkpoint(step=1) as reserved:
            (reserved / f"rank-{options['rank']}.bin").write_bytes(b"of this rank")
        run.close()
        return
    run.drain()
    delivered(options, left)
    found = run.restore(scratch / "restored")
    assert not left or (found is not None and found.step >= max(left)), f"step {max(left)} was pinned here, and {found} is newest"
    first = 1 if found is None else found.step + 1
    if found is not None:
        assert (scratch / "restored" / "model.bin").read_bytes() == content(found.step)["model.bin"]
    for step in range(first, options["steps"] + 1):
        with suppress(UploadFailed):  # this save is pinned; what went wrong with an earlier one does not stop a training
            save(run, scratch / f"step-{step}", step)
    run.close()


def save(run: Run, directory: Path, step: int) -> None:
    if step % 2 == 0:
        with run.checkpoint(step=step) as reserved:
            write(reserved, step)
        return
    write(directory, step)
    try:
        run.submit(directory, step=step)
    finally:
        shutil.rmtree(directory)


def start(options: dict[str, Any], home: Path, *, said: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[str]:
    """The trainer as a process of its own, with ``home`` as its machine's disk. ``said`` is where its standard error goes: a file, when
    nobody reads before its end."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runs.trainer", json.dumps(options)],
        cwd=ROOT,
        env={**os.environ, "STAGEKIT_HOME": str(home)},
        stderr=said,
        text=True,
    )


def reading(options: dict[str, Any]) -> Store:
    """The run as a reader sees it, who goes to the server itself (``reader``) also where the trainer goes through something else."""
    config = options.get("reader") or options.get("store")
    return open_store(options["run"], StoreConfig(**config) if config else None)


def delivered(options: dict[str, Any], steps: set[int]) -> None:
    """Every one of ``steps``, which were pinned on this disk, is in the bucket, or the bucket says that policy dropped it."""
    store = reading(options)
    committed = {checkpoint.step for checkpoint in catalog.read_all(store).checkpoints}
    dropped = {SupersededRecord.from_bytes(bytes(store.get(info.key)), source=info.key).step for info in store.list(SUPERSEDED)}
    assert steps <= committed | dropped, f"steps {sorted(steps - committed - dropped)} were pinned here, and are not in the bucket"


def oracle(options: dict[str, Any], directory: Path) -> int | None:
    """Using only the bucket: the newest checkpoint is what the trainer wrote at that step, and not older than any reported verified."""
    found = restore(reading(options), directory)
    journal = Path(options["journal"])
    verified = max(map(int, journal.read_text().split()), default=None) if journal.exists() else None
    if found is None:
        assert verified is None, f"step {verified} was reported verified and the bucket has none"
        return None
    assert verified is None or found.step >= verified, f"step {verified} was reported verified and the bucket has {found.step}"
    expected = content(found.step)
    assert {record.path: record.sha256 for record in found.files} == {
        path: hashlib.sha256(data).hexdigest() for path, data in expected.items()
    }
    for path, data in expected.items():
        assert (directory / path).read_bytes() == data
    shutil.rmtree(directory)
    return found.step


if __name__ == "__main__":
    main()
