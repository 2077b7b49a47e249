"""Limits on requests and bytes a second: over threads, stores and processes, whoever is killed or stopped."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagekit.config import StoreConfig
from stagekit.errors import Throttled, UsageError
from stagekit.store import open_store
from stagekit.store.base import Data, ObjectInfo, WrappedStore
from stagekit.store.limits import Limits, limits_path
from stagekit.store.memory import MemoryStore
from stagekit.store.retry import RetryStore

from ..conftest import S3Place


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def test_requests_are_spaced_and_a_pause_is_followed_by_no_burst(tmp_path: Path) -> None:
    clock = Clock()
    limits = Limits(tmp_path / "limits", requests_per_s=250, clock=clock, sleep=clock.sleep)
    for _ in range(251):
        limits.wait()
    assert clock.now_s == pytest.approx(1001)
    clock.now_s += 3600
    for _ in range(251):
        limits.wait()
    assert clock.now_s == pytest.approx(1001 + 3600 + 1)


def test_bytes_are_paid_before_they_go_and_those_that_came_unannounced_afterwards(tmp_path: Path) -> None:
    clock = Clock()
    limits = Limits(tmp_path / "limits", bytes_per_s=10e6, clock=clock, sleep=clock.sleep)
    for _ in range(3):
        limits.wait(5_000_000)
    assert clock.now_s == pytest.approx(1001)
    limits.charge(20_000_000)
    assert clock.now_s == pytest.approx(1001)
    limits.wait(0)  # what carries nothing does not wait for bytes
    assert clock.now_s == pytest.approx(1001)
    limits.wait(1)
    assert clock.now_s == pytest.approx(1003.5)


def test_bytes_that_went_are_paid_for_together_and_whoever_is_alone_has_all_of_the_rate(tmp_path: Path) -> None:
    clock = Clock()
    first, second = (Limits(tmp_path / "limits", bytes_per_s=1e6, holders=2, clock=clock, sleep=clock.sleep) for _ in range(2))
    for _ in range(3):
        first.pay(1_000_000)
    assert clock.now_s == pytest.approx(1003)
    waits: list[float] = []
    Limits(tmp_path / "limits", bytes_per_s=1e6, holders=2, clock=clock, sleep=waits.append).pay(2_000_000)  # another process, meanwhile
    second.pay(500_000)
    assert waits == [pytest.approx(2)]
    assert clock.now_s == pytest.approx(1005.5)
    first.pay(0)
    assert clock.now_s == pytest.approx(1005.5)
    (tmp_path / "a file").touch()
    Limits(tmp_path / "a file" / "limits", bytes_per_s=1e6, holders=2, clock=clock, sleep=clock.sleep).pay(1_000_000)
    assert clock.now_s == pytest.approx(1007.5), "two that do not know of each other keep to a half each"


def test_a_request_without_bytes_is_not_held_up_by_a_long_queue_of_bytes(tmp_path: Path) -> None:
    clock = Clock()
    limits = Limits(tmp_path / "limits", requests_per_s=10, bytes_per_s=1e6, clock=clock, sleep=clock.slept.append)
    limits.wait(60_000_000)
    limits.wait(1)
    limits.wait(0)
    assert clock.slept == [pytest.approx(60), pytest.approx(0.2)]


def test_threads_and_other_holders_of_the_same_file_share_it(tmp_path: Path) -> None:
    slept: list[float] = []
    many = [Limits(tmp_path / "limits", requests_per_s=100, clock=lambda: 5.0, sleep=slept.append) for _ in range(4)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: many[number % 4].wait(), range(400)))
    assert sorted(slept) == pytest.approx([number / 100 for number in range(1, 400)])


_TAKE = """
import sys
from pathlib import Path
from stagekit.store.limits import Limits
limits = Limits(Path(sys.argv[1]), requests_per_s=100, clock=lambda: 5.0, sleep=lambda seconds: None)
for _ in range(50):
    limits.wait()
print("taken", flush=True)
sys.stdin.read()
"""


def test_processes_share_it_and_a_killed_one_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "limits"
    others = [
        subprocess.Popen([sys.executable, "-c", _TAKE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for other in others:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        other.kill()
        other.communicate()
    slept: list[float] = []
    Limits(path, requests_per_s=100, clock=lambda: 5.0, sleep=slept.append).wait()
    assert slept == [pytest.approx(1.0)]


_HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_stopped_holder_of_the_lock_costs_a_second_and_a_killed_one_nothing(tmp_path: Path) -> None:
    path = tmp_path / "limits"
    slept: list[float] = []
    limits = Limits(path, requests_per_s=100, clock=lambda: 5.0, sleep=slept.append)
    limits.wait()
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGSTOP)
    limits.wait()  # by this process's own account
    holder.kill()
    holder.communicate()
    limits.wait()
    assert slept == [pytest.approx(0.01)] * 2  # the second is that of the file, which knows of the first turn only


def test_a_forked_child_takes_its_turns_as_well(tmp_path: Path) -> None:
    path = tmp_path / "limits"
    limits = Limits(path, requests_per_s=100, clock=lambda: 5.0, sleep=lambda seconds: None)
    limits.wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = Limits(path, requests_per_s=100, clock=lambda: 5.0, sleep=lambda seconds: None)
            for _ in range(9):
                own.wait()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    slept: list[float] = []
    Limits(path, requests_per_s=100, clock=lambda: 5.0, sleep=slept.append).wait()
    assert slept == [pytest.approx(0.1)]


def test_a_moment_of_another_clock_means_nothing(tmp_path: Path) -> None:
    path = tmp_path / "limits"
    slept: list[float] = []
    Limits(path, requests_per_s=1, clock=lambda: 1e9, sleep=slept.append).wait()
    Limits(path, requests_per_s=1, clock=lambda: 5.0, sleep=slept.append).wait()
    assert slept == []


def test_without_a_file_this_process_keeps_to_it_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of the directory")
    slept: list[float] = []
    limits = Limits(tmp_path / "file" / "limits", requests_per_s=100, clock=lambda: 5.0, sleep=slept.append)
    limits.wait()
    limits.wait()
    assert slept == [pytest.approx(0.01)]


def test_each_endpoint_has_its_own_file(tmp_path: Path) -> None:
    one, other = (limits_path(endpoint, tmp_path) for endpoint in ("https://a.example", "https://b.example"))
    assert one != other
    assert one == limits_path("https://a.example", tmp_path)


def test_every_request_of_a_store_waits_for_its_turn(place_on: Callable[[str], S3Place]) -> None:
    place = place_on("rclone")
    slow = StoreConfig(endpoint_url=place.config.endpoint_url, profile=place.config.profile, max_requests_per_s=50)
    store, again = open_store(place.url, slow), pickle.loads(pickle.dumps(open_store(place.url, slow)))
    store.put("a", b"bytes")
    began = time.monotonic()
    for one in (store, again):
        one.head("a")
        one.get("a", 0, 2)
        list(one.list())
        one.put("b", b"bytes")
        one.delete("b")
    assert time.monotonic() - began >= 9 / 50


def test_bytes_of_a_store_wait_in_both_directions(place_on: Callable[[str], S3Place]) -> None:
    place = place_on("rclone")
    slow = StoreConfig(endpoint_url=place.config.endpoint_url, profile=place.config.profile, max_bytes_per_s=10e6)
    store = open_store(place.url, slow)
    began = time.monotonic()
    store.put("a", bytes(1_000_000))
    assert len(store.get("a", 0, 500_000)) == 500_000
    assert len(store.get("a")) == 1_000_000  # nobody knew before how much it would be
    store.put("b", b"x")
    assert time.monotonic() - began >= 0.25


def test_waiting_for_a_turn_is_not_taken_from_the_budget_for_repeating(tmp_path: Path) -> None:
    clock = Clock()
    limits = Limits(tmp_path / "limits", bytes_per_s=1e6, clock=clock, sleep=clock.sleep)
    limits.wait(200_000_000)  # somebody else's

    class Slow(WrappedStore):
        failures = 3

        def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
            limits.wait(len(data))
            if self.failures:
                self.failures -= 1
                raise Throttled("slow down")
            return self.inner.put(key, data)

    slow = Slow(MemoryStore("memory://limits/waiting"))
    RetryStore(slow, 60, clock=clock, sleep=clock.sleep, random=lambda: 1.0).put("a", bytes(1_000_000))
    assert clock.now_s > 1200
    slow.failures = 1000
    with pytest.raises(Throttled, match=r"tried \d+ times in"):
        RetryStore(slow, 60, clock=clock, sleep=clock.sleep, random=lambda: 1.0).put("a", bytes(1_000_000))


@pytest.mark.parametrize("name", ["max_requests_per_s", "max_bytes_per_s"])
def test_limits_that_cannot_be_meant_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: 0 is not above 0"):
        StoreConfig(**{name: 0})  # type: ignore[arg-type]  # the name is a parameter
    with pytest.raises(UsageError, match="engine='fsspec' sends requests past the limit"):
        StoreConfig(**{name: 5.0}, engine="fsspec")  # type: ignore[arg-type]
