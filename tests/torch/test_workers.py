"""``workers=``: the same batches from other processes, and an end to them whatever happens."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagekit.errors import UsageError, WorkerDied
from stagekit.store.directory import DirectoryStore
from stagekit.torch import StreamLoader
from stagekit.torch.workers import _packed, _receive, _send, _unpacked

from ..stream.build import build, numbered

# What is sent to a spawned process must be found there by name.


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "cls": sample["cls"] * 2, "x": torch.full((40, 40), float(sample["cls"])), "y": np.arange(3) + sample["cls"]}


def without_thirds(sample: dict[str, Any]) -> dict[str, Any] | None:
    return sample if sample["cls"] % 3 else None


def nothing(sample: dict[str, Any]) -> None:
    return None


def refusing_seven(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 7:
        raise Awkward(7, "seven")
    return sample


class Awkward(Exception):
    """Cannot be unpickled: it is made with other arguments than it keeps."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text} is refused")


def wrong_value(sample: dict[str, Any]) -> dict[str, Any]:
    return {"cls": {}[sample["cls"]]}


def killing_itself(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def drawing(sample: dict[str, Any]) -> dict[str, Any]:
    return {"cls": sample["cls"], "t": torch.rand(()), "n": float(np.random.rand())}


def where(sample: dict[str, Any]) -> dict[str, Any]:
    return {"cls": sample["cls"], "pid": os.getpid()}


@pytest.fixture(autouse=True, scope="module")
def tracker() -> None:
    """Python's own helper process of spawned ones, which stays: it is no leak of ours."""
    resource_tracker.ensure_running()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Forty samples in small blocks, so that a window is not all there is."""
    build(DirectoryStore(tmp_path / "data"), numbered(40, field="cls"))
    return tmp_path / "data"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return bool(one == other)


def shared_memory() -> set[str]:
    """Named pieces of shared memory, of the kinds that Python and torch make."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("stagekit-batch", "torch_", "psm_"))}


def no_children() -> bool:
    return not multiprocessing.active_children()


@pytest.mark.parametrize(("transform", "drop_last"), [(doubled, True), (without_thirds, False)])
def test_batches_and_receipt_are_those_of_threads(data: Path, transform: Any, drop_last: bool) -> None:
    loaders = [StreamLoader(data, 8, transform=transform, drop_last=drop_last, workers=workers) for workers in (0, 2)]
    threads, processes = (list(loader) for loader in loaders)
    assert len(threads) == len(processes)
    assert all(same(one, other) for one, other in zip(threads, processes, strict=True))
    assert [loader.epoch for loader in loaders] == [1, 1]
    receipts = [loader.receipt for loader in loaders]
    assert receipts[0] is not None
    assert receipts[1] is not None
    assert (receipts[0].delivered, receipts[0].dropped, receipts[0].complete) == (
        receipts[1].delivered,
        receipts[1].dropped,
        receipts[1].complete,
    )
    assert no_children()


def test_several_processes_make_them_and_not_this_one(data: Path) -> None:
    pids = [set(batch["pid"].tolist()) for batch in StreamLoader(data, 8, transform=where, workers=2)]
    assert all(len(found) == 1 for found in pids)
    assert len(set.union(*pids)) == 2
    assert os.getpid() not in set.union(*pids)


def test_a_batch_may_be_written_to_and_kept(data: Path) -> None:
    files = len(os.listdir("/proc/self/fd"))
    batches = list(StreamLoader(data, 8, transform=doubled, shuffle=False, workers=1))
    assert len(os.listdir("/proc/self/fd")) <= files + 1  # a kept batch keeps no descriptor
    batches[0]["x"] += 1
    assert batches[0]["x"][3, 0, 0] == 4.0
    assert batches[1]["x"][0, 0, 0] == 8.0


def test_a_state_counts_what_was_taken_and_goes_on_with_any_number_of_workers(data: Path) -> None:
    whole = [batch["__key__"] for batch in StreamLoader(data, 4, transform=doubled)]
    first = StreamLoader(data, 4, transform=doubled, workers=2)
    got = []
    for batch in first:
        got.append(batch["__key__"])
        if len(got) == 3:
            break
    second = StreamLoader(data, 4, transform=doubled, workers=1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert got + [batch["__key__"] for batch in second] == whole


def test_random_transforms_give_the_same_with_any_number_of_workers_and_after_a_resume(data: Path) -> None:
    def run(workers: int, seed: int = 0, state: Any = None) -> list[tuple[list[float], list[float]]]:
        loader = StreamLoader(data, 8, transform=drawing, workers=workers, seed=seed)
        if state is not None:
            loader.load_state_dict(state)
        return [(batch["t"].tolist(), batch["n"].tolist()) for batch in loader]

    one = run(1)
    assert one[0] != one[1]
    loader = StreamLoader(data, 8, transform=drawing, workers=2)
    assert [(batch["t"].tolist(), batch["n"].tolist()) for batch, _ in zip(loader, range(2), strict=False)] == one[:2]
    state = loader.state_dict()
    assert run(2, state=state) == one[state["batches"] :]
    assert run(1, seed=1)[0] != one[0]


def test_an_error_comes_in_its_batch_s_place_with_the_worker_s_traceback(data: Path) -> None:
    loader = StreamLoader(data, 4, shuffle=False, transform=wrong_value, workers=2)
    with pytest.raises(KeyError) as caught:
        list(loader)
    shown = "".join(traceback.format_exception(caught.value))
    assert "raised in worker process" in shown
    assert 'return {"cls": {}[sample["cls"]]}' in shown
    assert "raised by transform for the sample" in shown
    assert no_children()


def test_an_error_that_cannot_be_sent_is_told_as_text(data: Path) -> None:
    got = 0
    with pytest.raises(RuntimeError, match="Awkward: seven is refused") as caught:
        for _ in StreamLoader(data, 4, shuffle=False, transform=refusing_seven, workers=2):
            got += 1
    assert got == 1
    assert "raised in worker process" in "".join(caught.value.__notes__)


def test_a_worker_that_is_killed_is_an_error_and_never_a_hang(data: Path) -> None:
    with pytest.raises(
        WorkerDied, match=r"worker process 0 of 2 \(pid \d+\) was killed by SIGKILL while it made a batch: perhaps .* memory"
    ):
        list(StreamLoader(data, 4, shuffle=False, transform=killing_itself, workers=2))
    assert no_children()


def test_leaving_early_ends_the_processes(data: Path) -> None:
    loader = StreamLoader(data, 4, transform=doubled, workers=2)
    for _ in loader:
        assert len(multiprocessing.active_children()) == 2
        break
    assert no_children()


def test_what_cannot_be_sent_is_refused_in_words(data: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"workers: transform, decode and collate are sent .* define it at the top of a module"):
        list(StreamLoader(data, 4, transform=lambda sample: (lock, sample), workers=1))
    with pytest.raises(UsageError, match="workers: -1 is below 0"):
        StreamLoader(data, 4, workers=-1)


def test_a_batch_with_nothing_in_it_is_refused_or_masked(data: Path) -> None:
    with pytest.raises(UsageError, match=r"every sample of .* was dropped or skipped, so that there was no batch"):
        list(StreamLoader(data, 4, transform=nothing, workers=1))


def test_whatever_a_batch_may_hold_arrives_as_it_was() -> None:
    batch = {
        "__key__": ["a", "b"],
        "bytes": [b"", b"x" * 100_000],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "half": torch.arange(60_000, dtype=torch.bfloat16).reshape(3, 20_000),
        "turned": torch.arange(50_000).reshape(100, 500).T,
        "flags": torch.arange(5) < 3,
        "array": np.arange(30_000, dtype=np.float64).reshape(3, -1),
        "learned": torch.ones(3, requires_grad=True),
        "complex": torch.view_as_complex(torch.randn(10_000, 2)).conj(),
        "nested": [{"a": torch.ones(9000)}, None, ("t", 1)],
    }
    here, there = multiprocessing.get_context("spawn").Pipe()
    try:
        sender = threading.Thread(target=_send, args=(here, *_packed(batch)))
        sender.start()
        message = _receive(there)
        sender.join()
        assert message is not None
        found = _unpacked(*message)
    finally:
        here.close()
        there.close()
    assert list(found) == list(batch)
    for name in ("empty", "scalar", "half", "turned", "flags", "learned", "complex"):
        assert found[name].dtype == batch[name].dtype  # type: ignore[attr-defined]
        assert torch.equal(found[name], batch[name]), name  # type: ignore[arg-type]
    assert found["learned"].requires_grad
    assert np.array_equal(found["array"], batch["array"])  # type: ignore[arg-type]
    assert torch.equal(found["nested"][0]["a"], torch.ones(9000))
    assert found["nested"][1:] == [None, ("t", 1)]
    assert found["bytes"] == batch["bytes"]


_TRAINER = """
import sys, time
from tests.torch.test_workers import doubled
from stagekit.store.directory import DirectoryStore
from stagekit.torch import StreamLoader

if __name__ == "__main__":
    import multiprocessing
    for number, batch in enumerate(StreamLoader(sys.argv[1], 4, transform=doubled, workers=2)):
        if number == 0:
            continue  # the second worker may not have begun yet
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        if sys.argv[2] == "wait":
            time.sleep(60)
        break
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_when_the_trainer_is_stopped(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    before = shared_memory()
    script = tmp_path / "train.py"
    script.write_text(_TRAINER)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(script), str(data), "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        pids = [int(text) for text in process.stdout.readline().split()]
        assert len(pids) == 2
        if number is signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        process.wait(60)
        noise = process.stderr.read()
    for pid in pids:
        _wait_until_gone(pid)
    assert "worker" not in noise, noise
    assert shared_memory() <= before


def _wait_until_gone(pid: int) -> None:
    """Where it is not our child, its end is seen through a descriptor of it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        import select

        assert select.select([descriptor], [], [], 20)[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)


def test_what_is_sent_can_be_pickled_with_every_decoder(data: Path) -> None:
    loader = StreamLoader(data, 4, decode={"cls": int})
    copy = pickle.loads(pickle.dumps(loader._plan.make))
    assert copy.decoder({"__key__": "a", "cls": b"5"}) == {"__key__": "a", "cls": 5}
