"""What goes over the wire: a real S3 server behind a proxy that spoils replies and keeps a log of every request."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from stagekit.config import StoreConfig
from stagekit.dataset import Dataset
from stagekit.errors import CorruptShard, StallTimeout, StoreError
from stagekit.order import Epoch
from stagekit.shards.index import Block
from stagekit.store import open_store
from stagekit.testing.proxy import Cut, Drop, Fault, FaultProxy, FlipBit, Html, Request, ShortBody, SlowDown, Stall, Status
from stagekit.torch import StreamLoader

from ..rigs.servers import S3Server
from ..stream.build import build, numbered

SIZE = 40_000
BLOCK = 3 * (512 + SIZE + -SIZE % 512)


@dataclass
class Wire:
    url: str
    config: StoreConfig
    proxy: FaultProxy

    def loader(self, batch_size: int = 4, **options: Any) -> StreamLoader:
        return StreamLoader(self.url, batch_size, **{"threads": 0, "connections": 2, "window": 4, "store": self.config, **options})

    @property
    def tars(self) -> list[Request]:
        return [one for one in self.proxy.requests if one.method == "GET" and one.key.endswith(".tar")]


@pytest.fixture
def open_wire(s3_server: Callable[[str], S3Server], credentials_for: Callable[[S3Server], StoreConfig]) -> Callable[[str], Any]:
    """60 samples of 40 kB in blocks of three, on the server that is named, behind a proxy."""

    @contextmanager
    def opened(name: str) -> Iterator[Wire]:
        server = s3_server(name)
        url, config = f"s3://{server.create_bucket()}/digits", credentials_for(server)
        build(open_store(url, config), numbered(60, field="cls", size=SIZE), shards=[20, 30, 10])
        with FaultProxy(server.endpoint_url) as proxy:
            yield Wire(url, replace(config, endpoint_url=proxy.endpoint_url, engine="botocore", retry_s=20.0, read_timeout_s=20.0), proxy)

    return opened


def everything(batches: Any) -> list[int]:
    return sorted(number for batch in batches for number in batch["cls"].tolist())


def all_blocks(wire: Wire) -> list[Block]:
    dataset = Dataset(wire.url, store=wire.config)
    return [dataset.block(number) for number in range(len(dataset.block_samples))]


def span(one: Request) -> tuple[int, int]:
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", one.range)
    assert found is not None
    return int(found[1]), int(found[2]) + 1


@pytest.mark.parametrize("stop", [0, 5])
def test_before_the_first_resumed_batch_at_most_a_window_is_fetched(open_wire: Callable[[str], Any], stop: int) -> None:
    with open_wire("moto") as wire:
        first = wire.loader()
        batches = iter(first)
        for _ in range(stop):
            next(batches)
        state = first.state_dict()
        batches.close()
        dataset = Dataset(wire.url, store=wire.config)
        order = Epoch(dataset.block_samples, 0, digest=dataset.digest, seed=0, shuffle=True, window=4)
        window = next(order.stretches(((4 * stop, 60),)))
        needed = {(one.key, one.start) for one in map(dataset.block_range, window.blocks.tolist())}
        again = wire.loader()
        again.load_state_dict(state)
        # What is fetched ahead does not get through before the batch was taken.
        wire.proxy.fault(
            Stall(), method="GET", key="*.tar", where=lambda one: (one.key.removeprefix("digits/"), span(one)[0]) not in needed, times=None
        )
        before = len(wire.proxy.requests)
        resumed = iter(again)
        next(resumed)
        log = [one for one in wire.proxy.requests[before:] if one.method == "GET"]
        fetched = sum(one.sent for one in log if one.key.endswith(".tar"))
        tables = sum(one.sent for one in log if one.key.endswith(".blocks"))
        assert 0 < fetched <= 4 * BLOCK
        assert fetched + tables == sum(one.sent for one in log)
        wire.proxy.release()
        resumed.close()


@pytest.mark.parametrize("name", ["moto", "rclone"])
def test_a_cut_body_is_continued_from_where_it_broke(open_wire: Callable[[str], Any], name: str) -> None:
    with open_wire(name) as wire:
        wire.proxy.fault(Cut(70_000), method="GET", key="*/000001.tar", times=1)
        made = wire.loader(5, shuffle=False)
        assert everything(made) == list(range(60))
        cut = next(one for one in wire.tars if one.faults)
        begin, end = span(cut)
        [rest] = [one for one in wire.tars if one is not cut and one.key == cut.key and begin < span(one)[0] < end]
        assert span(rest) == (begin + cut.sent, end)
        assert 0 < cut.sent <= 70_000
        etag = rest.headers.get("If-Match") or rest.headers.get("if-match")
        assert etag == open_store(wire.url, wire.config).head("shards/000001.tar").etag or etag is not None
        # No byte was asked for twice, whatever neighbours were asked for together.
        asked = sorted((one.key, span(one)[0], begin + cut.sent if one is cut else span(one)[1]) for one in wire.tars)
        assert all(one[0] < other[0] or one[2] == other[1] for one, other in pairwise(asked))
        assert {one[1] for one in asked if one[0] != cut.key} >= {0}


@pytest.mark.parametrize(
    "fault",
    [
        SlowDown(retry_after_s=0.2),
        Status(429, "TooManyRequests", retry_after_s=0.2),
        Status(503, "ServiceUnavailable"),
        Status(500),
        Drop(),
        Html(),
        ShortBody(7),
        FlipBit(100),
        FlipBit(700),
    ],
    ids=repr,
)
def test_what_passes_is_repeated_and_nothing_is_lost(open_wire: Callable[[str], Any], fault: Fault) -> None:
    with open_wire("moto") as wire:
        wire.proxy.fault(fault, method="GET", key="*/000001.tar", times=1)
        made = wire.loader(5, shuffle=False)
        began = time.monotonic()
        assert everything(made) == list(range(60))
        assert time.monotonic() - began >= (getattr(fault, "retry_after_s", None) or 0)
        [bad] = [one for one in wire.tars if one.faults]
        asked = sum(span(one)[1] - span(one)[0] for one in wire.tars)
        blocks = sum(block.size for block in all_blocks(wire))
        assert 0 < asked - blocks <= span(bad)[1] - span(bad)[0]  # that request once more, or what was wrong of it


@pytest.mark.parametrize("fault", [Html(), ShortBody(7), FlipBit(100), FlipBit(700)], ids=repr)
def test_what_stays_is_an_error_with_the_block_or_skipped_by_name(open_wire: Callable[[str], Any], fault: Fault) -> None:
    with open_wire("moto") as wire:
        wire.config = replace(wire.config, retry_s=0.5)
        wire.proxy.fault(fault, method="GET", key="*/000001.tar", where=lambda one: span(one)[0] == 2 * BLOCK, times=None)
        got: list[int] = []
        with pytest.raises(CorruptShard, match=rf"block 2 of 10 of .*000001\.tar \(samples 6 to 8 of the shard, {BLOCK} bytes at offset"):
            for batch in wire.loader(2, shuffle=False):
                got += batch["cls"].tolist()
        assert got == list(range(26))
        skipping = wire.loader(5, shuffle=False, on_bad="skip", drop_last=False)
        with pytest.warns(RuntimeWarning, match=r"3 skipped as damaged"):
            found = sorted(n for batch in skipping for n in batch["cls"][batch["__mask__"]].tolist())
        assert found == [number for number in range(60) if number not in (26, 27, 28)]


def test_a_throttling_that_does_not_end_is_an_error_after_its_budget(open_wire: Callable[[str], Any]) -> None:
    with open_wire("moto") as wire:
        wire.config = replace(wire.config, retry_s=0.5)
        made = wire.loader(5)
        wire.proxy.fault(SlowDown(), method="GET", key="*.tar", times=None)
        with pytest.raises(StoreError, match=r"000\d\d\d\.tar"):
            list(made)


def test_a_stalled_body_is_continued_from_where_it_stopped(open_wire: Callable[[str], Any]) -> None:
    with open_wire("moto") as wire:
        wire.config = replace(wire.config, read_timeout_s=0.5)
        wire.proxy.fault(Stall(50_000), method="GET", key="*/000001.tar", times=1)
        assert everything(wire.loader(5, shuffle=False)) == list(range(60))
        stalled = next(one for one in wire.tars if one.faults)
        begin, end = span(stalled)
        [rest] = [one for one in wire.tars if one is not stalled and one.key == stalled.key and span(one)[1] == end]
        assert span(rest) == (begin + 50_000, end)
        etag = open_store(wire.url, wire.config).head("shards/000001.tar").etag
        assert {name.lower(): value for name, value in rest.headers.items()}["if-match"] == f'"{etag}"'
        wire.proxy.release()


@pytest.mark.parametrize("threads", [0, 2])
def test_a_stall_that_lasts_is_an_error_with_object_and_threads(open_wire: Callable[[str], Any], threads: int) -> None:
    with open_wire("moto") as wire:
        made = wire.loader(5, stall_timeout_s=0.5, threads=threads)
        wire.proxy.fault(Stall(), method="GET", key="*.tar", times=None)
        began = time.monotonic()
        with pytest.raises(
            StallTimeout, match=r"(?s)no data for 0\.5 s while reading shards/00000\d\.tar at offset.*stagekit-fetch-\d.*File"
        ):
            list(made)
        assert time.monotonic() - began < 10
        wire.proxy.release()


def test_an_object_that_is_replaced_in_mid_epoch(open_wire: Callable[[str], Any]) -> None:
    with open_wire("moto") as wire:
        made = wire.loader(3, shuffle=False, connections=1, memory=3 * BLOCK)
        batches = iter(made)
        next(batches)
        store = open_store(wire.url, wire.config)
        store.put("shards/000001.tar", bytes(store.get("shards/000001.tar"))[::-1])
        with pytest.raises(CorruptShard, match=r"block 0 of 10 of .*000001\.tar.*should have xxh3-128 [0-9a-f]{32}, found [0-9a-f]{32}"):
            list(batches)


def test_a_state_is_taken_elsewhere_when_the_endpoint_has_another_name(open_wire: Callable[[str], Any], tmp_path: Any) -> None:
    with open_wire("moto") as wire:
        made = wire.loader(5)
        batches = iter(made)
        got = [number for _ in range(4) for number in next(batches)["cls"].tolist()]
        state = made.state_dict()
        batches.close()
        with FaultProxy(wire.proxy.endpoint_url) as other:
            config = replace(wire.config, endpoint_url=other.endpoint_url)
            again = wire.loader(3, store=config, cache_dir=tmp_path / "cache", cache_limit="10MB", threads=2)
            again.load_state_dict(state)
            rest = everything(again)
        assert sorted(got + rest)[:-1] == sorted(set(got + rest))[: len(got + rest) - 1]
        assert len(got) + len(rest) == 59  # 40 were left, in batches of three


@pytest.mark.parametrize("threads", [0, 2])
def test_leaving_breaks_off_the_reads_that_hang(open_wire: Callable[[str], Any], threads: int) -> None:
    """Half a body has come, and no more comes: no thread waits for the rest, nor for the socket's time-out of 20 s."""
    with open_wire("moto") as wire:
        wire.proxy.fault(Stall(50_000), method="GET", key="*/000001.tar", times=None)
        batches = iter(wire.loader(5, shuffle=False, threads=threads))
        for _ in range(3):
            next(batches)
        deadline = time.monotonic() + 30
        while sum(one.sent == 50_000 for one in wire.tars) < 2:  # both connections
            assert time.monotonic() < deadline
            time.sleep(0.01)
        reading = [thread for thread in threading.enumerate() if thread.name.startswith("stagekit-fetch")]
        assert len(reading) == 2
        batches.close()
        for thread in reading:
            thread.join(60)
        assert not any(thread.is_alive() for thread in reading)
        asked = len(wire.proxy.requests)
        wire.proxy.release()
        assert len(wire.proxy.requests) == asked  # nothing was tried again
