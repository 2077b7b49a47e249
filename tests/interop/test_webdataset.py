"""WebDataset's real package over Stagekit's reader, and by itself on the same tars: its methods, its loader, ranks, workers, damage."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from PIL import Image
from webdataset.gopen import gopen_schemes

import stagekit
import stagekit.interop
from stagekit.cli import main
from stagekit.errors import CorruptShard, MissingExtra, NotFound, UsageError
from stagekit.interop.webdataset import gopen, register
from stagekit.store import open_store
from stagekit.testing.proxy import Cut, FaultProxy

from ..rigs.servers import S3Server
from ..stream.build import build

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

COUNT = 97
TARS = 10
KEYS = [f"{number:06d}" for number in range(COUNT)]


def picture(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 3), (number, 0, 0)).save(out, "png")
    return out.getvalue()


def samples() -> list[tuple[str, dict[str, bytes]]]:
    return [(key, {"png": picture(number), "cls": str(number).encode()}) for number, key in enumerate(KEYS)]


@pytest.fixture(scope="module")
def bucket(rclone_server: S3Server) -> str:
    return rclone_server.create_bucket()


@pytest.fixture
def url(rclone_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The data set, published by the first test that asks, with the environment that leads to it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rclone_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rclone_server.secret_key)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    store = open_store(f"s3://{bucket}/digits")
    if not list(store.list("")):
        build(store, samples(), shards=[10] * 9 + [7])
    return f"s3://{bucket}/digits"


def braces(url: str) -> str:
    return f"{url}/shards/{{000000..00000{TARS - 1}}}.tar"


def test_the_methods_and_the_loader_work_on_it(url: str) -> None:
    pipeline = (
        stagekit.interop.webdataset(url, batch_size=8, connections=2, memory="100MB")
        .shuffle(20)
        .decode("pil")
        .to_tuple("jpg;png", "cls", "__key__")
        .batched(8, collation_fn=None)
    )
    orders = []
    for _ in range(2):
        batches = list(pipeline)
        assert [len(batch) for batch in batches] == [8] * 12 + [1]
        read = [sample for batch in batches for sample in batch]
        assert all((image.size, image.getpixel((0, 0)), key) == ((4, 3), (label, 0, 0), KEYS[label]) for image, label, key in read)
        orders.append([key for _, _, key in read])
        assert sorted(orders[-1]) == KEYS
    assert orders[0] != orders[1]
    reader = pipeline.stage(0)
    assert (len(reader), reader.receipt.delivered, reader.receipt.complete, reader.epoch) == (COUNT, COUNT, True, 2)

    epochs = [
        [[int(label) for _, label, _ in batch] for batch in wds.WebLoader(pipeline, batch_size=None, num_workers=2)] for _ in range(2)
    ]
    for epoch in epochs:
        assert sorted(number for batch in epoch for number in batch) == list(range(COUNT))
        assert sorted(map(len, epoch)) == [1] + [8] * 12, "workers get whole batches"
    assert epochs[0] != epochs[1]
    collated = next(iter(stagekit.interop.webdataset(url, shuffle=False).decode("torchrgb").to_tuple("png", "cls").batched(5)))
    assert (list(collated[0].shape), list(collated[1])) == ([5, 3, 3, 4], [0, 1, 2, 3, 4])


_RANK = """
import json, sys
import torch.distributed as dist
import stagekit.interop
import webdataset as wds

url, tars, meeting, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
fed = stagekit.interop.webdataset(url, drop_last=False)
plain = wds.WebDataset(tars, shardshuffle=False, nodesplitter=wds.split_by_node)
found = {}
for name, pipeline in (("fed", fed), ("again", fed), ("plain", plain)):
    loader = wds.WebLoader(pipeline, batch_size=None, num_workers=2)
    found[name] = [sample["__key__"] for sample in loader]
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_two_ranks_of_two_workers_read_each_sample_once(url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _RANK, url, braces(url), str(tmp_path / "meeting"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for rank in range(2)
    ]
    found: list[dict[str, list[str]]] = []
    for process in ranks:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err.decode()
        found.append(json.loads(out))
    for name in ("fed", "again", "plain"):
        assert sorted(found[0][name] + found[1][name]) == KEYS, name
    assert {len(one["fed"]) for one in found} == {48, 49}
    assert found[0]["fed"] != found[0]["again"]


def test_webdataset_alone_reads_the_tars(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", url, "--urls"]) == 0
    urls = capsys.readouterr().out.splitlines()
    assert len(urls) == TARS
    for named in (urls, braces(url)):
        read = {sample["__key__"]: sample for sample in wds.WebDataset(named, shardshuffle=False)}
        assert {key: {field: sample[field] for field in ("png", "cls")} for key, sample in read.items()} == dict(samples())
        assert {sample["__url__"] for sample in read.values()} == set(urls)


def test_opening_s3_by_itself(url: str, rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = f"{url}/shards/000000.tar"
    whole = bytes(open_store(url).get("shards/000000.tar"))
    with gopen(tar) as file:
        assert file.read(700) + file.read() == whole
        assert file.read() == b""
    threads = threading.active_count()
    begun = gopen(tar)
    begun.read(10)
    del begun  # as WebDataset does: it closes nothing
    assert threading.active_count() == threads
    with pytest.raises(NotFound, match=r"000099\.tar"):
        gopen(f"{url}/shards/000099.tar")
    with pytest.raises(UsageError, match=r"writing .*x\.tar through WebDataset is refused: .*stagekit shard"):
        wds.TarWriter(f"{url}/x.tar")
    with FaultProxy(rclone_server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        proxy.fault(Cut(1000), method="GET", key="*000000.tar", times=1)
        with gopen(tar) as file:
            assert file.read() == whole, "a connection that breaks is repeated, and never ends a tar"
        assert len([one for one in proxy.requests if one.method == "GET"]) == 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone_server.endpoint_url)

    def mine(*arguments: Any) -> None: ...

    monkeypatch.setitem(gopen_schemes, "s3", mine)
    register()
    assert gopen_schemes["s3"] is mine
    monkeypatch.delitem(gopen_schemes, "s3")
    stagekit.interop.webdataset(url)
    assert gopen_schemes["s3"] is gopen


def test_damage_is_an_error_or_counted(tmp_path: Path) -> None:
    store = open_store(tmp_path / "digits")
    build(store, samples(), shards=[97])
    shard = tmp_path / "digits" / "shards" / "000000.tar"
    damaged = bytearray(shard.read_bytes())
    damaged[700] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(CorruptShard, match=r"block 0 of 33 of .*000000\.tar"):
        list(stagekit.interop.webdataset(tmp_path / "digits").to_tuple("cls"))
    skipping = stagekit.interop.webdataset(tmp_path / "digits", on_bad="skip")
    with pytest.warns(RuntimeWarning, match="3 skipped as damaged"):
        assert sorted(sample["__key__"] for sample in skipping) == KEYS[3:]
    assert skipping.stage(0).receipt.skipped == 3


def test_what_is_missing_or_meant_otherwise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, method in (("decode", "decode"), ("transform", "map")):
        with pytest.raises(UsageError, match=rf"^{name}: .* append \.{method}\(\)"):
            stagekit.interop.webdataset(tmp_path, **{name: None})
    with pytest.raises(MissingExtra, match=r"'mosaicml-streaming', which is not installed.*pip install '?mosaicml-streaming"):
        stagekit.interop.mosaicml(tmp_path)
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(MissingExtra, match=r"'webdataset', which is not installed.*pip install '?webdataset"):
        stagekit.interop.webdataset(tmp_path)
