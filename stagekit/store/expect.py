"""Which uploads ask the server to agree (``Expect: 100-continue``) before their body is sent.

botocore asks for every body. For a small one that is a round trip more than the body itself takes. For a large one it is worth it: a server
that refuses says so at once, instead of closing the connection on a client that still sends and then never reads why.

A server may answer such a request for good without agreeing first. Until 2026 botocore kept that answer's status for the next such request
on the same connection: a refused upload looked accepted after an accepted one, and an accepted one refused after a refused one. Where
botocore is like that, nothing asks.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

from botocore.awsrequest import AWSHTTPConnection

_WORTH_ASKING = 2**20


def register(events: Any) -> None:
    """Have botocore's requests follow the rule of this module; ``events`` are a client's."""
    events.register_last("before-call.s3", _ask_seldom)


def _ask_seldom(params: dict[str, Any], **_: Any) -> None:
    headers = params["headers"]
    if "Expect" in headers and not (_forgets_answers() and _size(params["body"]) >= _WORTH_ASKING):
        del headers["Expect"]


def _size(body: Any) -> int:
    """How many bytes a body in memory has; that is the only kind there is here."""
    where: int = body.tell()
    end: int = body.seek(0, 2)
    body.seek(where)
    return end - where


class _Stopped(Exception):
    pass


class _NowhereConnection(AWSHTTPConnection):  # type: ignore[misc]
    def putrequest(self, *_: Any, **__: Any) -> None:
        raise _Stopped


@cache
def _forgets_answers() -> bool:
    """Whether botocore parses each answer by itself, tried out with a request that goes nowhere."""
    connection = _NowhereConnection("localhost")
    connection.response_class = None
    with suppress(_Stopped):
        connection.request("PUT", "/", body=b"", headers={"Expect": b"100-continue"})
    forgotten: bool = connection.response_class is not None
    return forgotten
