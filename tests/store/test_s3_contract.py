"""The contract on real servers: moto, rclone, Ceph RGW over http and https."""

from __future__ import annotations

import uuid

import pytest

from stagekit.config import StoreConfig
from stagekit.store.base import Store
from stagekit.store.s3 import S3Store

from ..conftest import S3Place
from .contract import BucketContract, SharedContract, StoreContract


class TestS3Store(StoreContract, SharedContract, BucketContract):
    @pytest.fixture
    def store(self, any_s3: S3Place) -> Store:
        S3Store(f"{any_s3.url}/beside", any_s3.config).put("other", b"")
        return S3Store(f"{any_s3.url}/base folder/in+it", any_s3.config)

    @pytest.fixture
    def missing(self, any_s3: S3Place) -> Store:
        return S3Store(f"s3://missing-{uuid.uuid4().hex[:12]}/base", any_s3.config)
