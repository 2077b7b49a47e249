"""One bucket, one data set of each kind and one process with the frameworks for all examples."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from stagekit.transfer.put import file_sha256

from ..rigs.servers import S3Server
from .machines import EXAMPLES, HERE, Cloud


@pytest.fixture(scope="session")
def cloud(rclone_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with Cloud(rclone_server, tmp_path_factory.mktemp("cloud")) as cloud:
        made = cloud.run("office", HERE / "prepare.py")
        assert made.codes == [0], made.said
        yield cloud


@pytest.fixture(autouse=True)
def keys(isolated: object, rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests can look into the bucket as well."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rclone_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rclone_server.secret_key)


@pytest.fixture(scope="session")
def lora(cloud: Cloud) -> str:
    """A run of lora.py that lost its machine in the second epoch and went on with another one."""
    run = "runs/llama-chat"
    lost = cloud.run("lora-1", EXAMPLES / "lora.py", POWER_CUT=cloud.cut(run, "'epoch': '2'"))
    assert lost.codes == [-signal.SIGKILL], lost.said
    done = cloud.run("lora-2", EXAMPLES / "lora.py")
    assert done.codes == [0], done.said
    return run


@pytest.fixture(scope="session")
def adapter(cloud: Cloud) -> dict[str, str]:
    """The digests of the adapter that lora_plain.py trains when nothing interrupts it and nobody looks."""
    place = cloud.directory / "lora-straight"
    made = cloud.run("lora-straight", HERE / "pulled.py")
    assert made.codes == [0], made.said
    return {name: file_sha256(place / "out" / "checkpoint-12" / name) for name in ("adapter_model.safetensors", "optimizer.pt")}
