"""Requests and bytes are counted where they are sent, and the counts are those of a proxy in between."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from stagekit.config import Engine
from stagekit.location import Location
from stagekit.store import open_store
from stagekit.store.retry import RetryStore
from stagekit.store.s3 import S3Store
from stagekit.store.usage import Usage, meter_of, usage_below
from stagekit.testing.proxy import Cut, FaultProxy, SlowDown

from ..conftest import S3Place


def logged(proxy: FaultProxy) -> Usage:
    """What the proxy saw."""
    return Usage(len(proxy.requests), sum(one.received for one in proxy.requests), sum(one.sent for one in proxy.requests))


@pytest.mark.parametrize("engine", ["botocore", "auto"])
def test_the_counts_are_those_of_a_proxy(engine: Engine, place_on: Callable[[str], S3Place]) -> None:
    place = place_on("moto")
    assert place.config.endpoint_url is not None
    with FaultProxy(place.config.endpoint_url) as proxy:
        config = replace(place.config, endpoint_url=proxy.endpoint_url, engine=engine)
        store = open_store(place.url, config)
        for number in range(5):
            store.put(f"small/{number}", bytes(10_000))
        with store.multipart("large", part_size=5 << 20) as upload:
            upload.put_part(0, bytes(5 << 20))
            upload.put_part(1, bytes(1 << 20))
        for number in range(6):
            store.get("large", number << 20, 1 << 20)
        store.get("large")
        store.head("large")
        assert len(list(store.list())) == 6
        store.conditional_create()
        proxy.fault(SlowDown(), method="GET", times=1)
        proxy.fault(Cut(500_000), method="GET", times=1)
        impatient = RetryStore(S3Store(place.url, config), sleep=lambda seconds: None)
        assert len(impatient.get("large")) == 6 << 20
        store.delete("large")
        counted, seen = usage_below(place.url), logged(proxy)
    assert counted.requests == seen.requests
    assert counted.sent_bytes == seen.sent_bytes
    assert counted.received_bytes == pytest.approx(seen.received_bytes, rel=0.05)
    assert counted.received_bytes > 18 << 20


def test_places_are_counted_apart_and_together(place_on: Callable[[str], S3Place]) -> None:
    place = place_on("moto")
    one, other = open_store(f"{place.url}/run-1", place.config), open_store(f"{place.url}/run-10", place.config)
    one.put("a", b"12345")
    other.put("a", b"123")
    other.put("b", b"123")
    assert (usage_below(f"{place.url}/run-1").requests, usage_below(f"{place.url}/run-1").sent_bytes) == (1, 5)
    assert usage_below(f"{place.url}/run-10").requests == 2
    assert usage_below(place.url).sent_bytes == 11
    pickle.loads(pickle.dumps(one)).put("b", b"1")
    assert usage_below(f"{place.url}/run-1").sent_bytes == 6


def test_a_forked_child_counts_from_nothing() -> None:
    place = Location.parse("s3://bucket/counted")
    meter_of(place).add(Usage(3, 4, 5))
    child = os.fork()
    if child == 0:
        os._exit(0 if usage_below(place) == Usage() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert usage_below(place) == Usage(3, 4, 5)


def test_counts_read_well_and_have_a_price() -> None:
    usage = Usage(1234, 5_000_000, 200_000_000_000)
    assert str(usage) == "1,234 requests, 5.00 MB sent, 200 GB received"
    assert str(Usage(1)) == "1 request, 0 B sent, 0 B received"
    assert usage.cost(0.09) == pytest.approx(18.0)
    assert usage - Usage(1234) == Usage(0, 5_000_000, 200_000_000_000)
    assert not usage - usage
