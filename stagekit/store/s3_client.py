"""botocore clients: one per process, endpoint and credential source, made when first needed.

A client that was made before a fork shares its connections with the parent: both read answers from one socket, and **wrong bytes
arrive without an exception**. So clients are kept by process id and forgotten in a forked child. obstore hangs in one: it is never used
there.
"""

from __future__ import annotations

import os
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore
import botocore.session
from botocore.config import Config

from ..config import StoreConfig, environment_fingerprint
from ..errors import UsageError, WrongCredentials
from ..location import Location
from ..sdk import known_settings, service_endpoints, take_conditions
from . import expect
from .s3_errors import VENDOR_ERRORS, Address, redact, translate
from .traffic import Traffic

_DEFAULT_REGION = "us-east-1"  # what endpoints without regions expect in a signature


@dataclass(slots=True)
class Client:
    """A botocore client and what this process has found out about its endpoint."""

    pid: int
    api: Any  # botocore makes the class at run time
    endpoint: str | None
    session: Any
    settings: StoreConfig
    profile: str | None
    traffic: Traffic
    was_reached: bool = False
    facts: dict[tuple[str, str], bool] = field(default_factory=dict)
    fast: dict[str, Any] = field(default_factory=dict)  # bucket → what reads its ranges faster (s3_obstore), None for nothing
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self) -> Address:
        """Where calls of this client go, for messages."""
        # The client's own credentials object: asking the session again could fetch new ones over the network.
        credentials = self.api._request_signer._credentials
        frozen = credentials.get_frozen_credentials() if credentials is not None and not self.settings.anonymous else None
        return Address(
            endpoint=self.endpoint,
            profile=self.profile,
            key_source=getattr(credentials, "method", None),
            secrets=tuple(text for text in (frozen.secret_key, frozen.token, frozen.access_key) if text) if frozen else (),
            read_timeout_s=self.settings.read_timeout_s,
            connect_timeout_s=self.settings.connect_timeout_s,
            was_reached=self.was_reached,
            anonymous=self.settings.anonymous,
        )


_clients: dict[tuple[Any, ...], Client] = {}
_lock = threading.Lock()
_forked = False


def _forget() -> None:
    """In a forked child: the parent's clients are not ours, and a thread of the parent may have held the lock."""
    global _clients, _lock, _forked
    _clients = {}
    _lock = threading.Lock()
    _forked = True


def is_forked_child() -> bool:
    """Whether this process was forked, without an ``exec``, from one that had loaded this module. Threads of that one are missing here."""
    return _forked


os.register_at_fork(after_in_child=_forget)


def client_for(location: Location, settings: StoreConfig) -> Client:
    """This process's client for ``location``. Stores with the same endpoint and credential source share it and its connections.

    It sends no request. Raises ``WrongCredentials`` for a profile that does not exist, ``UsageError`` for settings that cannot be used.
    """
    pid = os.getpid()
    key = (pid, location.profile, settings, environment_fingerprint())
    with _lock:
        found = _clients.get(key)
        if found is None:
            found = _clients[key] = _make(pid, location, settings)
        return found


def endpoint_of(location: Location, settings: StoreConfig) -> str | None:
    """The endpoint that ``client_for`` would use, for other clients; ``None`` is AWS."""
    return client_for(location, settings).endpoint


def address_of(location: Location, settings: StoreConfig) -> Address:
    """The address that ``client_for`` would use, for the messages of other clients."""
    return client_for(location, settings).address


def drop(client: Client) -> None:
    """Make the next ``client_for`` read the credentials anew."""
    with _lock:
        for key in [key for key, known in _clients.items() if known is client]:
            del _clients[key]


def _make(pid: int, location: Location, settings: StoreConfig) -> Client:
    profile = location.profile or settings.profile
    try:
        session = botocore.session.Session(profile=profile)
        endpoint = _endpoint(session, location, settings)
        anonymous = {"signature_version": botocore.UNSIGNED} if settings.anonymous else {}
        signed = {"signature_version": "s3v4"} if endpoint and not settings.anonymous else {}
        addressing = settings.addressing or ("path" if endpoint else None)
        api = session.create_client(
            "s3",
            endpoint_url=endpoint,
            region_name=settings.region or session.get_config_variable("region") or _DEFAULT_REGION,
            verify=_existing(settings.ca_bundle),
            config=Config(
                connect_timeout=settings.connect_timeout_s,
                read_timeout=settings.read_timeout_s,
                max_pool_connections=settings.connections,
                tcp_keepalive=True,
                # Repeating is the business of RetryStore, which has a budget; two layers of it multiply.
                retries={"total_max_attempts": 1, "mode": "standard"},
                user_agent_extra="stagekit",
                **known_settings(
                    # The SDK's default checksums cannot upload to Ceph RGW 16 or rclone over TLS.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    # What the environment names is resolved here; the keys of a URL's profile must not go to another endpoint.
                    ignore_configured_endpoint_urls=True,
                ),
                **({"s3": {"addressing_style": addressing}} if addressing else {}),
                **anonymous,
                **signed,
            ),
        )
    except VENDOR_ERRORS as error:
        raise translate(error, "connecting to", str(location), Address(settings.endpoint_url, profile)) from error
    except ValueError as error:
        raise UsageError(f"connecting to {location}: {error}") from error
    traffic = Traffic(endpoint, settings)
    traffic.watch(api)
    take_conditions(api)
    api.meta.events.register("before-sign.s3", _sign_by_md5)
    expect.register(api.meta.events)
    if endpoint and not _is_aws(endpoint):
        api.meta.events.register_last("before-parameter-build.s3", _follow_no_redirect)
    return Client(pid, api, endpoint, session, settings, profile, traffic)


def _is_aws(endpoint: str) -> bool:
    return (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _follow_no_redirect(context: dict[str, Any], **_: Any) -> None:
    """Have the SDK take a redirect as the answer. Its own way of following one asks for the bucket's region, which only AWS's servers tell:
    one that redirects always is asked until the stack is full."""
    context["s3_redirected"] = True  # up to botocore 1.29
    context.setdefault("s3_redirect", {})["redirected"] = True


_BODY_UNSIGNED = Config(s3={"payload_signing_enabled": False})


def _sign_by_md5(request: Any, **_: Any) -> None:
    """Sign a body by its Content-MD5, which is a signed header and which servers compare, and not by a sha-256 as well.

    Over https botocore does so by itself. Over http it would hash everything once more, a quarter of what an upload costs.
    """
    if request.headers.get("Content-MD5"):
        request.context["client_config"] = _BODY_UNSIGNED


def _existing(ca_bundle: str | None) -> str | None:
    if ca_bundle is not None and not Path(ca_bundle).is_file():
        raise UsageError(f"ca_bundle: there is no file {ca_bundle}")
    if ca_bundle is not None:
        try:
            ssl.create_default_context(cafile=ca_bundle)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(
                f"ca_bundle: {ca_bundle} holds no certificate in PEM form ({error.strerror or error}); give one that does"
            ) from error
    return ca_bundle


def _endpoint(session: Any, location: Location, settings: StoreConfig) -> str | None:
    """A URL's profile brings its own endpoint, or the argument's; else argument, environment, profile. ``None`` is AWS."""
    scoped = session.get_scoped_config()
    s3 = service_endpoints(session.full_config, scoped.get("services", "")).get("s3", {})
    own: str | None = (s3.get("endpoint_url") if isinstance(s3, dict) else None) or scoped.get("endpoint_url")
    own = own.rstrip("/") if own else None
    if location.profile:
        return own or settings.endpoint({})
    return settings.endpoint() or own


@dataclass(frozen=True, slots=True)
class Access:
    """What another program needs to do what our client does. It holds keys: it is made when that program starts, and never kept or shown.

    ``keys`` are access key, secret and session token (which may be empty), and ``None`` for unsigned requests.
    """

    endpoint: str
    region: str
    path_style: bool
    ca_bundle: str | None
    keys: tuple[str, str, str] | None = field(repr=False)

    def redacted(self, text: str) -> str:
        """``text`` without anything that may be a secret."""
        return redact(text, [key for key in self.keys or () if key])


def access_of(location: Location, settings: StoreConfig) -> Access:
    """The access of ``client_for(location, settings)``. Raises ``WrongCredentials`` where there are no keys to sign with."""
    client = client_for(location, settings)
    path_style = settings.addressing == "path" or (settings.addressing is None and client.endpoint is not None)
    authority = settings.ca_bundle or client.session.get_config_variable("ca_bundle")
    keys = None
    if not settings.anonymous:
        credentials = client.api._request_signer._credentials
        if credentials is None:
            raise WrongCredentials(f"connecting to {location}: there are no keys; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        frozen = credentials.get_frozen_credentials()
        keys = (frozen.access_key, frozen.secret_key, frozen.token or "")
    return Access(client.api.meta.endpoint_url, client.api.meta.region_name, path_style, authority, keys)
