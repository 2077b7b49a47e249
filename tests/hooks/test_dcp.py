"""Real torch.distributed.checkpoint: nothing is handed over that ``.metadata`` promises and the disk does not hold."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stagekit.errors import CheckpointError, Denied, UploadFailed
from stagekit.hooks.dcp import load, save
from stagekit.hooks.loop import Run
from stagekit.runs import catalog
from stagekit.saves.dcp import DcpContents
from stagekit.saves.whole import is_whole
from stagekit.store.directory import DirectoryStore
from stagekit.testing.faults import FaultStore

from .machines import group, machine
from .toolkit import BATCHES, EPOCHS, Stop, dcp


def test_every_epoch_is_in_the_bucket_and_another_machine_goes_on_to_the_same_weights(
    make_run: Callable[..., Run], store: FaultStore, tmp_path: Path
) -> None:
    def stop(step: int) -> None:
        if step == 2 * BATCHES + 1:
            raise Stop

    straight = dcp(None, tmp_path, seed=1)
    run = make_run()
    with pytest.raises(Stop):
        dcp(run, tmp_path, seed=1, stop=stop)
    run.close()
    second = make_run()
    assert dcp(second, tmp_path, seed=5) == straight
    second.close()
    found = catalog.read_all(store).checkpoints
    assert [(one.step, one.epoch) for one in found] == [(BATCHES * epoch, epoch) for epoch in range(EPOCHS, 0, -1)]
    assert {record.path for record in found[0].files} == {".metadata", "__0_0.distcp"}


def test_two_ranks_go_on_together_and_one_can_take_over(tmp_path: Path) -> None:
    lost = group(tmp_path, "one", "toolkit", "dcp", "w", "--straight", "--stop-at", str(BATCHES + 2))
    assert lost.codes == [9, 9], lost.said
    (found,) = catalog.read_all(DirectoryStore(tmp_path / "run")).checkpoints
    assert {record.path for record in found.files} >= {".metadata", "__0_0.distcp"}
    done = group(tmp_path, "two", "toolkit", "dcp", "w", "--seed", "3")
    assert done.codes == [0, 0], done.said
    for rank in "01":
        assert (done.directory / f"w.{rank}").read_bytes() == (lost.directory / f"w.straight.{rank}").read_bytes()
    alone = machine(tmp_path, "three", "toolkit", "dcp", "w")
    assert alone.code == 0, alone.said
    assert (alone.directory / "w.0").read_bytes() == (done.directory / "w.0").read_bytes(), "all epochs are done, in the same weights"


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """A disk on which no file grows beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("thread_count", [1, 4])
def test_a_file_that_could_not_be_written_is_never_committed(
    make_run: Callable[..., Run], store: FaultStore, monkeypatch: pytest.MonkeyPatch, thread_count: int
) -> None:
    """With several threads torch's writer loses an error, and what it reports as saved cannot be loaded."""
    lost: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: lost.append(arguments.exc_value))
    state = {f"{number}": torch.full((2**18 if number == 3 else 2**8,), float(number)) for number in range(4)}
    run = make_run()
    reason = r"step 1 is not saved: rank 0: RuntimeError" if thread_count == 1 else r"torch reported no error, but 3 was not written"
    with small_files(2**19), pytest.raises(CheckpointError, match=reason):
        save(state, run, step=1, thread_count=thread_count)
    assert bool(lost) == (thread_count > 1)
    save(state, run, step=2, thread_count=thread_count)
    run.close()
    assert [one.step for one in catalog.read_all(store).checkpoints] == [2]
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    again = make_run()
    found = load(loaded, again)
    again.close()
    assert found is not None
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_problems_name_the_file_and_both_lengths() -> None:
    contents = DcpContents({"a": 5, "b": 7, "c": 1}, ("x",))
    assert contents.problems({"a": 5, "b": 6}) == ["x was not written", "b has 6 bytes, .metadata names 7", "c is missing"]


def test_any_step_can_be_asked_for(make_run: Callable[..., Run]) -> None:
    run = make_run()
    for step in (1, 2):
        save({"x": torch.full((3,), float(step))}, run, step=step)
    run.drain()
    values: dict[str, Any] = {"x": torch.zeros(3)}
    assert load(values, run, step=1) is not None
    assert values["x"].tolist() == [1.0, 1.0, 1.0]
    run.close()


def test_what_is_refused_in_the_background_is_raised_at_the_next_save(
    make_run: Callable[..., Run], refuse: Callable[[], list[str]]
) -> None:
    refusing = refuse()
    run = make_run()
    save({"x": torch.ones(3)}, run, step=1)
    with pytest.raises(UploadFailed):
        run.drain()
    with pytest.raises(UploadFailed, match=r"step 1 is not in .* yet, its local copy is kept: no"):
        save({"x": torch.ones(3)}, run, step=2)
    assert run.status().pending == (1, 2)
    refusing.clear()
    run.close()


def test_a_run_that_cannot_be_seen_or_was_saved_otherwise_is_refused(make_run: Callable[..., Run], store: FaultStore) -> None:
    assert load({"x": torch.ones(3)}, make_run()) is None
    with make_run() as run, run.checkpoint(step=1) as directory:
        (directory / "model.pt").write_bytes(b"weights")
    with pytest.raises(CheckpointError, match=r"step 1 of .* was not saved by torch\.distributed\.checkpoint \(it holds model\.pt\)"):
        load({"x": torch.ones(3)}, make_run())
    store.fail("children", Denied("no"), times=None)
    with pytest.raises(Denied):
        load({"x": torch.ones(3)}, make_run())


def test_files_are_whole_when_their_format_says_so(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(9)}, tmp_path / "new.pt")
    torch.save({"x": torch.ones(9)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "wrong.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "short.safetensors").write_bytes(b"\x01")
    (tmp_path / "log.txt").write_text("x")
    found = {path.name: is_whole(path) for path in sorted(tmp_path.iterdir())}
    assert found == {
        "empty.pt": False,
        "log.txt": True,
        "new.pt": True,
        "old.pt": True,
        "short.safetensors": False,
        "wrong.safetensors": False,
    }
    assert not is_whole(tmp_path)
    assert not is_whole(tmp_path / "none.pt")
