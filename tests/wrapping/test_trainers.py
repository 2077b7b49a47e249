"""``stagekit run`` around real trainers that know nothing of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stagekit.saves.find import look

from .machine import Machine

HF, LIGHTNING, FSDP = (str(Path(__file__).with_name(name)) for name in ("hf.py", "lit.py", "fsdp.py"))
SHARDED = {
    *(f"{folder}/{name}" for folder in ("pytorch_model_fsdp_0", "optimizer_0") for name in (".metadata", "__0_0.distcp", "__1_0.distcp")),
    *("rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"),
}
"""What transformers 5.24 with Accelerate 1.15 writes for two ranks of FSDP2."""


def test_a_trainer_that_is_killed_goes_on_with_the_same_losses_on_another_machine(tmp_path: Path) -> None:
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    machine = Machine(tmp_path / "machine", str(tmp_path / "bucket" / "run"), quiet)
    straight = tmp_path / "straight.json"
    command = [sys.executable, "-W", "ignore", HF, "out", "losses.json"]
    killed = machine.stagekit(*machine.line([*command, "--straight", str(straight), "--die-at", "7"]))
    assert killed.code == 137, killed.err
    assert machine.steps() == [4]
    other = Machine(tmp_path / "other", machine.url, quiet)
    resumed = other.stagekit(*other.line(command))
    assert resumed.code == 0, resumed.err
    assert f"going on from step 4 of {machine.url}, now in {other.out}/checkpoint-4" in resumed.err
    assert machine.steps()[0] == 12, "the last epoch is in the bucket as well"
    assert not (other.out / "checkpoint-4").exists(), "the trainer rotated it away as ever"
    whole = json.loads(straight.read_text())
    assert len(whole) == 12
    assert json.loads((other.directory / "losses.json").read_text()) == whole


def test_a_lightning_training_goes_on_with_ckpt_path_last(tmp_path: Path) -> None:
    quiet = {"OMP_NUM_THREADS": "1"}
    machine = Machine(tmp_path / "machine", str(tmp_path / "bucket" / "run"), quiet)
    command = [sys.executable, "-W", "ignore", LIGHTNING, "out"]
    killed = machine.stagekit(*machine.line([*command, "--die-at", "2"]))
    assert killed.code == 137, killed.err
    assert "from step 0" in killed.out
    assert set(machine.steps()) == {8}
    other = Machine(tmp_path / "other", machine.url, quiet)
    resumed = other.stagekit(*other.line(command))
    assert resumed.code == 0, resumed.err
    assert "from step 8" in resumed.out
    assert max(machine.steps()) == 12


def test_two_ranks_of_fsdp_under_torchrun_go_on_with_the_same_losses_on_another_machine(tmp_path: Path) -> None:
    """What the real Trainer and Accelerate write is found complete by rule, and not while one of its files is missing."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    machine = Machine(tmp_path / "machine", str(tmp_path / "bucket" / "run"), quiet)
    straight = tmp_path / "straight.json"
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--standalone", "--nproc-per-node", "2", FSDP, "out", "losses.json"]
    lost = machine.stagekit(*machine.line([*command, "--straight", str(straight), "--die-at", "3"]))
    assert lost.code == 1, lost.err
    assert "failed (exitcode: 9)" in lost.err
    assert machine.steps() == [2]
    other = Machine(tmp_path / "other", machine.url, quiet)
    resumed = other.stagekit(*other.line(command))
    assert resumed.code == 0, resumed.err
    assert f"going on from step 2 of {machine.url}, now in {other.out}/checkpoint-2" in resumed.err
    assert machine.steps() == [4, 2]
    whole = json.loads(straight.read_text())
    assert len(whole) == 4
    assert json.loads((other.directory / "losses.json").read_text()) == whole

    last = other.out / "checkpoint-4"

    def lacking() -> list[str]:
        (found,) = (found for found in look(other.out).found if found.path == last)
        assert found.kind == "trainer"
        return found.lacking(world_size=2)

    assert {path.relative_to(last).as_posix() for path in last.rglob("*") if path.is_file()} == SHARDED
    assert lacking() == []
    for name in sorted(SHARDED):
        (last / name).rename(tmp_path / "aside")
        (lack,) = lacking()
        assert lack.startswith(name)
        (tmp_path / "aside").rename(last / name)
    part = last / "optimizer_0" / "__1_0.distcp"
    whole_part = part.read_bytes()
    part.write_bytes(whole_part[:-1])
    assert lacking() == [f"optimizer_0/__1_0.distcp has {len(whole_part) - 1} bytes, .metadata names {len(whole_part)}"]
