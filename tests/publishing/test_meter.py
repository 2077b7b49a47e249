"""What a person sees while a publication runs."""

from __future__ import annotations

from stagekit.progress import Event, Message, Progress
from stagekit.publishing.meter import Meter
from stagekit.shards.plan import PlannedShard


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def started(size: int, shards: int = 2) -> tuple[Meter, Clock, list[Event]]:
    told: list[Event] = []
    clock = Clock()
    meter = Meter(told.append, clock=clock)
    meter.begin([PlannedShard(number, f"shards/{number:06d}.tar", (), size) for number in range(shards)])
    return meter, clock, told


def test_the_sum_of_all_shards_with_files_and_retries() -> None:
    meter, _, told = started(1000)
    assert meter.takes(Progress("shards/000000.tar", 20, unit="files"))
    assert meter.takes(Progress("shards/000000.tar", 300, 1000))
    assert told == [Progress("shard", 300, 2000, "bytes", "20 files, 0 of 2 shards")]
    assert not meter.takes(Message("writing s3://b/a: 503; trying again in 0.4 s", "warning", repeating="s3://b"))
    assert not meter.takes(Message("something else", "warning"))
    assert not meter.takes(Progress("another task", 3))
    meter.shard_done(1, 70)
    assert told[-1] == Progress("shard", 1300, 2000, "bytes", "90 files, 1 of 2 shards, 1 retries")
    meter.shard_done(0, 65)
    assert told[-1] == Progress("shard", 2000, 2000, "bytes", "135 files, 2 of 2 shards, 1 retries", finished=True)


def test_200_gb_at_40_mbit_s_are_eleven_hours() -> None:
    meter, clock, told = started(100 * 10**9)
    clock.now_s += 30  # until the first byte: nothing that every byte would cost
    meter.takes(Progress("shards/000000.tar", 1_000_000))
    clock.now_s += 4
    meter.takes(Progress("shards/000000.tar", 21_000_000))
    assert not [event for event in told if isinstance(event, Message)]
    clock.now_s += 2
    for done in (31_000_000, 32_000_000):
        meter.takes(Progress("shards/000000.tar", done))
    (estimate,) = (event for event in told if isinstance(event, Message))
    assert estimate.text == ("200 GB take 11.1 h at the 5.00 MB/s of the first 6.0 s; interrupt it at any time, the same command goes on")


def test_who_waits_a_minute_is_not_told_so() -> None:
    meter, clock, told = started(50_000_000)
    meter.takes(Progress("shards/000000.tar", 1_000_000))
    clock.now_s += 6
    meter.takes(Progress("shards/000000.tar", 31_000_000))
    assert not [event for event in told if isinstance(event, Message)]
