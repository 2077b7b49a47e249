"""What every S3 server of the rigs is to a test, and the two light ones."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagekit.sdk import known_settings
from stagekit.testing.rclone import RcloneServer


@dataclass(frozen=True)
class S3Server:
    """A running server. ``name`` also names its profile in the credentials file."""

    name: str
    endpoint_url: str
    access_key: str
    secret_key: str
    ca_bundle: str | None = None

    def client(self, **settings: Any) -> Any:
        """A plain botocore client: what a test uses to look at, or to spoil, what Stagekit stored."""
        return s3_client(self.endpoint_url, self.access_key, self.secret_key, self.ca_bundle, **settings)

    def create_bucket(self, prefix: str = "test") -> str:
        """A new, empty bucket with a name of its own."""
        bucket = f"{prefix}-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=bucket)
        return bucket


def s3_client(endpoint_url: str, access_key: str, secret_key: str, ca_bundle: str | None = None, **settings: Any) -> Any:
    from botocore.config import Config
    from botocore.session import Session

    session = Session()
    # A named profile in a test's environment must not stand in the way of explicit keys.
    session.set_config_variable("profile", None)
    options = {
        "signature_version": "s3v4",
        "s3": {"addressing_style": "path"},
        **known_settings(request_checksum_calculation="when_required", response_checksum_validation="when_required"),
        "retries": {"total_max_attempts": 1},
        "connect_timeout": 5,
        "read_timeout": 30,
        **settings,
    }
    return session.create_client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        verify=ca_bundle or True,
        config=Config(**options),
    )


@contextmanager
def moto() -> Iterator[S3Server]:
    """moto's server in a thread: the API's shape, conditional PUT. It takes any key, secret and MD5."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server("moto", f"http://{host}:{port}", "moto-access", "moto-secret")
    finally:
        server.stop()


@contextmanager
def rclone(directory: Path) -> Iterator[S3Server]:
    """``rclone serve s3`` on a real directory, as the demo runs it."""
    with RcloneServer(directory / "root", log=directory / "rclone.log") as server:
        yield S3Server("rclone", server.endpoint_url, server.access_key, server.secret_key)
