"""One bucket for each server and one credentials file for the session: the contract has hundreds of tests, and each takes a folder."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from stagekit.config import StoreConfig

from ..conftest import ANY_S3, S3Place
from ..rigs.servers import S3Server


class Account:
    """A credentials file with a profile for each server that was asked for, and a bucket on each."""

    def __init__(self, directory: Path) -> None:
        self.credentials = directory / "credentials"
        self._servers: dict[str, S3Server] = {}
        self._buckets: dict[str, str] = {}

    def place(self, server: S3Server) -> S3Place:
        """A new folder in the server's bucket, and how to get there."""
        if server.name not in self._buckets:
            self._servers[server.name] = server
            self._buckets[server.name] = server.create_bucket()
            self.credentials.write_text(
                "".join(
                    f"[{name}]\naws_access_key_id = {one.access_key}\naws_secret_access_key = {one.secret_key}\n"
                    for name, one in self._servers.items()
                )
            )
        config = StoreConfig(endpoint_url=server.endpoint_url, profile=server.name, ca_bundle=server.ca_bundle)
        return S3Place(f"s3://{self._buckets[server.name]}/{uuid.uuid4().hex}", config)


@pytest.fixture(scope="session")
def account(tmp_path_factory: pytest.TempPathFactory) -> Account:
    return Account(tmp_path_factory.mktemp("account"))


@pytest.fixture
def place_on(account: Account, s3_server: Callable[[str], S3Server], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], S3Place]:
    """A function from a server's name to a new folder on it."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(account.credentials))

    def place(name: str) -> S3Place:
        return account.place(s3_server(name))

    return place


@pytest.fixture(params=ANY_S3)
def s3_place(request: pytest.FixtureRequest, place_on: Callable[[str], S3Place]) -> S3Place:
    """Runs the test on every S3 server there is, each time in a new folder."""
    return place_on(request.param)
