"""A bucket on a real server, reached through the fault proxy by trainers and directly by the reader that judges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from stagekit.config import StoreConfig
from stagekit.runs.spool import pending
from stagekit.testing.proxy import FaultProxy

from ..rigs.certificates import Certificates, make_certificates
from ..rigs.servers import S3Server
from .trainer import oracle, start

SERVERS = (pytest.param("moto", id="moto"), pytest.param("rclone", id="rclone"), pytest.param("rgw-https", marks=pytest.mark.rig("rgw")))


@dataclass
class Proxied:
    """Where a training writes through ``proxy``, on a disk of its own below ``directory``; a neighbour lies in the same bucket."""

    server: S3Server
    proxy: FaultProxy
    bucket: str
    directory: Path
    reader: StoreConfig
    ca_bundle: str | None

    def __post_init__(self) -> None:
        (self.directory / "scratch").mkdir()
        self.server.client().put_object(Bucket=self.bucket, Key="runs/neighbour/manifest.json", Body=b"not this run's")
        self._neighbours = self._others()

    def options(self, steps: int, **store: Any) -> dict[str, Any]:
        """What to give the trainer; ``store`` are settings of its ``StoreConfig``."""
        config = StoreConfig(endpoint_url=self.proxy.endpoint_url, profile=self.server.name, ca_bundle=self.ca_bundle, **store)
        return {
            "run": f"s3://{self.bucket}/runs/first",
            "journal": str(self.directory / "journal"),
            "scratch": str(self.directory / "scratch"),
            "steps": steps,
            "keep_last": 3,
            "store": asdict(config),
            "reader": asdict(self.reader),
        }

    def train(self, options: dict[str, Any]) -> int:
        """One start of the trainer, then the oracle. Returns the exit code, which agrees with what is in the bucket."""
        home = self.directory / "home"
        process = start(options, home)
        _, said = process.communicate(timeout=120)
        newest = self.look(options)
        left = [entry.step for entry in pending(home / "spool")]
        assert (process.returncode == 0) == (newest == options["steps"] and not left), f"{process.returncode}, {newest}, {left}\n{said}"
        return process.returncode

    def look(self, options: dict[str, Any]) -> int | None:
        """The oracle: the bucket alone, and what is in it beside the run."""
        found = oracle(options, self.directory / "looked")
        assert self._others() == self._neighbours
        return found

    def _others(self) -> dict[str, str]:
        listed = self.server.client().list_objects_v2(Bucket=self.bucket).get("Contents", ())
        return {one["Key"]: one["ETag"] for one in listed if not one["Key"].startswith("runs/first/")}


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For a proxy before a server that speaks https."""
    return make_certificates(tmp_path_factory.mktemp("proxy") / "tls")


@pytest.fixture(params=SERVERS)
def proxied(
    request: pytest.FixtureRequest,
    s3_server: Callable[[str], S3Server],
    credentials_for: Callable[[S3Server], StoreConfig],
    certificates: Certificates,
    tmp_path: Path,
) -> Iterator[Proxied]:
    """A new bucket on each of the servers; https on both sides of the proxy where the server speaks it."""
    server = s3_server(request.param)
    secure = server.ca_bundle is not None
    own = (certificates.leaf, certificates.leaf_key) if secure else None
    with FaultProxy(server.endpoint_url, ca_bundle=server.ca_bundle, certificate=own) as proxy:
        authority = str(certificates.authority) if secure else None
        yield Proxied(server, proxy, server.create_bucket(), tmp_path, credentials_for(server), authority)
