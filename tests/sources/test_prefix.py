"""Objects below a URL as a source: the same listing as the same files in a folder, and races that a folder does not have."""

from __future__ import annotations

import pickle
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stagekit.config import StoreConfig
from stagekit.dataset import Dataset
from stagekit.errors import Conflict, Denied, NotFound, PublishError, SourceError, Unreachable
from stagekit.location import Location
from stagekit.publishing import publish, shard, source_of
from stagekit.publishing.job import read_samples
from stagekit.shards.plan import PlannedSample
from stagekit.sources.files import FileRules
from stagekit.sources.folder import FolderSource
from stagekit.sources.prefix import PrefixSource
from stagekit.store import open_store
from stagekit.store.base import Data, ObjectInfo, Store, WrappedStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from ..conftest import S3Place

FILES = {
    "b/x.jpg": b"picture",
    "b/x.json": b"{}",
    "a/deep/y.seg.png": b"mask",
    "a/deep/y.jpg": b"yes",
    "c/._z.jpg": b"apple",
    "c/.hidden/z.jpg": b"x",
    "c/thumbs/z.jpg": b"x",
    "c/thumbs/more/z.jpg": b"x",
    "c/z.txt": b"",
}
RULES = FileRules(labels="dir", exclude=("thumbs",))


def fill(store: Store) -> Store:
    for key, data in FILES.items():
        store.put(key, data)
    return store


def test_one_object_is_no_source(tmp_path: Path) -> None:
    fill(MemoryStore(f"memory://{tmp_path.name}/raw"))
    with pytest.raises(SourceError, match=r"reading memory://.*/raw/b/x\.jpg: it is one object; a source is the prefix"):
        PrefixSource(Location.parse(f"memory://{tmp_path.name}/raw/b/x.jpg")).listing()
    with pytest.raises(SourceError, match="there is no file to pack in it"):
        PrefixSource(Location.parse(f"memory://{tmp_path.name}/nothing")).listing()


def content(source: PrefixSource, sample: PlannedSample) -> dict[str, bytes]:
    return {name: b"".join(map(bytes, pieces)) for name, _, pieces in source.read(sample)}


def unmarked(samples: Sequence[PlannedSample]) -> list[PlannedSample]:
    """Without the times and etags by which each source knows a change."""
    return [PlannedSample(sample.key, tuple(field._replace(mark=None) for field in sample.fields)) for sample in samples]


def test_the_listing_is_that_of_the_same_files_in_a_folder(tmp_path: Path) -> None:
    for key, data in FILES.items():
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(data)
    source = PrefixSource(fill(MemoryStore("memory://prefix/listing")), RULES)
    ours, folder = source.listing(), FolderSource(str(tmp_path), RULES).listing()
    assert unmarked(ours.samples) == unmarked(folder.samples)
    assert ours.skipped == folder.skipped == {"AppleDouble files": 1, "dot-files": 1, "excluded by a pattern": 1}
    assert ours.classes == folder.classes == ("a", "b", "c")
    assert content(source, ours.samples[0]) == {"jpg": b"yes", "seg.png": b"mask", "cls": b"0"}


def test_a_source_can_be_pickled() -> None:
    source = PrefixSource(Location.parse("s3://bucket/raw"), RULES, StoreConfig(profile="mine"))
    assert pickle.loads(pickle.dumps(source)) == source
    assert source.name == "s3://bucket/raw"


@pytest.mark.parametrize("size", [1000, 20 * 2**20])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda store: store.put("a.bin", bytes(999)), "it shrank from"),
        (lambda store: store.put("a.bin", bytes(21 * 2**20)), "it grew from"),
        (lambda store: store.delete("a.bin"), "is gone"),
    ],
)
def test_an_object_that_changed_since_the_listing_is_named(size: int, change: object, words: str) -> None:
    store = MemoryStore(f"memory://prefix/{size}-{words.replace(' ', '-')}")
    store.put("a.bin", bytes(size))
    source = PrefixSource(store)
    (sample,) = source.listing().samples
    change(store)  # type: ignore[operator]  # one of the lambdas above
    with pytest.raises(SourceError, match=rf"memory://prefix/.*/a\.bin: .*{words}.*--on-bad skip"):
        content(source, sample)


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (Denied("access denied"), SourceError, "it may not be read"),
        (NotFound("no such object"), SourceError, "is gone"),
        (Unreachable("no answer", transient=False), Unreachable, "no answer"),
    ],
)
def test_what_the_store_says(error: Exception, expected: type[Exception], words: str) -> None:
    """An object that may not be read is the source's fault; a store that does not answer tells nothing about the object."""
    store = FaultStore(MemoryStore(f"memory://prefix/{words.replace(' ', '-')}"))
    store.put("a.bin", b"x")
    source = PrefixSource(store)
    (sample,) = source.listing().samples
    store.fail("get", error, "a.bin")
    with pytest.raises(expected, match=words):
        content(source, sample)


def test_a_store_that_tells_etags_in_its_listings_alone() -> None:
    class Inconsistent(WrappedStore):
        def head(self, key: str) -> ObjectInfo:
            return replace(self.inner.head(key), etag=None)

        def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
            if if_match is not None:
                raise Conflict("there is no etag to compare with")
            return self.inner.get(key, start, length)

    store = Inconsistent(MemoryStore("memory://prefix/inconsistent"))
    store.put("small.bin", b"small")
    store.put("large.bin", bytes(2**20 + 1))
    source = PrefixSource(store)
    large, small = source.listing().samples
    assert content(source, small) == {"bin": b"small"}
    assert content(source, large) == {"bin": bytes(2**20 + 1)}


def test_a_large_object_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    store = FaultStore(MemoryStore("memory://prefix/replaced"))
    store.put("a.bin", bytes(20 * 2**20))
    source = PrefixSource(store)
    (sample,) = source.listing().samples
    store.fail("get", Conflict("its etag is another one now"), "a.bin", skip=1)
    with pytest.raises(SourceError, match="it was replaced after the source was listed"):
        content(source, sample)


def test_skipping_bad_objects(tmp_path: Path) -> None:
    raw = FaultStore(fill(MemoryStore("memory://prefix/skip")))
    raw.fail("get", Denied("access denied"), "b/x.json")
    out = MemoryStore("memory://prefix/skip-out")
    done = publish(PrefixSource(raw, FileRules(exclude=("c",), on_bad="skip")), out, on_bad="skip", workers=1)
    assert [sample["__key__"] for sample in Dataset(out)] == ["a/deep/y"]
    assert [bad.path for bad in done.bad] == ["b/x"]


def test_an_empty_prefix() -> None:
    with pytest.raises(SourceError, match="memory://prefix/none: there is no file to pack in it"):
        PrefixSource(Location.parse("memory://prefix/none")).listing()


class _Together(WrappedStore):
    """Answers a read when a second one is asked for."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.barrier = threading.Barrier(2, timeout=60)

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        self.barrier.wait()
        return super().get(key, start, length, if_match=if_match)


@pytest.mark.parametrize("files", [{"a.bin": bytes(100), "b.bin": bytes(100)}, {"a.bin": bytes(16 * 2**20)}])
def test_objects_are_fetched_at_the_same_time(files: dict[str, bytes]) -> None:
    """Small ones beside each other, a large one in ranges beside each other (an even number of both)."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    for key, data in files.items():
        store.put(key, data)
    source = PrefixSource(_Together(store))
    found = []
    for read in read_samples(source, source.listing().samples):
        assert isinstance(read, tuple)
        assert not isinstance(read[1], SourceError)
        found += [b"".join(map(bytes, pieces)) for _, _, pieces in read[1]]
    assert found == list(files.values())


ODD = ("with space", "100%2F", "a+b", "#1", "q?x=1&y", "emoji 🐘", "e\u0301", "\u00e9")


def test_from_a_bucket_into_the_same_bucket(tmp_path: Path, any_s3: S3Place) -> None:
    more = {"c/large.bin": bytes(9 * 2**20), **{f"c/{name}.txt": name.encode() for name in ODD}}
    raw = open_store(f"{any_s3.url}/raw", any_s3.config)
    fill(raw)
    for key, data in more.items():
        raw.put(key, data)
    dataset = shard(f"{any_s3.url}/raw", f"{any_s3.url}/out", labels="dir", exclude=["thumbs"], workers=2, store=any_s3.config)
    samples = {sample["__key__"]: sample for sample in dataset}
    assert sorted(samples) == sorted(["a/deep/y", "b/x", "c/large", "c/z", *(f"c/{name}" for name in ODD)])
    assert all(samples[f"c/{name}"]["txt"] == name.encode() for name in ODD), "names and bytes go through a bucket and come back"
    local = tmp_path / "local"
    for key, data in {**FILES, **more}.items():
        (local / key).parent.mkdir(parents=True, exist_ok=True)
        (local / key).write_bytes(data)
    assert dataset.digest == shard(local, "memory://prefix/local", labels="dir", exclude=["thumbs"]).digest
    with pytest.raises(PublishError, match="the destination lies inside the source"):
        publish(source_of(f"{any_s3.url}/raw", store=any_s3.config), f"{any_s3.url}/raw/out", store=any_s3.config)
