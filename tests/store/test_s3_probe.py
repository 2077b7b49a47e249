"""Everything an endpoint is asked, on every server there is, and through a proxy that takes rights and promises away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from stagekit.facts import Fact
from stagekit.store.s3 import S3Store
from stagekit.store.s3_probe import NAMES, S3Probe
from stagekit.testing.proxy import FaultProxy, Hang, HideKeys, Html, Request, ShortBody, SlowDown, Status, WrongDate

from ..conftest import S3Place

DENIED = Status(403, "AccessDenied")


def told(store: S3Store, *, read_only: bool = False, budget_s: float = 600.0) -> dict[str, Fact]:
    return {fact.name: fact for fact in S3Probe(store, read_only=read_only, budget_s=budget_s).facts()}


def test_what_each_server_can_do(place_on: Callable[[str], S3Place]) -> None:
    for name, status, create, complete, md5, defaults in (
        ("moto", 206, True, True, False, True),
        ("rclone", 200, False, False, True, True),
        ("rgw-http", 206, True, False, True, True),
        ("rgw-https", 206, True, False, True, False),
    ):
        place = place_on(name)
        store = S3Store(place.url, place.config)
        facts = told(store)
        assert tuple(facts) == NAMES, name
        assert not [fact for fact in facts.values() if fact.state in ("bad", "unknown")], name
        assert facts["rights"].values["rights"] == dict.fromkeys(("list", "get", "put", "delete"), True), name
        assert facts["ranges"].values["status"] == status, name
        assert facts["conditions"].values["conditions"]["create"] is create, name
        assert facts["conditions"].values["conditions"]["complete"] is complete, name
        assert facts["checksums"].values["content_md5"] is md5, name
        assert facts["checksums"].values["sdk_defaults"] is defaults, name
        assert facts["listing"].values == {"paged": True, "folders": True}, name
        assert facts["multipart"].values["highest_part"] == 10_000, name
        assert facts["uploads"].values["listed"] is True, name
        assert facts["names"].state == "ok", name
        assert facts["speed"].values["down_bytes_per_s"] > 0, name
        assert list(store.list()) == [], name
        assert list(store.open_uploads()) == [], name


@pytest.fixture
def proxied(place_on: Callable[[str], S3Place]) -> Iterator[tuple[FaultProxy, S3Store]]:
    """A store behind a proxy, whose read time-out is short."""
    place = place_on("moto")
    assert place.config.endpoint_url is not None
    with FaultProxy(place.config.endpoint_url) as proxy:
        yield proxy, S3Store(place.url, replace(place.config, endpoint_url=proxy.endpoint_url, read_timeout_s=2.0))


def test_read_only_writes_nothing_and_says_what_it_therefore_cannot_tell(proxied: tuple[FaultProxy, S3Store]) -> None:
    proxy, store = proxied
    store.put("there", bytes(2 << 20))
    proxy.clear()
    facts = told(store, read_only=True)
    assert {one.method for one in proxy.requests} <= {"GET", "HEAD"}
    assert facts["rights"].text == "list yes, get yes, put not tried, delete not tried"
    assert facts["ranges"].state == facts["speed"].state == "ok"
    for name in ("conditions", "checksums", "listing", "names", "multipart"):
        assert facts[name].state == "unknown"
        assert "not tried" in facts[name].text


def test_keys_that_cannot_delete_train_and_the_scratch_object_that_stays_is_named(proxied: tuple[FaultProxy, S3Store]) -> None:
    proxy, store = proxied
    is_object = lambda request: "uploadId" not in request.query  # noqa: E731 - a rule of one line
    proxy.fault(DENIED, method="DELETE", where=is_object)
    facts = told(store)
    assert facts["rights"].text == "list yes, get yes, put yes, delete no"
    assert "these keys cannot delete: training works" in (facts["rights"].advice or "")
    assert facts["conditions"].state == facts["multipart"].state == "ok"
    left = [info.key for info in store.list()]
    assert len(left) == 1
    assert facts["left behind"].values["keys"] == left
    assert left[0] in facts["left behind"].text


def test_keys_that_only_read(proxied: tuple[FaultProxy, S3Store]) -> None:
    proxy, store = proxied
    store.put("there", bytes(2 << 20))
    proxy.fault(DENIED, method="PUT")
    proxy.fault(DENIED, method="POST")
    proxy.fault(DENIED, method="DELETE")
    facts = told(store)
    assert facts["rights"].text == "list yes, get yes, put no, delete not tried"
    assert facts["rights"].advice == "these keys only read: stream with them, and give runs and `stagekit shard` others"
    assert "left behind" not in facts
    assert facts["speed"].state == "ok"


def test_keys_that_only_write(proxied: tuple[FaultProxy, S3Store]) -> None:
    proxy, store = proxied
    proxy.fault(DENIED, method="GET")
    proxy.fault(DENIED, method="HEAD")
    facts = told(store)
    assert facts["rights"].text.startswith("list no, get no, put yes")
    assert facts["rights"].state == "bad"
    assert "a run looks before it commits" in (facts["rights"].advice or "")
    assert facts["ranges"].state == facts["speed"].state == "unknown"


def test_keys_that_may_nothing(proxied: tuple[FaultProxy, S3Store]) -> None:
    proxy, store = proxied
    proxy.fault(DENIED)
    facts = told(store)
    assert facts["rights"].state == "bad"
    assert facts["endpoint"].state == "ok"


@pytest.mark.parametrize(("seconds", "state"), [(30.0, "ok"), (-300.0, "note"), (3600.0, "bad")])
def test_a_clock_that_differs(seconds: float, state: str, proxied: tuple[FaultProxy, S3Store]) -> None:
    proxy, store = proxied
    proxy.fault(WrongDate(seconds))
    fact = told(store, read_only=True)["clock"]
    assert fact.state == state
    assert ("behind" if seconds < 0 else "ahead of") in fact.text
    assert abs(fact.values["skew_s"] - seconds) < 60
    assert (state == "ok") == (fact.advice is None)


def test_a_listing_that_hides_something_is_bad(proxied: tuple[FaultProxy, S3Store]) -> None:
    proxy, store = proxied
    proxy.fault(HideKeys("*/run-1/b"))
    fact = told(store)["listing"]
    assert fact.state == "bad"
    assert "2 of 3 keys" in fact.text


def test_a_range_that_is_cut_is_no_range(proxied: tuple[FaultProxy, S3Store]) -> None:
    proxy, store = proxied
    proxy.fault(ShortBody(1), method="GET", where=lambda request: request.range == "bytes=2-5")
    assert told(store)["ranges"].state == "bad"


def test_an_endpoint_that_is_none_and_a_bucket_that_is_not_there(proxied: tuple[FaultProxy, S3Store]) -> None:
    proxy, store = proxied
    nowhere = told(S3Store("s3://no-such-bucket-anywhere/x", store.config))
    assert list(nowhere) == ["endpoint"]
    assert nowhere["endpoint"].state == "bad"
    assert "there is no bucket 'no-such-bucket-anywhere'" in nowhere["endpoint"].text
    proxy.fault(Html())
    page = told(store)
    assert list(page) == ["endpoint"]
    assert page["endpoint"].state == "bad"


def test_a_step_that_fails_is_unknown_and_the_others_are_still_told(proxied: tuple[FaultProxy, S3Store]) -> None:
    proxy, store = proxied

    def uploads(request: Request) -> bool:
        return request.method == "POST" and "uploads" in request.query

    proxy.fault(SlowDown(), where=uploads)
    proxy.fault(Hang(), method="GET", where=lambda request: "lifecycle" in request.query)
    facts = told(store)
    assert {name for name, fact in facts.items() if fact.state == "unknown"} == {"conditions", "multipart", "uploads", "lifecycle"}
    assert "sent nothing for 2.0 s" in facts["lifecycle"].text
    assert list(store.list()) == []


def test_no_step_begins_when_the_time_is_over_and_nothing_is_left(proxied: tuple[FaultProxy, S3Store]) -> None:
    _, store = proxied
    now = iter(range(10_000))
    facts = {fact.name: fact for fact in S3Probe(store, budget_s=12.0, clock=lambda: float(next(now))).facts()}
    assert facts["speed"].text.startswith("not asked: the other answers took")
    assert facts["rights"].state == "ok"
    assert list(store.list()) == []
