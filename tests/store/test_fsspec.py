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
    many = 25

    @pytest.fixture
    def store(self, s3_place: S3Place) -> Store:
        S3Store(f"{s3_place.url}/beside", s3_place.config).put("other", b"")
        return FsspecStore(f"{s3_place.url}/base folder/in+it", replace(s3_place.config, engine="fsspec"))

    @pytest.fixture
    def missing(self, s3_place: S3Place) -> Store:
        return FsspecStore(f"s3://missing-{uuid.uuid4().hex[:12]}/base", replace(s3_place.config, engine="fsspec"))
