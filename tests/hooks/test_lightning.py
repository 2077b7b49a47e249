"""A real Lightning Trainer: what it saves is in the bucket, what it removes waits for that, and ``ckpt_path`` goes on elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from stagekit.errors import CheckpointError, Denied, UploadFailed, UsageError
from stagekit.hooks.lightning import StagekitCheckpointIO
from stagekit.runs import catalog
from stagekit.runs.heartbeat import last_heartbeat
from stagekit.runs.run import Run
from stagekit.store.directory import DirectoryStore
from stagekit.testing.faults import FaultStore
from stagekit.torch import StreamLoader

from ..made import make_dataset
from .machines import group
from .toolkit import BATCHES, EPOCHS, Stop, lightning

# Lightning on torch 2.13, and its advice for real trainings.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "The 'train_dataloader' does not have many workers",
        "The dirpath has changed from",
        "Checkpoint directory .* exists and is not empty",
    )
]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 hands down to its children must not reach the next test."""
    monkeypatch.setenv("STAGEKIT_LIGHTNING_RESUME", "")
    monkeypatch.delenv("STAGEKIT_LIGHTNING_RESUME")


def stop_at(step: int) -> Callable[[int], None]:
    def stop(now: int) -> None:
        if now == step:
            raise Stop

    return stop


def names(store: FaultStore) -> list[tuple[int, int | None, str]]:
    return [(one.step, one.epoch, one.files[0].path) for one in catalog.read_all(store).checkpoints]


def test_every_epoch_is_in_the_bucket_and_another_machine_goes_on_to_the_same_weights(
    make_run: Callable[..., Run], store: FaultStore, tmp_path: Path
) -> None:
    straight = lightning(None, tmp_path / "straight", seed=1)
    run = make_run()
    with pytest.raises(Stop):
        lightning(run, tmp_path / "one", seed=1, stop=stop_at(2 * BATCHES + 1))
    run.close()
    beat = last_heartbeat(run.url)
    assert beat is not None
    assert 1 <= beat.step <= 2 * BATCHES + 1, "it is written every few seconds"
    second = make_run()
    assert lightning(second, tmp_path / "two", seed=5) == straight
    second.close()
    found = names(store)
    assert {(step, epoch) for step, epoch, _ in found} == {(BATCHES * epoch, epoch) for epoch in range(1, EPOCHS + 1)}
    assert found[0] == (BATCHES * EPOCHS, EPOCHS, f"latest-epoch={EPOCHS - 1}.ckpt")
    assert "loss" in catalog.read_all(store).checkpoints[-1].metrics, "what ModelCheckpoint monitors"


def test_two_ranks_go_on_together(tmp_path: Path) -> None:
    lost = group(tmp_path, "one", "toolkit", "lightning", "w", "--straight", "--stop-at", str(BATCHES + 2))
    assert lost.codes == [9, 9], lost.said
    done = group(tmp_path, "two", "toolkit", "lightning", "w", "--seed", "3")
    assert done.codes == [0, 0], done.said
    for rank in "01":
        assert (done.directory / f"w.{rank}").read_bytes() == (lost.directory / f"w.straight.{rank}").read_bytes()
    assert catalog.read_all(DirectoryStore(tmp_path / "run")).uncommitted == ()


def checkpoint(step: int) -> dict[str, Any]:
    return {"global_step": step, "epoch": 0, "state_dict": {"x": torch.ones(4)}}


def test_a_file_is_removed_once_its_successor_is_verified_and_not_before(
    make_run: Callable[..., Run], refuse: Callable[[], list[str]], tmp_path: Path
) -> None:
    refusing = refuse()
    run = make_run()
    io = StagekitCheckpointIO(run)
    first, second, third = (tmp_path / f"{name}.ckpt" for name in ("first", "second", "third"))
    io.save_checkpoint(checkpoint(1), first)
    with pytest.raises(UploadFailed):
        run.drain()
    with pytest.raises(UploadFailed, match=r"step 1 is not in .* yet, its local copy is kept: no"):
        io.save_checkpoint(checkpoint(2), second)
    assert run.status().pending == (1, 2), "raised after this one was pinned"
    io.remove_checkpoint(first)
    assert first.exists(), "nothing of step 2 is in the bucket yet"
    refusing.clear()
    run.drain()
    io.save_checkpoint(checkpoint(3), third)
    io.remove_checkpoint(second)
    io.teardown()
    assert not first.exists()
    assert not second.exists()
    assert third.exists()
    run.close()


def test_a_file_that_is_saved_again_is_not_removed(make_run: Callable[..., Run], refuse: Callable[[], list[str]], tmp_path: Path) -> None:
    refusing = refuse()
    run = make_run()
    io = StagekitCheckpointIO(run)
    io.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    io.remove_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").exists()
    refusing.clear()
    io.save_checkpoint(checkpoint(2), tmp_path / "last.ckpt")
    io.teardown()
    assert (tmp_path / "last.ckpt").exists()
    run.close()


def test_fit_does_not_end_well_before_the_bucket_has_everything(
    make_run: Callable[..., Run], refuse: Callable[[], list[str]], tmp_path: Path
) -> None:
    refusing = refuse()
    run = make_run()
    with pytest.raises(UploadFailed, match=r"is not in .* yet; the local copies are kept"):
        lightning(run, tmp_path / "one", seed=1, both=False, max_epochs=1)
    refusing.clear()
    run.close()


def test_a_training_that_fails_is_told_as_such(make_run: Callable[..., Run], refuse: Callable[[], list[str]], tmp_path: Path) -> None:
    refusing = refuse()
    run = make_run()
    with pytest.raises(Stop) as caught:
        lightning(run, tmp_path / "one", seed=1, both=False, stop=stop_at(BATCHES + 1))
    assert caught.value.__context__ is None, "and not hidden behind the upload that failed, too"
    refusing.clear()
    run.close()


def test_a_run_that_cannot_be_seen_is_no_new_run(make_run: Callable[..., Run], store: FaultStore, tmp_path: Path) -> None:
    assert StagekitCheckpointIO(make_run()).resume_path(tmp_path / "restored") is None
    store.fail("children", Denied("no"), times=None)
    with pytest.raises(Denied):
        StagekitCheckpointIO(make_run()).resume_path(tmp_path / "restored")


def test_what_was_restored_is_not_fetched_again_and_goes_when_it_is_old(
    make_run: Callable[..., Run], store: FaultStore, tmp_path: Path
) -> None:
    run = make_run()
    io = StagekitCheckpointIO(run)
    for step in (1, 2):
        io.save_checkpoint(checkpoint(step), tmp_path / f"{step}.ckpt")
        run.drain()
        first = io.resume_path(tmp_path / "restored")
        before = len([call for call in store.calls if call.operation == "get" and "/files/" in call.key])
        assert io.resume_path(tmp_path / "restored") == first
        assert len([call for call in store.calls if call.operation == "get" and "/files/" in call.key]) == before
    assert len(list((tmp_path / "restored").iterdir())) == 1
    assert first is not None
    Path(first).write_bytes(b"damaged")
    again = io.resume_path(tmp_path / "restored")
    assert again == first
    assert TorchCheckpointIO().load_checkpoint(again, weights_only=True)["global_step"] == 2
    run.close()


def test_a_child_that_lightning_starts_takes_what_rank_0_found(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    io = StagekitCheckpointIO(run)
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    path = io.resume_path(tmp_path / "restored")
    assert path is not None
    run.close()
    # What Lightning's launcher sets for the processes in which it runs the same script again.
    code = "from stagekit.hooks.lightning import StagekitCheckpointIO as IO; print(IO('nowhere').resume_path('other'))"
    environ = {**os.environ, "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}
    child = subprocess.run([sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert child.stdout.strip() == path
    assert not (tmp_path / "other").exists()


def test_ranks_that_cannot_ask_each_other_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(
        UsageError, match=r"rank 1 of 2 cannot agree with the others .* Start with torchrun, or make the process group first"
    ):
        StagekitCheckpointIO(tmp_path / "run").resume_path(tmp_path / "restored")


def test_what_cannot_be_meant_is_said(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    io = StagekitCheckpointIO(run)
    with pytest.raises(UsageError, match=r"s3://bucket/x\.ckpt is no local path\. Let ModelCheckpoint save to a local dirpath"):
        io.save_checkpoint(checkpoint(1), "s3://bucket/x.ckpt")
    with pytest.raises(UsageError, match="keep_last: give these to the Run itself"):
        StagekitCheckpointIO(run, keep_last=1)
    with run.checkpoint(step=1) as directory:
        (directory / "a.pt").write_bytes(b"a")
        (directory / "b.pt").write_bytes(b"b")
    run.drain()
    with pytest.raises(CheckpointError, match=r"was not saved by StagekitCheckpointIO: its checkpoint holds a\.pt, b\.pt"):
        io.resume_path(tmp_path / "restored")
    run.close()


def test_the_package_under_its_other_name_takes_it_too(make_run: Callable[..., Run]) -> None:
    import lightning_fabric.plugins

    assert "lightning_fabric.plugins" in sys.modules
    assert isinstance(StagekitCheckpointIO(make_run()), lightning_fabric.plugins.CheckpointIO)


@pytest.mark.parametrize("every", [5, 6], ids=["in an epoch", "with its last batch"])
def test_a_stream_loader_goes_on_with_the_epochs_that_lightning_counts(tmp_path: Path, every: int) -> None:
    url = str(tmp_path / "data")
    make_dataset(DirectoryStore(tmp_path / "data"))

    def train(out: Path, epochs: int, ckpt_path: str | None = None, **saving: Any) -> list[tuple[int, list[str]]]:
        seen: list[tuple[int, list[str]]] = []

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(1, 1)

            def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
                seen.append((self.current_epoch, list(batch["__key__"])))
                return self.layer(torch.ones(len(batch["__key__"]), 1)).mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        saver = ModelCheckpoint(dirpath=out, **saving)
        trainer = Trainer(max_epochs=epochs, callbacks=[saver], accelerator="cpu", logger=False, enable_progress_bar=False)
        trainer.fit(Module(), StreamLoader(url, 4), ckpt_path=ckpt_path)
        return seen

    straight = train(tmp_path / "straight", 4)
    assert len(straight) == 4 * 6
    saving = {"every_n_train_steps": every, "save_top_k": -1}
    begun = train(tmp_path / "one", 2, **saving)
    [newest] = (tmp_path / "one").glob(f"*step={12 // every * every}.ckpt")
    assert begun[: 12 // every * every] + train(tmp_path / "two", 4, str(newest), **saving) == straight
    train(tmp_path / "three", 1)
    [at_the_end] = (tmp_path / "three").glob("*.ckpt")
    assert train(tmp_path / "four", 4, str(at_the_end)) == straight[6:]
