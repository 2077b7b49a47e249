"""Each example as it stands, on tiny data: lost after an epoch and started again on another machine, it ends as if nothing had happened."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from .machines import EXAMPLES, HERE, Cloud, Machine

SMALL = {"CLASSES": 2, "SIDE": 16, "WIDTH": 4, "BATCH": 8, "EPOCHS": 3, "THREADS": 2}


def lost_and_resumed(cloud: Cloud, program: str, line: str, **environ: Any) -> tuple[str, str, str]:
    """What a training says that nothing interrupts, one that loses its machine at a ``line`` of its second epoch, and its second half.

    The runs are ``runs/PROGRAM-straight`` and ``runs/PROGRAM``.
    """
    run = f"runs/{program}"
    straight = cloud.run(f"{program}-straight", EXAMPLES / f"{program}.py", RUN=f"{cloud.url}/{run}-straight", **environ)
    lost = cloud.run(f"{program}-1", EXAMPLES / f"{program}.py", RUN=f"{cloud.url}/{run}", POWER_CUT=cloud.cut(run, line), **environ)
    assert len(cloud.checkpoints(run)) == 1, "the second epoch was lost with the machine"
    resumed = cloud.run(f"{program}-2", EXAMPLES / f"{program}.py", RUN=f"{cloud.url}/{run}", **environ)
    assert [straight.codes, lost.codes, resumed.codes] == [[0], [-signal.SIGKILL], [0]], (straight.said, lost.said, resumed.said)
    return straight.said[0], lost.said[0], resumed.said[0]


def epochs(said: str) -> list[str]:
    """The lines of the epochs, without what differs from one machine to the next."""
    return [re.sub(r" in \d+ request.*|, waited.*", "", line) for line in said.splitlines() if line.startswith("epoch ")]


def test_the_image_classifier_ends_with_the_same_weights(cloud: Cloud) -> None:
    straight, lost, resumed = lost_and_resumed(cloud, "image_classifier", "epoch 2", **SMALL | {"BATCH": 2})
    assert len(epochs(straight)) == 3
    assert epochs(lost) == epochs(straight)[:2]
    assert epochs(resumed) == epochs(straight)[1:]
    assert "epoch 2: 48 of 48 samples in 24 batches" in epochs(straight)[2]
    assert "accuracy 1.0000" in epochs(straight)[2]
    weights = cloud.digests("runs/image_classifier", "model.pt", "optimizer.pt")
    assert weights == cloud.digests("runs/image_classifier-straight", "model.pt", "optimizer.pt")


@pytest.mark.parametrize("program", ["with_lightning", "with_accelerate"])
def test_frameworks_end_with_the_same_losses(cloud: Cloud, program: str) -> None:
    straight, lost, resumed = lost_and_resumed(cloud, program, "epoch 2", **SMALL)
    assert len(epochs(straight)) == 3
    assert epochs(lost) == epochs(straight)[:2]
    assert epochs(resumed) == epochs(straight)[1:]


def test_the_language_model_goes_on_with_fewer_ranks_at_the_next_document(cloud: Cloud) -> None:
    small = {"LAYERS": 1, "HEADS": 2, "WIDTH": 16, "CONTEXT": 32, "BATCH": 8, "EPOCHS": 2, "TELL": 1}
    program, run = HERE / "with_keys.py", "runs/gpt"
    cut = cloud.cut(run, "epoch 1  7 batches left", checkpoints=0, signal=signal.SIGTERM)
    two = cloud.run("gpt-2-ranks", program, ranks=2, POWER_CUT=cut, **small)
    assert two.codes == [143, 143], two.said
    one = cloud.run("gpt-1-rank", program, **small)
    assert one.codes == [0], one.said
    (*_, stopped), (went_on, *_) = (re.findall(r"epoch 1  (\d+) batches left", machine.said[0]) for machine in (two, one))
    assert int(went_on) == int(stopped) - 1 <= 6, "at the very next batch"
    first, rest = keys(two), keys(one)
    assert len(first["0"]) == (12 - int(stopped)) * 8
    assert sorted(first["0"] + rest["0"]) == sorted(rest["1"]) == [f"{number:02}" for number in range(96)]


def keys(machine: Machine) -> dict[str, list[str]]:
    """The documents that were trained on, by epoch."""
    found: dict[str, list[str]] = {}
    for file in machine.directory.glob("keys-*.txt"):
        for line in file.read_text().splitlines():
            epoch, _, documents = line.partition(" ")
            found.setdefault(epoch, []).extend(documents.split())
    return found


def test_lora_brings_its_model_and_goes_on_with_the_same_adapter(cloud: Cloud, lora: str, adapter: dict[str, str]) -> None:
    assert [one.step for one in cloud.checkpoints(lora)] == [12, 8, 4], "the adapter of every epoch"
    lost = {record.path: record.sha256 for record in cloud.checkpoints(lora)[-1].files}
    assert all(lost[name] != digest for name, digest in adapter.items()), "the first machine did not get far"
    assert cloud.digests(lora, *adapter) == adapter


def test_they_are_short_and_their_first_lines_say_how_to_start_them() -> None:
    for program in sorted(EXAMPLES.glob("*.py")):
        lines = program.read_text().splitlines()
        assert len(lines) <= 80, program
        assert re.search(rf"^    .*{program.name}", program.read_text().split('"""')[1], re.MULTILINE), program


def test_the_plain_script_is_the_other_without_stagekit() -> None:
    ours, plain = ((EXAMPLES / name).read_text() for name in ("lora.py", "lora_plain.py"))
    assert "stagekit" not in plain.split('"""', 2)[2]
    begin = "set_seed(0)"
    lines = [text[text.index(begin, text.index("EPOCHS =")) :].splitlines() for text in (ours, plain)]
    assert [line for line in lines[0] if line not in lines[1]] == [line for line in lines[0] if "callback" in line]
    assert len(lines[0]) == len(lines[1])
