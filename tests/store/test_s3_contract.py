"""The contract on real servers: moto, rclone, Ceph RGW over http and https."""

from __future__ import annotations

import uuid

import pytest

from stagekit.store.base import Store
from stagekit.store.s3 import S3Store

from ..conftest import S3Place
from .contract import BucketContract, SharedContract, StoreContract


class TestS3Store(StoreContract, SharedContract, BucketContract):
    many = 25

    @pytest.fixture
    def store(self, s3_place: S3Place) -> Store:
        S3Store(f"{s3_place.url}/beside", s3_place.config).put("other", b"")
        return S3Store(f"{s3_place.url}/base folder/in+it", s3_place.config, page_size=10)

    @pytest.fixture
    def missing(self, s3_place: S3Place) -> Store:
        return S3Store(f"s3://missing-{uuid.uuid4().hex[:12]}/base", s3_place.config)
