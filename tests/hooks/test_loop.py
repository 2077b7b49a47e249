"""A loop over ``run.epochs`` that is interrupted anywhere gives the same weights as one that is not, to the last bit."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stagekit.errors import CheckpointError, Denied, OutOfSpace, StagekitError, UploadFailed, UsageError
from stagekit.hooks.loop import Epoch, Run, best_interval_s
from stagekit.progress import Event, Message
from stagekit.runs import catalog
from stagekit.runs.sync import SyncSettings
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from ..made import make_dataset
from .toy import Training

ROOT = Path(__file__).parents[2]
EPOCHS = 4
BATCHES = 5


@pytest.mark.parametrize(
    ("n", "state", "words"),
    [
        (3, None, "state: None is no mapping from names to what is to be saved"),
        (3, [nn.Linear(1, 1)], "state: .* is no mapping"),
        ("3", {}, "epochs: '3' is no whole number"),
        (2.5, {}, "epochs: 2.5 is no whole number"),
        (-1, {}, "epochs: -1 is below 0"),
    ],
)
def test_arguments_that_cannot_be_meant(n: Any, state: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Run("memory://arguments/run").epochs(n, state=state)


def test_a_loop_does_not_begin_where_a_data_set_lies(machine: Callable[..., Run], store: FaultStore) -> None:
    make_dataset(store)
    with pytest.raises(UsageError, match=r"is a data set, as it holds manifest\.json; give the run a URL of its own"):
        next(iter(machine().epochs(1, state={"model": nn.Linear(1, 1)})))


def test_a_full_disk_is_told_where_torch_hides_it(machine: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 662")

    run = machine()
    with pytest.raises(OutOfSpace, match=r"saving step 1 of memory://.* to .*disk-0: the disk is full"):
        for _ in run.epochs(1, state={"model": nn.Linear(1, 1)}):
            monkeypatch.setattr(torch, "save", save)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))


class Stop(Exception):
    """The machine is gone."""


@pytest.fixture
def store() -> FaultStore:
    return FaultStore(MemoryStore(f"memory://{uuid.uuid4().hex}/run"))


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def machine(store: FaultStore, events: list[Event], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """A function that makes a run on a new machine: another disk each time."""
    made: list[Run] = []

    def make(**options: Any) -> Run:
        settings = SyncSettings(retry_after_s=lambda _: 0.01)
        run = Run(store, spool_dir=tmp_path / f"disk-{len(made)}", on_event=events.append, settings=settings, drain_s=20, **options)
        made.append(run)
        return run

    yield make
    for run in made:
        run._drain_s = 0.5
        try:
            run.close()
        except StagekitError:
            continue


def train(
    run: Run, training: Training, *, epochs: int = EPOCHS, stop_at: int | None = None, tell: bool = False, every: str | None = None
) -> list[int]:
    """Train; the process is gone once ``stop_at`` batches were trained here. Returns the epochs of the batches that were trained."""
    batches = 0
    for epoch in run.epochs(epochs, state=training.state, every=every):
        training.model.train()
        for batch in training.loader:
            loss = training.batch(epoch, batch)
            batches += 1
            if tell:
                run.step(loss=loss)
            if batches == stop_at:
                raise Stop
        training.scheduler.step()
        epoch.metrics["loss"] = float(epoch)
    return [epoch for epoch, _ in training.seen]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[tuple[int, float]]]:
    """Weights and batches of a training that nothing interrupts."""
    run = Run(MemoryStore("memory://loop-straight/run"), spool_dir=tmp_path_factory.mktemp("straight"), on_event=lambda _: None)
    training = Training()
    train(run, training)
    run.close()
    return training.weights(), training.seen


# When nothing of an epoch is left, its scheduler steps before this process's optimizer did. torch cannot know that it had, before.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("stop_at", [1, 2, BATCHES - 1, BATCHES, BATCHES + 1, 2 * BATCHES + 3])
@pytest.mark.parametrize("tell", [False, True], ids=["before-batch", "step"])
def test_interrupted_anywhere_it_goes_on_at_the_very_next_batch(
    machine: Callable[..., Run], straight: tuple[bytes, list[tuple[int, float]]], stop_at: int, tell: bool
) -> None:
    weights, seen = straight
    first = Training()
    run = machine()
    with pytest.raises(Stop):
        train(run, first, stop_at=stop_at, tell=tell, every="0s")
    run.drain()  # what was saved before the end came; the batch after it is trained again
    saved = run.status().verified
    assert saved == (stop_at if tell else stop_at - 1 or None)
    second = Training(seed=99)
    train(machine(), second, tell=tell)
    assert second.seen == seen[saved or 0 :]
    if saved:
        assert second.weights() == weights


def test_two_epochs_and_two_are_four(
    machine: Callable[..., Run], straight: tuple[bytes, list[tuple[int, float]]], store: FaultStore
) -> None:
    weights, seen = straight
    first = Training()
    train(machine(), first, epochs=2)
    second = Training(seed=5)
    assert train(machine(), second) == [2] * BATCHES + [3] * BATCHES
    assert first.seen + second.seen == seen
    assert second.weights() == weights
    found = catalog.read_all(store).checkpoints
    assert [(one.step, one.epoch, one.metrics["loss"]) for one in found] == [(20, 4, 3.0), (15, 3, 2.0), (10, 2, 1.0), (5, 1, 0.0)]
    assert {record.path for record in found[0].files} == {
        "model.pt",
        "optimizer.pt",
        "scheduler.pt",
        "loader.json",
        "progress.json",
        "rng-0.pt",
    }


def test_a_run_that_has_all_its_epochs_yields_none(machine: Callable[..., Run], events: list[Event]) -> None:
    train(machine(), Training(), epochs=1)
    again = Training(seed=3)
    assert train(machine(), again, epochs=1) == []
    assert any(isinstance(one, Message) and "has all of its 1 epochs already" in one.text and one.level == "warning" for one in events)


def test_the_generators_come_back(machine: Callable[..., Run]) -> None:
    model = nn.Linear(1, 1)
    run = machine()
    drawn = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        for epoch in run.epochs(2, state={"model": model}):
            drawn.append((int(epoch), random.random(), random.gauss(0, 1), float(np.random.randn()), torch.rand(3).tolist()))
            if seed == 1 and epoch == 1:
                break
    assert [one[0] for one in drawn] == [0, 1, 1]
    assert drawn[1] == drawn[2]


def test_epochs_count_as_steps_when_nobody_tells_and_break_saves_nothing(machine: Callable[..., Run], store: FaultStore) -> None:
    model = nn.Linear(1, 1)
    run = machine()
    for epoch in run.epochs(5, state={"model": model}):
        assert isinstance(epoch, Epoch)
        if epoch == 3:
            break
    run.close()
    assert [(one.step, one.epoch) for one in catalog.read_all(store).checkpoints] == [(3, 3), (2, 2), (1, 1)]


def test_timed_saves_follow_the_clock(machine: Callable[..., Run], store: FaultStore) -> None:
    clock = [0.0]
    training = Training()
    run = machine()
    for epoch in run.epochs(2, state=training.state, every="10min", monotonic=lambda: clock[0]):
        for batch in training.loader:
            training.batch(epoch, batch)
            clock[0] += 250.0
    run.close()
    # Batch 3 ends at 750 s; the epoch's end saves, too, and the ten minutes count from there.
    assert [one.step for one in catalog.read_all(store).checkpoints] == [10, 8, 5, 3]


def test_how_often_to_save_is_suggested_once_from_what_it_takes(machine: Callable[..., Run], events: list[Event]) -> None:
    assert best_interval_s(0.0, 42.0) == 42.0, "never more often than one can be sent"
    assert best_interval_s(12.0, 42.0) == pytest.approx(1440.0), "the root of 2 x 12 s x a day"
    run = machine()
    model = nn.Linear(1, 1)
    for _ in run.epochs(4, state={"model": model}):
        run.drain()
    [text] = [event.text for event in events if isinstance(event, Message) and "loses least" in event.text]
    assert re.search(r'if the machine fails once a day, every="\d+min" loses least$', text)


def test_a_store_that_refuses_does_not_stop_the_training_and_is_raised_at_its_end(
    machine: Callable[..., Run], store: FaultStore, events: list[Event], straight: tuple[bytes, object]
) -> None:
    store.fail("put", Denied("uploading: not allowed"), "*/files/*", times=None)
    training = Training()
    with pytest.raises(UploadFailed, match=r"20 (is|are) not in .*not allowed"):
        train(machine(), training)
    assert training.weights() == straight[0]
    assert any(isinstance(event, Message) and event.level == "error" and "uploading: not allowed" in event.text for event in events)


def test_cannot_tell_stops_before_training(machine: Callable[..., Run], store: FaultStore) -> None:
    store.fail("children", Denied("listing: forbidden"), times=None)
    training = Training()
    with pytest.raises(Denied, match="listing: forbidden"):
        train(machine(), training)
    assert training.seen == []
    run = machine()
    assert [int(epoch) for epoch in run.epochs(1, state=training.state, allow_fresh=True)] == [0]


def test_what_a_killed_process_left_on_this_disk_is_sent_first(machine: Callable[..., Run], store: FaultStore, tmp_path: Path) -> None:
    code = (
        "import os, sys, threading; from torch import nn; from stagekit.hooks.loop import Run; from stagekit.store.directory import *; "
        "from stagekit.testing.faults import FaultStore; store = FaultStore(DirectoryStore(sys.argv[1])); "
        "store.act('put', lambda call: threading.Event().wait(), '*/files/*'); run = Run(store)\n"
        "for epoch in run.epochs(9, state={'model': nn.Linear(1, 1)}):\n    if epoch == 2: os._exit(9)"
    )
    gone = subprocess.run([sys.executable, "-c", code, str(tmp_path / "bucket")], cwd=ROOT, check=False)
    assert gone.returncode == 9
    run = Run(tmp_path / "bucket", on_event=lambda _: None)
    assert run.latest() is None
    assert [int(epoch) for epoch in run.epochs(3, state={"model": nn.Linear(1, 1)})] == [2]
    run.close()


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        ({"a/b": nn.Linear(1, 1)}, {}, "'a/b' is no name for a file"),
        ({"rng-0": nn.Linear(1, 1)}, {}, "no name for a file"),
        ({"model": object()}, {}, r"'model' has no state_dict\(\) and load_state_dict\(\)"),
        ({"model": nn.Linear(1, 1)}, {"every": "10min"}, r"needs a loader that can go on there: pass it as state="),
        ({"model": nn.Linear(1, 1)}, {"every": "soon"}, "every: 'soon' is not a duration"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_the_call(
    machine: Callable[..., Run], state: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        machine().epochs(3, state=state, **options)
    with pytest.raises(UsageError, match="epochs: -1 is below 0"):
        machine().epochs(-1, state={})


def test_steps_and_loops_belong_together(machine: Callable[..., Run]) -> None:
    run = machine()
    with pytest.raises(UsageError, match=r"outside of a loop over run\.epochs"):
        run.step()
    model = nn.Linear(1, 1)
    for _ in run.epochs(1, state={"model": model}):
        with pytest.raises(UsageError, match="one loop over run"):
            next(run.epochs(1, state={"model": model}))


def test_a_checkpoint_that_does_not_fit_says_what_it_has(machine: Callable[..., Run], tmp_path: Path) -> None:
    train(machine(), Training(), epochs=1)
    with pytest.raises(CheckpointError, match=r"has no 'ema' to load \(it has model, optimizer, scheduler\)"):
        next(machine().epochs(2, state={"ema": nn.Linear(1, 1)}))
    with pytest.raises(RuntimeError, match="Missing key") as raised:
        next(machine().epochs(2, state={"model": nn.Linear(1, 1)}))
    assert raised.value.__notes__[0].startswith("while loading 'model' from step 5 of memory://")


def test_a_directory_that_another_trainer_submitted_is_told_apart(machine: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter.bin").write_bytes(b"a")
    run = machine()
    run.submit(tmp_path / "out", step=1)
    run.close()
    with pytest.raises(CheckpointError, match=r"was not saved by run\.epochs\(\) \(it holds adapter\.bin\)"):
        next(machine().epochs(2, state={"model": nn.Linear(1, 1)}))


class Pickled:
    """A state that is more than tensors and plain values."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("/tmp")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it must not come this far")


def test_what_only_unpickling_could_read_is_not_read(machine: Callable[..., Run]) -> None:
    for _ in machine().epochs(1, state={"thing": Pickled()}):
        pass
    with pytest.raises(CheckpointError, match=r"thing\.pt of step 1 .* holds more than tensors and plain values"):
        next(machine().epochs(2, state={"thing": Pickled()}))


def test_wrappers_around_a_model_leave_no_trace_in_its_names(machine: Callable[..., Run]) -> None:
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    for _ in machine().epochs(1, state={"model": wrapped}):
        pass
    bare = nn.Linear(2, 2)
    assert list(machine().epochs(1, state={"model": bare})) == []
    assert torch.equal(bare.weight, wrapped.module.weight)


def test_a_loader_whose_state_json_cannot_hold_is_kept_by_torch(machine: Callable[..., Run], store: FaultStore) -> None:
    training = Training()
    training.loader.state_dict = lambda: {"epoch": training.loader.epoch, "taken": training.loader.taken, "buffer": (1, 2)}  # type: ignore[method-assign]
    train(machine(), training, epochs=1)
    [found] = catalog.read_all(store).checkpoints
    assert "loader.pt" in {record.path for record in found.files}
    again = Training(seed=2)
    assert train(machine(), again, epochs=2) == [1] * BATCHES


def test_the_data_sets_digest_is_pinned_and_another_one_is_told(
    machine: Callable[..., Run], store: FaultStore, events: list[Event]
) -> None:
    for epochs, digest in ((1, "aa"), (2, "bb")):
        training = Training()
        training.loader.dataset = SimpleNamespace(digest=digest)  # type: ignore[attr-defined]  # as StreamLoader has one
        train(machine(), training, epochs=epochs)
    assert [one.manifest.identity["dataset"] for one in catalog.read_all(store).checkpoints] == ["bb", "aa"]
    assert any(isinstance(event, Message) and "was trained on the data set aa, now it is bb" in event.text for event in events)


def test_torch_is_loaded_by_the_loop_only() -> None:
    code = (
        "import sys; from stagekit.hooks.loop import Run; run = Run('/nowhere'); "
        "assert not {'torch', 'botocore', 'numpy.random'} & set(sys.modules) - {'numpy.random'}, sorted(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------- on two real machines


def process(tmp_path: Path, machine: str, *arguments: str) -> tuple[int, bytes]:
    """The toy as a process of its own, with a home and a directory of its own; returns its exit code and the weights it ended with."""
    home = tmp_path / machine
    home.mkdir()
    out = home / "weights"
    environ = {**os.environ, "HOME": str(home), "STAGEKIT_HOME": str(home / "state"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.hooks.toy", str(tmp_path / "bucket" / "run"), str(out), str(EPOCHS), *arguments]
    done = subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, out.read_bytes() if out.exists() else b""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a process that nothing interrupts."""
    code, weights = process(tmp_path_factory.mktemp("alone"), "one")
    assert code == 0
    return weights


def test_another_process_on_another_machine_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, alone: bytes) -> None:
    assert process(tmp_path, "one", "--every", "0s", "--stop-at", "8") == (9, b"")
    assert process(tmp_path, "two", "--seed", "7") == (0, alone)


def test_sigterm_saves_at_the_next_boundary_and_exits_with_143(tmp_path: Path, alone: bytes) -> None:
    assert process(tmp_path, "one", "--tell-steps", "--term-at", "8") == (143, b"")
    [newest, *_] = Run(tmp_path / "bucket" / "run").checkpoints()
    assert newest.step == 8
    assert process(tmp_path, "two", "--seed", "7", "--tell-steps") == (0, alone)


def test_forked_workers_of_a_dataloader_neither_upload_nor_drain(tmp_path: Path) -> None:
    code, weights = process(tmp_path, "one", "--workers", "2")
    assert code == 0
    assert [one.step for one in Run(tmp_path / "bucket" / "run").checkpoints()] == [4, 3, 2, 1]
    owners = list((tmp_path / "bucket" / "run" / "owners").glob("*.json"))
    assert len(owners) == 1
    (tmp_path / "again").mkdir()
    assert process(tmp_path / "again", "two", "--workers", "2") == (0, weights), "shuffled by torch's generator, which came back"
