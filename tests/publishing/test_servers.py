"""The same promises on every S3 server there is."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

from stagekit.dataset import Dataset
from stagekit.publishing import ShardWriter, publish, shard, source_of
from stagekit.store import open_store
from stagekit.store.memory import MemoryStore

from ..conftest import S3Place
from .conftest import make_raw, read_by_webdataset, tree


def test_a_folder_into_a_bucket_and_again(raw: Path, tmp_path: Path, any_s3: S3Place) -> None:
    url = f"{any_s3.url}/deep/data"
    dataset = shard(raw, url, shard_size="160KiB", labels="dir", workers=2, store=any_s3.config)
    local = MemoryStore(f"memory://{tmp_path.name}/local")
    publish(source_of(raw, labels="dir"), local, shard_size="160KiB")
    store = open_store(url, any_s3.config)
    assert tree(store) == tree(local)
    assert list(open_store(any_s3.url, any_s3.config).open_uploads()) == []

    for record in dataset.shards:
        path = tmp_path / record.name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(store.get(record.name))
    theirs = read_by_webdataset([str(tmp_path / record.name) for record in dataset.shards])
    assert theirs == list(Dataset(url, store=any_s3.config))

    again = publish(source_of(raw, labels="dir"), url, shard_size="160KiB", store=any_s3.config)
    assert again.unchanged

    store.delete("manifest.json")
    store.delete(dataset.shards[1].name.replace(".tar", ".blocks"))
    resumed = publish(source_of(raw, labels="dir"), url, shard_size="160KiB", store=any_s3.config, takeover=True)
    assert tree(store) == tree(local)
    assert resumed.manifest.digest == dataset.digest


def test_shards_of_several_parts_are_kept_by_a_rerun(tmp_path: Path, any_s3: S3Place) -> None:
    """Their etags are no plain MD5s: a rerun has to recognise them all the same."""
    raw = tmp_path / "raw"
    raw.mkdir()
    rng = random.Random(4)
    for number in range(5):
        (raw / f"{number}.bin").write_bytes(rng.randbytes(7 * 2**20))
    url = f"{any_s3.url}/large"
    store = open_store(url, any_s3.config)

    class Stop(Exception):
        pass

    def stop(event: object) -> None:
        if getattr(event, "name", "") == "confirmed":
            raise Stop

    with contextlib.suppress(Stop):
        publish(source_of(raw), url, shard_size="25MiB", store=any_s3.config, on_event=stop, workers=1)
    resumed = publish(source_of(raw), url, shard_size="25MiB", store=any_s3.config, workers=1)
    assert (resumed.sent, resumed.kept) == (0, 2)
    assert sum(len(sample["bin"]) for sample in Dataset(store)) == 35 * 2**20


def test_a_writer_into_a_bucket(any_s3: S3Place) -> None:
    url = f"{any_s3.url}/written"
    with ShardWriter(url, samples_per_shard=2, store=any_s3.config) as writer:
        for number in range(5):
            writer.write({"__key__": f"k{number}", "txt": f"text {number}", "cls": number})
    assert [(sample["__key__"], sample["txt"], sample["cls"]) for sample in writer.dataset] == [
        (f"k{number}", f"text {number}".encode(), str(number).encode()) for number in range(5)
    ]
    assert len(writer.dataset.shards) == 3


def test_two_data_sets_side_by_side_do_not_see_each_other(tmp_path: Path, any_s3: S3Place) -> None:
    """``data/1`` must not take ``data/10`` for foreign objects of its own."""
    one, ten = make_raw(tmp_path / "one", 6, seed=1), make_raw(tmp_path / "ten", 6, seed=2)
    publish(source_of(ten), f"{any_s3.url}/data/10", store=any_s3.config)
    publish(source_of(one), f"{any_s3.url}/data/1", store=any_s3.config)
    assert len(Dataset(f"{any_s3.url}/data/1", store=any_s3.config)) == 6
