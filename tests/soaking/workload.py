"""Stream, sync and pull beside each other until somebody says stop, comparing every byte that comes back."""

from __future__ import annotations

import hashlib
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import stagekit
from stagekit.report import RunInfo
from stagekit.runs import Run
from stagekit.store.base import Store
from stagekit.testing.proxy import Cut, Delay, Drop, FaultProxy, Request, SlowDown, Status, Throttle
from stagekit.torch import StreamLoader

SAMPLES = 400
Open = Callable[[str], Store]
"""The store below the soak's place, with whatever patience the soak has."""


def sample(number: int) -> bytes:
    """The bytes of one sample, of sizes up to 16 kB."""
    return hashlib.sha256(str(number).encode()).digest() * (1 + number * 37 % 500)


def checkpoint(step: int) -> bytes:
    """The bytes of one checkpoint, 0.3 to 1.3 MB."""
    return hashlib.sha256(f"checkpoint {step}".encode()).digest() * (10_000 + step % 30_000)


def prepare(directory: Path, store: Store) -> None:
    """The data set that is streamed and pulled, without faults."""
    raw = directory / "raw"
    raw.mkdir(parents=True)
    for number in range(SAMPLES):
        (raw / f"{number:06}.bin").write_bytes(sample(number))
    stagekit.shard(raw, store, shard_size="1MB")


def misbehave(proxy: FaultProxy, *, clock: Callable[[], float], seed: int, flap_every_s: float, flap_s: float, slow: float) -> None:
    """One request in ten fails, another is slow, and every ``flap_every_s`` seconds nothing goes through for ``flap_s``."""
    randomness = random.Random(seed)
    lock = threading.Lock()

    def chance(share: float) -> Callable[[Request], bool]:
        def takes(_: Request) -> bool:
            with lock:
                return randomness.random() < share

        return takes

    proxy.fault(Drop(), where=lambda _: clock() % flap_every_s < flap_s)
    proxy.fault(SlowDown(retry_after_s=1), where=chance(0.03))
    proxy.fault(Status(500), where=chance(0.02))
    proxy.fault(Drop(), where=chance(0.02))
    proxy.fault(Drop(after_request=True), where=chance(0.01))
    proxy.fault(Cut(50_000), where=chance(0.02))
    proxy.fault(Cut(20_000, of="request"), method="PUT", where=chance(0.02))
    proxy.fault(Throttle(slow), where=chance(0.1))
    proxy.fault(Delay(0.2), where=chance(0.1))


@dataclass
class Outcome:
    """What was done, all of it compared."""

    epochs: int = 0
    samples: int = 0
    checkpoints: int = 0
    pulls: int = 0
    bytes_compared: int = 0
    errors: list[BaseException] = field(default_factory=list)


def soak(open_at: Open, directory: Path, *, stop: Callable[[], bool], pause: Callable[[float], None]) -> Outcome:
    """Do all three until ``stop()``, then finish what was begun. ``pause`` is what the trainer waits with between checkpoints."""
    outcome = Outcome()
    lock = threading.Lock()

    def stream() -> None:
        loader = StreamLoader(open_at("data"), batch_size=16, drop_last=False, decode=None, on_event=lambda _: None)
        while not stop():
            seen = []
            for batch in loader:
                for key, value in zip(batch["__key__"], batch["bin"], strict=True):
                    if key:
                        seen.append(int(key))
                        assert bytes(value) == sample(int(key)), f"sample {key} came back as something else"
            assert sorted(seen) == list(range(SAMPLES)), "an epoch does not have each sample once"
            with lock:
                outcome.epochs += 1
                outcome.samples += len(seen)
                outcome.bytes_compared += sum(len(sample(number)) for number in seen)

    def sync() -> None:
        run = Run(open_at("run"), spool_dir=directory / "spool", keep_last=3, on_event=lambda _: None)
        step = 0
        while not stop() or not step:
            step += 1
            with run.checkpoint(step=step) as into:
                (Path(into) / "model.bin").write_bytes(checkpoint(step))
            pause(1.0)
            run.drain()
        run.close()
        back = directory / "back"
        found = Run(open_at("run"), spool_dir=directory / "spool", on_event=lambda _: None).restore(back)
        assert found is not None
        assert found.step == step, f"the newest checkpoint is of step {found.step}, and {step} was reported safe"
        assert (back / "model.bin").read_bytes() == checkpoint(step), "the checkpoint came back as something else"
        told = stagekit.info(open_at("run"))
        assert isinstance(told, RunInfo)
        assert [one.step for one in told.checkpoints] == list(range(max(1, step - 2), step + 1))
        assert stagekit.verify(open_at("run"), deep=True).ok
        with lock:
            outcome.checkpoints = step

    def pull() -> None:
        while not stop():
            target = directory / "pulled"
            stagekit.pull(open_at("data"), target, threads=4)
            count = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
            shutil.rmtree(target)
            with lock:
                outcome.pulls += 1
                outcome.bytes_compared += count

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            outcome.errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), name=work.__name__, daemon=True) for work in (stream, sync, pull)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome
