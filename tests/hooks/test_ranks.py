"""Several ranks, one commit: everybody's generators in it, and nobody goes on alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from stagekit.errors import UsageError
from stagekit.hooks.loop import Run
from stagekit.hooks.ranks import Ranks
from stagekit.runs import catalog
from stagekit.store.directory import DirectoryStore

from .group import TERM_AT

ROOT = Path(__file__).parents[2]


def group(tmp_path: Path, name: str, epochs: int, *, world_size: int = 2, seed: int = 1, **more: str) -> tuple[list[int], list[bytes], str]:
    """Run the group on a machine called ``name``: exit codes, what each rank ended with, and everything they said."""
    machine = tmp_path / name
    machine.mkdir(parents=True)
    processes = []
    for rank in range(world_size):
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size), "STAGEKIT_HOME": str(machine / "home")}
        environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}
        arguments = [str(tmp_path / "run"), str(machine / "init"), str(machine / "out"), str(epochs), str(seed)]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.hooks.group", *arguments], cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True
            )
        )
    said = [process.communicate(timeout=150)[1] for process in processes]
    outs = [machine / f"out.{rank}" for rank in range(world_size)]
    return [process.returncode for process in processes], [out.read_bytes() if out.exists() else b"" for out in outs], "".join(said)


def test_two_ranks_go_on_together_and_a_single_one_can_take_over(tmp_path: Path) -> None:
    straight = group(tmp_path / "straight", "one", 3)
    assert straight[0] == [0, 0], straight[2]
    assert straight[1][0] != straight[1][1], "each rank has a generator of its own"
    first = group(tmp_path, "one", 1, EVERY="yes")
    assert first[0] == [0, 0], first[2]
    checkpoints = catalog.read_all(DirectoryStore(tmp_path / "run"))
    assert [(one.step, one.epoch) for one in checkpoints.checkpoints] == [(12, 1), (10, 0)], "time-based saves are agreed on"
    assert checkpoints.uncommitted == ()
    assert {record.path for record in checkpoints.checkpoints[0].files} == {
        "loader.json",
        "model.pt",
        "optimizer.pt",
        "progress.json",
        "rng-0.pt",
        "rng-1.pt",
    }
    second = group(tmp_path, "two", 3, seed=9)
    assert second[0] == [0, 0], second[2]
    assert second[1] == straight[1]
    alone = group(tmp_path, "three", 4, world_size=1, seed=5)
    assert alone[0] == [0], alone[2]
    assert "it was saved by 2 ranks, now there are 1" in alone[2]
    wider = group(tmp_path, "four", 5, seed=6)
    assert wider[0] == [0, 0], wider[2]
    assert "was saved by fewer ranks and has no random state for rank 1" in wider[2]


@pytest.mark.parametrize("late", ["sending", "loading"])
def test_a_rank_that_needs_longer_than_the_groups_timeout_to_begin_is_waited_for(tmp_path: Path, late: str) -> None:
    assert group(tmp_path, "one", 1)[0] == [0, 0]
    again = group(tmp_path, "two", 2, seed=9, TIMEOUT_S="3", LATE=late)
    assert again[0] == [0, 0], again[2]
    assert group(tmp_path / "straight", "one", 2)[1] == again[1]


def test_ranks_that_give_no_sign_of_life_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store, slept = dist.HashStore(), []
    beats = iter([5] * 40)

    def sleep(time_s: float) -> None:
        slept.append(time_s)
        if next(beats, None) is not None:
            store.add("stagekit-busy", 1)  # another rank is at work

    ranks = Ranks(0, 2, monotonic=lambda: 10.0 * len(slept), sleep=sleep)
    monkeypatch.setattr(ranks, "_shared", lambda: store)
    ranks._meet()
    assert len(slept) == 40 + 31, "a little more than the five minutes after the last sign"
    assert max(slept) == 1.0


def test_when_rank_0_cannot_see_the_run_no_rank_trains(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"no directory")
    codes, outs, said = group(tmp_path, "one", 1)
    # gloo now and then aborts a process that ends while the one at its other end does.
    assert all(code in (1, -signal.SIGABRT) for code in codes), codes
    assert outs == [b"", b""]
    assert said.count("Traceback") >= 2


def test_several_ranks_need_a_process_group(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", rank=0, world_size=2, on_event=lambda _: None)
    with pytest.raises(UsageError, match=r"with 2 ranks needs torch\.distributed\.init_process_group\(\) before it"):
        next(run.epochs(1, state={}))
    run.close()


def saved(tmp_path: Path) -> list[tuple[int, int | None]]:
    return [(one.step, one.epoch) for one in catalog.read_all(DirectoryStore(tmp_path / "run")).checkpoints]


@pytest.mark.parametrize("steps", ["with loader", "without loader"])
def test_sigterm_to_one_rank_stops_a_plain_loop_at_the_next_step(tmp_path: Path, steps: str) -> None:
    codes, _, said = group(tmp_path, "one", 3, TERM_RANK="1", STEPS=steps)
    assert codes == [143, 143], said
    # Without a loader in the state there is nothing to save inside an epoch; it has stopped there all the same.
    assert saved(tmp_path) == ([(TERM_AT + 2, 0)] if steps == "with loader" else [])


def test_sigterm_to_one_rank_stops_all_of_them_inside_the_epoch_also_without_every(tmp_path: Path) -> None:
    codes, _, said = group(tmp_path, "one", 3, TERM_RANK="1")
    assert codes == [143, 143], said
    assert saved(tmp_path) == [(TERM_AT + 2, 0)], "behind the step after the one in which it came"
    straight = group(tmp_path / "straight", "one", 1)
    again = group(tmp_path, "two", 1, seed=9)
    assert again[0] == [0, 0], again[2]
    assert again[1] == straight[1], "and it goes on there, with everybody's generators"
