from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from stagekit.store.base import Store
from stagekit.store.fsspec import FsspecStore
from stagekit.store.s3 import S3Store

from ..conftest import S3Place
from .contract import BucketContract, SharedContract, StoreContract


class TestS3fs(StoreContract, SharedContract, BucketContract):
    @pytest.fixture
    def store(self, any_s3: S3Place) -> Store:
        S3Store(f"{any_s3.url}/beside", any_s3.config).put("other", b"")
        return FsspecStore(f"{any_s3.url}/base folder/in+it", replace(any_s3.config, engine="fsspec"))

    @pytest.fixture
    def missing(self, any_s3: S3Place) -> Store:
        return FsspecStore(f"s3://missing-{uuid.uuid4().hex[:12]}/base", replace(any_s3.config, engine="fsspec"))
