"""Settings as frozen values, and the only code that reads the environment.

Nothing is read at import: the functions here are called when a store is opened, so a variable set later is seen, and deeper code
cannot be surprised by one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from .errors import UsageError
from .sdk import known_settings

Engine = Literal["auto", "botocore", "fsspec"]

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """How to talk to object storage. It names a credential *source* and never holds, prints or pickles a key.

    Keys come from botocore's chain (environment, profile, SSO, instance metadata); ``profile`` selects one by name.
    ``endpoint_url`` beats the environment (``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, ``S3_ENDPOINT_URL``).
    ``addressing`` is ``path`` for custom endpoints and botocore's choice for AWS unless set. ``ca_bundle`` is a PEM file for an
    endpoint whose certificate a public authority did not sign (else ``AWS_CA_BUNDLE``). ``anonymous`` sends unsigned requests.
    ``engine`` is the client for ``s3://``: ``auto`` is ``botocore``, and ``obstore`` (extra ``fast``) for ranges where it is certain to do
    the same; ``botocore`` is it alone, ``fsspec`` is s3fs.
    ``connections`` bounds the open connections of one process to one endpoint. ``retry_s`` is the budget, in seconds, for repeating
    one call that fails for a passing reason; 0 tries once.
    ``max_requests_per_s`` and ``max_bytes_per_s`` (in both directions together) are limits for this whole machine: every thread and every
    process that was given them for one endpoint shares them. Contabo's default limits are 250 requests and 10 MB a second.

    Example: ``StoreConfig(endpoint_url="https://eu2.contabostorage.com", profile="contabo")``.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing: Literal["path", "virtual"] | None = None
    ca_bundle: str | None = None
    anonymous: bool = False
    engine: Engine = "auto"
    connections: int = 16
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    retry_s: float = 300.0
    max_requests_per_s: float | None = None
    max_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url, "endpoint_url")
        if self.engine not in ("auto", "botocore", "fsspec"):
            raise UsageError(f"engine: {self.engine!r} is none of auto, botocore, fsspec")
        if self.connections < 1:
            raise UsageError(f"connections: {self.connections} is below 1")
        for name in ("connect_timeout_s", "read_timeout_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name}: {getattr(self, name)} is not above 0")
        if self.retry_s < 0:
            raise UsageError(f"retry_s: {self.retry_s} is below 0")
        for name in ("max_requests_per_s", "max_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name}: {value} is not above 0")
            if value is not None and self.engine == "fsspec":
                raise UsageError(f"{name}: engine='fsspec' sends requests past the limit; leave out one of the two")
        if self.anonymous and self.profile:
            raise UsageError(f"anonymous=True and profile={self.profile!r} contradict each other; give one of them")

    def endpoint(self, environ: Mapping[str, str] | None = None) -> str | None:
        """The endpoint to use: the argument, else the environment, else ``None`` (the profile's own, or AWS).

        Raises ``UsageError`` when two of the environment's variables name different endpoints.
        """
        if self.endpoint_url is not None:
            return self.endpoint_url.rstrip("/")
        env = os.environ if environ is None else environ
        found = [(name, env[name].rstrip("/")) for name in _ENDPOINT_VARIABLES if env.get(name)]
        for name, value in found:
            _check_endpoint(value, name)
        for name, value in found[1:]:
            if value != found[0][1]:
                raise UsageError(
                    f"{found[0][0]}={found[0][1]} and {name}={value} name two different endpoints; "
                    "unset one of them, or pass the endpoint as an option"
                )
        return found[0][1] if found else None

    @staticmethod
    def in_force(given: StoreConfig | None, url: str, environ: Mapping[str, str] | None = None) -> StoreConfig | None:
        """``given``, with the endpoint that the environment names now: what a record of ``url`` holds, so that whoever reads it in another
        shell reaches the same store. A URL's profile brings its endpoint with it, and its keys must not go to another."""
        if not url.startswith("s3://") or "@" in url.removeprefix("s3://").partition("/")[0]:
            return given
        config = given or StoreConfig()
        endpoint = config.endpoint(environ)
        return given if endpoint == config.endpoint_url else replace(config, endpoint_url=endpoint)

    def hurried(self, retry_s: float, answer_s: float) -> StoreConfig:
        """These settings with shorter waits, for a first look: at most ``retry_s`` for a call, and ``answer_s`` for an answer."""
        return replace(
            self,
            retry_s=min(self.retry_s, retry_s),
            connect_timeout_s=min(self.connect_timeout_s, answer_s),
            read_timeout_s=min(self.read_timeout_s, answer_s),
        )

    @classmethod
    def from_record(cls, values: Mapping[str, Any] | None) -> StoreConfig | None:
        """What ``asdict`` made of settings, or of none, in a record on disk. What a newer Stagekit has besides is left out."""
        if values is None:
            return None
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def fsspec_options(self, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Keyword arguments for ``s3fs`` and whatever else opens ``s3://`` through fsspec, with the same endpoint and credential source.

        The SDK's default checksums, where it has any, are set to ``when_required``: Ceph RGW 16 and ``rclone serve s3`` refuse uploads with
        them.
        """
        endpoint = self.endpoint(environ)
        s3: dict[str, Any] = {"addressing_style": self.addressing} if self.addressing else {}
        if endpoint and not self.addressing:
            s3["addressing_style"] = "path"
        options: dict[str, Any] = {
            "anon": self.anonymous,
            "config_kwargs": {
                **known_settings(request_checksum_calculation="when_required", response_checksum_validation="when_required"),
                "connect_timeout": self.connect_timeout_s,
                "read_timeout": self.read_timeout_s,
                "max_pool_connections": self.connections,
                **({"s3": s3} if s3 else {}),
            },
        }
        client: dict[str, Any] = {}
        if self.region:
            client["region_name"] = self.region
        if self.ca_bundle:
            client["verify"] = self.ca_bundle
        if client:
            options["client_kwargs"] = client
        if endpoint:
            options["endpoint_url"] = endpoint
        if self.profile:
            options["profile"] = self.profile
        return options


def home_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where this machine's own records lie: ``$STAGEKIT_HOME``, else ``$XDG_STATE_HOME/stagekit``, else ``~/.local/state/stagekit``."""
    env = os.environ if environ is None else environ
    if env.get("STAGEKIT_HOME"):
        return Path(env["STAGEKIT_HOME"]).expanduser().absolute()
    state = env.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "stagekit"


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where blocks are cached unless told otherwise: ``$XDG_CACHE_HOME/stagekit``, else ``~/.cache/stagekit``."""
    env = os.environ if environ is None else environ
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "stagekit"


def process_rank(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """This process's rank and the number of ranks, as launchers such as ``torchrun`` tell them (``RANK``, ``WORLD_SIZE``); 0 of 1 else."""
    env = os.environ if environ is None else environ
    values = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")):
        text = env.get(name) or default
        if not (text.isascii() and text.isdecimal()):
            raise UsageError(f"{name}={text!r} is no number; unset it, or let the launcher set it")
        values.append(int(text))
    rank, world_size = values
    if not rank < max(world_size, 1):
        raise UsageError(f"RANK={rank} and WORLD_SIZE={world_size} contradict each other; unset both, or let the launcher set them")
    return rank, max(world_size, 1)


def has_launcher(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher such as ``torchrun`` has told this process how many ranks there are."""
    return bool((os.environ if environ is None else environ).get("WORLD_SIZE"))


def git_ceilings(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Directories that git does not look into for a checkout around one below them (``GIT_CEILING_DIRECTORIES``)."""
    env = os.environ if environ is None else environ
    return frozenset(os.path.realpath(path) for path in env.get("GIT_CEILING_DIRECTORIES", "").split(os.pathsep) if path)


RUN_VARIABLE = "STAGEKIT_RUN"
"""In the environment of what ``stagekit run`` starts: the URL of its run."""


def wrapped_by(environ: Mapping[str, str] | None = None) -> str | None:
    """The run of the ``stagekit run`` around this process, where there is one."""
    return (os.environ if environ is None else environ).get(RUN_VARIABLE) or None


def hub_endpoint(environ: Mapping[str, str] | None = None) -> str | None:
    """Where the Hugging Face Hub is, when ``HF_ENDPOINT`` says so."""
    return (os.environ if environ is None else environ).get("HF_ENDPOINT") or None


def hub_cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where Hugging Face's libraries keep models: ``HF_HUB_CACHE``, else ``$HF_HOME/hub``, else ``~/.cache/huggingface/hub``."""
    env = os.environ if environ is None else environ
    named = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser().absolute() / "hub"


def environment_fingerprint(environ: Mapping[str, str] | None = None) -> str:
    """A text that changes when the environment, or the AWS files it names, may give other credentials or settings. It reveals none."""
    env = os.environ if environ is None else environ
    digest = hashlib.sha256()
    for name in sorted(env):
        if name.startswith("AWS_") or name.upper().endswith("_PROXY") or name == "S3_ENDPOINT_URL":
            digest.update(f"{name}={env[name]}\0".encode(errors="surrogateescape"))
    home = Path(env.get("HOME", "~")).expanduser()
    for variable, default in (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")):
        path = Path(env.get(variable) or home / ".aws" / default).expanduser()
        try:
            found = path.stat()
        except OSError:
            continue
        digest.update(f"{path} {found.st_ino} {found.st_size} {found.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _check_endpoint(url: str, name: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{name}: {url!r} is no endpoint; write https://host or http://host:port")
    if parts.username or parts.password:
        raise UsageError(f"{name}: an endpoint URL must not hold credentials; put them into a profile or the environment")
