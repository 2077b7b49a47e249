"""The fault proxy does to a real server's traffic exactly what its script says, and nothing when there is none."""

from __future__ import annotations

import base64
import gc
import hashlib
import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, ReadTimeoutError, ResponseStreamingError

from stagekit.testing.proxy import (
    Cut,
    Delay,
    Drop,
    FaultProxy,
    FlipBit,
    Hang,
    HideKeys,
    Html,
    ShortBody,
    SlowDown,
    Stall,
    Status,
    Throttle,
    WrongDate,
)
from tests.conftest import ANY_S3
from tests.rigs.certificates import make_certificates
from tests.rigs.servers import S3Server, s3_client

BODY = random.Random(0).randbytes(300_000)


class Rig:
    """A proxy before a server that holds ``BODY`` under ``a.tar``."""

    def __init__(self, server: S3Server, proxy: FaultProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.direct = server.client()
        self.bucket = server.create_bucket()
        self.direct.put_object(Bucket=self.bucket, Key="a.tar", Body=BODY)

    def client(self, **settings: Any) -> Any:
        return s3_client(self.proxy.endpoint_url, self.server.access_key, self.server.secret_key, **settings)

    def get(self, **arguments: Any) -> bytes:
        body: bytes = self.client().get_object(Bucket=self.bucket, Key="a.tar", **arguments)["Body"].read()
        return body


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def rig(rclone_server: S3Server, slept: list[float]) -> Iterator[Rig]:
    with FaultProxy(rclone_server.endpoint_url, sleep=slept.append) as proxy:
        yield Rig(rclone_server, proxy)


@pytest.mark.parametrize("name", ANY_S3)
def test_without_rules_nothing_changes(name: str, s3_server: Callable[[str], S3Server]) -> None:
    server = s3_server(name)
    with FaultProxy(server.endpoint_url, ca_bundle=server.ca_bundle) as proxy:
        rig = Rig(server, proxy)
        client = rig.client()
        client.put_object(Bucket=rig.bucket, Key="dir/ü b+c", Body=b"", ContentMD5="1B2M2Y8AsgTpgAmY7PhCfg==")
        assert client.get_object(Bucket=rig.bucket, Key="dir/ü b+c")["Body"].read() == b""
        assert client.head_object(Bucket=rig.bucket, Key="a.tar")["ContentLength"] == len(BODY)
        assert client.get_object(Bucket=rig.bucket, Key="a.tar", Range="bytes=7-99")["Body"].read() == BODY[7:100]
        upload = client.create_multipart_upload(Bucket=rig.bucket, Key="big")["UploadId"]
        part = client.upload_part(Bucket=rig.bucket, Key="big", UploadId=upload, PartNumber=1, Body=BODY)
        client.complete_multipart_upload(
            Bucket=rig.bucket, Key="big", UploadId=upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        )
        assert rig.direct.get_object(Bucket=rig.bucket, Key="big")["Body"].read() == BODY
        client.delete_object(Bucket=rig.bucket, Key="big")
        assert [one["Key"] for one in client.list_objects_v2(Bucket=rig.bucket)["Contents"]] == ["a.tar", "dir/ü b+c"]
        with pytest.raises(ClientError, match="NoSuchKey"):
            client.get_object(Bucket=rig.bucket, Key="big")


def test_every_request_is_on_record(rig: Rig) -> None:
    client = rig.client()
    client.put_object(Bucket=rig.bucket, Key="x/y", Body=b"12345")
    client.get_object(Bucket=rig.bucket, Key="a.tar", Range="bytes=0-9")["Body"].read()
    client.list_objects_v2(Bucket=rig.bucket, Prefix="x/")
    put, get, listing = rig.proxy.requests
    assert (put.method, put.bucket, put.key, put.status, put.received, put.sent) == ("PUT", rig.bucket, "x/y", 200, 5, 0)
    assert (get.method, get.key, get.range, get.received) == ("GET", "a.tar", "bytes=0-9", 0)
    assert get.sent == 10
    assert (listing.method, listing.key, listing.query["prefix"], listing.status) == ("GET", "", "x/", 200)
    rig.proxy.clear()
    assert rig.proxy.requests == ()


def test_rules_count_and_the_first_wins(rig: Rig) -> None:
    rig.proxy.fault(Status(500), method="GET", key="*.tar", skip=1, times=2)
    rig.proxy.fault(Status(403, "AccessDenied"), method="GET", key="a*", skip=1)
    outcomes = []
    for _ in range(5):
        try:
            rig.get()
            outcomes.append("ok")
        except ClientError as error:
            outcomes.append(error.response["Error"]["Code"])
    # The first rule lets one pass, which the second counts as the one that it lets pass; then the first takes two.
    assert outcomes == ["ok", "InternalError", "InternalError", "AccessDenied", "AccessDenied"]
    rig.proxy.clear()
    rig.proxy.fault(Status(500), where=lambda request: request.range == "bytes=5-9")
    assert rig.get() == BODY
    with pytest.raises(ClientError, match="InternalError"):
        rig.get(Range="bytes=5-9")


def test_a_cut_reply_ends_after_exactly_so_many_bytes(rig: Rig) -> None:
    rig.proxy.fault(Cut(100_001), method="GET")
    reply = rig.client().get_object(Bucket=rig.bucket, Key="a.tar")["Body"]
    assert reply.read(100_001) == BODY[:100_001]
    with pytest.raises(ResponseStreamingError, match="IncompleteRead"):
        reply.read()
    assert rig.proxy.requests[-1].sent == 100_001


def test_a_cut_request_leaves_nothing_on_the_server(rig: Rig) -> None:
    rig.proxy.fault(Cut(1000, of="request"), method="PUT")
    with pytest.raises(ConnectionClosedError):
        rig.client().put_object(Bucket=rig.bucket, Key="new", Body=BODY)
    assert rig.proxy.requests[-1].received == 1000
    with pytest.raises(ClientError, match="404"):
        rig.direct.head_object(Bucket=rig.bucket, Key="new")


@pytest.mark.parametrize("offset", [0, 65_535, 65_536, len(BODY) - 1])
def test_one_bit_of_a_reply_flips(rig: Rig, offset: int) -> None:
    rig.proxy.fault(FlipBit(offset, bit=3), method="GET")
    got = rig.get()
    assert [i for i in range(len(BODY)) if got[i] != BODY[i]] == [offset]
    assert got[offset] ^ BODY[offset] == 8


@pytest.mark.parametrize("name", [one for one in ANY_S3 if one.id != "moto"])
def test_one_flipped_bit_of_a_request_is_noticed_by_the_server(name: str, s3_server: Callable[[str], S3Server]) -> None:
    """Where a Content-MD5 is sent. It is why every upload here sends one: rclone does not look at the signed SHA-256."""
    server = s3_server(name)
    with FaultProxy(server.endpoint_url, ca_bundle=server.ca_bundle) as proxy:
        rig = Rig(server, proxy)
        proxy.fault(FlipBit(70_000, of="request"), method="PUT")
        md5 = base64.b64encode(hashlib.md5(BODY).digest()).decode()
        with pytest.raises(ClientError, match=r"BadDigest|XAmzContentSHA256Mismatch"):
            rig.client().put_object(Bucket=rig.bucket, Key="new", Body=BODY, ContentMD5=md5)
        with pytest.raises(ClientError, match="404"):
            rig.direct.head_object(Bucket=rig.bucket, Key="new")


def test_errors_of_s3(rig: Rig) -> None:
    rig.proxy.fault(SlowDown(retry_after_s=7), times=1)
    rig.proxy.fault(Status(403, "AccessDenied", "no"), times=1)
    with pytest.raises(ClientError, match="SlowDown") as slow:
        rig.client().put_object(Bucket=rig.bucket, Key="new", Body=BODY)
    assert slow.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert slow.value.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "7"
    with pytest.raises(ClientError, match=r"AccessDenied.*no"):
        rig.get()
    assert [one.status for one in rig.proxy.requests] == [503, 403]
    with pytest.raises(ClientError, match="404"):
        rig.direct.head_object(Bucket=rig.bucket, Key="new")


def test_an_error_to_head_has_no_body(rig: Rig) -> None:
    rig.proxy.fault(Status(403, "AccessDenied"), method="HEAD", times=1)
    client = rig.client()
    with pytest.raises(ClientError, match="403"):
        client.head_object(Bucket=rig.bucket, Key="a.tar")
    assert client.head_object(Bucket=rig.bucket, Key="a.tar")["ContentLength"] == len(BODY)


def test_a_short_body_is_well_formed(rig: Rig) -> None:
    rig.proxy.fault(ShortBody(missing=100_000), method="GET")
    client = rig.client()
    for _ in range(2):
        reply = client.get_object(Bucket=rig.bucket, Key="a.tar")
        assert reply["ContentLength"] == 200_000
        assert reply["Body"].read() == BODY[:200_000]


def test_a_short_request_is_well_formed_and_stored_as_if_it_were_whole(moto_server: S3Server) -> None:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        rig = Rig(moto_server, proxy)
        proxy.fault(ShortBody(missing=100_000, of="request"), method="PUT")
        rig.client().put_object(Bucket=rig.bucket, Key="short", Body=BODY)
        assert rig.direct.get_object(Bucket=rig.bucket, Key="short")["Body"].read() == BODY[:200_000]


@pytest.mark.parametrize("after_request", [False, True])
def test_a_request_that_nobody_answers(rig: Rig, after_request: bool) -> None:
    rig.proxy.fault(Hang(after_request), method="PUT", times=1)
    with pytest.raises(ReadTimeoutError):
        rig.client(read_timeout=1).put_object(Bucket=rig.bucket, Key="silent", Body=BODY)
    deadline = time.monotonic() + 60  # the server may still be at it when the client has given up

    def is_there() -> bool:
        return "Contents" in rig.direct.list_objects_v2(Bucket=rig.bucket, Prefix="silent")

    while after_request and not is_there() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_there() == after_request


def test_a_web_page_instead_of_the_object(rig: Rig) -> None:
    rig.proxy.fault(Html("<html>log in</html>"), method="GET")
    reply = rig.client().get_object(Bucket=rig.bucket, Key="a.tar")
    assert (reply["ContentType"], reply["Body"].read()) == ("text/html", b"<html>log in</html>")


def test_waiting_goes_through_the_argument(rig: Rig, slept: list[float]) -> None:
    rig.proxy.fault(Delay(30), Throttle(100_000), method="GET")
    assert rig.get() == BODY
    assert slept[0] == 30
    assert sum(slept[1:]) == pytest.approx(len(BODY) / 100_000)


def test_uploads_can_be_throttled(rig: Rig, slept: list[float]) -> None:
    rig.proxy.fault(Throttle(50_000, of="request"), method="PUT")
    rig.client().put_object(Bucket=rig.bucket, Key="new", Body=BODY)
    assert sum(slept) == pytest.approx(len(BODY) / 50_000)


def test_a_stalled_reply_goes_on_when_released(rig: Rig) -> None:
    rig.proxy.fault(Stall(5000), method="GET", times=2)
    with pytest.raises(ReadTimeoutError):
        rig.client(read_timeout=0.3).get_object(Bucket=rig.bucket, Key="a.tar")["Body"].read()
    got: list[bytes] = []
    reply = rig.client().get_object(Bucket=rig.bucket, Key="a.tar")["Body"]
    reader = threading.Thread(target=lambda: got.append(reply.read()))
    reader.start()
    while rig.proxy.requests[-1].sent < 5000:
        reader.join(0.01)
    assert not got
    rig.proxy.release()
    reader.join()
    assert got == [BODY]


def test_stopping_ends_a_stalled_reply(rclone_server: S3Server) -> None:
    with FaultProxy(rclone_server.endpoint_url) as proxy:
        rig = Rig(rclone_server, proxy)
        proxy.fault(Stall(10), method="GET")
        reply = rig.client().get_object(Bucket=rig.bucket, Key="a.tar")["Body"]
    with pytest.raises(ResponseStreamingError):
        reply.read()


def test_a_wrong_date(rig: Rig) -> None:
    rig.proxy.fault(WrongDate(-3600), method="HEAD")
    stated = rig.client().head_object(Bucket=rig.bucket, Key="a.tar")["ResponseMetadata"]["HTTPHeaders"]["date"]
    then = datetime.strptime(stated, "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    assert 3500 < (datetime.now(UTC) - then).total_seconds() < 3700


@pytest.mark.parametrize("name", ANY_S3)
def test_hidden_keys_are_in_no_listing_and_still_there(name: str, s3_server: Callable[[str], S3Server]) -> None:
    server = s3_server(name)
    with FaultProxy(server.endpoint_url, ca_bundle=server.ca_bundle) as proxy:
        rig = Rig(server, proxy)
        for key in ("dir/one", "dir/two", "other/three"):
            rig.direct.put_object(Bucket=rig.bucket, Key=key, Body=b"1")
        proxy.fault(HideKeys("dir/*"))
        client = rig.client()
        listing = client.list_objects_v2(Bucket=rig.bucket)
        assert ([one["Key"] for one in listing["Contents"]], listing["KeyCount"]) == (["a.tar", "other/three"], 2)
        folders = client.list_objects_v2(Bucket=rig.bucket, Delimiter="/")["CommonPrefixes"]
        assert [one["Prefix"] for one in folders] == ["other/"]
        assert client.get_object(Bucket=rig.bucket, Key="dir/one")["Body"].read() == b"1"


def test_a_dropped_request_never_reaches_the_server(rig: Rig) -> None:
    rig.proxy.fault(Drop(), method="PUT", key="never", times=1)
    rig.proxy.fault(Drop(after_request=True), method="PUT", key="lost", times=1)
    client = rig.client()
    for key in ("never", "lost"):
        with pytest.raises(ConnectionClosedError):
            client.put_object(Bucket=rig.bucket, Key=key, Body=b"1")
    with pytest.raises(ClientError, match="404"):
        rig.direct.head_object(Bucket=rig.bucket, Key="never")
    assert rig.direct.head_object(Bucket=rig.bucket, Key="lost")["ContentLength"] == 1
    assert [one.status for one in rig.proxy.requests] == [0, 0]


def test_the_proxy_speaks_https_when_given_a_certificate(rclone_server: S3Server, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "tls")
    with FaultProxy(rclone_server.endpoint_url, certificate=(certificates.leaf, certificates.leaf_key)) as proxy:
        rig = Rig(rclone_server, proxy)
        client = s3_client(proxy.endpoint_url, rclone_server.access_key, rclone_server.secret_key, str(certificates.authority))
        assert client.get_object(Bucket=rig.bucket, Key="a.tar")["Body"].read() == BODY


def test_a_body_of_unknown_length_reaches_the_server(rig: Rig) -> None:
    """Chunked by the client: the framing is the proxy's own on the way out, the bytes are not."""
    body = b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
    connection = http.client.HTTPConnection("127.0.0.1", int(rig.proxy.endpoint_url.rpartition(":")[2]))
    connection.request("PUT", f"/{rig.bucket}/chunked", body=body, headers={"Transfer-Encoding": "chunked"}, encode_chunked=False)
    assert connection.getresponse().status in (400, 403)  # it is unsigned, and the server got far enough to say so
    connection.close()
    assert rig.proxy.requests[-1].received == len(b"hello world")


def test_many_threads_at_once(rig: Rig) -> None:
    client = rig.client(max_pool_connections=16)
    digests: list[str] = []

    def read() -> None:
        for _ in range(5):
            body = client.get_object(Bucket=rig.bucket, Key="a.tar")["Body"].read()
            digests.append(hashlib.sha256(body).hexdigest())

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digests == [hashlib.sha256(BODY).hexdigest()] * 80
    assert len(rig.proxy.requests) == 80


def test_a_reply_that_is_left_half_read_is_closed(moto_server: S3Server) -> None:
    """moto ends every connection with its reply, which then owns the socket. A failure that is kept keeps the reply as well."""

    def fail(seconds: float) -> None:
        raise ValueError(f"no sleep of {seconds} s")

    def fail_in_mid_reply() -> None:
        with FaultProxy(moto_server.endpoint_url, sleep=fail) as proxy:
            rig = Rig(moto_server, proxy)
            proxy.fault(Throttle(1000), method="GET")
            with pytest.raises((ResponseStreamingError, ConnectionClosedError)):
                rig.get()

    with pytest.raises(RuntimeError, match="the fault proxy failed"):
        fail_in_mid_reply()
    gc.collect()  # which finds nothing open: that would be a warning, and so an error


def test_a_target_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match="names no host and port"):
        FaultProxy("http://localhost")


def test_a_proxy_that_does_not_run_has_no_endpoint() -> None:
    with pytest.raises(RuntimeError, match="is not running"):
        _ = FaultProxy("http://127.0.0.1:1").endpoint_url
