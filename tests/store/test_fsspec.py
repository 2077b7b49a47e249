from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from stagekit.config import StoreConfig
from stagekit.errors import LocationError, MissingExtra, Unreachable, UsageError, WrongCredentials
from stagekit.store import open_store
from stagekit.store.base import Store
from stagekit.store.fsspec import FsspecStore
from stagekit.store.s3 import S3Store

from ..conftest import S3Place
from ..rigs.servers import S3Server
from .contract import BucketContract, SharedContract, StoreContract


class TestS3fs(StoreContract, SharedContract, BucketContract):
    many = 25

    # moto, rclone and Ceph over TLS; without TLS Ceph answers s3fs the same, and the botocore store runs there too.
    @pytest.fixture(params=["moto", "rclone", pytest.param("rgw-https", marks=pytest.mark.rig("rgw"))])
    def s3_place(self, request: pytest.FixtureRequest, place_on: Callable[[str], S3Place]) -> S3Place:
        return place_on(request.param)

    @pytest.fixture
    def store(self, s3_place: S3Place) -> Store:
        S3Store(f"{s3_place.url}/beside", s3_place.config).put("other", b"")
        return FsspecStore(f"{s3_place.url}/base folder/in+it", replace(s3_place.config, engine="fsspec"))

    @pytest.fixture
    def missing(self, s3_place: S3Place) -> Store:
        return FsspecStore(f"s3://missing-{uuid.uuid4().hex[:12]}/base", replace(s3_place.config, engine="fsspec"))


class ScratchFileSystem(MemoryFileSystem):
    """Stands for a file system without objects, such as sftp: a file is visible from its first byte."""

    protocol = "scratch"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]


fsspec.register_implementation("scratch", ScratchFileSystem, clobber=True)


class TestFileSystem(StoreContract):
    many = 25

    @pytest.fixture
    def store(self) -> Store:
        return FsspecStore(f"scratch://host/{uuid.uuid4().hex}")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(MissingExtra, match=r"S3 through fsspec needs the package 's3fs'.* pip install '?s3fs"):
        open_store("s3://bucket", StoreConfig(engine="fsspec"))
    with pytest.raises(MissingExtra, match=r"gs:// needs a package that is not installed. Install it with: pip install gcsfs"):
        open_store("gs://bucket/x")


def test_what_the_network_said_is_found_behind_what_a_client_of_http_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except OSError as error:
            raise RuntimeError("all attempts failed") from error

    monkeypatch.setattr(ScratchFileSystem, "info", refuse)
    with pytest.raises(Unreachable, match="the scratch file system does not answer"):
        FsspecStore("scratch://host/a").head("key")


def test_what_a_class_of_fsspecs_own_needs_is_named_and_not_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "sftp", raising=False)
    with pytest.raises(MissingExtra, match=r'^sftp:// needs a package that is not installed: .*"paramiko"') as caught:
        open_store("sftp://host/x")
    assert str(caught.value).endswith(". Install it with: pip install paramiko")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "http", raising=False)
    with pytest.raises(MissingExtra, match=r"^http:// needs a package that is not installed: .*\. Install it with: pip install aiohttp$"):
        open_store("http://host/x")


def test_an_unknown_kind_of_url() -> None:
    with pytest.raises(LocationError, match="nonsense:// is no kind of URL"):
        open_store("nonsense://bucket/x")


def test_nothing_is_created_exclusively() -> None:
    with pytest.raises(UsageError, match="nothing can be created exclusively through fsspec"):
        FsspecStore("scratch://host/x").put("a", b"", if_absent=True)


@pytest.mark.rig("rgw")
def test_a_wrong_key_is_told_as_by_the_other_engine(
    s3_server: Callable[[str], S3Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3_server("rgw-http")
    (tmp_path / "credentials").write_text("[wrong]\naws_access_key_id = NOSUCHKEY\naws_secret_access_key = sentinel\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    store = FsspecStore(f"s3://{server.create_bucket()}/x", StoreConfig(endpoint_url=server.endpoint_url, profile="wrong", engine="fsspec"))
    for call in (lambda: store.head("a"), lambda: store.get("a"), lambda: store.put("a", b""), lambda: list(store.list())):
        with pytest.raises(WrongCredentials, match="does not know the access key; check the keys of profile 'wrong'") as caught:
            call()
        assert "sentinel" not in str(caught.value)
