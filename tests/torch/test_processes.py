"""Real processes: a gloo group, signals, and workers that are forked after the parent has used S3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stagekit.store.directory import DirectoryStore

from ..stream.build import build, numbered

_RANK = """
import json, sys
import torch.distributed as dist
from stagekit.torch import StreamLoader

data, meeting, rank, world, stop, state = sys.argv[1:]
loader = StreamLoader(data, 4, window=4, drop_last=False)  # made before the group is there
before = len(loader)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world))
if state:
    loader.load_state_dict(json.loads(state))
count, got = len(loader), []
for batch in loader:
    got.append([key for key in batch["__key__"] if key])
    dist.barrier()  # hangs when one rank has fewer batches
    if len(got) == int(stop):
        break
state = loader.state_dict()
states = [None] * int(world)
dist.all_gather_object(states, state)
assert all(other == state for other in states)
print(json.dumps({"before": before, "count": count, "got": got, "state": state}))
dist.destroy_process_group()
"""


def run_group(data: Path, tmp_path: Path, world: int, *, stop: int, state: Any = "") -> list[dict[str, Any]]:
    meeting = tmp_path / f"meeting-{world}-{stop}"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                _RANK,
                str(data),
                str(meeting),
                str(rank),
                str(world),
                str(stop),
                state and json.dumps(state),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for rank in range(world)
    ]
    results = []
    for process in ranks:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err.decode()
        results.append(json.loads(out))
    return results


def test_a_group_of_two_splits_the_data_and_one_rank_reads_what_is_left(tmp_path: Path) -> None:
    data = tmp_path / "digits"
    build(DirectoryStore(data), numbered(61, field="cls"), shards=[20, 30, 11])
    first = run_group(data, tmp_path, 2, stop=3)
    assert [rank["before"] for rank in first] == [16, 16]
    assert [rank["count"] for rank in first] == [8, 8]
    assert [len(rank["got"]) for rank in first] == [3, 3]
    [rest] = run_group(data, tmp_path, 1, stop=-1, state=first[0]["state"])
    keys = [key for rank in (*first, rest) for batch in rank["got"] for key in batch]
    assert sorted(keys) == [f"{number:06d}" for number in range(61)]
    assert rest["state"]["epoch"] == 1


_TRAINING = """
import os, sys, time
from stagekit.store.directory import DirectoryStore
from stagekit.store.base import WrappedStore
from stagekit.torch import StreamLoader

class Slow(WrappedStore):
    def get(self, key, start=0, length=None, *, if_match=None):
        if key.endswith(".tar") and start:
            os.write(1, b"stalled\\n")
            time.sleep(3600)
        return super().get(key, start, length, if_match=if_match)

batches = 0
for batch in StreamLoader(Slow(DirectoryStore(sys.argv[1])), 1, shuffle=False, threads=2, connections=2):
    batches += 1
"""


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_a_process_that_waits_for_data(tmp_path: Path, sent: signal.Signals, status: int) -> None:
    """Every fetch thread hangs in a read for an hour; the process goes nevertheless, and soon."""
    data = tmp_path / "digits"
    build(DirectoryStore(data), numbered(20, field="cls"))
    command = [sys.executable, "-W", "ignore", "-c", _TRAINING, str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "stalled\n"
            process.send_signal(sent)
            began = time.monotonic()
            out, err = process.communicate(timeout=20)
            took_s = time.monotonic() - began
        finally:
            process.kill()
    assert process.returncode == status, (out, err)
    assert sent is not signal.SIGINT or "KeyboardInterrupt" in err
    # Two seconds, of which a machine that others use as well gives a part.
    assert took_s < 2 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


_UNFINISHED = """
import sys
from stagekit.torch import StreamDataset, StreamLoader

data = StreamLoader(sys.argv[1], 1, threads=4) if sys.argv[2] == "loader" else StreamDataset(sys.argv[1])
samples = iter(data)
print(next(samples)["__key__"])
"""


@pytest.mark.parametrize("kind", ["loader", "dataset"])
def test_a_script_that_ends_in_the_middle_of_an_epoch_ends_quietly(tmp_path: Path, kind: str) -> None:
    data = tmp_path / "digits"
    build(DirectoryStore(data), numbered(200, field="cls"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _UNFINISHED, str(data), kind], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
