"""The policies of docs/providers.md, on a real gateway: a second user gets what the page promises and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import stagekit
from stagekit.config import StoreConfig
from stagekit.errors import Denied
from stagekit.progress import Event
from stagekit.store.s3 import S3Store
from stagekit.store.s3_probe import S3Probe
from stagekit.torch import StreamLoader

from .rigs.rgw import Rgw

PAGE = Path(__file__).parents[1] / "docs" / "providers.md"


def policy(bucket: str, count: int = 2) -> str:
    """The first ``count`` policies of the page as one, for ``bucket``."""
    found = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    assert len(found) == 2
    statements = [statement for one in found[:count] for statement in one["Statement"]]
    return json.dumps({"Version": "2012-10-17", "Statement": statements}).replace("my-bucket", bucket).replace("user/me", "user/tester")


@pytest.mark.rig("rgw")
def test_the_policies_of_the_page(
    rgw: Rgw, credentials_for: Callable[[object], StoreConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, guest = credentials_for(rgw.http), credentials_for(rgw.guest)
    bucket = rgw.http.create_bucket()
    rgw.http.client().put_bucket_policy(Bucket=bucket, Policy=policy(bucket))
    raw = tmp_path / "raw"
    raw.mkdir()
    for number in range(20):
        (raw / f"{number}.txt").write_text(str(number))
    stagekit.shard(raw, f"s3://{bucket}/digits", store=owner)
    S3Store(f"s3://{bucket}/secrets", owner).put("a", b"not for guests")

    loader = StreamLoader(f"s3://{bucket}/digits", batch_size=4, store=guest)
    assert sum(len(batch["txt"]) for batch in loader) == 20

    url = f"s3://{bucket}/runs/first"
    run = stagekit.Run(url, store=guest, spool_dir=tmp_path / "spool")
    for step in (1, 2):
        with run.checkpoint(step=step) as directory:
            (Path(directory) / "model.bin").write_bytes(bytes([step]) * 6_000_000)
    run.close()
    again = stagekit.Run(url, store=guest, spool_dir=tmp_path / "other")
    restored = again.restore(tmp_path / "back")
    assert restored is not None
    assert restored.step == 2
    assert (tmp_path / "back" / "model.bin").read_bytes() == bytes([2]) * 6_000_000

    assert [entry.kind for entry in stagekit.ls(f"s3://{bucket}/runs", store=owner)] == ["run"]
    assert stagekit.verify(url, store=owner, deep=True).ok
    stagekit.pull(url, tmp_path / "home", store=owner)
    assert (tmp_path / "home" / "model.bin").read_bytes() == bytes([2]) * 6_000_000
    told: list[Event] = []
    assert stagekit.prune(url, keep_last=1, store=owner, on_event=told.append).places[0].steps == (1,)
    assert [entry.kind for entry in stagekit.ls(url, store=owner)] == ["run", "checkpoint"]

    there = S3Store(f"s3://{bucket}", guest)
    for refused in (
        lambda: there.get("secrets/a"),
        lambda: there.put("secrets/b", b""),
        lambda: there.put("digits/b", b""),
        lambda: there.delete("digits/manifest.json"),
        lambda: there.delete("runs/first/run.json"),
    ):
        with pytest.raises(Denied, match="access denied"):
            refused()

    facts = {fact.name: fact for fact in S3Probe(S3Store(url, guest)).facts()}
    assert facts["rights"].text == "list yes, get yes, put yes, delete no"
    assert facts["left behind"].state == "note"

    rgw.http.client().put_bucket_policy(Bucket=bucket, Policy=policy(bucket, 1))
    facts = {fact.name: fact for fact in S3Probe(S3Store(f"s3://{bucket}/digits", guest)).facts()}
    assert facts["rights"].text == "list no, get yes, put no, delete not tried"
    assert [fact.name for fact in facts.values() if fact.state == "bad"] == []


def test_what_the_page_says_was_tested_is_what_the_suite_starts() -> None:
    text = PAGE.read_text()
    tested = re.search(r"\*\*Tested here\*\*.*?\n\n", text, re.DOTALL)
    assert tested is not None
    for server in ("RADOS Gateway", "`rclone serve s3`", "moto"):
        assert server in tested.group(0)
