"""A server's life and the hand-over to inference: the scripts as they stand, against a real S3 server."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from stagekit.transfer.put import file_sha256

from .machines import EXAMPLES, HERE, Cloud

SERVER = EXAMPLES / "server"


@contextmanager
def started(cloud: Cloud, name: str, script: str, *arguments: str, **environ: object) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A script on a new machine, with what it says in a file. It does not outlive the test."""
    env = cloud.environ(name, **environ)
    said = cloud.directory / name / f"said-{script.rpartition('/')[2]}-{'-'.join(arguments)}.txt"
    with said.open("wb") as file:
        line = ["bash", str(EXAMPLES / script), *arguments]
        process = subprocess.Popen(line, cwd=said.parent, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process, said
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def done(cloud: Cloud, name: str, script: str, *arguments: str, **environ: object) -> str:
    """What a script says that ends well."""
    with started(cloud, name, script, *arguments, **environ) as (process, said):
        assert process.wait(timeout=280) == 0, said.read_text()
        return said.read_text()


@pytest.mark.timeout(600)  # two servers, each with an interpreter for every step
def test_a_server_that_is_shut_down_and_the_next_one_that_is_destroyed(cloud: Cloud, adapter: dict[str, str]) -> None:
    run = "runs/on-servers"
    line = {"RUN": f"{cloud.url}/{run}", "TRAIN": f"{sys.executable} {EXAMPLES / 'lora_plain.py'}", "DESTROY": "touch destroyed"}
    held = cloud.directory / "held"
    cut = {"PYTHONPATH": HERE / "hooks", "POWER_CUT": cloud.cut(run, "'epoch': '2'", held=held)}
    with started(cloud, "server-1", "server/server.sh", **line, **cut) as (first, said):
        deadline = time.monotonic() + 240
        while not held.exists():
            assert first.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)  # to the script alone, as systemd and docker do
        assert first.wait(timeout=120) == 143, said.read_text()
    text = said.read_text()
    assert "YES: nothing in this scope would be lost" in text
    assert "this server was asked to end, so nothing is destroyed" in text
    assert not (said.parent / "destroyed").exists()
    assert [one.step for one in cloud.checkpoints(run)] == [4]

    work = cloud.directory / "server-2" / "work"
    text = done(cloud, "server-2", "server/onstart.sh", **line, WORK=work)
    assert re.findall("^== (\\w+)", text, re.MULTILINE) == ["doctor", "pull", "train", "teardown", "this"]
    assert f"going on from step 4 of {cloud.url}/{run}" in text
    assert "YES: nothing in this scope would be lost" in text
    assert (work / "destroyed").exists()
    assert cloud.digests(run, *adapter) == adapter, "as if there had been one server"


def test_a_training_that_handles_the_shutdown_and_ends_well_destroys_nothing(cloud: Cloud) -> None:
    program = """
import pathlib, signal, sys, time
def save(*_):
    folder = pathlib.Path("out/checkpoint-1")
    folder.mkdir()
    (folder / "weights.json").write_text("[1]")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("up").touch()
time.sleep(600)
"""
    line = {"RUN": f"{cloud.url}/runs/graceful", "TRAIN": shlex.join([sys.executable, "-c", program]), "DESTROY": "touch destroyed"}
    with started(cloud, "server-3", "server/server.sh", **line) as (process, said):
        deadline = time.monotonic() + 120
        while not (said.parent / "up").exists():
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0, said.read_text()
    assert "this server was asked to end, so nothing is destroyed" in said.read_text()
    assert not (said.parent / "destroyed").exists()
    assert [one.step for one in cloud.checkpoints("runs/graceful")] == [1]


SHIM = """#!/usr/bin/env bash
echo "$1" >> calls
if [ "$1" = "$HELD" ]; then
    trap 'echo told >> calls; exit 143' TERM
    touch up
    while :; do sleep 0.05; done
fi
"""


@pytest.mark.parametrize("held", ["doctor", "pull", "teardown"])
def test_a_shutdown_during_any_step_reaches_it_and_destroys_nothing(tmp_path: Path, held: str) -> None:
    shim = tmp_path / "bin" / "stagekit"
    shim.parent.mkdir()
    shim.write_text(SHIM)
    shim.chmod(0o755)
    env = {"PATH": f"{shim.parent}:{os.environ['PATH']}", "HELD": held, "DESTROY": "touch destroyed"}
    process = subprocess.Popen(["bash", str(SERVER / "server.sh")], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "up").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
    calls = (tmp_path / "calls").read_text().split()
    assert calls == [*["doctor", "pull", "pull", "run", "teardown"][: {"doctor": 1, "pull": 2, "teardown": 5}[held]], "told"]
    assert not (tmp_path / "destroyed").exists()


def test_a_model_is_handed_over_in_the_layouts_that_servers_load(cloud: Cloud, lora: str) -> None:
    nvme = cloud.directory / "inference" / "nvme"
    more = {"NVME": nvme, "NAME": "tiny/llama", "ADAPTER": f"{cloud.url}/{lora}", "HF_HUB_CACHE": nvme / "hub"}
    said = done(cloud, "inference", "serve.sh", "safetensors", **more)
    assert f"vllm serve {nvme}/llama --enable-lora --lora-modules chat={nvme}/llama-adapter" in said
    loaded = cloud.run("inference", HERE / "load.py", NVME=nvme)
    assert loaded.codes == [0], loaded.said

    said = done(cloud, "inference", "serve.sh", "gguf", NVME=nvme)
    modelfile = nvme / "llama-gguf" / "Modelfile"
    assert modelfile.read_text() == "FROM ./tiny-q4.gguf\n"
    assert file_sha256(modelfile.parent / "tiny-q4.gguf") == file_sha256(cloud.directory / "office" / "gguf" / "tiny-q4.gguf")
    assert f"llama-server --model {nvme}/llama-gguf/tiny-q4.gguf" in said


def test_the_files_for_machines_say_what_they_mean(tmp_path: Path) -> None:
    script = (SERVER / "server.sh").read_text()
    init = yaml.safe_load((SERVER / "cloud-init.yaml").read_text())
    (file,) = init["write_files"]
    assert file["permissions"] == "0600", "it holds keys"
    settings = {line.split("=", 1)[0] for line in file["content"].splitlines()}
    assert {name for name in settings if not name.startswith("AWS_")} <= set(re.findall(r"^(\w+)=\$\{\w+:-", script, re.MULTILINE))
    copied = [name for line in init["runcmd"] if line.startswith("cp ") for name in re.findall(r"/opt/stagekit/(\S+)", line)]
    assert copied
    assert all((EXAMPLES.parent / name).exists() for name in copied)

    unit = (SERVER / "stagekit-train.service").read_text()
    for name, value in re.findall(r"^(EnvironmentFile|WorkingDirectory)=(\S+)", unit, re.MULTILINE):
        assert {"EnvironmentFile": file["path"], "WorkingDirectory": "/opt/train"}[name] == value
    if shutil.which("systemd-analyze"):
        here = tmp_path / "stagekit-train.service"
        here.write_text(unit.replace("/opt/train/server.sh", "/bin/true").replace("/opt/train/venv/bin/stagekit", "/bin/true"))
        said = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=True, timeout=60)
        assert said.stdout + said.stderr == ""
    for program in (SERVER / "server.sh", SERVER / "onstart.sh", EXAMPLES / "serve.sh"):
        assert os.access(program, os.X_OK), program
