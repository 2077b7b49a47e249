"""Where each S3 request of a client passes: it waits for its turn there, and it is counted."""

from __future__ import annotations

import re
from typing import Any

from botocore.utils import determine_content_length

from ..config import StoreConfig, home_directory
from .limits import Limits, limits_path
from .usage import Usage, count

_AWS = "aws"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_ANNOUNCED = "stagekit_announced"


class Traffic:
    """The requests of one client, which is told of them by botocore, or by whoever sends them past it."""

    def __init__(self, endpoint: str | None, settings: StoreConfig) -> None:
        self._limits: Limits | None = None
        if settings.max_requests_per_s or settings.max_bytes_per_s:
            self._limits = Limits(
                limits_path(endpoint or _AWS, home_directory()),
                requests_per_s=settings.max_requests_per_s,
                bytes_per_s=settings.max_bytes_per_s,
            )

    def watch(self, api: Any) -> None:
        """Be told of every request of ``api``, a botocore client: before it is signed, since a signature ages while it waits."""
        api.meta.events.register("before-sign.s3", self._before)
        api.meta.events.register("response-received.s3", self._after)

    def begin(self, sent: int, announced: int) -> None:
        """A request with a body of ``sent`` bytes is about to be sent, whose answer will have ``announced`` bytes, as far as is known."""
        if self._limits is not None:
            self._limits.wait(sent + announced)
        count(Usage(1, sent))

    def received(self, size: int) -> None:
        """``size`` bytes of an answer's body were read."""
        count(Usage(received_bytes=size))

    def _before(self, request: Any, **_: Any) -> None:
        match = _RANGE.fullmatch(request.headers.get("Range") or "") if request.method == "GET" else None
        announced = int(match[2]) - int(match[1]) + 1 if match else 0
        request.context[_ANNOUNCED] = bool(match)
        self.begin(determine_content_length(request.data) or 0, announced)

    def _after(self, response_dict: Any, context: Any, **_: Any) -> None:
        if response_dict is None:
            return
        body = response_dict["body"]
        if isinstance(body, bytes):
            size = len(body)
            self.received(size)
        else:  # a stream, which is counted while it is read
            size = int(response_dict["headers"].get("content-length") or 0)
        if self._limits is not None and not context.get(_ANNOUNCED):
            self._limits.charge(size)
