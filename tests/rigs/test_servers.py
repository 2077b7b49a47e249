"""Every server of the rigs is real enough to store an object and to refuse a wrong key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from botocore.exceptions import ClientError
from botocore.session import Session

from stagekit.config import StoreConfig
from tests.conftest import ANY_S3, S3Place
from tests.rigs.rgw import Rgw
from tests.rigs.servers import S3Server, s3_client


@pytest.mark.parametrize("name", ANY_S3)
def test_a_server_keeps_an_object(name: str, s3_server: Callable[[str], S3Server]) -> None:
    server = s3_server(name)
    bucket = server.create_bucket()
    client = server.client()
    client.put_object(Bucket=bucket, Key="a/b", Body=b"bytes")
    assert client.get_object(Bucket=bucket, Key="a/b")["Body"].read() == b"bytes"
    assert [one["Key"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]] == ["a/b"]


@pytest.mark.parametrize("name", [one for one in ANY_S3 if one.id != "moto"])
def test_a_server_refuses_a_wrong_secret(name: str, s3_server: Callable[[str], S3Server]) -> None:
    server = s3_server(name)
    stranger = s3_client(server.endpoint_url, server.access_key, "not-the-secret", server.ca_bundle)
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        stranger.list_buckets()


def test_keys_come_from_a_profile(any_s3: S3Place) -> None:
    session = Session(profile=any_s3.config.profile)
    client = session.create_client("s3", endpoint_url=any_s3.config.endpoint_url, region_name="us-east-1", verify=any_s3.config.ca_bundle)
    assert "Contents" not in client.list_objects_v2(Bucket=any_s3.url.removeprefix("s3://"))


def test_default_checksums_are_refused_by_a_real_gateway_over_tls(rgw: Rgw) -> None:
    """Why every upload here sets ``when_required``: if this ever passes, the setting has lost its reason."""
    raw = rgw.https.client(request_checksum_calculation="when_supported")
    bucket = rgw.https.create_bucket()
    with pytest.raises(ClientError, match="MissingContentLength"):
        raw.put_object(Bucket=bucket, Key="a", Body=b"bytes")


def test_one_test_may_use_two_servers(
    moto_server: S3Server, rclone_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    one, two = credentials_for(moto_server), credentials_for(rclone_server)
    for config, server in ((one, moto_server), (two, rclone_server)):
        keys = Session(profile=config.profile).get_credentials()
        assert (keys.access_key, keys.secret_key) == (server.access_key, server.secret_key)
