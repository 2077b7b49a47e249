"""``stagekit run`` around real trainers that know nothing of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .machine import Machine

HF = str(Path(__file__).with_name("hf.py"))


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
