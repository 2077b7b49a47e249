"""Real Accelerate: ``save_state`` into a run, ``load_state`` from it on the next machine, by one process and by two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from stagekit.errors import Denied, UploadFailed
from stagekit.hooks.accelerate import load_state, save_state
from stagekit.hooks.loop import Run
from stagekit.runs import catalog
from stagekit.store.directory import DirectoryStore
from stagekit.testing.faults import FaultStore

from .machines import group
from .toolkit import BATCHES, EPOCHS, Stop, accelerate, net


def test_every_epoch_is_in_the_bucket_and_another_machine_goes_on_to_the_same_weights(
    make_run: Callable[..., Run], store: FaultStore, tmp_path: Path
) -> None:
    def stop(step: int) -> None:
        if step == 2 * BATCHES + 1:
            raise Stop

    straight = accelerate(None, tmp_path, seed=1)
    run = make_run()
    with pytest.raises(Stop):
        accelerate(run, tmp_path, seed=1, stop=stop)
    run.close()
    second = make_run()
    assert accelerate(second, tmp_path, seed=5) == straight
    second.close()
    found = catalog.read_all(store).checkpoints
    assert [(one.step, one.epoch) for one in found] == [(BATCHES * epoch, epoch) for epoch in range(EPOCHS, 0, -1)]
    assert {record.path for record in found[0].files} == {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"}
    assert found[0].metrics.keys() == {"loss"}


def test_two_ranks_go_on_together(tmp_path: Path) -> None:
    lost = group(tmp_path, "one", "toolkit", "accelerate", "w", "--straight", "--stop-at", str(BATCHES + 2))
    assert lost.codes == [9, 9], lost.said
    (found,) = catalog.read_all(DirectoryStore(tmp_path / "run")).checkpoints
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= {record.path for record in found.files}
    done = group(tmp_path, "two", "toolkit", "accelerate", "w", "--seed", "3")
    assert done.codes == [0, 0], done.said
    for rank in "01":
        assert (done.directory / f"w.{rank}").read_bytes() == (lost.directory / f"w.straight.{rank}").read_bytes()


class Counter:
    """Something of the user's own that is registered for checkpointing."""

    def __init__(self) -> None:
        self.count = 0
        self.broken = False

    def state_dict(self) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("cannot be saved now")
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_save_that_fails_commits_nothing_and_the_next_one_does(make_run: Callable[..., Run], store: FaultStore) -> None:
    accelerator = Accelerator(cpu=True)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    run = make_run()
    counter.broken = True
    with pytest.raises(RuntimeError, match="cannot be saved now"):
        save_state(accelerator, run, step=1)
    counter.broken, counter.count = False, 7
    save_state(accelerator, run, step=2)
    run.close()
    assert [one.step for one in catalog.read_all(store).checkpoints] == [2]
    counter.count = 0
    again = make_run()
    found = load_state(accelerator, again)
    assert found is not None
    assert (found.step, counter.count) == (2, 7)
    again.close()


def test_what_is_refused_in_the_background_is_raised_at_the_next_save_and_at_the_end(
    make_run: Callable[..., Run], refuse: Callable[[], list[str]]
) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net(0))
    assert isinstance(model, torch.nn.Module)
    refusing = refuse()
    run = make_run()
    save_state(accelerator, run, step=1)
    with pytest.raises(UploadFailed):
        run.drain()
    with pytest.raises(UploadFailed, match=r"step 1 is not in .* yet, its local copy is kept: no"):
        save_state(accelerator, run, step=2)
    assert run.status().pending == (1, 2)
    refusing.clear()
    run.close()


def test_a_run_that_cannot_be_seen_is_no_new_run(make_run: Callable[..., Run], store: FaultStore) -> None:
    accelerator = Accelerator(cpu=True)
    assert load_state(accelerator, make_run()) is None
    store.fail("children", Denied("no"), times=None)
    with pytest.raises(Denied):
        load_state(accelerator, make_run())
    assert load_state(accelerator, make_run(), allow_fresh=True) is None
