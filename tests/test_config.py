from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from stagekit.config import StoreConfig, environment_fingerprint
from stagekit.errors import UsageError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"endpoint_url": "eu2.contabostorage.com"}, "endpoint_url: 'eu2.contabostorage.com' is no endpoint; write https://host"),
        ({"endpoint_url": "ftp://host"}, "is no endpoint"),
        ({"endpoint_url": "https://"}, "is no endpoint"),
        ({"engine": "curl"}, "engine: 'curl' is none of auto, botocore, fsspec"),
        ({"connections": 0}, "connections: 0 is below 1"),
        ({"read_timeout_s": 0}, "read_timeout_s: 0 is not above 0"),
        ({"connect_timeout_s": -1}, "connect_timeout_s: -1 is not above 0"),
        ({"retry_s": -1}, "retry_s: -1 is below 0"),
        ({"anonymous": True, "profile": "a"}, "anonymous=True and profile='a' contradict each other"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_when_made(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        StoreConfig(**settings)


def test_an_endpoint_never_holds_credentials() -> None:
    with pytest.raises(UsageError, match="must not hold credentials") as caught:
        StoreConfig(endpoint_url="https://me:sentinel@host")
    assert "sentinel" not in str(caught.value)


def test_the_argument_beats_the_environment_and_the_special_variable_the_general_one() -> None:
    env = {"AWS_ENDPOINT_URL": "https://one.example/"}
    assert StoreConfig().endpoint({}) is None
    assert StoreConfig().endpoint(env) == "https://one.example"
    assert StoreConfig(endpoint_url="https://argument.example/").endpoint(env) == "https://argument.example"
    assert (
        StoreConfig().endpoint({"AWS_ENDPOINT_URL_S3": "https://one.example", "S3_ENDPOINT_URL": "https://one.example"})
        == "https://one.example"
    )


def test_two_different_endpoints_in_the_environment_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"AWS_ENDPOINT_URL=https://a\.example and S3_ENDPOINT_URL=https://b\.example name two different endpoints"
    ):
        StoreConfig().endpoint({"AWS_ENDPOINT_URL": "https://a.example", "S3_ENDPOINT_URL": "https://b.example"})
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL: 'host' is no endpoint"):
        StoreConfig().endpoint({"AWS_ENDPOINT_URL": "host"})


def test_settings_are_values() -> None:
    config = StoreConfig(endpoint_url="https://host", profile="a")
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(StoreConfig(endpoint_url="https://host", profile="a"))
    with pytest.raises(AttributeError):
        config.profile = "b"  # type: ignore[misc]


def test_fsspec_gets_the_same_source_and_no_default_checksums() -> None:
    options = StoreConfig(endpoint_url="https://host", region="r1", profile="a", ca_bundle="/ca.pem").fsspec_options({})
    assert options["endpoint_url"] == "https://host"
    assert options["profile"] == "a"
    assert options["client_kwargs"] == {"region_name": "r1", "verify": "/ca.pem"}
    assert options["config_kwargs"]["request_checksum_calculation"] == "when_required"
    assert options["config_kwargs"]["response_checksum_validation"] == "when_required"
    assert options["config_kwargs"]["s3"] == {"addressing_style": "path"}
    assert StoreConfig(anonymous=True).fsspec_options({})["anon"] is True
    assert "s3" not in StoreConfig().fsspec_options({})["config_kwargs"]
    assert StoreConfig(addressing="virtual").fsspec_options({})["config_kwargs"]["s3"] == {"addressing_style": "virtual"}


def test_the_fingerprint_changes_with_keys_and_files_and_reveals_nothing(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "AWS_SECRET_ACCESS_KEY": "sentinel", "PATH": "/bin"}
    first = environment_fingerprint(env)
    assert "sentinel" not in first
    assert environment_fingerprint({**env, "PATH": "/usr/bin"}) == first
    assert environment_fingerprint({**env, "AWS_SECRET_ACCESS_KEY": "other"}) != first
    assert environment_fingerprint({**env, "AWS_PROFILE": "a"}) != first
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[a]\n")
    second = environment_fingerprint(env)
    assert second != first
    (tmp_path / ".aws" / "credentials").write_text("[a]\nmore\n")
    assert environment_fingerprint(env) != second


def test_a_record_holds_the_endpoint_that_was_in_force() -> None:
    named, url = {"AWS_ENDPOINT_URL": "https://a.example"}, "s3://bucket/run"
    assert StoreConfig.in_force(None, url, named) == StoreConfig(endpoint_url="https://a.example")
    given = StoreConfig(profile="p", connections=3)
    assert StoreConfig.in_force(given, url, named) == StoreConfig(endpoint_url="https://a.example", profile="p", connections=3)
    own = StoreConfig(endpoint_url="https://b.example")
    assert StoreConfig.in_force(own, url, named) == own
    assert StoreConfig.in_force(None, url, {}) is None
    assert StoreConfig.in_force(None, "s3://profile@bucket/run", named) is None
    assert StoreConfig.in_force(None, "/data/run", {**named, "S3_ENDPOINT_URL": "https://c.example"}) is None, "they are not looked at"
