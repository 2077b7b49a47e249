"""Half an hour of a bad store, on a clock that only moves when somebody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stagekit.config import StoreConfig
from stagekit.store import open_store
from stagekit.store.base import Store
from stagekit.store.retry import RetryStore
from stagekit.store.s3 import S3Store
from stagekit.testing.proxy import FaultProxy

from ..rigs.servers import S3Server
from .workload import misbehave, prepare, soak

HALF_AN_HOUR_S = 1800.0


class Clock:
    """Time for many threads: what one of them waits passes for all."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now_s

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now_s += seconds


def test_half_an_hour_of_a_bad_store_loses_nothing(
    rclone_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig], tmp_path: Path
) -> None:
    plain, bucket, clock = credentials_for(rclone_server), rclone_server.create_bucket(), Clock()
    prepare(tmp_path, open_store(f"s3://{bucket}/data", plain))
    with FaultProxy(rclone_server.endpoint_url, sleep=clock.sleep) as proxy:
        misbehave(proxy, clock=clock, seed=1, flap_every_s=300, flap_s=20, slow=50_000)
        config = replace(plain, endpoint_url=proxy.endpoint_url)

        def open_at(folder: str) -> Store:
            return RetryStore(S3Store(f"s3://{bucket}/{folder}", config), 3600, clock=clock, sleep=clock.sleep)

        outcome = soak(open_at, tmp_path, stop=lambda: clock() > HALF_AN_HOUR_S, pause=clock.sleep)
        spoilt = sum(bool(request.faults) for request in proxy.requests)
    if outcome.errors:
        raise outcome.errors[0]
    assert clock() > HALF_AN_HOUR_S
    assert spoilt > 50
    assert outcome.epochs
    assert outcome.checkpoints
    assert outcome.pulls
