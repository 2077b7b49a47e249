"""Finished checkpoints are found from outside: each kind by its own rule, never one that is being written."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save

from stagekit.saves import trainer
from stagekit.saves.find import Found, Look, Watch, look, step_in

RNG = b"PK\x05\x06" + bytes(18)  # an empty zip: what ends a file of torch.save


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Watch:
    return Watch(30.0, clock)


def save(root: Path, step: int, *, ranks: int = 1, state: bool = True, loss: float = 0.5) -> Path:
    """A checkpoint as a Trainer writes it, file after file."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(RNG)
    (folder / "training_args.bin").write_bytes(RNG)
    (folder / "optimizer.pt").write_bytes(RNG)
    (folder / "scheduler.pt").write_bytes(RNG)
    for rank in range(ranks):
        (folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth")).write_bytes(RNG)
    if state:
        told = {"global_step": step, "epoch": 1.0, "log_history": [{"loss": loss, "step": step}]}
        (folder / trainer.STATE).write_text(json.dumps(told))
    return folder


def names(found: list[Found]) -> list[str]:
    return [one.name for one in found]


def finished(watch: Watch, root: Path, *patterns: str, **options: Any) -> list[str]:
    return names(watch.finished([look(root, patterns)], **options))


def test_a_trainers_save_counts_once_its_state_is_there_and_only_once(tmp_path: Path, watch: Watch) -> None:
    save(tmp_path, 4, state=False)
    assert finished(watch, tmp_path) == []
    save(tmp_path, 4, loss=0.25)
    (found,) = watch.finished([look(tmp_path)])
    assert (found.name, found.kind, found.step(), found.told()) == ("checkpoint-4", "trainer", 4, (1, {"loss": 0.25}))
    torchs = {"pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert set(found.sizes) == {"config.json", *torchs, "trainer_state.json"}
    watch.take(found)
    assert finished(watch, tmp_path) == []


@pytest.mark.parametrize("lost", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin", "trainer_state.json"])
def test_a_trainers_save_without_a_part_is_unfinished_however_quiet(tmp_path: Path, watch: Watch, clock: Clock, lost: str) -> None:
    (save(tmp_path, 4) / lost).unlink()
    assert finished(watch, tmp_path) == []
    clock.now += 1000
    assert finished(watch, tmp_path) == []
    assert finished(watch, tmp_path, still=True) == []
    (found,) = watch.unfinished([look(tmp_path)])
    assert any(lost in lacking or "weights" in lacking for lacking in found.lacking())


def test_weights_alone_are_whole_when_nothing_else_was_begun(tmp_path: Path, watch: Watch) -> None:
    folder = save(tmp_path, 4)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).unlink()
    assert finished(watch, tmp_path) == ["checkpoint-4"]


def test_other_ranks_are_waited_for(tmp_path: Path, clock: Clock) -> None:
    watch = Watch(30.0, clock, world_size=2)
    folder = save(tmp_path, 4, ranks=2)
    (folder / "rng_state_1.pth").rename(tmp_path / "late")
    assert finished(watch, tmp_path) == []
    (tmp_path / "late").rename(folder / "rng_state_1.pth")
    assert finished(watch, tmp_path) == ["checkpoint-4"]


def test_ranks_of_another_node_are_not_waited_for_for_ever(tmp_path: Path, clock: Clock) -> None:
    watch = Watch(30.0, clock, world_size=4)
    save(tmp_path, 4, ranks=2)
    assert finished(watch, tmp_path) == []
    clock.now += 31
    assert finished(watch, tmp_path) == ["checkpoint-4"]


def test_when_nobody_knows_the_number_of_ranks_quiet_decides(tmp_path: Path, watch: Watch, clock: Clock) -> None:
    save(tmp_path, 4, ranks=2)
    assert finished(watch, tmp_path) == []
    clock.now += 29
    (tmp_path / "checkpoint-4" / "rng_state_2.pth").write_bytes(RNG)
    assert finished(watch, tmp_path) == []
    clock.now += 29
    assert finished(watch, tmp_path) == []
    clock.now += 2
    assert finished(watch, tmp_path) == ["checkpoint-4"]


def test_a_save_over_an_older_one_waits_for_the_new_state(tmp_path: Path, watch: Watch) -> None:
    folder = save(tmp_path, 4)
    watch.take(watch.finished([look(tmp_path)])[0])
    newer = os.stat(folder / trainer.STATE).st_mtime_ns + 10**9
    (folder / "pytorch_model.bin").write_bytes(RNG)
    os.utime(folder / "pytorch_model.bin", ns=(newer, newer))
    assert finished(watch, tmp_path) == []
    os.utime(folder / trainer.STATE, ns=(newer, newer))
    assert finished(watch, tmp_path) == ["checkpoint-4"]


def test_deepspeed_needs_latest_and_every_ranks_part(tmp_path: Path, clock: Clock) -> None:
    watch = Watch(30.0, clock, world_size=2)
    folder = save(tmp_path, 4, ranks=2)
    (folder / "optimizer.pt").unlink()
    (folder / "global_step4").mkdir()
    for rank in range(2):
        (folder / "global_step4" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(RNG)
    (folder / "global_step4" / "mp_rank_00_model_states.pt").write_bytes(RNG)
    assert finished(watch, tmp_path) == []
    (folder / "latest").write_text("global_step4")
    later = os.stat(folder / "latest").st_mtime_ns
    os.utime(folder / trainer.STATE, ns=(later, later))
    assert finished(watch, tmp_path) == ["checkpoint-4"]
    (folder / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert finished(watch, tmp_path) == []


# What deepspeed 0.19.8 wrote for two ranks over gloo below ``checkpoint-<step>/`` of transformers 5.24, by ZeRO stage. With bf16 the
# parts of the optimizer have the name ``bf16_zero_pp_rank_…``. Each file with the model's states says how many ranks there were.
DEEPSPEED = {
    0: ["mp_rank_00_model_states.pt"],
    2: ["mp_rank_00_model_states.pt", *(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))],
    3: [f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in range(2) for kind in ("model", "optim")],
}


@pytest.mark.parametrize("stage", DEEPSPEED)
@pytest.mark.parametrize("world_size", [None, 2])
def test_each_file_of_what_deepspeed_writes_is_needed(tmp_path: Path, clock: Clock, stage: int, world_size: int | None) -> None:
    folder = save(tmp_path, 2, ranks=2)
    for name in ("optimizer.pt", "pytorch_model.bin"):
        (folder / name).unlink()  # with ZeRO-3 there are no weights beside
    (folder / "latest").write_text("global_step2")
    (folder / "global_step2").mkdir()
    for name in DEEPSPEED[stage]:
        told = {"dp_world_size": 2, "mp_world_size": 1, "global_steps": 2} if "model_states" in name else {"optimizer_state_dict": {}}
        torch.save(told, folder / "global_step2" / name)
    state = folder / trainer.STATE
    state.write_bytes(state.read_bytes())  # it comes last
    watch = Watch(30.0, clock, world_size)
    assert finished(watch, tmp_path, still=True) == ["checkpoint-2"]
    for path in [folder / "latest", *(folder / "global_step2" / name for name in DEEPSPEED[stage])]:
        path.rename(tmp_path / "aside")
        assert finished(watch, tmp_path, still=True) == [], path
        (found,) = watch.unfinished([look(tmp_path)])
        assert all("global_step2" in lacking or lacking == "latest" for lacking in found.lacking(world_size))
        (tmp_path / "aside").rename(path)


def test_deepspeed_with_ranks_that_share_the_model_needs_each_ones_part(tmp_path: Path, clock: Clock) -> None:
    folder = save(tmp_path, 2, ranks=4)
    (folder / "optimizer.pt").unlink()
    (folder / "latest").write_text("global_step2")
    (folder / "global_step2").mkdir()
    for model in range(2):
        torch.save({"dp_world_size": 2, "mp_world_size": 2}, folder / "global_step2" / f"mp_rank_0{model}_model_states.pt")
        for data in range(2):
            torch.save({}, folder / "global_step2" / f"bf16_zero_pp_rank_{data}_mp_rank_0{model}_optim_states.pt")
    watch = Watch(30.0, clock, 4)
    assert finished(watch, tmp_path, still=True) == ["checkpoint-2"]
    (folder / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    assert finished(watch, tmp_path, still=True) == []


def test_dcp_counts_when_every_file_of_its_metadata_is_there(tmp_path: Path, watch: Watch) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one rank is meant
        dcp_save({"x": torch.ones(1000), "step": 3}, storage_writer=FileSystemWriter(tmp_path / "step-30"), no_dist=True)
    (found,) = watch.finished([look(tmp_path)])
    assert (found.name, found.kind, found.step()) == ("step-30", "dcp", 30)
    (shard,) = (tmp_path / "step-30").glob("*.distcp")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert finished(watch, tmp_path, still=True) == []
    (found,) = watch.unfinished([look(tmp_path)])
    assert "bytes, .metadata names" in found.lacking()[0]
    shard.write_bytes(whole)
    (tmp_path / "step-30" / ".metadata").unlink()
    assert finished(watch, tmp_path, still=True) == []


def test_lightning_needs_quiet_and_the_end_of_its_zip(tmp_path: Path, watch: Watch, clock: Clock) -> None:
    path = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "epoch=1-step=40.ckpt"
    path.parent.mkdir(parents=True)
    state = {"epoch": 1, "global_step": 41, "callbacks": {"ModelCheckpoint": {"monitor": "loss", "current_score": 0.5}}}
    torch.save({**state, "state_dict": {"w": torch.ones(1000)}}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert finished(watch, tmp_path) == []
    clock.now += 31
    assert finished(watch, tmp_path) == []
    path.write_bytes(whole)
    assert finished(watch, tmp_path) == []
    clock.now += 31
    (found,) = watch.finished([look(tmp_path)])
    assert (found.kind, found.step(), found.told()) == ("lightning", 41, (1, {"loss": 0.5}))
    assert found.sizes == {"epoch=1-step=40.ckpt": len(whole)}


def test_a_link_to_a_save_elsewhere_is_one_and_one_to_anything_else_is_not_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "out", tmp_path / "scratch"
    root.mkdir()
    (elsewhere / "data").mkdir(parents=True)
    (elsewhere / "data" / "a.txt").write_text("a sample")
    save(elsewhere, 4)
    (root / "checkpoint-4").symlink_to(elsewhere / "checkpoint-4")
    (root / "data").symlink_to(elsewhere / "data")
    (root / "up").symlink_to(tmp_path)
    (root / "nowhere").symlink_to(tmp_path / "nowhere")
    seen = look(root)
    assert [found.name for found in seen.found] == ["checkpoint-4"]
    assert seen.found[0].lacking() == []
    assert seen.links == (root / "data",)
    assert seen.others == {}


def test_a_link_to_the_last_one_is_no_checkpoint_of_its_own(tmp_path: Path) -> None:
    torch.save({"global_step": 1}, tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    seen = look(tmp_path)
    assert names(list(seen.found)) == ["a.ckpt"]
    assert seen.others == {}


def test_accelerate_is_finished_when_quiet(tmp_path: Path, watch: Watch, clock: Clock) -> None:
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    for name in ("model.safetensors", "optimizer.bin", "random_states_0.pkl"):
        (folder / name).write_bytes(RNG)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert finished(watch, tmp_path) == []
    clock.now += 31
    (found,) = watch.finished([look(tmp_path)])
    assert (found.kind, found.step()) == ("accelerate", 500)


def test_a_directory_with_a_trainers_name_and_nothing_of_a_trainer_is_finished_when_quiet(
    tmp_path: Path, watch: Watch, clock: Clock
) -> None:
    folder = tmp_path / "checkpoint-9"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert finished(watch, tmp_path) == []
    clock.now += 31
    (found,) = watch.finished([look(tmp_path)])
    assert (found.kind, found.step()) == ("pattern", 9)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "latest.pt"):  # names that any program may choose
        (folder / name).write_bytes(RNG)
    assert finished(watch, tmp_path) == []
    clock.now += 31
    assert finished(watch, tmp_path) == ["checkpoint-9"]
    (folder / "training_args.bin").write_bytes(RNG)  # it is a Trainer that is slow
    assert finished(watch, tmp_path, still=True) == []


def test_a_pattern_names_files_or_directories_and_quiet_decides(tmp_path: Path, watch: Watch, clock: Clock) -> None:
    (tmp_path / "weights-7.npz").write_bytes(b"x")
    (tmp_path / "iter_0000012").mkdir()
    (tmp_path / "iter_0000012" / "model.bin").write_bytes(b"x")
    (tmp_path / "iter_0000012" / "meta.json").write_text("{")
    patterns = ("*.npz", "iter_*")
    assert finished(watch, tmp_path, *patterns) == []
    clock.now += 31
    found = watch.finished([look(tmp_path, patterns)])
    assert [(one.name, one.step(), one.tells_its_end()) for one in found] == [("weights-7.npz", 7, False)]
    (tmp_path / "iter_0000012" / "meta.json").write_text("{}")
    clock.now += 1
    assert finished(watch, tmp_path, *patterns) == ["weights-7.npz"]
    clock.now += 31
    assert finished(watch, tmp_path, *patterns) == ["weights-7.npz", "iter_0000012"]


def test_what_belongs_to_no_checkpoint_is_told_apart(tmp_path: Path) -> None:
    save(tmp_path, 4)
    save(tmp_path, 5).rename(tmp_path / "checkpoint-5.incomplete")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.out.tfevents.1").write_bytes(b"1234")
    (tmp_path / "README.md").write_text("x")
    (tmp_path / ".restoring-7").mkdir()
    (tmp_path / ".restoring-7" / "model.bin").write_bytes(b"x")
    seen: Look = look(tmp_path)
    assert names(list(seen.found)) == ["checkpoint-4"]
    assert {path: size for path, (_, size, _) in seen.others.items()} == {"README.md": 1, "runs/events.out.tfevents.1": 4}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=2-step=300.ckpt", 300),
        ("iter_0000120", 120),
        ("checkpoint-7", 7),
        ("run3/global_step80", 80),
        ("run3/weights", 3),
        ("model_e2_final.pt", 2),
        ("epoch=3-loss=0.25.ckpt", 3),
        ("weights.h5", None),
        ("last.ckpt", None),
    ],
)
def test_the_step_in_a_name(name: str, step: int | None) -> None:
    assert step_in(name) == step


def test_circles_of_links_end(tmp_path: Path, watch: Watch) -> None:
    (save(tmp_path, 4) / "self").symlink_to(tmp_path / "checkpoint-4")
    assert finished(watch, tmp_path) == ["checkpoint-4"]


def test_what_is_removed_under_a_look_is_gone_and_not_unreadable(tmp_path: Path, watch: Watch) -> None:
    for step in (4, 5, 6):
        save(tmp_path, step)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("x")
    asked = 0

    def remove() -> bool:
        """At each place where a look can be interrupted, somewhere else something vanishes."""
        nonlocal asked
        asked += 1
        if asked == 4:
            shutil.rmtree(tmp_path / "checkpoint-5")  # listed, and not entered yet
            shutil.rmtree(tmp_path / "logs")
        if asked == 8:
            (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
        return False

    seen = look(tmp_path, over=remove)
    assert (seen.unreadable, seen.cut, seen.others) == ({}, None, {})
    assert names(watch.finished([seen])) == ["checkpoint-4"]
    assert asked > 8


def test_a_look_ends_when_the_time_is_over_and_says_where(tmp_path: Path, watch: Watch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    left = iter((*[False] * 10, *[True] * 100))
    seen = look(tmp_path, over=lambda: next(left))
    assert names(list(seen.found)) == ["checkpoint-1"]
    assert seen.cut is not None
    assert seen.cut.is_relative_to(tmp_path / "checkpoint-2")
    assert watch.finished([seen], over=lambda: True) == []
    assert watch.left == [tmp_path / "checkpoint-1"]
    assert finished(watch, tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert watch.left == []


def test_what_cannot_be_read_is_told_and_makes_its_checkpoint_unfinished(tmp_path: Path, watch: Watch, as_nobody: Any) -> None:
    for step in (4, 5):
        save(tmp_path, step)
    closed = [tmp_path / "closed", tmp_path / "checkpoint-5" / "global_step5", tmp_path / "checkpoint-6", tmp_path / "blind"]
    for folder in closed:
        folder.mkdir()
    (closed[3] / "a.log").write_text("listed, and its size cannot be asked for")
    for folder in closed[:3]:
        folder.chmod(0)
    closed[3].chmod(0o744)

    def attempt() -> str:
        seen = look(tmp_path)
        told = [*names(watch.finished([seen], still=True)), *(found.lacking()[0] for found in watch.unfinished([seen]))]
        return json.dumps([sorted(map(str, seen.unreadable)), told, list(seen.others)])

    unreadable, told, others = json.loads(as_nobody(attempt))
    assert unreadable == sorted(map(str, [*closed[:3], closed[3] / "a.log"]))
    assert told == ["checkpoint-4", f"{closed[1]} (Permission denied)"]
    assert others == []
