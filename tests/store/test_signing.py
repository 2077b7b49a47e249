"""What is signed of a body that is sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stagekit.config import StoreConfig
from stagekit.store import open_store
from stagekit.testing.proxy import FaultProxy

from ..conftest import ANY_S3
from ..rigs.servers import S3Server


@pytest.mark.parametrize("name", [one for one in ANY_S3 if one.id != "rgw-https"])
def test_a_body_is_signed_by_its_md5_and_hashed_no_more_than_that(
    name: str, s3_server: Callable[[str], S3Server], credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    server = s3_server(name)
    config = credentials_for(server)
    with FaultProxy(server.endpoint_url) as proxy:
        store = open_store(f"s3://{server.create_bucket()}/x", StoreConfig(endpoint_url=proxy.endpoint_url, profile=config.profile))
        store.put("one", b"a body")
        with store.multipart("two", part_size=5 * 2**20) as upload:
            upload.put_part(0, bytes(5 * 2**20))
            upload.put_part(1, b"rest")
        sent = [request for request in proxy.requests if request.method == "PUT"]
        assert len(sent) == 3
        for request in sent:
            signed = request.headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
            assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
            assert {"content-md5", "x-amz-content-sha256"} <= set(signed)
        others = [request for request in proxy.requests if request.method == "POST" and "uploadId" in request.query]
        assert others[0].headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD", "without an MD5 the body is signed itself"
    assert bytes(open_store(str(store.location), config).get("one")) == b"a body"
