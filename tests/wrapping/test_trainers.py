"""``stagekit run`` around real trainers that know nothing of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .machine import Machine

HF, LIGHTNING = (str(Path(__file__).with_name(name)) for name in ("hf.py", "lit.py"))


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
