"""Streaming from real S3 servers, in the parent and in workers that are forked after the parent has used its connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.utils.data import DataLoader

from stagekit.config import StoreConfig
from stagekit.errors import CorruptShard, ManifestError, StoreError
from stagekit.store import open_store
from stagekit.torch import StreamDataset, StreamLoader

from ..conftest import S3Place
from ..rigs.servers import S3Server
from ..stream.build import build, numbered


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_parent_and_forked_workers_read_the_same_bytes(any_s3: S3Place) -> None:
    url = f"{any_s3.url}/data/digits"
    build(open_store(url, any_s3.config), numbered(90, field="cls", size=3000), shards=[40, 1, 49])
    loader = StreamLoader(url, 9, window=4, store=any_s3.config)
    keys = [key for batch in loader for key in batch["__key__"]]
    assert sorted(keys) == [f"{number:06d}" for number in range(90)]
    dataset = StreamDataset(url, window=4, store=any_s3.config)
    workers = DataLoader(dataset, batch_size=9, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        batches = list(workers)
        assert sorted(number for batch in batches for number in batch["cls"].tolist()) == list(range(90))
        assert all([int(key) for key in batch["__key__"]] == batch["cls"].tolist() for batch in batches)


def test_what_cannot_be_read_is_told_apart(any_s3: S3Place) -> None:
    url = f"{any_s3.url}/digits"
    with pytest.raises(ManifestError, match=r"holds no data set.*manifest\.json"):
        StreamLoader(url, 2, store=any_s3.config)
    with pytest.raises(StoreError) as caught:
        StreamLoader("s3://no-such-bucket-here/digits", 2, store=any_s3.config)
    assert not isinstance(caught.value, FileNotFoundError)
    store = open_store(url, any_s3.config)
    build(store, numbered(12, field="cls"))
    shard = bytes(store.get("shards/000000.tar"))
    # Another key for the cut shard, and a manifest that names it, would be another data set: here the object itself is cut.
    store.put("shards/000000.tar", shard[: 4 * 1024])
    with pytest.raises(CorruptShard, match=r"block 1 of 4 of .*000000\.tar \(samples 3 to 5 of the shard, 3072 bytes at offset 3072\)"):
        list(StreamLoader(url, 3, shuffle=False, threads=0, connections=1, store=any_s3.config))


@pytest.mark.parametrize("name", ["rclone", pytest.param("rgw-http", marks=pytest.mark.rig("rgw"))])
def test_a_refusal_is_never_no_data_set(
    name: str, s3_server: Callable[[str], S3Server], credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    """moto is left out: it lets everybody in, so it can tell that nothing is there."""
    server = s3_server(name)
    config = replace(credentials_for(server), profile=None, anonymous=True, retry_s=0)
    with pytest.raises(StoreError) as caught:
        StreamLoader(f"s3://{server.create_bucket()}/digits", 2, store=config)
    assert not isinstance(caught.value, FileNotFoundError)
