"""The command that an error gives for putting one data set in another's place does that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stagekit
from stagekit.errors import PublishError
from stagekit.report import DatasetInfo
from stagekit.store import open_store
from stagekit.store.memory import MemoryStore
from stagekit.store.removing import removal

from ..rigs.servers import S3Server


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_another_data_set_can_be_replaced_as_the_error_says(
    kind: str, rclone_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rclone_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rclone_server.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone_server.endpoint_url)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "raw").mkdir()
    for number in range(9):
        (tmp_path / "raw" / f"{number}.txt").write_bytes(b"x" * 3000)
    dest = str(tmp_path / "it's out") if kind == "directory" else f"s3://{rclone_server.create_bucket()}/digits"
    stagekit.shard(tmp_path / "raw", dest, shard_size="8kB")
    with pytest.raises(PublishError, match="it holds another data set") as refused:
        stagekit.shard(tmp_path / "raw", dest)
    command, _, after = str(refused.value).partition("put this one in its place: ")[2].partition(", then the same with ")
    assert after == "--takeover (takeover=True)"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    stagekit.shard(tmp_path / "raw", dest, takeover=True)
    told = stagekit.info(dest)
    assert isinstance(told, DatasetInfo)
    assert (told.samples, told.shards) == (9, 1)
    assert stagekit.verify(dest, deep=True).ok


def test_a_store_without_such_a_program_is_told_in_words() -> None:
    assert removal(MemoryStore("memory://x/data"), "manifest.json") == "delete memory://x/data/manifest.json"
    profiled = removal(open_store("s3://me@bucket/data", stagekit.StoreConfig(endpoint_url="http://s3:1")), "manifest.json")
    assert profiled == "s5cmd --endpoint-url http://s3:1 --profile me rm --raw s3://bucket/data/manifest.json"
