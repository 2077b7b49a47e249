"""What S3 demands beyond the contract: dialects of ranges, forks, lost answers, endpoints of profiles, checksums."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import botocore.exceptions
import pytest

from stagekit.config import StoreConfig
from stagekit.errors import Conflict, InvalidReply, StoreError, Unreachable
from stagekit.store import open_store
from stagekit.store.retry import RetryStore
from stagekit.store.s3 import S3Store
from stagekit.store.s3_client import client_for

from ..conftest import S3Place
from ..rigs.rgw import Rgw
from .answers import Answer, Request, answering, refusal
from .contract import run_apart


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def at(url: str) -> S3Store:
    return S3Store("s3://bucket/base", StoreConfig(endpoint_url=url))


# ------------------------------------------------------------------------------------------------------------- what servers really do


def test_the_sdk_s_default_checksums_cannot_upload_to_ceph_over_tls_and_ours_can(rgw: Rgw, place_on: Callable[[str], S3Place]) -> None:
    """The reason for ``when_required``. When the first half stops failing, the setting may go."""
    place = place_on("rgw-https")
    defaults = rgw.https.client(request_checksum_calculation="when_supported", response_checksum_validation="when_supported")
    with pytest.raises(botocore.exceptions.ClientError, match="MissingContentLength"):
        defaults.put_object(Bucket=place.url.split("/")[2], Key="canary", Body=b"song")
    store = S3Store(place.url, place.config)
    store.put("canary", b"song")
    assert bytes(store.get("canary")) == b"song"


def test_what_each_server_proves(place_on: Callable[[str], S3Place]) -> None:
    for name, exclusive, digests in (("moto", True, False), ("rclone", False, True), ("rgw-http", True, True), ("rgw-https", True, True)):
        place = place_on(name)
        store = S3Store(place.url, place.config)
        assert (store.conditional_create(), store.checks_digest()) == (exclusive, digests), name


def test_uploads_carry_their_md5(keys: None) -> None:
    seen: list[Request] = []

    def answer(request: Request) -> Answer:
        seen.append(request)
        if request.method == "POST":
            result = "InitiateMultipartUploadResult" if "uploads" in request.path else "CompleteMultipartUploadResult"
            body = f'<?xml version="1.0"?><{result}><UploadId>u1</UploadId><ETag>"x-1"</ETag></{result}>'
            return Answer(200, body.encode(), {"Content-Type": "application/xml"})
        return Answer(200, b"", {"ETag": '"x"'})

    with answering(answer) as url:
        at(url).put("a", b"hello")
        with at(url).multipart("b", part_size=5) as upload:
            upload.put_part(0, b"hello")
    puts = [request for request in seen if request.method == "PUT"]
    assert [request.headers["Content-MD5"] for request in puts] == ["XUFAKrxLKna5cZ2REBfFkg=="] * 2
    assert all(not name.lower().startswith("x-amz-checksum") for request in seen for name in request.headers)
    assert [request.path.split("?")[0] for request in puts] == ["/bucket/base/a", "/bucket/base/b"]


# ----------------------------------------------------------------------------------------------------------------------------- ranges

OBJECT = bytes(range(200))


@pytest.mark.parametrize("dialect", ["206", "200 with the range", "200 with the whole object"])
def test_a_range_is_understood_in_every_dialect(keys: None, dialect: str) -> None:
    def answer(request: Request) -> Answer:
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers["Range"]).groups()  # type: ignore[union-attr]
        start, end = int(first), int(last or 199) + 1
        stated = {"ETag": '"e"', "Content-Range": f"bytes {start}-{end - 1}/200"}
        if dialect == "206":
            return Answer(206, OBJECT[start:end], stated)
        if dialect == "200 with the range":
            return Answer(200, OBJECT[start:end], stated)
        return Answer(200, OBJECT, {"ETag": '"e"'})

    with answering(answer) as url:
        for start, length in ((50, 100), (1, 199), (199, 1), (150, None)):
            end = 200 if length is None else start + length
            assert bytes(at(url).get("a", start, length)) == OBJECT[start:end]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Range": "bytes 40-139/200"},
        {"Content-Range": "bytes 50-99/200"},
        {"Content-Range": "nonsense"},
        {},
    ],
)
def test_another_range_than_the_one_asked_for_is_refused(keys: None, headers: dict[str, str]) -> None:
    with answering(lambda _: Answer(206, OBJECT[50:150], {"ETag": '"e"', **headers})) as url, pytest.raises(InvalidReply):
        at(url).get("a", 50, 100)


def test_a_server_that_ignores_conditions_gives_no_other_object(keys: None) -> None:
    with answering(lambda _: Answer(200, OBJECT, {"ETag": '"new"'})) as url, pytest.raises(Conflict, match="no longer old"):
        at(url).get("a", if_match="old")


def test_a_cut_body_holds_what_arrived(keys: None) -> None:
    data = os.urandom(1_000_000)
    with answering(lambda _: Answer(200, data[:600_000], {"ETag": '"e"'}, length=1_000_000)) as url, pytest.raises(Unreachable) as caught:
        at(url).get("a")
    assert caught.value.transient
    assert caught.value.etag == "e"
    assert len(caught.value.received) >= 600_000 - 256 * 1024
    assert data.startswith(caught.value.received)


def test_a_cut_body_is_continued_by_range_and_if_match(keys: None) -> None:
    data = os.urandom(1_000_000)
    seen: list[tuple[str | None, str | None]] = []

    def answer(request: Request) -> Answer:
        seen.append((request.headers.get("Range"), request.headers.get("If-Match")))
        start = int(request.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        stated = {"ETag": '"e"', "Content-Range": f"bytes {start}-999999/1000000"}
        rest = data[start:]
        return Answer(206, rest[:400_000], stated, length=len(rest)) if len(rest) > 400_000 else Answer(206, rest, stated)

    with answering(answer) as url:
        assert bytes(RetryStore(at(url), sleep=lambda _: None).get("a")) == data
    assert len(seen) > 2
    assert seen[0] == (None, None)
    assert all(asked is not None and same == '"e"' for asked, same in seen[1:])


# ------------------------------------------------------------------------------------------------------------------------ lost answers


@pytest.mark.parametrize(("etag", "found"), [("right", True), ("0" * 32 + "-1", False)])
def test_a_completion_whose_answer_was_lost_is_recognised(keys: None, etag: str, found: bool) -> None:
    part = hashlib.md5(b"hello", usedforsecurity=False)
    whole = f"{hashlib.md5(part.digest(), usedforsecurity=False).hexdigest()}-1" if etag == "right" else etag
    completions = iter([refusal(500, "InternalError"), refusal(404, "NoSuchUpload"), refusal(404, "NoSuchUpload")])

    def answer(request: Request) -> Answer:
        if request.method == "POST" and "uploads" in request.path:
            body = b'<?xml version="1.0"?><InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>'
            return Answer(200, body, {"Content-Type": "application/xml"})
        if request.method == "PUT":
            return Answer(200, b"", {"ETag": f'"{part.hexdigest()}"'})
        if request.method == "POST":
            return next(completions)
        if request.method == "HEAD":
            return Answer(200, b"", {"ETag": f'"{whole}"'}, length=5)
        return Answer(204)

    with answering(answer) as url:
        store = RetryStore(at(url), sleep=lambda _: None)

        def upload() -> int:
            with store.multipart("a", part_size=5) as upload:
                upload.put_part(0, b"hello")
            return upload.info.size

        if found:
            assert upload() == 5
        else:
            with pytest.raises(StoreError, match="aborted by somebody else"):
                upload()


# --------------------------------------------------------------------------------------------------------------- clients and processes


def test_stores_with_the_same_source_share_a_client_and_others_do_not(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = StoreConfig(endpoint_url="http://127.0.0.1:9")
    first, second = S3Store("s3://one/a", config), S3Store("s3://two/b", config)
    assert client_for(first.location, config) is client_for(second.location, config)
    assert client_for(first.location, StoreConfig(endpoint_url="http://127.0.0.1:10")) is not client_for(first.location, config)
    before = client_for(first.location, config)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert client_for(first.location, config) is not before


def test_a_forked_child_has_a_client_of_its_own(keys: None) -> None:
    script = (
        "import os\n"
        "from stagekit.config import StoreConfig\n"
        "from stagekit.store.s3 import S3Store\n"
        "store = S3Store('s3://bucket', StoreConfig(endpoint_url='http://127.0.0.1:9'))\n"
        "mine = store._bound()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    its = store._bound()\n"
        "    os._exit(0 if its is not mine and its.pid == os.getpid() and its.api is not mine.api else 1)\n"
        "print(os.waitpid(pid, 0)[1], store._bound() is mine)\n"
    )
    done = run_apart(script)
    assert done.stdout == "0 True\n", done.stderr


def test_the_guard_against_inherited_connections_is_needed_and_works() -> None:
    """Without it a forked child gets, for its own request and without an exception, the bytes that a sibling asked for."""
    script = Path(__file__).with_name("inherited.py").read_text()
    unguarded, guarded = run_apart(script, "unguarded"), run_apart(script, "guarded")
    assert unguarded.stdout == "asked for mine, got slow", unguarded.stderr
    assert guarded.stdout == "asked for mine, got mine", guarded.stderr


def test_importing_and_opening_reads_no_environment_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("s3://bucket/a")  # no keys, no endpoint: found missing at the first call
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "later")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "later")
    seen: list[Request] = []

    def answer(request: Request) -> Answer:
        seen.append(request)
        return refusal(404, "NoSuchKey")

    with answering(answer) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        with pytest.raises(FileNotFoundError):
            store.get("x")
    assert "Credential=later/" in seen[0].headers["Authorization"]


def test_renewed_keys_are_read_after_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def answer(request: Request) -> Answer:
        if "Credential=old/" in request.headers["Authorization"]:
            return refusal(400, "ExpiredToken")
        return Answer(200, b"data", {"ETag": '"e"'})

    with answering(answer) as url:
        store = at(url)
        with pytest.raises(PermissionError, match="have expired"):
            store.get("a")
        file.write_text("[default]\naws_access_key_id = renewed\naws_secret_access_key = s\n")
        assert bytes(store.get("a")) == b"data"


# ------------------------------------------------------------------------------------------------------------------------- endpoints


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def write(config: str) -> None:
        (tmp_path / "config").write_text(config)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    return write


KEYS = "aws_access_key_id = k\naws_secret_access_key = s\n"


def endpoint(url: str, config: StoreConfig | None = None) -> str | None:
    store = S3Store(url, config)
    return store._bound().endpoint


def test_a_profile_in_the_url_brings_its_endpoint(profiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    profiles(
        f"[profile contabo]\nendpoint_url = https://eu2.contabostorage.com/\n{KEYS}"
        f"[profile section]\nservices = mine\n{KEYS}[services mine]\ns3 =\n  endpoint_url = https://s3.section.example\n"
        f"[profile aws]\n{KEYS}"
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://environment.example")
    argument = StoreConfig(endpoint_url="https://argument.example")
    assert endpoint("s3://contabo@bucket/x") == "https://eu2.contabostorage.com"
    assert endpoint("s3://contabo@bucket/x", argument) == "https://eu2.contabostorage.com"
    assert endpoint("s3://section@bucket/x") == "https://s3.section.example"
    # The keys of a URL's profile never go to an endpoint that only the environment names.
    assert endpoint("s3://aws@bucket/x") is None
    assert endpoint("s3://aws@bucket/x", argument) == "https://argument.example"


def test_without_one_the_argument_wins_then_the_environment_then_the_profile(
    profiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles(f"[default]\nendpoint_url = https://profile.example\n{KEYS}")
    assert endpoint("s3://bucket") == "https://profile.example"
    monkeypatch.setenv("S3_ENDPOINT_URL", "https://environment.example")
    assert endpoint("s3://bucket") == "https://environment.example"
    assert endpoint("s3://bucket", StoreConfig(endpoint_url="https://argument.example")) == "https://argument.example"


def test_two_profiles_are_two_accounts(profiles: Callable[[str], None]) -> None:
    seen: list[str] = []

    def answer(request: Request) -> Answer:
        seen.append(request.headers["Authorization"].split("Credential=")[1].split("/")[0])
        return Answer(200, b"", {"ETag": '"e"'})

    with answering(answer) as url:
        profiles("".join(f"[profile {n}]\nendpoint_url = {url}\naws_access_key_id = {n}-key\naws_secret_access_key = s\n" for n in "ab"))
        S3Store("s3://a@bucket").put("x", b"")
        S3Store("s3://b@bucket").put("x", b"")
    assert seen == ["a-key", "b-key"]
