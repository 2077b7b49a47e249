"""``bench``: what is measured is what is there, and the advice follows from the numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagekit.benchmark import BenchReport, bench
from stagekit.cli import main
from stagekit.errors import ManifestError, UsageError
from stagekit.progress import Event, Message
from stagekit.store.directory import DirectoryStore
from stagekit.store.usage import Usage

from .stream.build import build, numbered


class Ticking:
    """A clock that is a second further whenever it is looked at."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def data(tmp_path: Path) -> Path:
    build(DirectoryStore(tmp_path / "data"), numbered(40, field="cls"))
    return tmp_path / "data"


def report(**changes: Any) -> BenchReport:
    """200 GB in two million samples, behind a link of 10 MB/s."""
    values: dict[str, Any] = {
        "url": "s3://bucket/big",
        "samples": 2_000_000,
        "bytes": 200 * 10**9,
        "batch_size": 64,
        "first_batch_s": 1.5,
        "link_bytes": 10e6,
        "cpu_samples": 2000.0,
        "loader_samples": 95.0,
    }
    return BenchReport(**{**values, **changes})


def test_a_thin_link_is_named_with_what_an_epoch_costs_and_when_copying_pays() -> None:
    found = report()
    assert found.bottleneck == "link"
    assert found.link_samples == 100
    assert found.stream_s == 20_000
    assert found.copy_s == 20_000
    assert found.lines[-2] == "bottleneck       the link: an epoch takes 5.6 h"
    assert found.lines[-1] == (
        "advice           streaming, an epoch takes 5.6 h (200 GB at 10.0 MB/s); with the data here it would take 16 min 40 s. From 2 "
        "epochs on, copy it first (`stagekit pull`, 200 GB of disk), or let cache_dir= and cache_limit= keep what was read"
    )


def test_copying_pays_only_after_the_epochs_that_it_costs() -> None:
    nearly = report(cpu_samples=125.0)  # 16,000 s an epoch of decoding, 20,000 s of link
    assert nearly.stream_s == 20_000
    told = replace(nearly, epochs=3, free_bytes=10**12)
    assert told.advice.startswith("stream: a copy pays from 6 epochs on, and 3 are to come; streaming, an epoch takes 5.6 h")
    assert nearly.local_s == 16_000
    assert "From 6 epochs on, copy it first" in nearly.advice  # 20,000 + 6 × 16,000 < 6 × 20,000


def test_a_slow_step_makes_copying_useless() -> None:
    found = report(step_samples=40.0)
    assert found.bottleneck == "step"
    assert found.stream_s == found.local_s == 50_000
    assert found.advice == "stream: the link brings 2.5 times what the training step takes, so a copy of the data would gain nothing"
    assert "training step    40 samples/s" in found.lines


def test_slow_decoding_is_told_from_a_slow_link() -> None:
    found = report(cpu_samples=50.0, step_samples=80.0)
    assert found.bottleneck == "decode"
    assert found.lines[-2] == "bottleneck       decoding on this machine's CPU: an epoch takes 11.1 h"
    assert "stream: the link brings 2.0 times what decoding takes" in found.advice
    assert found.advice.endswith("More CPU cores, smaller images or workers= would")


def test_what_is_measured_is_counted_by_the_clock_that_is_given(data: Path) -> None:
    events: list[Event] = []
    found = bench(data, batch_size=8, step_ms=20, seconds=100, threads=1, clock=Ticking(), on_event=events.append)
    assert (found.samples, found.batch_size, found.step_samples) == (40, 8, 400)
    assert found.first_batch_s == 1  # one look at the clock before it, one after
    assert found.loader_samples == 8  # a batch a tick, to the end of the epoch, which came too soon
    assert found.whole_s == 5
    assert (
        found.lines[6]
        == "too small        StreamLoader had all of it after 5.0 s, start included: too short to measure by, so these rates are rough"
    )
    blocks = 14  # three samples each
    assert found.link_bytes == pytest.approx(sum(_block_sizes(data)) / blocks)  # a block a tick
    assert found.cpu_samples == pytest.approx(3, rel=0.2)  # a block a tick, until 20 ticks are over
    assert [event.text for event in events if isinstance(event, Message)][:1] == ["measuring the loader"]


def _block_sizes(data: Path) -> list[int]:
    from stagekit import Dataset

    dataset = Dataset(data)
    return [block.size for shard in range(len(dataset.shards)) for block in dataset.table(shard).blocks]


def test_a_clock_that_is_over_at_once_ends_each_measurement_after_its_first_step(data: Path) -> None:
    found = bench(data, batch_size=8, seconds=0.1, threads=1, clock=Ticking())
    assert found.loader_samples == 8
    assert found.whole_s is None
    assert not [line for line in found.lines if line.startswith("too small")]
    assert found.step_samples is None
    assert found.cpu_samples > 0


def test_a_data_set_of_one_batch_is_measured_by_it(tmp_path: Path) -> None:
    build(DirectoryStore(tmp_path / "one"), numbered(3))
    found = bench(tmp_path / "one", batch_size=8, threads=1, clock=Ticking())
    assert (found.loader_samples, found.whole_s) == (3, 1)


def test_what_cannot_be_meant_is_refused(data: Path, tmp_path: Path) -> None:
    for arguments, words in (({"batch_size": 0}, "batch_size: 0"), ({"step_ms": 0.0}, "step_ms: 0.0"), ({"seconds": 0.0}, "seconds: 0.0")):
        with pytest.raises(UsageError, match=words):
            bench(data, **arguments)
    with pytest.raises(ManifestError, match="holds no data set"):
        bench(tmp_path / "nothing")


def test_the_command_prints_for_people_and_for_programs(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", str(data), "--seconds", "0.2s", "--batch-size", "8", "--step-ms", "1000"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [name for line in lines[1:] if (name := line.split("  ")[0]) != "too small"] == [
        "link",
        "decoding",
        "training step",
        "StreamLoader",
        "first batch",
        "bottleneck",
        "advice",
    ]
    assert "the training step" in lines[-2]
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["event"], record["bottleneck"], record["step_samples_per_s"]) == ("bench", "step", 8.0)
    assert record["samples"] == 40


def test_a_price_tells_what_an_epoch_costs() -> None:
    found = report(usage=Usage(10, 0, 500_000_000), price_per_gb=0.1)
    assert found.lines[-2] == "this bench       10 requests, 0 B sent, 500 MB received, costs 0.05"
    assert found.lines[-1] == "an epoch costs   20.00 streamed, 200 GB at 0.1 a GB"
    assert found.record["epoch_cost"] == pytest.approx(20.0)
    assert found.record["usage"] == {"requests": 10, "sent_bytes": 0, "received_bytes": 500_000_000}
    assert report().record["epoch_cost"] is None
