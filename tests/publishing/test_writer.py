from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.dataset import Dataset
from stagekit.errors import DuplicateKey, KeyNotAllowed, ManifestError, OutOfSpace, PublishError, ShardError, Unreachable, UsageError
from stagekit.progress import Event, Message, Progress, Stage
from stagekit.publishing import ShardWriter, publish, shard, source_of
from stagekit.publishing.claim import Claim, read_claim
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from .conftest import read_by_webdataset, tree


def sample(number: int) -> dict[str, Any]:
    return {"__key__": f"k{number:03d}", "txt": f"text {number} {'x' * 2000}", "cls": number}


def test_samples_come_back_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "out", shard_size="20KiB") as writer:
        writer.write({"__key__": "z", "jpg": b"picture", "cls": 3, "json": {"a": [1]}, "txt": "häuser", "__url__": "left out"})
        for number in range(20):
            writer.write(sample(number))
    dataset = writer.dataset
    found = list(dataset)
    assert found[0] == {"__key__": "z", "jpg": b"picture", "cls": b"3", "json": b'{"a": [1]}', "txt": "häuser".encode()}
    assert [one["__key__"] for one in found[1:]] == [f"k{number:03d}" for number in range(20)]
    assert len(dataset.shards) == 5
    assert all(record.bytes <= 20 * 1024 for record in dataset.shards)
    assert read_by_webdataset([str(tmp_path / "out" / record.name) for record in dataset.shards]) == found


def test_a_shard_is_as_full_as_it_can_be(tmp_path: Path) -> None:
    """Cut by the same rule as a plan: the same samples as files give the same bytes."""
    rng = random.Random(5)
    raw = tmp_path / "raw"
    raw.mkdir()
    data = {f"{number:03d}": rng.randbytes(rng.randrange(3000)) for number in range(50)}
    for key, value in data.items():
        (raw / f"{key}.bin").write_bytes(value)
    by_files, by_writer = MemoryStore(f"memory://{tmp_path.name}/a"), MemoryStore(f"memory://{tmp_path.name}/b")
    publish(source_of(raw), by_files, shard_size=20_480)
    with ShardWriter(by_writer, shard_size=20_480) as writer:
        for key, value in data.items():
            writer.write({"__key__": key, "bin": value})
    assert tree(by_files) == tree(by_writer)


def test_what_a_person_should_know_is_said_at_the_end(tmp_path: Path) -> None:
    told: list[Event] = []
    samples = [
        {"__key__": "a", "txt": "x", "__url__": "s3://b/x.tar"},
        {"__key__": "B", "txt": "y", "__source__": "web"},
        {"__key__": "b", "txt": "z"},
        {"__key__": "c", "bin": bytes(900)},
    ]
    shard(samples, tmp_path / "out", shard_size=2048, on_event=told.append)
    overhead, oversized, alike, left_out = (event.text for event in told if isinstance(event, Message))
    assert "tar headers and padding add" in overhead
    assert "put the small fields of a sample into one" in overhead
    assert oversized == "1 sample larger than the shard size of 2.05 kB, in a larger shard of its own: c"
    assert "keys that differ only in case or Unicode normalisation stay apart" in alike
    assert "'B'; 'b'" in alike
    assert left_out.startswith("left out: __source__, __url__; names that start with two underscores belong to the sample itself")
    told.clear()
    shard([{"__key__": f"{n}", "bin": bytes(50_000)} for n in range(3)], tmp_path / "large", on_event=told.append)
    assert not [event for event in told if isinstance(event, Message)]


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z0-9/]{0,5}[a-z0-9]", fullmatch=True).filter(lambda key: "//" not in key and key[0] != "/"),
        st.dictionaries(st.sampled_from(["bin", "jpg", "seg.png"]), st.binary(max_size=3000), min_size=1),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 12_000),
    st.integers(1, 5),
)
def test_whatever_is_written_is_read(samples: dict[str, dict[str, bytes]], shard_size: int, samples_per_shard: int) -> None:
    store = MemoryStore(f"memory://property/{os.urandom(8).hex()}")
    with ShardWriter(store, shard_size=shard_size, samples_per_shard=samples_per_shard) as writer:
        for key, fields in samples.items():
            writer.write({"__key__": key, **fields})
    assert list(Dataset(store)) == [{"__key__": key, **fields} for key, fields in samples.items()]
    assert all(r.samples <= samples_per_shard and (r.bytes <= shard_size or r.samples == 1) for r in Dataset(store).shards)


def test_samples_per_shard() -> None:
    store = MemoryStore("memory://writer/count")
    with ShardWriter(store, samples_per_shard=4) as writer:
        for number in range(10):
            writer.write(sample(number))
    assert [record.samples for record in writer.dataset.shards] == [4, 4, 2]


@pytest.mark.parametrize("error", [ValueError("the user's own"), KeyboardInterrupt()])
def test_an_exception_inside_publishes_nothing_and_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    store = DirectoryStore(tmp_path / "out")
    with pytest.raises(type(error)):
        with ShardWriter(store, samples_per_shard=2) as writer:
            for number in range(5):
                writer.write(sample(number))
            assert read_claim(store)
            raise error
    assert tree(store) == {}
    with pytest.raises(ManifestError):
        Dataset(tmp_path / "out")
    with pytest.raises(UsageError, match="when its with-block has ended without an exception"):
        _ = writer.dataset


def test_an_open_multipart_upload_is_aborted(tmp_path: Path) -> None:
    store = MemoryStore("memory://writer/multipart")
    with pytest.raises(ValueError, match="stop"):
        with ShardWriter(store) as writer:
            writer.write({"__key__": "a", "bin": bytes(20 * 2**20)})
            assert len(list(store.open_uploads())) == 1
            raise ValueError("stop")
    assert list(store.open_uploads()) == []
    assert tree(store) == {}


def test_a_bad_sample_is_refused_and_the_next_one_is_welcome() -> None:
    store = MemoryStore("memory://writer/bad")
    with ShardWriter(store) as writer:
        writer.write(sample(1))
        with pytest.raises(DuplicateKey, match="the key 'k001' was written before"):
            writer.write(sample(1))
        with pytest.raises(ShardError, match="needs a '__key__' that is a text, not None"):
            writer.write({"jpg": b""})
        with pytest.raises(ShardError, match=r"a sample is a mapping such as \{'__key__'.* not of the type tuple"):
            writer.write(("x", 1))  # type: ignore[arg-type]
        with pytest.raises(ShardError, match="the sample 'x' has a field named 1; a field's name is a text"):
            writer.write({"__key__": "x", 1: b""})  # type: ignore[dict-item]
        with pytest.raises(ShardError, match=r"'cls' of the sample 'x' .* 'cat' is no number"):
            writer.write({"__key__": "x", "cls": "cat"})
        with pytest.raises(ShardError, match="'empty' has no field"):
            writer.write({"__key__": "empty", "__url__": "x"})
        with pytest.raises(ShardError, match="'jpg' of the sample 'x' cannot hold a value of the type object"):
            writer.write({"__key__": "x", "jpg": object()})
        with pytest.raises(KeyNotAllowed, match="write 'jpg'"):
            writer.write({"__key__": "x", "JPG": b""})
        with pytest.raises(KeyNotAllowed, match="a dot in its last component"):
            writer.write({"__key__": "x.y", "jpg": b""})
        writer.write(sample(2))
    assert [one["__key__"] for one in Dataset(store)] == ["k001", "k002"]


def test_no_sample_is_no_data_set() -> None:
    store = MemoryStore("memory://writer/none")
    with pytest.raises(PublishError, match="no sample was written"):
        with ShardWriter(store):
            pass
    assert tree(store) == {}


@pytest.mark.parametrize("key", ["shards/000001.tar", "shards/000001.tar.idx", "shards/000001.blocks", "wids.json", "manifest.json"])
def test_a_store_that_fails_publishes_nothing(key: str) -> None:
    store = FaultStore(MemoryStore(f"memory://writer/fails/{key}"))
    store.fail("put", OutOfSpace(f"writing {key}: the disk is full", transient=False), key)
    with pytest.raises(OutOfSpace, match="the disk is full"):
        with ShardWriter(store, samples_per_shard=2) as writer:
            for number in range(4):
                writer.write(sample(number))
    assert tree(store.inner) == {}


def test_a_failure_that_was_swallowed_still_publishes_nothing() -> None:
    store = FaultStore(MemoryStore("memory://writer/swallowed"))
    store.fail("put", Unreachable("no answer", transient=False), "shards/000000.tar")
    with pytest.raises(PublishError, match="nothing was published"):
        with ShardWriter(store, samples_per_shard=1) as writer:
            writer.write(sample(1))
            with pytest.raises(Unreachable):
                writer.write(sample(2))
            with pytest.raises(PublishError, match="an earlier sample failed"):
                writer.write(sample(3))
    assert tree(store.inner) == {}


def test_a_destination_with_a_data_set_is_refused() -> None:
    store = MemoryStore("memory://writer/full")
    with ShardWriter(store) as writer:
        writer.write(sample(1))
    before = tree(store)
    with pytest.raises(PublishError, match=r"holds another data set \(1 sample in 1 shard.*a ShardWriter only writes new ones"):
        with ShardWriter(store):
            raise AssertionError("the block must not begin")
    assert tree(store) == before


def leave_a_dead_writer(store: MemoryStore, **changes: Any) -> None:
    writer = ShardWriter(store, samples_per_shard=1)
    writer.__enter__()
    for number in range(4):
        writer.write(sample(number))
    claim = json.loads(store.get(".claim.json"))
    store.put(".claim.json", json.dumps({**claim, **changes}).encode())


def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    store = MemoryStore("memory://writer/dead")
    leave_a_dead_writer(store, pid=2**22 + 1)
    assert "shards/000002.tar" in tree(store)
    with ShardWriter(store) as writer:
        writer.write(sample(9))
    assert sorted(tree(store)) == [
        "manifest.json",
        "shards/000000.blocks",
        "shards/000000.samples",
        "shards/000000.tar",
        "shards/000000.tar.idx",
        "wids.json",
    ]


def test_a_writer_that_lives_or_cannot_be_asked_is_respected() -> None:
    store = MemoryStore("memory://writer/alive")
    leave_a_dead_writer(store)
    with pytest.raises(PublishError, match="wait until it has ended"), ShardWriter(store):
        pass
    leave = MemoryStore("memory://writer/elsewhere")
    leave_a_dead_writer(leave, boot_id="another machine")
    with pytest.raises(PublishError, match=r"cannot be asked from here.*takeover=True"), ShardWriter(leave):
        pass
    with ShardWriter(leave, takeover=True) as writer:
        writer.write(sample(1))
    assert len(writer.dataset) == 1


def test_a_writer_that_lost_its_claim_publishes_nothing_and_touches_nothing() -> None:
    store = MemoryStore("memory://writer/lost")
    theirs = Claim.mine("somebody else's plan").to_bytes()
    with pytest.raises(PublishError, match="has claimed this destination for other data"):
        with ShardWriter(store, samples_per_shard=1) as writer:
            writer.write(sample(1))
            writer.write(sample(2))
            store.put(".claim.json", theirs)
    assert "manifest.json" not in tree(store)
    assert store.get(".claim.json") == theirs
    assert "shards/000000.tar" in tree(store)  # it may be theirs by now


def test_a_writer_is_used_once_and_inside_its_block() -> None:
    writer = ShardWriter(MemoryStore("memory://writer/once"))
    with pytest.raises(UsageError, match="inside its with-block"):
        writer.write(sample(1))
    with writer:
        writer.write(sample(1))
    with pytest.raises(UsageError, match="inside its with-block"):
        writer.write(sample(2))
    with pytest.raises(UsageError, match="writes one data set"):
        writer.__enter__()


@pytest.mark.parametrize(("options", "words"), [({"shard_size": 0}, "no size for a shard"), ({"samples_per_shard": 0}, "0 is below 1")])
def test_options_that_cannot_be_meant(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ShardWriter("memory://writer/options", **options)


def test_events() -> None:
    events: list[Event] = []
    with ShardWriter(MemoryStore("memory://writer/events"), samples_per_shard=2, on_event=events.append) as writer:
        for number in range(3):
            writer.write({"__key__": str(number), "bin": bytes(2**20)})
    assert [event.subject for event in events if isinstance(event, Stage)] == ["shards/000000.tar", "shards/000001.tar"]
    progress = [event for event in events if isinstance(event, Progress)]
    assert progress[0].note == "1 sample"
    assert progress[-1].finished
    assert progress[-1].note == "3 samples"


def test_shard_takes_an_iterable_of_samples() -> None:
    dataset = shard((sample(number) for number in range(10)), MemoryStore("memory://writer/iterable"), samples_per_shard=4)
    assert [one["__key__"] for one in dataset] == [f"k{number:03d}" for number in range(10)]
    assert len(dataset.shards) == 3
    with pytest.raises(UsageError, match="source: 5 is neither a path, a URL, a source, nor an iterable of samples"):
        shard(5, "memory://writer/none")  # type: ignore[arg-type]


def test_an_iterable_that_raises_publishes_nothing() -> None:
    store = MemoryStore("memory://writer/raising")

    def samples() -> Iterator[dict[str, Any]]:
        yield sample(1)
        raise LookupError("the source is broken")

    with pytest.raises(LookupError, match="the source is broken"):
        shard(samples(), store)
    assert tree(store) == {}


@pytest.mark.parametrize("option", [{"workers": 2}, {"labels": "dir"}, {"on_bad": "skip"}, {"limit_rate": "1MB/s"}, {"dots": "field"}])
def test_options_that_an_iterable_has_no_use_for(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="samples from a program are written in their order by this process"):
        shard([sample(1)], "memory://writer/unused", **option)
