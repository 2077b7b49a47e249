"""The one place where botocore's exceptions become Stagekit's, each kind with a message of its own.

No message quotes an address with its query, a header, or a text that may hold a key: what a server says is quoted only where nothing
better is known, and only after everything that looks like a secret was taken out of it. The vendor's exception stays the cause.
"""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from ..errors import (
    BadDigest,
    BucketNotFound,
    ClockSkew,
    Conflict,
    Denied,
    InvalidReply,
    MissingExtra,
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
from ..units import format_duration

VENDOR_ERRORS: tuple[type[Exception], ...] = (BotoCoreError, ClientError, ResponseParserError, HTTPError)
"""Everything that botocore raises from a call or from a body that is read."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Each class of botocore.exceptions is in exactly one of these; a test fails when botocore adds one. Names, since older releases lack some.
UNREACHABLE = _names(
    "HTTPClientError ConnectionError EndpointConnectionError ConnectionClosedError ReadTimeoutError ConnectTimeoutError "
    "ResponseStreamingError IncompleteReadError CapacityNotAvailableError"
)
PROXY = _names("ProxyConnectionError InvalidProxiesConfigError")
TLS = _names("SSLError")
NO_CREDENTIALS = _names("NoCredentialsError NoAuthTokenError")
BAD_CREDENTIALS = _names(
    "PartialCredentialsError CredentialRetrievalError UnknownCredentialError RefreshWithMFAUnsupportedError TokenRetrievalError "
    "UnknownTokenProviderError MetadataRetrievalError SSOError SSOTokenLoadError UnauthorizedSSOTokenError LoginError "
    "LoginRefreshRequired LoginInsufficientPermissions LoginTokenLoadError LoginAuthorizationCodeError "
    "InfiniteLoopConfigError"
)
NO_PROFILE = _names("ProfileNotFound")
SETTINGS = _names(
    "ConfigParseError ConfigNotFound InvalidConfigError InvalidIMDSEndpointError InvalidIMDSEndpointModeError UnknownRegionError "
    "InvalidRegionError NoRegionError BaseEndpointResolverError EndpointVariantError UnknownEndpointError UnknownFIPSEndpointError "
    "ServiceNotInRegionError InvalidDNSNameError InvalidS3AddressingStyleError UnsupportedS3ArnError UnsupportedS3ControlArnError "
    "InvalidHostLabelError UnsupportedOutpostResourceError UnsupportedS3ConfigurationError UnsupportedS3AccesspointConfigurationError "
    "UnsupportedS3ControlConfigurationError InvalidEndpointDiscoveryConfigurationError InvalidRetryConfigurationError "
    "InvalidMaxRetryAttemptsError InvalidRetryModeError InvalidS3UsEast1RegionalEndpointConfigError "
    "InvalidSTSRegionalEndpointsConfigError InvalidDefaultsMode InvalidEndpointConfigurationError EndpointProviderError "
    "EndpointResolutionError UnknownEndpointResolutionBuiltInName InvalidChecksumConfigError UnknownSignatureVersionError "
    "UnsupportedSignatureVersionError UnsupportedServiceProtocolsError"
)
BAD_BODY = _names("ChecksumError FlexibleChecksumError")
INCOMPLETE_INSTALL = _names("MissingDependencyException MD5UnavailableError DataNotFoundError UnknownServiceError")
OUR_MISTAKE = _names(
    "ApiVersionNotFoundError MissingParametersError ValidationError ParamValidationError UnknownKeyError RangeError "
    "UnknownParameterError AliasConflictParameterError UnknownServiceStyle PaginationError OperationNotPageableError "
    "UnseekableStreamError WaiterError InvalidExpressionError WaiterConfigError UnknownClientMethodError StubResponseError "
    "StubAssertionError UnStubbedResponseError UndefinedModelAttributeError MissingServiceIdError AwsChunkedWrapperError "
    "EventStreamError"
)
BASES = _names("BotoCoreError ClientError")
GROUPS = (
    *(UNREACHABLE, PROXY, TLS, NO_CREDENTIALS, BAD_CREDENTIALS, NO_PROFILE, SETTINGS, BAD_BODY, INCOMPLETE_INSTALL, OUR_MISTAKE, BASES),
)

# S3's error codes, as AWS, Ceph, MinIO and others write them.
_UNKNOWN_KEY = {"InvalidAccessKeyId", "UnrecognizedClientException", "InvalidClientTokenId"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_BAD_TOKEN = {"InvalidToken", "InvalidSecurity"}
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "TooManyRequestsException",
              "BandwidthLimitExceeded", "RequestThrottled"}  # fmt: skip
_SKEWED = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_DIGEST = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
_FULL = {"QuotaExceeded", "StorageQuotaExceeded", "InsufficientStorage", "InsufficientCapacity", "ServiceQuotaExceededException",
         "XMinioStorageFull", "TooManyObjects", "LimitExceeded"}  # fmt: skip
_CUT = {"RequestTimeout", "IncompleteBody", "IncompleteBodyError"}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301", "307"}
_SECRET_SHAPES = re.compile(
    r"(?i)(\?\S+"  # a query: it may be presigned
    r"|(?:x-amz-[a-z-]*(?:signature|credential|security-token)|signature|credential|awsaccesskeyid|secret\w*|token)\s*[=:]\s*[^\s,;&]+"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b)"
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a call went, in words for a message. ``secrets`` are the texts that no message may hold."""

    endpoint: str | None
    profile: str | None = None
    key_source: str | None = None
    secrets: tuple[str, ...] = ()
    read_timeout_s: float = 60.0
    connect_timeout_s: float = 10.0
    was_reached: bool = False
    anonymous: bool = False

    def __str__(self) -> str:
        return self.endpoint or "AWS"

    @property
    def keys(self) -> str:
        """``the keys of profile 'x'``, ``the keys from the environment``."""
        if self.anonymous:
            return "unsigned requests"
        if self.profile:
            return f"the keys of profile {self.profile!r}"
        if self.key_source == "env":
            return "the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return "the keys found by the AWS credential chain" + (f" ({self.key_source})" if self.key_source else "")


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """``text`` without ``secrets``, without queries of addresses, and without whatever else looks like a credential."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "…")
    return _SECRET_SHAPES.sub("…", text)


def error_code(error: Exception) -> str:
    """S3's error code, or the HTTP status as text where the answer had no body; empty for errors that are no answer."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def status_of(error: Exception) -> int:
    """The HTTP status of the answer, 0 for errors that are no answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) if isinstance(error, ClientError) else 0


def bare(error: Exception) -> bool:
    """Whether ``error`` is the answer to a HEAD, which has a status and no code."""
    return error_code(error).isdigit()


def translate(error: Exception, doing: str, name: str, at: Address) -> StagekitError:
    """The error to raise ``from error``: ``doing`` (``"reading"``) ``name`` (the object's URL) at ``at`` failed with it."""
    what = f"{doing} {name}"
    if isinstance(error, ClientError):
        return _translate_answer(error, what, name, at)
    if isinstance(error, ResponseParserError):
        return InvalidReply(f"{what}: {at} answered with something that is no S3 answer; is the endpoint right, or is a proxy in between?")
    for kind in type(error).__mro__:
        group = next((group for group in GROUPS if kind.__name__ in group and group is not BASES), None)
        if group is not None:
            return _translate_failure(error, group, what, at)
    if isinstance(error, HTTPError):  # urllib3's own, from a body that is being read
        return _unreachable(error, what, at)
    return StoreError(f"{what}: {type(error).__name__} at {at}")


def _translate_failure(error: Exception, group: frozenset[str], what: str, at: Address) -> StagekitError:
    kind = type(error).__name__
    if group is UNREACHABLE:
        return _unreachable(error, what, at)
    if group is TLS:
        return _untrusted(error, what, at)
    if group is PROXY:
        return Unreachable(f"{what}: the proxy on the way to {at} does not answer; check HTTP_PROXY, HTTPS_PROXY and NO_PROXY")
    if group is NO_CREDENTIALS:
        return WrongCredentials(
            f"{what}: no credentials were found for {at}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile of "
            "~/.aws/credentials in the URL (s3://PROFILE@bucket/…) or in AWS_PROFILE"
        )
    if group is NO_PROFILE:
        return WrongCredentials(
            f"{what}: there is no profile {at.profile!r}; check its spelling in ~/.aws/config and ~/.aws/credentials"
            if at.profile
            else f"{what}: the profile in AWS_PROFILE does not exist; check its spelling in ~/.aws/config and ~/.aws/credentials"
        )
    if group is BAD_CREDENTIALS:
        # Not its text: a credential process may have written anything there.
        return WrongCredentials(f"{what}: {at.keys} cannot be used ({kind}); log in again, or complete the profile's settings")
    if group is SETTINGS:
        return UsageError(f"{what}: the AWS settings in use are not valid ({redact(str(error), at.secrets)}); correct them and try again")
    if group is BAD_BODY:
        return BadDigest(f"{what}: the bytes that arrived from {at} do not match the checksum it sent with them")
    if group is INCOMPLETE_INSTALL:
        return MissingExtra(
            f"{what}: the botocore installation is incomplete ({kind}); reinstall it with: pip install --force-reinstall botocore"
        )
    return StoreError(f"{what}: the S3 client refused the call ({kind}: {redact(str(error), at.secrets)})")


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what lies behind it, however the layers below passed it on."""
    seen: set[int] = set()
    queue: list[BaseException] = [error]
    while queue:
        found = queue.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        inner: list[Any] = [found.__cause__, found.__context__, getattr(found, "reason", None), *found.args]
        inner.extend(getattr(found, "kwargs", {}).values() if isinstance(found, BotoCoreError) else ())
        queue.extend(item for item in inner if isinstance(item, BaseException))


def _unreachable(error: Exception, what: str, at: Address) -> StoreError:
    kind = type(error).__name__
    for cause in chain(error):
        if isinstance(cause, socket.gaierror):
            # A name that never resolved is most likely misspelt; one that did, in this process, will be back.
            hopeless = cause.errno == socket.EAI_NONAME and not at.was_reached
            return Unreachable(
                f"{what}: the name of the endpoint {at} cannot be resolved; check its spelling, and this machine's DNS",
                transient=not hopeless,
            )
        if isinstance(cause, ConnectionRefusedError):
            return Unreachable(f"{what}: nothing accepts connections at {at}; check host and port, and whether the server runs")
        if isinstance(cause, OSError) and cause.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return Unreachable(f"{what}: there is no route to {at}; check this machine's network")
    if kind == "ConnectTimeoutError":
        return Unreachable(
            f"{what}: {at} did not accept a connection within {format_duration(at.connect_timeout_s)}; check the network, or a firewall"
        )
    if kind == "ReadTimeoutError":
        return Unreachable(f"{what}: {at} sent nothing for {format_duration(at.read_timeout_s)}")
    if kind == "EndpointConnectionError":
        return Unreachable(f"{what}: no connection to {at}; check the address, and this machine's network")
    return Unreachable(f"{what}: the connection to {at} was cut")


def _untrusted(error: Exception, what: str, at: Address) -> TLSFailed:
    text = str(error)
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text.lower():
        return TLSFailed(f"{what}: {at} does not speak TLS; if it is meant to be unencrypted, write http:// instead of https://")
    reason = re.search(r"certificate verify failed: ([^(\[]+?)\s*(?:\(|$)", text)
    why = f": {reason.group(1)}" if reason else ""
    return TLSFailed(
        f"{what}: the TLS certificate of {at} is not trusted{why}; give the PEM file of its authority as ca_bundle= or in AWS_CA_BUNDLE"
    )


def _translate_answer(error: ClientError, what: str, name: str, at: Address) -> StoreError:
    code, status = error_code(error), status_of(error)
    headers = {key.lower(): value for key, value in error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).items()}
    retry_after_s = _retry_after(headers.get("retry-after"))
    bucket = name.split("://", 1)[-1].split("/", 1)[0].rpartition("@")[2]
    if code == "NoSuchBucket":
        return BucketNotFound(f"{what}: there is no bucket {bucket!r} at {at}; check the name, the endpoint, or create the bucket first")
    if code == "NoSuchKey":
        return NotFound(f"{what}: there is no such object")
    if code == "NoSuchUpload":
        return StoreError(f"{what}: the upload was aborted by somebody else; send the object again")
    if code in _UNKNOWN_KEY:
        return WrongCredentials(f"{what}: {at} does not know the access key; check {at.keys}, and that they belong to this endpoint")
    if code == "SignatureDoesNotMatch":
        return WrongCredentials(f"{what}: the secret key is wrong for its access key; check {at.keys}")
    if code in _EXPIRED:
        return WrongCredentials(f"{what}: {at.keys} have expired; log in again or renew the session token")
    if code in _BAD_TOKEN:
        return WrongCredentials(
            f"{what}: {at} refuses the session token; check {at.keys}, and unset AWS_SESSION_TOKEN if there should be none"
        )
    if code in _SKEWED:
        return ClockSkew(
            f"{what}: {at} refuses the request because {_skew(headers.get('date'))}; set this machine's clock (timedatectl set-ntp true)"
        )
    if code in ("PreconditionFailed", "412") or status == 412:
        return Conflict(f"{what}: the object is no longer the one that was meant, or exists already")
    if code in ("ConditionalRequestConflict", "OperationAborted"):
        return Conflict(f"{what}: another request for the same name is under way", transient=True)
    if code == "InvalidRange" or status == 416:
        return InvalidReply(f"{what}: the range lies beyond the end of the object", transient=False)
    if code in _DIGEST:
        return BadDigest(f"{what}: the bytes that arrived at {at} are not those that were sent; nothing was stored")
    if code in _FULL or status == 507:
        return OutOfSpace(f"{what}: the quota at {at} is used up; delete something there, or buy more")
    if code in _THROTTLED or status in (429, 503):  # a HEAD has no code, and 503 nearly always means this
        return Throttled(
            f"{what}: {at} asks to slow down; try again later, with fewer processes at once, or with max_requests_per_s=",
            retry_after_s=retry_after_s,
        )
    if code in _CUT:
        return Unreachable(f"{what}: {at} received only a part of the request", retry_after_s=retry_after_s)
    if 300 <= status < 400 and (there := urlsplit(headers.get("location") or "")).hostname and "x-amz-bucket-region" not in headers:
        origin = redact(f"{there.scheme}://{there.netloc.rpartition('@')[2]}", at.secrets)
        return StoreError(f"{what}: {at} redirects to {origin} (HTTP {status}); if that is the store, give it as the endpoint")
    if code in _WRONG_REGION:
        region = error.response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region")
        where = f"region {region!r}" if region else "another region"
        return StoreError(f"{what}: the bucket belongs to {where}; set region= or AWS_REGION, and check the endpoint {at}")
    if code in ("NotImplemented", "MethodNotAllowed") or status in (405, 501):
        return StoreError(f"{what}: {at} does not support this request")
    if status >= 500:
        # S3 documents InternalError as "try again". `rclone serve s3` gives it when two objects are the first of a new folder at one time.
        momentary = code == "InternalError"
        return Unreachable(f"{what}: {at} has an internal problem (HTTP {status})", momentary=momentary, retry_after_s=retry_after_s)
    if code in ("EntityTooLarge", "EntityTooSmall", "KeyTooLongError", "InvalidBucketName", "InvalidURI", "TooManyParts"):
        return StoreError(f"{what}: {at} does not allow this ({code})")
    if code == "InvalidObjectState":
        return Denied(f"{what}: the object is archived; restore it in the provider's console first")
    if status in (401, 403) or code in ("AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden"):
        return Denied(f"{what}: access denied; {at.keys} may not do this on bucket {bucket!r}. Ask for the permission, or use other keys")
    if status == 404:
        return InvalidReply(f"{what}: {at} answered 404 without saying what is missing; check that this is the endpoint of an object store")
    said = redact(str(error.response.get("Error", {}).get("Message", "")), at.secrets)[:200]
    return StoreError(f"{what}: {at} refused the request (HTTP {status}, {redact(code, at.secrets)}{': ' + said if said else ''})")


def _retry_after(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def _skew(date: str | None) -> str:
    try:
        ahead_s = time.time() - parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return "its clock and this machine's differ"
    return f"this machine's clock is {format_duration(abs(ahead_s))} {'ahead' if ahead_s > 0 else 'behind'}"
