"""Which uploads wait for the server's word before their body, by a real server's record of what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from botocore.awsrequest import AWSConnection

from stagekit.store import expect
from stagekit.store.s3 import S3Store
from stagekit.testing.proxy import FaultProxy

from ..conftest import S3Place


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    expect._forgets_answers.cache_clear()
    yield
    expect._forgets_answers.cache_clear()


def asked(place: S3Place) -> dict[str, bool]:
    """Which of some uploads had the header."""
    assert place.config.endpoint_url is not None
    with FaultProxy(place.config.endpoint_url) as proxy:
        store = S3Store(place.url, replace(place.config, endpoint_url=proxy.endpoint_url))
        for key, size in (("none", 0), ("small", 2**20 - 1), ("large", 2**20)):
            store.put(key, bytes(size))
            assert store.get(key) == bytes(size)
        with store.multipart("parts", part_size=5 * 2**20) as upload:
            upload.put_part(0, bytes(2**20))
        assert store.head("parts").size == 2**20
        return {one.key.rpartition("/")[2]: "100-continue" in one.headers.values() for one in proxy.requests if one.method == "PUT"}


def test_only_a_large_body_waits_for_the_servers_word(place_on: Callable[[str], S3Place]) -> None:
    assert asked(place_on("rclone")) == {"none": False, "small": False, "large": True, "parts": True}


def test_nothing_waits_where_botocore_takes_an_earlier_answer_for_a_later_one(
    place_on: Callable[[str], S3Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = AWSConnection.request

    def request(self: Any, method: str, url: str, body: Any = None, headers: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As before 2026: when this request asks, the class that an earlier answer has set stays."""
        if "Expect" not in (headers or {}):
            return now(self, method, url, body, headers, *args, **kwargs)
        first, self._original_response_cls = self._original_response_cls, self.response_class
        try:
            return now(self, method, url, body, headers, *args, **kwargs)
        finally:
            self._original_response_cls = first

    monkeypatch.setattr(AWSConnection, "request", request)
    assert not any(asked(place_on("rclone")).values())
