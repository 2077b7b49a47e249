from __future__ import annotations

from pathlib import Path

import pytest

from stagekit.store.base import Store
from stagekit.store.directory import DirectoryStore

from .contract import BucketContract, SharedContract, StoreContract


class TestDirectoryStore(StoreContract, SharedContract, BucketContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        (tmp_path / "beside").write_bytes(b"other")
        return DirectoryStore(tmp_path / "base folder")

    @pytest.fixture
    def missing(self, tmp_path: Path) -> Store:
        return DirectoryStore(tmp_path / "unmounted", create=False)
