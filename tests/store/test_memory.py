from __future__ import annotations

import hashlib
import uuid

import pytest

from stagekit.store import open_store
from stagekit.store.base import Store
from stagekit.store.memory import MemoryStore

from .contract import StoreContract, keys_of


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        name = uuid.uuid4().hex
        MemoryStore(f"memory://{name}/beside").put("other", b"")
        return MemoryStore(f"memory://{name}/base/folder")


def test_stores_of_one_name_see_the_same_objects() -> None:
    name = uuid.uuid4().hex
    open_store(f"memory://{name}/a").put("b/c", b"1")
    assert keys_of(open_store(f"memory://{name}").list()) == ["a/b/c"]
    assert keys_of(open_store(f"memory://{uuid.uuid4().hex}").list()) == []


def test_etags_are_those_of_s3() -> None:
    store = MemoryStore(f"memory://{uuid.uuid4().hex}")
    assert store.put("a", b"hello").etag == "5d41402abc4b2a76b9719d911017c592"
    with store.multipart("b", part_size=5) as upload:
        upload.put_part(0, b"hello")
    part = hashlib.md5(b"hello", usedforsecurity=False).digest()
    assert upload.info.etag == f"{hashlib.md5(part, usedforsecurity=False).hexdigest()}-1"
