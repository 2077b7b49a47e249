"""Ranges through obstore: the same bytes, the same errors, and only where that is certain."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Callable

import pytest

from stagekit.config import StoreConfig
from stagekit.errors import Conflict, InvalidReply, NotFound, Unreachable
from stagekit.store.s3 import S3Store
from stagekit.store.s3_client import client_for
from stagekit.store.s3_obstore import RANGES, FastReads, fast_reads

from ..conftest import S3Place
from .answers import Answer, Request, answering, refusal
from .contract import run_apart

BYTES = bytes(range(256)) * 2000
CONFIG = StoreConfig(anonymous=True)


def fast_of(store: S3Store) -> FastReads | None:
    return fast_reads(store.location, client_for(store.location, store._config))


def forget(store: S3Store) -> None:
    """The bucket is shared with other tests, which may have found out already what this one wants to see found out."""
    client = client_for(store.location, store._config)
    client.facts.pop((store.location.bucket, RANGES), None)
    client.fast.pop(store.location.bucket, None)


def header(request: Request, name: str) -> str:
    return {key.lower(): value for key, value in request.headers.items()}[name]


def part_of(body: bytes, request: Request, etag: str = "x") -> Answer:
    """What an object store answers to a range of an object that holds ``body``."""
    first, last = header(request, "range").removeprefix("bytes=").split("-")
    start, stop = int(first), int(last) + 1
    headers = {
        "Content-Range": f"bytes {start}-{stop - 1}/{len(body)}",
        "ETag": f'"{etag}"',
        "Last-Modified": "Mon, 30 Nov 2026 12:00:00 GMT",
    }
    return Answer(206, body[start:stop], headers)


def by_obstore(request: Request) -> bool:
    return header(request, "user-agent") == "stagekit"


@pytest.mark.parametrize("server", ["moto", "rgw-http", "rgw-https"])
def test_the_same_bytes_and_the_same_errors_on_real_servers(place_on: Callable[[str], S3Place], server: str) -> None:
    """With the keys of a profile, and over https with an authority that only ``ca_bundle`` names."""
    place = place_on(server)
    store = S3Store(f"{place.url}/base", place.config)
    etag = store.put("folder/a.bin", BYTES).etag
    forget(store)
    assert fast_of(store) is None  # no range was answered yet
    assert bytes(store.get("folder/a.bin", 0, 100)) == BYTES[:100]
    fast = fast_of(store)
    assert fast is not None
    path = store._path("folder/a.bin")
    for start, length in ((0, len(BYTES)), (7, 400_000), (len(BYTES) - 1, 1)):
        found = fast.get(path, start, length, None)
        assert found is not None
        assert bytes(found) == BYTES[start : start + length] == bytes(store.get("folder/a.bin", start, length))
    found = fast.get(path, 5, 1000, etag)
    assert found is not None
    assert bytes(found) == BYTES[5:1005]

    for _ in range(5):  # refusals do not count against obstore
        with pytest.raises(InvalidReply, match=f"a.bin: .* beyond its end at {len(BYTES)}"):
            store.get("folder/a.bin", len(BYTES) - 1, 2)
        with pytest.raises(NotFound, match="missing: there is no such object"):
            store.get("missing", 0, 5)
        store.put("replaced", b"first")
        old = store.head("replaced").etag
        store.put("replaced", b"second")
        with pytest.raises(Conflict, match="replaced: the object was replaced"):
            store.get("replaced", 0, 5, if_match=old)
    assert fast.get(path, 0, 10, None) is not None


def test_odd_keys_are_left_to_botocore(place_on: Callable[[str], S3Place]) -> None:
    place = place_on("rgw-http")
    store = S3Store(place.url, place.config)
    for key in ("a/ä ü", "a/plus+and%2Fpercent", "a/~tilde", "a/b#c"):
        store.put(key, BYTES)
        for _ in range(5):
            assert bytes(store.get(key, 1000, 3)) == BYTES[1000:1003]
    fast = fast_of(store)
    assert fast is not None
    assert fast.get(store._path("a/~tilde"), 0, 3, None) is None


def test_a_server_that_answers_ranges_with_200_is_left_to_botocore(place_on: Callable[[str], S3Place]) -> None:
    place = place_on("rclone")
    store = S3Store(place.url, place.config)
    store.put("a", BYTES)
    for _ in range(2):
        assert bytes(store.get("a", 3, 500)) == BYTES[3:503]
        assert fast_of(store) is None


def test_another_engine_that_was_asked_for_is_the_one_that_reads() -> None:
    seen: list[bool] = []

    def answer(request: Request) -> Answer:
        seen.append(by_obstore(request))
        return part_of(BYTES, request)

    with answering(answer) as url:
        for engine, expected in (("botocore", [False, False]), ("auto", [False, True])):
            seen.clear()
            store = S3Store("s3://bucket/x", dataclasses.replace(CONFIG, endpoint_url=url, engine=engine))
            assert [bytes(store.get("a", 0, 9)) for _ in range(2)] == [BYTES[:9]] * 2
            assert seen == expected, engine


def test_an_endpoint_in_the_environment_does_not_get_what_the_argument_s_should(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def answer(request: Request) -> Answer:
        seen.append(by_obstore(request))
        return part_of(BYTES, request)

    def wrong(request: Request) -> Answer:
        raise AssertionError("the keys went to another endpoint")

    with answering(answer) as url, answering(wrong) as other:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", other)
        monkeypatch.setenv("AWS_ENDPOINT_URL", other)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        store = S3Store("s3://bucket/x", StoreConfig(endpoint_url=url))
        for _ in range(2):
            assert bytes(store.get("a", 5, 9)) == BYTES[5:14]
    assert seen == [False, True]


def test_what_obstore_cannot_read_is_asked_again_and_after_three_times_no_more() -> None:
    tries: list[bool] = []

    def answer(request: Request) -> Answer:
        tries.append(by_obstore(request))
        return refusal(500, "InternalError") if by_obstore(request) else part_of(BYTES, request)

    with answering(answer) as url:
        store = S3Store("s3://bucket/x", dataclasses.replace(CONFIG, endpoint_url=url))
        for _ in range(6):
            assert bytes(store.get("a", 5, 9)) == BYTES[5:14]
    assert tries == [False] + [True, False] * 3 + [False] * 2


def test_a_range_that_is_too_short_is_no_answer() -> None:
    seen: list[Request] = []

    def answer(request: Request) -> Answer:
        seen.append(request)
        whole = part_of(BYTES, request)
        return whole if len(seen) == 1 else dataclasses.replace(whole, body=whole.body[:4], length=9)

    with answering(answer) as url:
        store = S3Store("s3://bucket/x", dataclasses.replace(CONFIG, endpoint_url=url))
        store.get("a", 0, 9)
        with pytest.raises(Unreachable, match="the body ended after 4 of 9 bytes") as caught:
            store.get("a", 0, 9)
    assert caught.value.received == BYTES[:4]


def test_a_forked_child_reads_through_botocore(place_on: Callable[[str], S3Place]) -> None:
    """obstore's threads are missing in a forked child, and a call of it would never return."""
    script = """
import os, pickle, sys
from stagekit.store.s3_client import client_for, is_forked_child
from stagekit.store.s3_obstore import fast_reads
store = pickle.loads(bytes.fromhex(sys.argv[1]))
def reads():
    return [bytes(store.get("a", number, 300_000)) for number in range(3)]
def fast():
    return fast_reads(store.location, client_for(store.location, store._config)) is not None
expected = reads()
assert fast() and not is_forked_child()
children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if reads() == expected and not fast() else 1)
    children.append(pid)
print([os.waitpid(pid, 0)[1] for pid in children], fast(), reads() == expected)
"""
    place = place_on("rgw-http")
    store = S3Store(place.url, place.config)
    store.put("a", BYTES)
    done = run_apart(script, pickle.dumps(store).hex())
    assert done.stdout == "[0, 0] True True\n", done.stderr


def test_without_the_package_botocore_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    seen: list[bool] = []

    def answer(request: Request) -> Answer:
        seen.append(by_obstore(request))
        return part_of(BYTES, request)

    with answering(answer) as url:
        store = S3Store("s3://bucket/x", dataclasses.replace(CONFIG, endpoint_url=url))
        for _ in range(3):
            store.get("a", 0, 9)
    assert seen == [False] * 3
