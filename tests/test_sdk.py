"""Stagekit on a botocore that is there already, years old: the whole path, on real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config

from stagekit.config import StoreConfig
from stagekit.sdk import known_settings, service_endpoints

from .rigs.rgw import Rgw
from .rigs.servers import S3Server
from .test_packaging import OF_2024, pip

ROOT = Path(__file__).parents[1]


def test_a_setting_that_botocore_lacks_is_left_out() -> None:
    assert known_settings(tcp_keepalive=True, of_a_later_release=True) == {"tcp_keepalive": True}


@pytest.mark.parametrize(
    ("configuration", "name"),
    [
        ({"services": {"mine": {"s3": 1}}}, "mine"),
        ({"services mine": {"s3": 1}}, "mine"),  # as releases before 1.31 have it
        ({"services 'my own'": {"s3": 1}, "services other": {"s3": 2}}, "my own"),
    ],
)
def test_a_services_section_is_found_wherever_a_release_has_it(configuration: dict[str, Any], name: str) -> None:
    assert service_endpoints(configuration, name) == {"s3": 1}
    assert service_endpoints(configuration, "") == {}
    assert service_endpoints({**configuration, "services 'open": {"s3": 3}, "services flat": "x"}, "flat") == {}


@pytest.fixture(scope="session")
def of_2024(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of an image of 2024."""
    folder = tmp_path_factory.mktemp("of-2024")
    # What these require in turn is here in newer releases, which they take.
    pip("install", "--quiet", "--no-deps", "--no-compile", "--target", folder, *OF_2024)
    return folder


@pytest.mark.timeout(600)
def test_the_whole_path_on_packages_of_2024(
    of_2024: Path,
    rclone_server: S3Server,
    moto_server: S3Server,
    rgw: Rgw,
    credentials_for: Callable[[S3Server], StoreConfig],
    tmp_path: Path,
) -> None:
    assert "request_checksum_calculation" in Config.OPTION_DEFAULTS, "the botocore of the other tests is as old as the one of this test"
    places = {
        server.name: {"url": f"s3://{server.create_bucket()}/{uuid.uuid4().hex}", "store": asdict(credentials_for(server))}
        for server in (moto_server, rclone_server, rgw.https)
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "tests.years_old", str(tmp_path), json.dumps(places)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(of_2024), str(ROOT)])},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert {f"{name}=={version}" for name, version in said["versions"].items()} == set(OF_2024)
    assert said["torch"] is False
    for name, found in said["places"].items():
        assert found["data set"] == {"told": 40, "the same": True}, name
        assert found["run"] == {"restored": 2, "the same": True, "late writer refused": True, "left": [3]}, name
        assert found["pushed and pulled"], name
        assert found["s3fs"], name
    kept = {name: found["conditions"]["kept"] for name, found in said["places"].items()}
    created = {name: found["conditions"]["created"] for name, found in said["places"].items()}
    # What each of them does with the conditions as parameters, too: `test_s3_probe.py`.
    assert kept["rgw-https"]["create"] is kept["moto"]["create"] is True
    assert kept["rclone"]["create"] is False
    assert created == {"rgw-https": "first", "moto": "first", "rclone": ""}
