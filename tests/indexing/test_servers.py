"""The same promises on every S3 server there is."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import stagekit
from stagekit.copies.pull import pull
from stagekit.dataset import Dataset
from stagekit.errors import SourceError
from stagekit.indexing import index_shards
from stagekit.store import open_store
from stagekit.torch import StreamLoader
from stagekit.verification import verify

from ..conftest import S3Place
from ..publishing.conftest import read_by_webdataset, tree
from .tars import expected, put_tars, samples, tar


def test_tars_in_a_bucket_beside_and_elsewhere(any_s3: S3Place, tmp_path: Path) -> None:
    url, config = any_s3
    bucket = open_store(url, config)
    made = put_tars(bucket, 3, folder="deep/ds/")
    paths = []
    for number in range(3):
        paths.append(tmp_path / f"{number}.tar")
        paths[-1].write_bytes(bucket.get(f"deep/ds/shard-{number:06d}.tar"))
    everything = read_by_webdataset([str(path) for path in paths])
    assert everything == [sample for files in made for sample in expected(files)]
    before = tree(bucket)

    beside = index_shards(f"{url}/deep/ds/shard-{{000000..000002}}.tar", f"{url}/deep/ds", store=config)
    apart = index_shards(f"{url}/deep/ds/", f"{url}/index", store=config)
    local = index_shards(f"{url}/deep/ds/", tmp_path / "index", store=config)
    assert (beside.read, apart.read, local.read) == (3, 3, 3)
    assert beside.manifest.digest == apart.manifest.digest == local.manifest.digest
    assert {key: value for key, value in tree(bucket).items() if key in before} == before
    assert not [key for key in tree(bucket) if ".indexing" in key or ".claim" in key]

    for where in (f"{url}/deep/ds", f"{url}/index", tmp_path / "index"):
        dataset = Dataset(where, store=config)
        assert list(dataset) == everything
        assert list(pickle.loads(pickle.dumps(dataset))) == everything
        assert verify(where, deep=True, store=config).ok
        assert index_shards(f"{url}/deep/ds/", where, store=config).unchanged
        keys = [key for batch in StreamLoader(where, 5, decode=None, drop_last=False, store=config) for key in batch["__key__"] if key]
        assert sorted(keys) == sorted(str(sample["__key__"]) for sample in everything)
    pull(f"{url}/index", tmp_path / "copy", store=config)
    assert list(Dataset(tmp_path / "copy")) == everything


def test_large_fields_come_in_many_ranges(any_s3: S3Place) -> None:
    """A tar of several pieces, whose samples are larger than a block and whose blocks end inside pieces."""
    url, config = any_s3
    files = [(f"{number}.bin", bytes([number]) * size) for number, size in enumerate((9 * 2**20, 100, 5 * 2**20, 6 * 2**20, 3))]
    open_store(url, config).put("a.tar", tar(files))
    dataset = stagekit.index(f"{url}/a.tar", url, store=config)
    assert list(dataset) == expected(files)
    assert dataset.manifest.shards[0].block_samples == (1, 2, 2)
    assert verify(url, deep=True, store=config).ok


def test_a_replaced_tar_is_noticed(any_s3: S3Place) -> None:
    url, config = any_s3
    bucket = open_store(url, config)
    put_tars(bucket, 2)

    def replace(event: object) -> None:
        if getattr(event, "name", "") == "shard":
            bucket.put("shard-000000.tar", tar(samples(70, 9)))

    with pytest.raises(SourceError, match=r"shard-000000.tar: it was replaced or removed"):
        index_shards(url, url, store=config, threads=1, on_event=replace)
    assert index_shards(url, url, store=config).manifest.samples == 17
