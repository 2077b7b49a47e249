"""What a server tells of its clock and of what it removes by itself, and how a server that does not know of such things is taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from stagekit.config import StoreConfig
from stagekit.errors import Denied
from stagekit.store import open_store
from stagekit.store.extras import ExpiryRule, clock_skew_s, expiry_rules
from stagekit.store.memory import MemoryStore
from stagekit.store.s3 import _expiry_rule
from stagekit.testing.proxy import FaultProxy, Status

from ..conftest import S3Place
from ..rigs.servers import S3Server


def test_the_servers_clock_is_read_from_its_answers(any_s3: S3Place) -> None:
    store = open_store(any_s3.url + "/run", any_s3.config)
    assert abs(clock_skew_s(store) or 0.0) < 60
    ahead = clock_skew_s(store, clock=lambda: time.time() - 1000)
    assert ahead is not None
    assert 900 < ahead < 1100


def test_a_bucket_without_rules_has_none_on_any_server(any_s3: S3Place) -> None:
    assert expiry_rules(open_store(any_s3.url + "/run", any_s3.config)) == ()


def test_rules_are_read_and_a_refusal_is_raised(
    moto_server: S3Server, fresh_bucket: Callable[[S3Server], str], credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    config, bucket = credentials_for(moto_server), fresh_bucket(moto_server)
    rules = [
        {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "runs/"}, "Expiration": {"Days": 30}},
        {"ID": "off", "Status": "Disabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}},
    ]
    moto_server.client().put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})
    assert expiry_rules(open_store(f"s3://{bucket}/runs/first", config)) == (ExpiryRule("old", "runs/", days=30),)
    with FaultProxy(moto_server.endpoint_url) as proxy:
        proxy.fault(Status(403, "AccessDenied"))
        refused = StoreConfig(endpoint_url=proxy.endpoint_url, profile=config.profile)
        with pytest.raises(Denied, match="reading the lifecycle rules of"):
            expiry_rules(open_store(f"s3://{bucket}/run", refused))
    with FaultProxy(moto_server.endpoint_url) as proxy:
        proxy.fault(Status(501, "NotImplemented"))
        plain = StoreConfig(endpoint_url=proxy.endpoint_url, profile=config.profile, retry_s=0)
        assert expiry_rules(open_store(f"s3://{bucket}/run", plain)) == ()


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ({"Expiration": {"Days": 3}, "Prefix": "a/"}, ExpiryRule("", "a/", days=3)),
        ({"Expiration": {"Days": 3}, "Filter": {}}, ExpiryRule("", "", days=3)),
        ({"Expiration": {"Days": 3}, "Filter": {"Tag": {"Key": "temporary", "Value": "1"}}}, None),
        ({"Expiration": {"Days": 3}, "Filter": {"And": {"Prefix": "a/", "Tags": [{"Key": "x", "Value": "y"}]}}}, None),
        (
            {"Expiration": {"Days": 3}, "Filter": {"And": {"Prefix": "a/", "ObjectSizeGreaterThan": 9, "ObjectSizeLessThan": 20}}},
            ExpiryRule("", "a/", days=3, above=10, below=20),
        ),
        ({"Expiration": {"ExpiredObjectDeleteMarker": True}, "Prefix": ""}, None),
        ({"NoncurrentVersionExpiration": {"NoncurrentDays": 1}, "Prefix": ""}, None),
        ({"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}, "Prefix": ""}, None),
    ],
)
def test_only_rules_that_remove_plain_current_objects_count(rule: dict[str, Any], found: ExpiryRule | None) -> None:
    assert _expiry_rule({"Status": "Enabled"} | rule) == found


def test_a_store_that_tells_nothing_more_has_no_clock_and_no_rules() -> None:
    store = MemoryStore("memory://extras/run")
    assert clock_skew_s(store) is None
    assert expiry_rules(store) == ()
