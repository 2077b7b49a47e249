"""Every way in which S3 refuses has a class and words of its own, and no message holds a secret."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from pathlib import Path

import botocore.exceptions
import pytest

from stagekit.config import StoreConfig
from stagekit.errors import (
    BadDigest,
    BucketNotFound,
    ClockSkew,
    Conflict,
    Denied,
    InvalidReply,
    NotFound,
    OutOfSpace,
    StagekitError,
    StoreError,
    Throttled,
    TLSFailed,
    Unreachable,
    UsageError,
    WrongCredentials,
)
from stagekit.store.base import Store
from stagekit.store.s3 import S3Store
from stagekit.store.s3_errors import GROUPS, Address, redact, translate

from ..conftest import S3Place
from ..rigs.rgw import Rgw
from ..rigs.servers import S3Server
from .answers import Answer, answering, refusal

ACCESS, SECRET, TOKEN = "AKIASENTINEL00000001", "sentinel+Secret/Key000000000000000000000", "sentinel-session-token"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)


def raised(call: Callable[[], object]) -> StagekitError:
    with pytest.raises(StagekitError) as caught:
        call()
    return caught.value


def all_calls(store: Store) -> list[Callable[[], object]]:
    def upload() -> None:
        with store.multipart("a", part_size=5 << 20) as upload:
            upload.put_part(0, b"x")

    return [
        lambda: store.head("a"),
        lambda: store.get("a"),
        lambda: store.get("a", 2, 3),
        lambda: store.put("a", b"x"),
        lambda: list(store.list()),
        lambda: store.children(),
        lambda: store.delete("a"),
        lambda: list(store.open_uploads()),
        upload,
    ]


# ------------------------------------------------------------------------------------------------------------------ the vendor's classes


def test_every_exception_class_of_botocore_is_mapped_exactly_once() -> None:
    classes = {
        name
        for name, found in inspect.getmembers(botocore.exceptions, inspect.isclass)
        if issubclass(found, Exception) and not issubclass(found, Warning) and found.__module__ == "botocore.exceptions"
    }
    mapped = [name for group in GROUPS for name in group]
    assert sorted(mapped) == sorted(set(mapped))
    assert classes - set(mapped) == set(), "botocore has exceptions that stagekit/store/s3_errors.py does not know"


def test_every_botocore_error_is_translated_by_its_own_group() -> None:
    at = Address("https://host")
    error = botocore.exceptions.ReadTimeoutError(endpoint_url="https://host/b/k?X-Amz-Signature=abc", error="")
    assert isinstance(translate(error, "reading", "s3://b/k", at), Unreachable)
    assert str(translate(error, "reading", "s3://b/k", at)) == "reading s3://b/k: https://host sent nothing for 1 min"


# -------------------------------------------------------------------------------------------------------------------- on real servers


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write(name: str, access_key: str, secret_key: str) -> None:
        with (tmp_path / "credentials").open("a") as file:
            file.write(f"[{name}]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n")

    return write


@pytest.mark.rig("rgw")
@pytest.mark.parametrize("name", ["rgw-http", "rgw-https"])
def test_a_wrong_key_a_wrong_secret_and_a_missing_right_are_told_apart(
    s3_server: Callable[[str], S3Server], name: str, profile: Callable[[str, str, str], None]
) -> None:
    server = s3_server(name)
    url = f"s3://{server.create_bucket()}/base"
    profile("unknown", "NOSUCHKEY0000000000A", SECRET)
    profile("secret", server.access_key, SECRET)
    config = {"endpoint_url": server.endpoint_url, "ca_bundle": server.ca_bundle}
    for call in all_calls(S3Store(url, StoreConfig(profile="unknown", **config))):  # type: ignore[arg-type]
        error = raised(call)
        assert type(error) is WrongCredentials
        assert f"{server.endpoint_url} does not know the access key; check the keys of profile 'unknown'" in str(error)
    for call in all_calls(S3Store(url, StoreConfig(profile="secret", **config))):  # type: ignore[arg-type]
        error = raised(call)
        assert type(error) is WrongCredentials
        assert "the secret key is wrong for its access key; check the keys of profile 'secret'" in str(error)
        assert SECRET not in str(error)
    for call in all_calls(S3Store(url, StoreConfig(anonymous=True, **config))):  # type: ignore[arg-type]
        error = raised(call)
        assert type(error) is Denied
        assert "access denied; unsigned requests may not do this on bucket 'test-" in str(error)
        assert isinstance(error, PermissionError)


def test_a_wrong_key_on_rclone(s3_server: Callable[[str], S3Server], profile: Callable[[str, str, str], None]) -> None:
    server = s3_server("rclone")
    profile("unknown", "NOSUCHKEY0000000000A", SECRET)
    store = S3Store(f"s3://{server.create_bucket()}", StoreConfig(endpoint_url=server.endpoint_url, profile="unknown"))
    for call in all_calls(store):
        error = raised(call)
        assert type(error) is WrongCredentials
        assert "does not know the access key" in str(error)


def test_a_missing_bucket_and_a_missing_object_are_told_apart(s3_place: S3Place) -> None:
    bucket = raised(lambda: S3Store("s3://not-there-at-all/base", s3_place.config).head("a"))
    assert type(bucket) is BucketNotFound
    assert "looking up s3://not-there-at-all/base/a: there is no bucket 'not-there-at-all' at http" in str(bucket)
    missing = raised(lambda: S3Store(s3_place.url, s3_place.config).head("a"))
    assert type(missing) is NotFound
    assert str(missing) == f"looking up {s3_place.url}/a: there is no such object"


def test_a_certificate_that_is_not_trusted(rgw: Rgw, keys: None) -> None:
    for call in all_calls(S3Store("s3://bucket", StoreConfig(endpoint_url=rgw.https_url))):
        error = raised(call)
        assert type(error) is TLSFailed
        assert f"the TLS certificate of {rgw.https_url} is not trusted: " in str(error)
        assert "as ca_bundle= or in AWS_CA_BUNDLE" in str(error)
        assert not error.transient


def test_tls_where_there_is_none(rgw: Rgw, keys: None) -> None:
    error = raised(lambda: S3Store("s3://bucket", StoreConfig(endpoint_url=rgw.http_url.replace("http:", "https:"))).head("a"))
    assert type(error) is TLSFailed
    assert "does not speak TLS; if it is meant to be unencrypted, write http://" in str(error)


def test_a_ca_bundle_that_is_not_there(keys: None) -> None:
    error = raised(lambda: S3Store("s3://bucket", StoreConfig(endpoint_url="https://host", ca_bundle="/not/there.pem")).head("a"))
    assert type(error) is UsageError
    assert "ca_bundle: there is no file /not/there.pem" in str(error)


# ------------------------------------------------------------------------------------------------------------------- without a server


def test_nothing_listens(keys: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for call in all_calls(S3Store("s3://bucket", StoreConfig(endpoint_url=url))):
            error = raised(call)
            assert type(error) is Unreachable
            assert f"nothing accepts connections at {url}; check host and port" in str(error)
            assert error.transient
            assert isinstance(error, ConnectionError)


def test_a_name_that_does_not_resolve(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(errno: int) -> Callable[..., object]:
        def getaddrinfo(*_: object, **__: object) -> object:
            raise socket.gaierror(errno, "Name or service not known")

        return getaddrinfo

    store = S3Store("s3://bucket", StoreConfig(endpoint_url="https://s3.mispelt.example"))
    monkeypatch.setattr(socket, "getaddrinfo", resolve(socket.EAI_NONAME))
    error = raised(lambda: store.head("a"))
    assert type(error) is Unreachable
    assert "the name of the endpoint https://s3.mispelt.example cannot be resolved; check its spelling" in str(error)
    assert not error.transient  # it never answered in this process, so waiting will not help
    monkeypatch.setattr(socket, "getaddrinfo", resolve(socket.EAI_AGAIN))
    assert raised(lambda: store.head("a")).transient


def test_no_answer_in_time(keys: None) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        error = raised(lambda: S3Store("s3://bucket", StoreConfig(endpoint_url=url, read_timeout_s=0.2)).head("a"))
    assert type(error) is Unreachable
    assert f"{url} sent nothing for 0.2 s" in str(error)
    assert error.transient


def test_no_credentials() -> None:
    for call in all_calls(S3Store("s3://bucket", StoreConfig(endpoint_url="http://127.0.0.1:9"))):
        error = raised(call)
        assert type(error) is WrongCredentials
        assert "no credentials were found for http://127.0.0.1:9; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in str(error)


def test_half_of_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    error = raised(lambda: S3Store("s3://bucket", StoreConfig(endpoint_url="http://127.0.0.1:9")).head("a"))
    assert type(error) is WrongCredentials
    assert "cannot be used (PartialCredentialsError)" in str(error)


def test_a_profile_that_does_not_exist() -> None:
    error = raised(lambda: S3Store("s3://nobody@bucket/x").head("a"))
    assert type(error) is WrongCredentials
    assert "there is no profile 'nobody'; check its spelling in ~/.aws/config" in str(error)


# ------------------------------------------------------------------------------------------------------------------- given on purpose

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


@pytest.mark.parametrize(
    ("answer", "kind", "words", "transient"),
    [
        (refusal(403, "RequestTimeTooSkewed", Date=DATE), ClockSkew, "this machine's clock is", False),
        (refusal(503, "SlowDown"), Throttled, "asks to slow down", True),
        (refusal(429, "TooManyRequests"), Throttled, "asks to slow down", True),
        (refusal(500, "InternalError"), Unreachable, r"has an internal problem \(HTTP 500\)", True),
        (Answer(502, b"<html>bad gateway</html>"), Unreachable, r"internal problem \(HTTP 502\)", True),
        (refusal(503, "ServiceUnavailable"), Throttled, "asks to slow down", True),
        (refusal(400, "RequestTimeout"), Unreachable, "received only a part of the request", True),
        (refusal(403, "QuotaExceeded"), OutOfSpace, "the quota at .* is used up", False),
        (refusal(507, "Whatever"), OutOfSpace, "the quota at .* is used up", False),
        (refusal(400, "ExpiredToken"), WrongCredentials, "have expired; log in again or renew the session token", False),
        (refusal(400, "InvalidToken"), WrongCredentials, "refuses the session token", False),
        (refusal(403, "AccessDenied"), Denied, "access denied; the keys in AWS_ACCESS_KEY_ID", False),
        (refusal(403, "InvalidObjectState"), Denied, "the object is archived", False),
        (refusal(400, "BadDigest"), BadDigest, "are not those that were sent; nothing was stored", True),
        (refusal(409, "ConditionalRequestConflict"), Conflict, "another request for the same name is under way", True),
        (refusal(501, "NotImplemented"), StoreError, "does not support this request", False),
        (refusal(400, "AuthorizationHeaderMalformed"), StoreError, "the bucket belongs to another region", False),
        (refusal(400, "EntityTooLarge"), StoreError, r"does not allow this \(EntityTooLarge\)", False),
        (refusal(404, "NoSuchUpload"), StoreError, "the upload was aborted by somebody else", False),
        (Answer(404, b"<html>not here</html>"), InvalidReply, "answered 404 without saying what is missing", True),
        (refusal(400, "Strange", "it is strange"), StoreError, r"refused the request \(HTTP 400, Strange: it is strange\)", False),
    ],
)
def test_each_answer_has_a_class_and_words(keys: None, answer: Answer, kind: type[StoreError], words: str, transient: bool) -> None:
    with answering(lambda _: answer) as url:
        store = S3Store("s3://bucket", StoreConfig(endpoint_url=url))
        calls: list[Callable[[], object]] = [lambda: store.get("a"), lambda: store.put("a", b"x"), lambda: store.head("a")]
        for call in calls:
            with pytest.raises(kind, match=words) as caught:
                call()
            assert type(caught.value) is kind
            assert caught.value.transient is transient
            assert "s3://bucket/a" in str(caught.value)
            assert isinstance(caught.value.__cause__, Exception)


@pytest.mark.parametrize(
    ("answer", "momentary"),
    [
        (refusal(500, "InternalError"), True),
        (refusal(500, "Whatever"), False),
        (refusal(503, "SlowDown"), False),
        (Answer(502, b""), False),
    ],
)
def test_what_the_server_calls_a_stumble_of_its_own_is_told_apart(keys: None, answer: Answer, momentary: bool) -> None:
    with answering(lambda _: answer) as url, pytest.raises(StoreError) as caught:
        S3Store("s3://bucket", StoreConfig(endpoint_url=url)).put("a", b"x")
    assert caught.value.momentary is momentary


def test_the_clock_skew_is_told_in_hours(keys: None) -> None:
    with answering(lambda _: refusal(403, "RequestTimeTooSkewed", Date="Fri, 01 Jan 2100 00:00:00 GMT")) as url:
        error = raised(lambda: S3Store("s3://bucket", StoreConfig(endpoint_url=url)).get("a"))
    assert "days behind; set this machine's clock" in str(error)


@pytest.mark.parametrize(("text", "expected"), [("7", 7.0), ("0.5", 0.5), ("nonsense", None), ("Thu, 01 Jan 2015 00:00:00 GMT", 0.0)])
def test_retry_after_is_handed_on(keys: None, text: str, expected: float | None) -> None:
    with answering(lambda _: refusal(503, "SlowDown", Retry_After=text)) as url, pytest.raises(Throttled) as caught:
        S3Store("s3://bucket", StoreConfig(endpoint_url=url)).get("a")
    assert caught.value.retry_after_s == expected


@pytest.mark.parametrize("body", [b"<html><body>Please log in</body></html>", b"Please log in", b""])
def test_the_login_page_of_a_captive_network_is_no_answer(keys: None, body: bytes) -> None:
    with answering(lambda _: Answer(200, body, {"Content-Type": "text/html"})) as url:
        store = S3Store("s3://bucket", StoreConfig(endpoint_url=url))
        calls: list[Callable[[], object]] = [
            *(lambda: store.head("a"), lambda: store.get("a"), lambda: store.get("a", 0, 5), lambda: store.put("a", b"x")),
            *(lambda: list(store.list()), lambda: store.children()),
        ]
        for call in calls:
            error = raised(call)
            # botocore itself takes some of these for an internal error of the server.
            assert type(error) in (InvalidReply, Unreachable)
            assert isinstance(error, StoreError)
            assert error.transient


def test_a_listing_that_never_ends_is_refused(keys: None) -> None:
    page = (
        b'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><IsTruncated>true</IsTruncated>'
        b"<NextContinuationToken>same</NextContinuationToken></ListBucketResult>"
    )
    with answering(lambda _: Answer(200, page, {"Content-Type": "application/xml"})) as url:
        error = raised(lambda: list(S3Store("s3://bucket", StoreConfig(endpoint_url=url)).list()))
    assert "the listing says that it goes on, and not where" in str(error)


def test_a_listing_of_something_else_is_refused(keys: None) -> None:
    page = (
        b'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated><Contents><Key>run-10/x</Key>'
        b"<Size>1</Size></Contents></ListBucketResult>"
    )
    with answering(lambda _: Answer(200, page, {"Content-Type": "application/xml"})) as url:
        error = raised(lambda: list(S3Store("s3://bucket", StoreConfig(endpoint_url=url)).list("run-1/")))
    assert "the answer holds 'run-10/x', which does not lie there" in str(error)


# -------------------------------------------------------------------------------------------------------------------------- secrets


def test_no_message_holds_a_secret(keys: None) -> None:
    echo = f"{SECRET} {TOKEN} {ACCESS} https://host/key?X-Amz-Signature=0123456789abcdef&X-Amz-Credential={ACCESS}%2Fx"
    answers = [
        *(refusal(status, code, echo) for status in (400, 403, 404, 409, 500, 503) for code in ("Strange", "AccessDenied", SECRET)),
        Answer(403, echo.encode()),
    ]
    for answer in answers:
        with answering(lambda _, answer=answer: answer) as url:  # type: ignore[misc]
            for call in all_calls(S3Store("s3://bucket", StoreConfig(endpoint_url=url))):
                error = raised(call)
                for text in (str(error), repr(error)):
                    for secret in (SECRET, TOKEN, ACCESS, "0123456789abcdef"):
                        assert secret not in text


def test_redaction_knows_secrets_by_their_shape() -> None:
    for text, secret in (
        ("GET https://host/key?X-Amz-Signature=abcd1234 failed", "abcd1234"),
        ("Signature=abcd1234, other", "abcd1234"),
        ("the key AKIAIOSFODNN7EXAMPLE is unknown", "AKIAIOSFODNN7EXAMPLE"),
        ("x-amz-security-token: abcd1234", "abcd1234"),
    ):
        assert secret not in redact(text)
    assert redact("nothing to hide at /a/b") == "nothing to hide at /a/b"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_server_that_redirects_is_told_with_where_it_redirects_to(keys: None, status: int) -> None:
    asked = 0

    def redirecting(_: object) -> Answer:
        nonlocal asked
        asked += 1
        return Answer(status, b"moved", {"Location": "https://user:secret@storage.example:8443/bucket/a?X-Amz-Signature=1"})

    with answering(redirecting) as url:
        store = S3Store("s3://bucket", StoreConfig(endpoint_url=url, retry_s=0.0))
        for call in (lambda: store.head("a"), lambda: store.get("a"), lambda: store.put("a", b"x"), lambda: list(store.list())):
            asked = 0
            with pytest.raises(StoreError) as caught:
                call()
            assert f"redirects to https://storage.example:8443 (HTTP {status}); if that is the store, give it as the endpoint" in str(
                caught.value
            )
            assert asked <= 2, "and not eighty times"
            assert "secret" not in str(caught.value)
