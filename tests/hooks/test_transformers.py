"""A real Trainer: every save of every epoch is in the bucket, whatever it rotates, and the next machine goes on with the same losses."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save
from transformers import Trainer, TrainerCallback
from transformers import __version__ as transformers_version

from stagekit.errors import CheckpointError, Denied, NotFound, UploadFailed, UsageError
from stagekit.hooks.base_model import base_model_of
from stagekit.hooks.transformers import StagekitCallback
from stagekit.progress import Event, Message
from stagekit.runs import catalog
from stagekit.runs.run import Run
from stagekit.saves.adapter import content_revision
from stagekit.saves.find import ABANDONED, INCOMPLETE, Found, set_aside
from stagekit.saves.trainer import Expected
from stagekit.store.directory import DirectoryStore
from stagekit.testing.faults import FaultStore
from stagekit.torch import StreamLoader

from ..made import make_dataset
from .hf import EPOCHS, Lines, Stop, StopAt, arguments, losses, tiny, with_adapter
from .machines import group, machine

STEPS = 4  # of an epoch

# This file also runs with transformers 4.57, in the environment of tests/mosaicml. It has no checkpoints on SIGTERM, and its Trainer cannot
# load its own optimizer on two ranks without a GPU (torch 2.14: "don't know how to restore data location … tagged with cpu:0").
SINCE_5 = pytest.mark.skipif(int(transformers_version.partition(".")[0]) < 5, reason="transformers 4.57 cannot do this, see above")

pytestmark = [
    # peft 0.21 asks transformers 5.24 for an attribute that it renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # What transformers 4.57 says of saves that are less than a second apart.
    pytest.mark.filterwarnings("ignore:mtime may not be reliable on this filesystem:UserWarning"),
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a training that nothing interrupts and nobody saves."""
    trainer = Trainer(tiny(), arguments(tmp_path_factory.mktemp("straight"), save_strategy="no"), train_dataset=Lines())
    trainer.train()
    return losses(trainer)


def fine_tune(callback: StagekitCallback, out: Path, *others: TrainerCallback, model: Any = None, seed: int = 0, **more: Any) -> Trainer:
    model = tiny(seed) if model is None else model
    trainer = Trainer(model, arguments(out, **more), train_dataset=Lines(), callbacks=[callback, *others])
    trainer.train(resume_from_checkpoint=callback.resume_dir())
    return trainer


def steps(store: FaultStore) -> list[int]:
    return [one.step for one in catalog.read_all(store).checkpoints]


def test_every_epoch_is_in_the_bucket_and_another_machine_goes_on_with_the_same_losses(
    make_run: Callable[..., Run], store: FaultStore, straight: dict[int, float], tmp_path: Path
) -> None:
    run = make_run()
    with pytest.raises(Stop):
        fine_tune(StagekitCallback(run), tmp_path / "one", StopAt(2 * STEPS + 1), save_total_limit=1)
    run.close()
    assert [path.name for path in (tmp_path / "one").iterdir()] == [f"checkpoint-{2 * STEPS}"], "the Trainer rotates as it was told"
    assert steps(store) == [2 * STEPS, STEPS], "and the bucket has what it rotated"
    shutil.rmtree(tmp_path / "one")

    second = make_run()
    trainer = fine_tune(StagekitCallback(second), tmp_path / "two", seed=5, save_total_limit=1)
    second.close()
    assert losses(trainer) == straight
    found = catalog.read_all(store).checkpoints
    assert [(one.step, one.epoch) for one in found] == [(12, 3), (8, 2), (4, 1)], "the last epoch is there before train() returns"
    assert found[0].metrics["loss"] == straight[12]
    assert {record.path for record in found[0].files} >= {
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        "training_args.bin",
    }


def test_ordinary_data_goes_on_inside_an_epoch(make_run: Callable[..., Run], straight: dict[int, float], tmp_path: Path) -> None:
    every = {"save_strategy": "steps", "save_steps": 1}
    with make_run() as run, pytest.raises(Stop):
        fine_tune(StagekitCallback(run), tmp_path / "one", StopAt(STEPS + 3), **every)
    with make_run() as second:
        trainer = fine_tune(StagekitCallback(second), tmp_path / "two", seed=5, **every)
    assert losses(trainer) == straight


@pytest.mark.parametrize("ending", [ABANDONED, INCOMPLETE])
def test_what_was_set_aside_survives_the_rotation(tmp_path: Path, ending: str) -> None:
    save(tmp_path / "checkpoint-2" / "model.safetensors")
    aside = set_aside(Found(tmp_path, tmp_path / "checkpoint-2", "trainer", {}), ending)
    Trainer(tiny(), arguments(tmp_path, save_total_limit=1), train_dataset=Lines()).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-12"]
    assert (aside / "model.safetensors").exists()


def test_a_stream_loader_goes_on_inside_an_epoch(make_run: Callable[..., Run], store: FaultStore, tmp_path: Path) -> None:
    make_dataset(DirectoryStore(tmp_path / "data"), 20, shards=(12, 8))
    seen: list[list[str]] = []

    def line(sample: dict[str, Any]) -> dict[str, Any]:
        return {**Lines()[int(sample["__key__"])], "key": sample["__key__"]}

    class Streaming(Trainer):
        def get_train_dataloader(self) -> Any:
            return StreamLoader(str(tmp_path / "data"), self.args.per_device_train_batch_size, transform=line)

        def training_step(self, model: Any, inputs: dict[str, Any], *others: Any, **named: Any) -> Any:
            seen.append(list(inputs.pop("key")))
            return super().training_step(model, inputs, *others, **named)

    def train(out: Path, seed: int, **given: Any) -> dict[int, float]:
        steps = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2, "remove_unused_columns": False}
        trainer = Streaming(tiny(seed), arguments(out, **steps), **given)
        callback = next((one for one in given.get("callbacks", []) if isinstance(one, StagekitCallback)), None)
        trainer.train(resume_from_checkpoint=callback.resume_dir() if callback is not None else None)
        return losses(trainer)

    undisturbed = train(tmp_path / "straight", 0)
    whole = list(seen)
    assert len(whole) == EPOCHS * 5, "three updates an epoch, the last one of a single batch"
    seen.clear()
    run = make_run()
    with pytest.raises(Stop):
        train(tmp_path / "one", 0, callbacks=[StagekitCallback(run), StopAt(5)])
    run.close()
    assert steps(store)[0] == 4, "the first update of the second epoch"
    assert seen == whole[:9]
    seen.clear()
    with make_run() as second:
        assert train(tmp_path / "two", 3, callbacks=[StagekitCallback(second)]) == undisturbed
    assert seen == whole[7:], "from the second update on, and the batches before it were not fetched"


def test_another_process_with_nothing_but_the_url_goes_on(straight: dict[int, float], tmp_path: Path) -> None:
    lost = machine(tmp_path, "one", "hf", "out", "losses.json", "--stop-at", str(STEPS + 2))
    assert lost.code == 9, lost.said
    done = machine(tmp_path, "two", "hf", "out", "losses.json", "--seed", "3")
    assert done.code == 0, done.said
    assert {int(step): loss for step, loss in json.loads(done.read("losses.json")).items()} == straight


@SINCE_5
def test_two_ranks_go_on_together(tmp_path: Path) -> None:
    lost = group(tmp_path, "one", "hf", "out", "losses.json", "--straight", "--stop-at", "3")
    assert lost.codes == [9, 9], lost.said
    found = catalog.read_all(DirectoryStore(tmp_path / "run")).checkpoints
    assert [one.step for one in found] == [2]
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {record.path for record in found[0].files}
    done = group(tmp_path, "two", "hf", "out", "losses.json", "--seed", "3")
    assert done.codes == [0, 0], done.said
    assert json.loads(done.read("losses.json")) == json.loads(lost.read("losses.json.straight"))
    assert [one.step for one in catalog.read_all(DirectoryStore(tmp_path / "run")).checkpoints] == [6, 4, 2]


def test_an_adapter_comes_back_on_its_own_base_and_on_no_other(
    make_run: Callable[..., Run], store: FaultStore, events: list[Event], tmp_path: Path
) -> None:
    tiny(1).save_pretrained(tmp_path / "there" / "base")
    whole = Trainer(with_adapter(tmp_path / "there" / "base"), arguments(tmp_path / "whole", save_strategy="no"), train_dataset=Lines())
    whole.train()
    run = make_run()
    with pytest.raises(Stop):
        fine_tune(StagekitCallback(run), tmp_path / "one", StopAt(STEPS + 1), model=with_adapter(tmp_path / "there" / "base"))
    run.close()
    (saved,) = catalog.read_all(store).checkpoints
    assert saved.manifest.identity["base_model"] == f"base@content-{content_revision(tmp_path / 'there' / 'base')}"
    assert "adapter_model.safetensors" in {record.path for record in saved.files}
    assert "model.safetensors" not in {record.path for record in saved.files}

    (tmp_path / "here").mkdir()
    (tmp_path / "there" / "base").rename(tmp_path / "here" / "base")
    tiny(2).save_pretrained(tmp_path / "other" / "base")
    with pytest.raises(CheckpointError, match=r"continues the base model base@content-.*, and this training says base@content-"):
        fine_tune(StagekitCallback(make_run()), tmp_path / "wrong", model=with_adapter(tmp_path / "other" / "base"))
    second = make_run()
    trainer = fine_tune(StagekitCallback(second), tmp_path / "two", model=with_adapter(tmp_path / "here" / "base", seed=9))
    second.close()
    assert losses(trainer) == losses(whole)


def test_a_base_model_of_the_hub_is_told_by_its_commit() -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny()
    base.config._name_or_path = "org/base"
    base.config._commit_hash = "0123abcd"
    base.name_or_path = "org/base"
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert base_model_of(model) == "org/base@0123abcd"
    assert base_model_of(tiny()) is None


def test_what_is_refused_in_the_background_is_raised_at_the_next_save_and_at_the_end(
    make_run: Callable[..., Run], store: FaultStore, refuse: Callable[[], list[str]], tmp_path: Path
) -> None:
    refusing = refuse()
    run = make_run()
    callback = StagekitCallback(run)
    seen: list[int] = []

    class Wait(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(state.global_step)
            if state.global_step == STEPS + 1:
                with pytest.raises(UploadFailed):
                    run.drain(10)

    with pytest.raises(UploadFailed, match=r"step 4 is not in .*run yet, its local copy is kept: no"):
        fine_tune(callback, tmp_path / "out", Wait())
    assert seen[-1] == 2 * STEPS, "the training reached the next save, which was pinned before"
    assert run.status().pending == (4, 8)
    with pytest.raises(UploadFailed, match="steps 4, 8 are not in"):
        run.close()
    refusing.clear()
    again = make_run(spool_dir=run._spool_dir)
    again.drain()
    again.close()
    assert steps(store) == [8, 4]


def test_the_training_does_not_end_well_before_the_bucket_has_everything(
    make_run: Callable[..., Run], store: FaultStore, refuse: Callable[[], list[str]], tmp_path: Path
) -> None:
    refusing = refuse()
    run = make_run()
    with pytest.raises(UploadFailed, match="step 1 is not in"):
        fine_tune(StagekitCallback(run), tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    refusing.clear()
    run.close()
    assert steps(store) == [1]


@SINCE_5
def test_a_save_without_on_save_is_found_at_the_end(make_run: Callable[..., Run], store: FaultStore, tmp_path: Path) -> None:
    """SIGTERM with transformers' own handler saves and ends the training without telling any callback."""
    previous = signal.getsignal(signal.SIGTERM)

    class Preempt(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                for other in trainer.callback_handler.callbacks:
                    if type(other).__name__ == "JITCheckpointCallback":
                        other.jit_manager.is_checkpoint_requested = True  # what its signal handler does, after a grace of 3 s

    run = make_run()
    callback = StagekitCallback(run)
    trainer = Trainer(
        tiny(),
        arguments(tmp_path / "out", enable_jit_checkpoint=True, save_strategy="no"),
        train_dataset=Lines(),
        callbacks=[callback, Preempt()],
    )
    try:
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, previous)
    run.close()
    assert trainer.state.global_step < EPOCHS * STEPS
    assert steps(store) == [2]


def test_a_model_saved_outside_of_a_checkpoint_is_sent_with_the_newest_one(
    make_run: Callable[..., Run], store: FaultStore, tmp_path: Path
) -> None:
    class Export(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.save_model(str(tmp_path / "out" / "best"))

    run = make_run()
    callback = StagekitCallback(run)
    trainer = Trainer(tiny(), arguments(tmp_path / "out", max_steps=3, save_strategy="steps", save_steps=3), train_dataset=Lines())
    trainer.add_callback(callback)
    trainer.add_callback(Export())
    trainer.train(resume_from_checkpoint=callback.resume_dir(tmp_path / "out"))
    run.close()
    newest = catalog.latest(store)
    assert newest is not None
    paths = {record.path for record in newest.files}
    assert {"exported/best/model.safetensors", "exported/best/config.json", "model.safetensors", "trainer_state.json"} <= paths
    again = make_run()
    assert StagekitCallback(again).resume_dir(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-3"), "it is here already"
    again.close()


def test_a_checkpoint_of_another_training_is_neither_sent_nor_overwritten(
    make_run: Callable[..., Run], store: FaultStore, events: list[Event], tmp_path: Path
) -> None:
    foreign = tmp_path / "out" / "checkpoint-4"
    foreign.mkdir(parents=True)
    (foreign / "trainer_state.json").write_text('{"global_step": 4}')
    run = make_run()
    fine_tune(StagekitCallback(run), tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1)
    run.close()
    assert steps(store) == [1]
    with make_run() as other, other.checkpoint(step=4) as directory:
        (directory / "trainer_state.json").write_text('{"global_step": 4, "x": 1}')
    again = make_run()
    resumed = StagekitCallback(again).resume_dir(tmp_path / "out")
    again.close()
    assert resumed is not None
    assert Path(resumed).name == "checkpoint-4"
    assert Path(resumed).is_relative_to(tmp_path / "out" / "restored")
    assert (foreign / "trainer_state.json").read_text() == '{"global_step": 4}'
    assert any(isinstance(event, Message) and "it is left alone, going on with" in event.text for event in events)


def test_a_run_that_cannot_be_seen_is_no_new_run(make_run: Callable[..., Run], store: FaultStore, tmp_path: Path) -> None:
    assert StagekitCallback(make_run()).resume_dir(tmp_path / "out") is None
    store.fail("children", Denied("no"), times=None)
    with pytest.raises(Denied, match="no"):
        StagekitCallback(make_run()).resume_dir(tmp_path / "out")


def test_a_run_that_another_trainer_saved_is_refused(make_run: Callable[..., Run], tmp_path: Path) -> None:
    with make_run() as run, run.checkpoint(step=4) as directory:
        (directory / "model.pt").write_bytes(b"weights")
    with pytest.raises(CheckpointError, match=r"step 4 of .* holds no trainer_state\.json, .* It holds model\.pt"):
        StagekitCallback(make_run()).resume_dir(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_cannot_be_meant_is_said(make_run: Callable[..., Run]) -> None:
    with pytest.raises(UsageError, match="keep_last: give these to the Run itself"):
        StagekitCallback(make_run(), keep_last=2)
    with pytest.raises(UsageError, match=r"resume_dir\(\): make the Trainer with this callback first, or say where"):
        StagekitCallback(make_run()).resume_dir()


# ------------------------------------------------------------------------------------------------------------ what is complete


def save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"x": torch.ones(4)}, path)


def whole(directory: Path, step: int, *names: str) -> Path:
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    save_file({"x": torch.ones(4)}, directory / "model.safetensors")
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name in names:
        save(directory / name)
    return directory


PLAIN = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json", *PLAIN])
@pytest.mark.parametrize("fault", ["missing", "cut", "old"])
def test_a_directory_is_complete_when_every_file_is_there_to_its_end_and_new(tmp_path: Path, name: str, fault: str) -> None:
    directory = whole(tmp_path / "checkpoint-7", 7, *PLAIN)
    assert Expected().missing(directory, 7) == []
    path = directory / name
    if fault == "missing":
        path.unlink()
    elif fault == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    is_new = (lambda other: other != path) if fault == "old" else (lambda _: True)
    (lacking,) = Expected().missing(directory, 7, is_new)
    assert name in lacking


def test_a_directory_is_not_complete_with_another_step_or_without_a_ranks_random_state(tmp_path: Path) -> None:
    directory = whole(tmp_path / "checkpoint-7", 6, "optimizer.pt", "scheduler.pt", "rng_state_0.pth")
    assert Expected(ranks=(0, 1), world_size=2).missing(directory, 7) == [
        "rng_state_1.pth",
        "trainer_state.json of step 7 (it is of step 6)",
    ]
    (directory / "checkpoint-is-incomplete.txt").write_text("saving")
    assert "the end of the save" in Expected(ranks=(0,), world_size=2).missing(directory, 6)[0]
    assert Expected().missing(tmp_path / "none", 7) == ["the directory itself"]


def test_weights_alone_are_enough_when_only_they_are_saved(make_run: Callable[..., Run], store: FaultStore, tmp_path: Path) -> None:
    run = make_run()
    fine_tune(StagekitCallback(run), tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1, save_only_model=True)
    run.close()
    (found,) = catalog.read_all(store).checkpoints
    assert not {"optimizer.pt", "rng_state.pth"} & {record.path for record in found.files}


def test_weights_in_parts_need_every_part(tmp_path: Path) -> None:
    directory = whole(tmp_path / "checkpoint-7", 7, *PLAIN)
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Expected().missing(directory, 7) == ["model-00002-of-00002.safetensors"]
    (directory / "model.safetensors.index.json").write_text("{")
    assert Expected().missing(directory, 7) == ["model.safetensors.index.json"]


def test_deepspeed_needs_latest_and_every_ranks_part_of_the_optimizer(tmp_path: Path) -> None:
    directory = whole(tmp_path / "checkpoint-7", 7, "rng_state_0.pth", "rng_state_1.pth")
    expected = Expected(ranks=(0, 1), world_size=2, sharding="deepspeed", zero_stage=2)
    (directory / "latest").write_text("global_step7")
    save(directory / "global_step7" / "mp_rank_00_model_states.pt")
    save(directory / "global_step7" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert expected.missing(directory, 7) == ["global_step7/*zero_pp_rank_1_*optim_states.pt"]
    save(directory / "global_step7" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert expected.missing(directory, 7) == []
    (directory / "latest").write_text("global_step6")
    assert expected.missing(directory, 7) == ["latest naming global_step7"]
    shutil.rmtree(directory / "global_step7")
    (directory / "latest").unlink()
    assert expected.missing(directory, 7)[:2] == ["latest", "global_step7/*model_states.pt"]


def test_fsdp_needs_every_file_and_length_that_metadata_names(tmp_path: Path) -> None:
    directory = whole(tmp_path / "checkpoint-7", 7, "scheduler.pt", "rng_state.pth")
    expected = Expected(sharding="fsdp")
    assert expected.missing(directory, 7) == [
        "pytorch_model_fsdp.bin or pytorch_model_fsdp_0/",
        "optimizer.bin or optimizer_0/",
    ]
    save(directory / "optimizer.bin")
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        dcp_save({"x": torch.ones(8)}, storage_writer=FileSystemWriter(directory / "pytorch_model_fsdp_0"), no_dist=True)
    assert expected.missing(directory, 7) == []
    shard = directory / "pytorch_model_fsdp_0" / "__0_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    (lacking,) = expected.missing(directory, 7)
    assert lacking == f"pytorch_model_fsdp_0/__0_0.distcp has {len(data) - 1} bytes, .metadata names {len(data)}"
    shard.unlink()
    assert expected.missing(directory, 7) == ["pytorch_model_fsdp_0/__0_0.distcp is missing"]
    (shard.parent / ".metadata").write_bytes(b"\x80")
    assert "pytorch_model_fsdp_0/.metadata (it cannot be read" in expected.missing(directory, 7)[0]


class _SlowRank:
    """What the callback sees of a training in which rank 1 saves late."""

    def __init__(self, out: Path) -> None:
        self.args: Any = arguments(out)
        self.state: Any = type("State", (), {"is_world_process_zero": True, "is_hyper_param_search": False, "global_step": 0})()


def test_a_checkpoint_waits_for_a_slow_rank_and_is_not_lost_to_rotation(
    make_run: Callable[..., Run], store: FaultStore, tmp_path: Path
) -> None:
    run = make_run()
    now = [0.0]
    callback = StagekitCallback(run, monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    slow = _SlowRank(tmp_path / "out")
    callback.on_train_begin(slow.args, slow.state, None)
    callback._expected = Expected(ranks=(0, 1), world_size=2)
    slow.state.global_step = 5
    directory = whole(tmp_path / "out" / "checkpoint-5", 5, "optimizer.pt", "scheduler.pt", "rng_state_0.pth")
    callback.on_save(slow.args, slow.state, None)
    run.drain()
    assert steps(store) == [], "rank 1 is still writing"
    save(directory / "rng_state_1.pth")
    callback.on_step_end(slow.args, slow.state, None)
    shutil.rmtree(directory)  # what the next save's rotation does
    run.drain()
    assert steps(store) == [5]

    whole(tmp_path / "out" / "checkpoint-6", 6, "optimizer.pt", "scheduler.pt", "rng_state_0.pth")
    slow.state.global_step = 6
    callback.on_save(slow.args, slow.state, None)
    whole(tmp_path / "out" / "checkpoint-7", 7, "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")
    slow.state.global_step = 7
    with pytest.raises(
        CheckpointError, match=r"step 6: .*checkpoint-6 is not complete, .* it lacks rng_state_1\.pth\. When the nodes do not"
    ):
        callback.on_save(slow.args, slow.state, None)
    run.drain()
    assert steps(store) == [7, 5], "what came after is not held up"
    slow.state.global_step = 8
    shutil.rmtree(whole(tmp_path / "out" / "checkpoint-8", 8))
    callback.on_save(slow.args, slow.state, None)
    with pytest.raises(CheckpointError, match=r"step 8: .*checkpoint-8 was removed before every rank had saved its part"):
        callback.on_train_end(slow.args, slow.state, None)
    assert now[0] > 60, "it waited for the slow rank first"
    run.close()


def test_a_search_for_hyperparameters_is_refused(make_run: Callable[..., Run], tmp_path: Path) -> None:
    slow = _SlowRank(tmp_path / "out")
    slow.state.is_hyper_param_search = True
    with pytest.raises(UsageError, match="one run holds one training; a hyperparameter search makes many"):
        StagekitCallback(make_run()).on_train_begin(slow.args, slow.state, None)


def test_the_newest_damaged_checkpoint_is_passed_over(make_run: Callable[..., Run], store: FaultStore, tmp_path: Path) -> None:
    for step in (1, 2):
        with make_run() as run, run.checkpoint(step=step) as directory:
            (directory / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    newest = catalog.latest(store)
    assert newest is not None
    store.delete(newest.files[0].key(newest.name))
    with pytest.raises(NotFound):
        store.head(newest.files[0].key(newest.name))
    run = make_run()
    assert StagekitCallback(run).resume_dir(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-1")
    run.close()
