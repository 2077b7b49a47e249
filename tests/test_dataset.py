"""A published data set as Python sees it."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest

from stagekit.dataset import Dataset
from stagekit.errors import (
    BucketNotFound,
    CorruptShard,
    Denied,
    ManifestError,
    MountRefused,
    RandomAccessRefused,
    Unreachable,
)
from stagekit.mounts import Judgement
from stagekit.shards.manifest import MANIFEST
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from .stream.build import build, numbered


@pytest.fixture
def store(request: pytest.FixtureRequest) -> FaultStore:
    inner = MemoryStore(f"memory://dataset-{request.node.name}/digits")
    build(inner, numbered(13), shards=[7, 1, 5])
    return FaultStore(inner)


def test_what_a_data_set_tells(store: FaultStore) -> None:
    dataset = Dataset(store)
    assert len(dataset) == 13
    assert [record.samples for record in dataset.shards] == [7, 1, 5]
    assert dataset.fields["txt"].samples == 13
    assert dataset.nbytes == sum(record.bytes for record in dataset.shards)
    assert len(dataset.digest) == 64
    assert str(dataset.location) in repr(dataset)
    assert "13 samples in 3 shards" in repr(dataset)
    # Opening reads the manifest and nothing else.
    assert [(call.operation, call.key) for call in store.calls] == [("get", MANIFEST)]


def test_samples_come_in_source_order_as_raw_bytes(store: FaultStore) -> None:
    dataset = Dataset(store)
    assert list(dataset) == [{"__key__": f"{number:06d}", "txt": str(number).encode()} for number in range(13)]
    assert list(dataset) == list(dataset)


@pytest.mark.parametrize(("count", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 2), (8, 4), (13, 6), (99, 6)])
def test_the_first_samples_cost_the_blocks_that_hold_them(store: FaultStore, count: int, blocks: int) -> None:
    dataset = Dataset(store)
    dataset.load_tables(range(3))
    before = len(store.calls)
    assert list(dataset.head(count)) == list(dataset)[:count]
    assert len(store.calls) - before - 6 == blocks  # six are for reading all of it


def test_blocks_are_numbered_over_all_shards(store: FaultStore) -> None:
    dataset = Dataset(store)
    assert dataset.block_samples.tolist() == [3, 3, 1, 1, 3, 2]
    assert [dataset.place(block) for block in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    assert dataset.block(4).offset == 0
    assert dataset.block_range(1).key == "shards/000000.tar"


def test_leaving_an_iteration_early_leaves_no_thread(store: FaultStore) -> None:
    before = threading.active_count()
    for _ in Dataset(store):
        break
    assert threading.active_count() == before


def test_a_sample_by_number_is_refused_naming_what_to_do_instead(store: FaultStore) -> None:
    with pytest.raises(RandomAccessRefused, match=r"sample 3 of memory://.*stagekit\.torch\.StreamLoader.*`stagekit pull`"):
        Dataset(store)[3]


def test_it_can_be_opened_by_path_and_pickled(tmp_path: Path) -> None:
    build(DirectoryStore(tmp_path), numbered(5))
    dataset = Dataset(tmp_path)
    assert len(list(dataset)) == 5
    again = pickle.loads(pickle.dumps(dataset))
    assert again.digest == dataset.digest
    assert list(again) == list(dataset)


def test_no_manifest_names_the_url_and_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(ManifestError, match=rf"{tmp_path}/d holds no data set: there is no {tmp_path}/d/manifest.json.*`stagekit shard"):
        Dataset(tmp_path / "d")
    with pytest.raises(ManifestError, match=r"memory://nothing-here/x holds no data set"):
        Dataset("memory://nothing-here/x")


@pytest.mark.parametrize("error", [BucketNotFound("no bucket"), Denied("403"), Unreachable("no answer")])
def test_a_store_that_cannot_tell_is_never_no_data_set(store: FaultStore, error: Exception) -> None:
    store.fail("get", error)
    with pytest.raises(type(error)) as caught:
        Dataset(store)
    assert not isinstance(caught.value, ManifestError)


def test_a_damaged_manifest_is_refused(store: FaultStore) -> None:
    data = bytes(store.get(MANIFEST))
    store.put(MANIFEST, data.replace(b'"samples":13', b'"samples":14'))
    with pytest.raises(ManifestError, match=r"digits/manifest\.json"):
        Dataset(store)
    store.put(MANIFEST, b"<html>Service Unavailable</html>")
    with pytest.raises(ManifestError, match=r"digits/manifest\.json"):
        Dataset(store)


def test_a_damaged_block_table_names_the_table(store: FaultStore) -> None:
    data = bytearray(store.get("shards/000002.blocks"))
    data[20] ^= 1
    store.put("shards/000002.blocks", bytes(data))
    dataset = Dataset(store)
    found = iter(dataset)
    assert [next(found)["__key__"] for _ in range(8)][-1] == "000007"
    with pytest.raises(CorruptShard, match=r"block 0 of 2 of .*000002\.tar.*block table.*expected sha-256.*found"):
        next(found)


def test_a_block_table_of_another_shard_is_refused(store: FaultStore) -> None:
    store.put("shards/000002.blocks", bytes(store.get("shards/000000.blocks")))
    with pytest.raises(CorruptShard, match=r"000002\.blocks.*expected sha-256"):
        Dataset(store).table(2)


def test_a_block_that_is_damaged_on_the_way_is_fetched_again(store: FaultStore) -> None:
    store.corrupt("shards/000000.tar", offset=600, times=1)
    assert len(list(Dataset(store))) == 13


def test_a_block_that_is_damaged_where_it_lies_is_named(store: FaultStore) -> None:
    store.corrupt("shards/000000.tar", offset=3 * 1024 + 600, times=None)
    found = iter(Dataset(store))
    assert [next(found)["__key__"] for _ in range(3)] == ["000000", "000001", "000002"]
    expected = r"block 1 of 3 of memory://.*/shards/000000\.tar \(samples 3 to 5 of the shard, 3072 bytes at offset 3072\).*xxh3-128.*found"
    with pytest.raises(CorruptShard, match=expected):
        next(found)


def test_a_directory_behind_a_mount_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judgement itself is tested with ``mounts``; here, that a data set asks for it before it touches the directory."""
    asked = []

    def refuse(path: Path, purpose: str, *, allow_mount: bool = False) -> Judgement:
        asked.append((path, purpose, allow_mount))
        raise MountRefused("refused")

    monkeypatch.setattr("stagekit.dataset.refuse_mount", refuse)
    with pytest.raises(MountRefused):
        Dataset(tmp_path / "never-there", allow_mount=True)
    assert asked == [(tmp_path / "never-there", "reading a data set from", True)]
