"""Ranged reads through obstore, where that is certain to be the same as through botocore: a Rust client that needs no GIL while it reads.

Only *where it can*: ``engine="auto"``, the package is installed, this process is no forked child (obstore's threads do not exist there,
and its calls hang), a first range of the bucket was answered with 206, and endpoint, addressing, keys and certificate authority can be
handed on exactly. Everything it gives up on is asked again through botocore, which reports well; so there is one set of errors, and a
range costs one more request when it fails. After a few ranges that only botocore could read, a bucket is left to botocore.
"""

from __future__ import annotations

import importlib
import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..location import Location
from . import s3_client
from .base import Data
from .s3_client import Client

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_=.-]+(/[A-Za-z0-9_=.-]+)*")  # obstore encodes other characters in its own way
_PLAIN_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")  # a bucket with dots has no certificate of its own
_MOST_FAILURES = 3
_KEYS_LAST = timedelta(minutes=5)


class FastReads:
    """Ranges of one bucket, for one client of this process."""

    def __init__(self, location: Location, client: Client) -> None:
        self._bucket = location.bucket
        self._client = client
        self._failures = 0
        self._lock = threading.Lock()
        self._api: Any = None  # obstore's types come with the package, which may be missing
        self._store: Any = None

    def open(self) -> bool:
        """Make the obstore client. ``False`` when it is missing, or cannot be made to do what ``client`` does."""
        options = _options(self._bucket, self._client)
        if options is None:
            return False
        try:
            self._api = importlib.import_module("obstore")
            store = importlib.import_module("obstore.store").S3Store
            self._store = store(self._bucket, **options)
        except Exception:
            # Whatever stands against it (not installed, an older release that lacks an option, half a key in the environment): there is
            # botocore, and it will say what is wrong if that is in its way as well.
            return False
        return True

    def get(self, path: str, start: int, length: int, if_match: str | None) -> Data | None:
        """The range, or ``None`` for any reason that may prevent it; then botocore is to be asked."""
        if self._failures >= _MOST_FAILURES or not _PLAIN_KEY.fullmatch(path):
            return None
        self._client.traffic.begin(0, length)
        try:
            if if_match is None:
                data = self._api.get_range(self._store, path, start=start, length=length)
            else:
                options = {"range": (start, start + length), "if_match": f'"{if_match}"'}
                data = self._api.get(self._store, path, options=options).bytes()
        except Exception:
            return None
        self._client.traffic.received(len(data))
        return memoryview(data) if len(data) == length else None

    def botocore_could(self) -> None:
        """Take note that botocore read a range that ``get`` gave up on."""
        with self._lock:
            self._failures += 1


def fast_reads(location: Location, client: Client) -> FastReads | None:
    """What reads ranges of ``location``'s bucket faster than ``client``, if anything can here. Once it cannot, it stays so.

    ``None`` in a forked child, and before ``client`` has seen a range of this bucket answered with 206.
    """
    if s3_client.is_forked_child() or client.settings.engine != "auto" or not client.facts.get((location.bucket, RANGES)):
        return None
    known: FastReads | None
    try:
        known = client.fast[location.bucket]
    except KeyError:
        with client.lock:
            if location.bucket not in client.fast:
                reads = FastReads(location, client)
                client.fast[location.bucket] = reads if reads.open() else None
            known = client.fast[location.bucket]
    return known


RANGES = "answers ranges with 206"
"""The fact about a bucket that ``S3Store`` finds out with its first range."""


def _options(bucket: str, client: Client) -> dict[str, Any] | None:
    """Arguments for obstore's ``S3Store`` that make it do what ``client`` does; ``None`` where that cannot be said with certainty."""
    settings = client.settings
    url = urlsplit(client.api.meta.endpoint_url)
    path_style = settings.addressing == "path" or (settings.addressing is None and client.endpoint is not None)
    if not path_style and not _PLAIN_BUCKET.fullmatch(bucket):
        return None
    endpoint = f"{url.scheme}://{url.netloc if path_style else f'{bucket}.{url.netloc}'}{url.path}"
    transport: dict[str, Any] = {
        "allow_http": url.scheme == "http",
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        "read_timeout": timedelta(seconds=settings.read_timeout_s),
        "timeout": timedelta(days=1),  # of a whole request; it may be slow as long as bytes arrive
        "http1_only": True,  # HTTP/2 would send all ranges through one connection
        "user_agent": "stagekit",
    }
    authority = settings.ca_bundle or client.session.get_config_variable("ca_bundle")
    if authority:
        transport["root_certificate"] = Path(authority).read_bytes()
    options: dict[str, Any] = {
        # Both, since the second has precedence and would be taken from the environment.
        "config": {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint},
        "region": client.api.meta.region_name,
        "virtual_hosted_style_request": not path_style,
        "client_options": transport,
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},  # repeating is the business of RetryStore
    }
    if settings.anonymous:
        return {**options, "skip_signature": True}
    credentials = client.api._request_signer._credentials
    if credentials is None:
        return None

    def keys() -> dict[str, Any]:
        # botocore renews what expires.
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _KEYS_LAST,
        }

    return {**options, "skip_signature": False, "credential_provider": keys}
