"""Each way in which a store fails has its class and its words: a real server, a proxy that spoils what passes, and the real client."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from stagekit import errors
from stagekit.config import StoreConfig
from stagekit.errors import (
    BadDigest,
    BucketNotFound,
    ClockSkew,
    Conflict,
    Denied,
    InvalidReply,
    NotFound,
    OutOfSpace,
    StoreError,
    Throttled,
    TLSFailed,
    Unreachable,
    WrongCredentials,
)
from stagekit.store.s3 import S3Store
from stagekit.testing.proxy import Cut, Drop, Fault, FaultProxy, FlipBit, Hang, Html, ShortBody, SlowDown, Status, WrongDate

from ..conftest import S3Place
from ..rigs.certificates import make_certificates
from ..rigs.servers import S3Server

Call = Callable[[S3Store], object]


def get(store: S3Store) -> object:
    return store.get("there")


def piece(store: S3Store) -> object:
    return store.get("there", 0, 5000)


def put(store: S3Store) -> object:
    return store.put("new", b"bytes")


def walk(store: S3Store) -> object:
    return list(store.list())


@dataclass(frozen=True)
class Row:
    """What passes, what is called, and what must come of it. ``words`` are in the message, besides the object's URL."""

    faults: tuple[Fault, ...]
    call: Call
    kind: type[StoreError]
    words: str
    transient: bool


ROWS = (
    Row((Status(404, "NoSuchKey"),), get, NotFound, "there is no such object", False),
    Row((Status(404, "NoSuchBucket"),), put, BucketNotFound, "create the bucket first", False),
    Row((Status(403, "AccessDenied"),), put, Denied, "Ask for the permission, or use other keys", False),
    Row((Status(403, "InvalidAccessKeyId"),), get, WrongCredentials, "does not know the access key", False),
    Row((Status(403, "SignatureDoesNotMatch"),), walk, WrongCredentials, "the secret key is wrong for its access key", False),
    Row((Status(400, "ExpiredToken"),), get, WrongCredentials, "log in again or renew the session token", False),
    Row((Drop(),), get, Unreachable, "the connection to", True),
    Row((Hang(),), put, Unreachable, "sent nothing for 1.0 s", True),
    Row((Cut(100),), get, Unreachable, "the body ended after 100 of 10000 bytes", True),
    Row((Status(500),), walk, Unreachable, "has an internal problem (HTTP 500)", True),
    Row((SlowDown(retry_after_s=7),), get, Throttled, "asks to slow down", True),
    Row((Status(429, "TooManyRequests"),), put, Throttled, "asks to slow down", True),
    Row((WrongDate(-7200), Status(403, "RequestTimeTooSkewed")), get, ClockSkew, "this machine's clock is 2.0 h ahead; set", False),
    Row((Status(409, "ConditionalRequestConflict"),), put, Conflict, "another request for the same name is under way", True),
    Row((Html(),), get, InvalidReply, "an answer without an etag", True),
    Row((Html(),), walk, InvalidReply, "an answer that is no listing", True),
    Row((ShortBody(1),), piece, InvalidReply, "asked for bytes from 0 and got", True),
    Row((Status(403, "QuotaExceeded"),), put, OutOfSpace, "delete something there, or buy more", False),
    Row((Status(405, "MethodNotAllowed"),), put, StoreError, "does not support this request", False),
    Row((Status(507, "InsufficientStorage"),), put, OutOfSpace, "the quota at", False),
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    made = make_certificates(tmp_path_factory.mktemp("made") / "tls")
    return made.leaf, made.leaf_key, made.authority


def test_each_failure_has_its_class_and_its_words(place_on: Callable[[str], S3Place]) -> None:
    place = place_on("rclone")
    S3Store(place.url, place.config).put("there", bytes(10_000))
    assert place.config.endpoint_url is not None
    with FaultProxy(place.config.endpoint_url) as proxy:
        store = S3Store(place.url, replace(place.config, endpoint_url=proxy.endpoint_url, read_timeout_s=1.0))
        for row in ROWS:
            proxy.clear()
            proxy.fault(*row.faults)
            with pytest.raises(StoreError) as caught:
                row.call(store)
            told = f"{row}: {caught.value!r}"
            assert type(caught.value) is row.kind, told
            assert row.words in str(caught.value), told
            assert place.url in str(caught.value), told
            assert caught.value.transient is row.transient, told
            assert "…" not in str(caught.value), told
        proxy.clear()
        proxy.fault(SlowDown(retry_after_s=7))
        with pytest.raises(Throttled) as slow:
            get(store)
        assert slow.value.retry_after_s == 7
        proxy.clear()
        assert get(store) == bytes(10_000), "and nothing of it stays"


def test_a_bit_that_flips_on_its_way_in_is_refused_there(place_on: Callable[[str], S3Place]) -> None:
    place = place_on("rclone")
    assert place.config.endpoint_url is not None
    with FaultProxy(place.config.endpoint_url) as proxy:
        store = S3Store(place.url, replace(place.config, endpoint_url=proxy.endpoint_url))
        proxy.fault(FlipBit(3, of="request"), method="PUT")
        with pytest.raises(BadDigest, match="are not those that were sent; nothing was stored"):
            store.put("new", b"bytes")
        with pytest.raises(NotFound):
            store.head("new")


def test_a_certificate_that_nobody_signed_for_us(place_on: Callable[[str], S3Place], certificate: tuple[Path, Path, Path]) -> None:
    place = place_on("rclone")
    leaf, key, authority = certificate
    S3Store(place.url, place.config).put("there", b"bytes")
    assert place.config.endpoint_url is not None
    with FaultProxy(place.config.endpoint_url, certificate=(leaf, key)) as proxy:
        config = replace(place.config, endpoint_url=proxy.endpoint_url)
        with pytest.raises(TLSFailed, match="give the PEM file of its authority as ca_bundle="):
            get(S3Store(place.url, config))
        assert get(S3Store(place.url, replace(config, ca_bundle=str(authority)))) == b"bytes"


def test_no_class_of_the_tree_is_left_out() -> None:
    below = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, StoreError)}
    tried = {row.kind for row in ROWS} | {BadDigest, TLSFailed}
    assert below == tried


# ------------------------------------------------------------------------------------------------------------ keys, and none


def test_missing_keys_are_an_error_and_never_an_unsigned_request(
    place_on: Callable[[str], S3Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_on("moto")
    assert place.config.endpoint_url is not None
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE")
    with FaultProxy(place.config.endpoint_url) as proxy:
        store = S3Store(place.url, StoreConfig(endpoint_url=proxy.endpoint_url))
        for call in (get, put, walk):
            with pytest.raises(WrongCredentials, match="no credentials were found for"):
                call(store)
        assert proxy.requests == ()


def test_keys_that_are_refused_are_not_followed_by_a_try_without_any(place_on: Callable[[str], S3Place]) -> None:
    place = place_on("moto")
    assert place.config.endpoint_url is not None
    with FaultProxy(place.config.endpoint_url) as proxy:
        proxy.fault(Status(403, "InvalidAccessKeyId"))
        with pytest.raises(WrongCredentials):
            get(S3Store(place.url, replace(place.config, endpoint_url=proxy.endpoint_url)))
        assert proxy.requests
        assert all("authorization" in request.headers for request in proxy.requests)


def test_anonymous_sends_no_key_even_where_there_is_one(
    place_on: Callable[[str], S3Place], moto_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_on("moto")
    S3Store(place.url, place.config).put("there", b"bytes")
    _, _, bucket, folder = place.url.split("/")
    moto_server.client().put_object_acl(Bucket=bucket, Key=f"{folder}/there", ACL="public-read")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert place.config.endpoint_url is not None
    with FaultProxy(place.config.endpoint_url) as proxy:
        store = S3Store(place.url, StoreConfig(endpoint_url=proxy.endpoint_url, anonymous=True))
        assert get(store) == b"bytes"
        store.get("there", 0, 2)
        store.get("there", 0, 2)  # by another client, where there is one
        assert len(proxy.requests) == 3
        assert all("authorization" not in request.headers for request in proxy.requests)
