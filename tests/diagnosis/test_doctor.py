"""``stagekit doctor`` for real: this machine, a real mount, real stores, and endpoints that are dead."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import stagekit
from stagekit.cli import main
from stagekit.config import StoreConfig
from stagekit.diagnosis import Diagnosis, doctor
from stagekit.diagnosis.machine import Machine, look_at_machine
from stagekit.facts import Fact
from stagekit.testing.proxy import FaultProxy, Hang

from ..conftest import S3Place
from ..rigs.fuse import FuseMount
from ..rigs.servers import S3Server


@pytest.fixture(scope="session")
def machine() -> Machine:
    """This one, looked at once."""
    return look_at_machine()


def fact(found: Diagnosis, name: str) -> Fact:
    return next(one for one in found.facts if one.name == name)


def test_this_machine(machine: Machine, tmp_path: Path) -> None:
    import torch

    assert machine.torch is not None
    assert machine.torch.trouble is None
    assert machine.torch.version == torch.__version__
    assert machine.torch.available == torch.cuda.is_available()
    assert machine.engines["botocore"]
    assert machine.engines["rclone"]
    assert machine.ram_bytes is not None
    assert machine.ram_bytes > 1 << 28
    found = doctor([tmp_path / "not" / "there"], machine=lambda: machine)
    assert fact(found, "path").values["path"] == str(tmp_path / "not" / "there")
    assert fact(found, "path").values["free_bytes"] > 0
    assert [section.about for section in found.sections] == [""]


def test_a_torch_that_hangs_is_not_waited_for() -> None:
    found = look_at_machine(torch_s=0.01)
    assert found.torch is not None
    assert found.torch.trouble == "it was not imported within 0 s"


def test_a_mounted_bucket_will_fail_and_its_url_is_told(fuse: FuseMount) -> None:
    told = fuse.python(
        "import sys; from stagekit.cli import main; sys.exit(main(['doctor', sys.argv[1], '--json']))", fuse.mount_point / "data"
    )
    assert told.returncode == 1, told.stderr
    record = json.loads(told.stdout.splitlines()[-1])
    found = next(one for one in record["sections"][0]["facts"] if one["name"] == "path")
    assert (found["state"], found["class"], found["type"]) == ("bad", "refused", "fuse.rclone")
    assert f"use s3://{fuse.bucket}/data instead" in found["advice"]
    mounts = next(one for one in record["sections"][0]["facts"] if one["name"] == "mounts")
    assert {"class": "refused", "type": "fuse.rclone", "point": str(fuse.mount_point)} in mounts["mounts"]


def test_a_mount_that_hangs_is_told_and_holds_nobody_up(fuse: FuseMount) -> None:
    os.kill(fuse.daemon.pid, signal.SIGSTOP)
    try:
        told = fuse.python(
            "import sys; from stagekit.cli import main; sys.exit(main(['doctor', sys.argv[1], '--json']))", fuse.mount_point / "data"
        )
    finally:
        os.kill(fuse.daemon.pid, signal.SIGCONT)
    assert told.returncode == 1, told.stderr
    record = json.loads(told.stdout.splitlines()[-1])
    found = next(one for one in record["sections"][0]["facts"] if one["name"] == "path")
    assert found["state"] == "bad"
    assert "it does not answer" in found["text"]
    assert f"unmount it (umount -l {fuse.mount_point})" in found["advice"]


def test_stores_are_asked_beside_each_other_and_nothing_is_left(any_s3: S3Place, machine: Machine) -> None:
    found = doctor([f"{any_s3.url}/runs", any_s3.url], store=any_s3.config, machine=lambda: machine)
    assert [section.about for section in found.sections] == ["", f"{any_s3.url}/runs", any_s3.url]
    assert [one.state for section in found.sections[1:] for one in section.facts if one.state in ("bad", "unknown")] == []
    assert "secret" not in "\n".join(found.lines)


def test_a_dead_endpoint_is_told_within_ten_seconds(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:  # takes connections and says nothing
        config = StoreConfig(endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        found = doctor(["s3://bucket/x"], store=config, machine=lambda: machine)
        assert time.monotonic() - began < 10
    assert fact(found, "endpoint").state == "bad"
    assert "sent nothing for 5.0 s" in fact(found, "endpoint").text
    assert "wJalrXUtnFEMI" not in json.dumps(found.record)
    assert "AKIAIOSFODNN7EXAMPLE" not in json.dumps(found.record)


def test_an_endpoint_that_holds_a_request_for_ever_is_not_waited_for(
    moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig], machine: Machine
) -> None:
    config = credentials_for(moto_server)
    with FaultProxy(moto_server.endpoint_url) as proxy:
        proxy.fault(Hang())
        found = doctor(["s3://bucket/x"], store=replace(config, endpoint_url=proxy.endpoint_url), machine=lambda: machine, answer_s=0.2)
    assert fact(found, "endpoint").text == "s3://bucket/x did not answer within 0.2 s"
    assert "check the endpoint's name" in found.changes[0]


def test_other_stores_are_asked_whether_they_answer(tmp_path: Path, machine: Machine) -> None:
    found = doctor(["memory://somewhere"], machine=lambda: machine)
    assert fact(found, "endpoint").state == "ok"


def test_a_host_that_nobody_knows_is_told_with_what_to_check(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = doctor(["ftp://nobody.invalid/x"], machine=lambda: machine)
    told = fact(found, "endpoint")
    assert (told.state, told.values["error"]) == ("bad", "Unreachable")
    assert "ftp://nobody.invalid/x: the name of its host is not known; check how it is written, this machine's network" in told.text


def test_what_is_no_location_is_told_and_the_others_are_looked_at(machine: Machine, tmp_path: Path) -> None:
    found = doctor(
        ["s3:/bucket", tmp_path, "s3://AKIA:hunter2@bucket/x", "gopher://there/x", "memory://somewhere"], machine=lambda: machine
    )
    assert [section.about for section in found.sections] == ["", "place 1", "place 3", "gopher://there/x", "memory://somewhere"]
    assert not found.healthy
    assert fact(found, "path").values["path"] == str(tmp_path)
    locations = [one for one in found.facts if one.name == "location"]
    assert [one.state for one in locations] == ["bad", "bad"]
    assert "looks like a URL without its two slashes; write s3://" in locations[0].text
    assert "a URL with a key or password in it is not accepted" in locations[1].text
    assert "hunter2" not in json.dumps(found.record)
    assert [section.facts[0].state for section in found.sections[3:]] == ["bad", "ok"]
    assert "gopher:// is no kind of URL" in found.sections[3].facts[0].text


def test_the_command(
    moto_server: S3Server,
    credentials_for: Callable[[S3Server], StoreConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, url = credentials_for(moto_server), f"s3://{moto_server.create_bucket()}"
    options = ["--endpoint-url", str(config.endpoint_url), "--profile", str(config.profile)]
    assert main(["doctor", url, "--read-only", *options]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("ok    software ")
    assert url in out
    assert any("not tried: nothing was to be written" in line for line in out)
    assert main(["doctor", "s3://no-such-bucket-anywhere", "--json", *options]) == 1
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["event"], record["healthy"]) == ("diagnosis", False)
    assert record["sections"][1]["facts"][0]["error"] == "BucketNotFound"
    assert "there is no bucket" in record["changes"][0]


def test_where_a_data_set_lies_it_says_whether_to_stream_or_to_copy(
    moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig], machine: Machine, tmp_path: Path
) -> None:
    config, url = credentials_for(moto_server), f"s3://{moto_server.create_bucket()}"
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.bin").write_bytes(bytes(3_000_000))
    stagekit.shard(tmp_path / "raw", f"{url}/data", store=config)
    found = doctor([f"{url}/data", url], store=config, machine=lambda: machine, read_only=True, answer_s=60)
    told = fact(found, "data set")
    assert told.values["bytes"] > 3_000_000
    assert "streaming, an epoch takes" in told.text
    assert "stagekit pull" in told.text
    assert [one.name for one in found.sections[2].facts].count("data set") == 0
