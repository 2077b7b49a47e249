"""Pulling to a local disk: complete and verified, or not at all."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
from pathlib import Path

import pytest

from stagekit import mounts
from stagekit.copies.pull import pull
from stagekit.dataset import Dataset
from stagekit.errors import (
    BadDigest,
    CheckpointError,
    DamagedCheckpoint,
    Denied,
    ManifestError,
    MountRefused,
    NoValidCheckpoint,
    OutOfSpace,
    Unreachable,
    UsageError,
)
from stagekit.progress import Event, Message, Progress
from stagekit.publishing import ShardWriter
from stagekit.report import ls
from stagekit.shards.manifest import samples_name
from stagekit.store import open_store
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore
from stagekit.verdict import teardown
from stagekit.verification import verify

from ..conftest import S3Place
from ..made import make_checkpoint, make_dataset, make_run

_numbers = itertools.count()


@pytest.fixture
def url() -> str:
    return f"memory://staging-{next(_numbers)}/run"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_data_sets_and_runs_come_back_from_every_kind_of_store(any_s3: S3Place, tmp_path: Path) -> None:
    run = open_store(f"{any_s3.url}/runs/a b+c", any_s3.config)
    make_run(run)
    make_checkpoint(run, 100, {"model.pt": b"m" * 3_000_000, "sub dir/ü.txt": "ü".encode()})
    manifest = make_dataset(open_store(f"{any_s3.url}/digits", any_s3.config), size=20_000)
    assert verify(f"{any_s3.url}/digits", deep=True, store=any_s3.config).findings == ()
    assert verify(f"{any_s3.url}/runs/a b+c", deep=True, store=any_s3.config).findings == ()
    assert [entry.kind for entry in ls(any_s3.url, store=any_s3.config)] == ["dataset", "folder"]
    assert [entry.kind for entry in ls(f"{any_s3.url}/runs", store=any_s3.config)] == ["run"]
    pull(f"{any_s3.url}/digits", tmp_path / "digits", store=any_s3.config)
    assert Dataset(str(tmp_path / "digits")).digest == manifest.digest
    pull(f"{any_s3.url}/runs/a b+c@100", tmp_path / "checkpoint", store=any_s3.config)
    assert contents(tmp_path / "checkpoint") == {"model.pt": b"m" * 3_000_000, "sub dir/ü.txt": "ü".encode()}
    verdict = teardown([tmp_path / "checkpoint"], [f"{any_s3.url}/runs/a b+c"], store=any_s3.config)
    assert verdict.answer == "YES", verdict.findings


FILES = {"model.pt": b"m" * 5000, "deep/er/rng.pt": b"r", "empty": b""}


def test_a_checkpoint_arrives_as_it_was_saved(url: str, tmp_path: Path) -> None:
    store = MemoryStore(url)
    make_run(store)
    first = make_checkpoint(store, 100, {**FILES, "old": b"o"}, metrics={"loss": 1.0}, best=("loss", "min"))
    make_checkpoint(store, 200, FILES, shared={"model.pt": first.file_key("model.pt")}, metrics={"loss": 2.0})
    events: list[Event] = []
    pulled = pull(url, tmp_path / "new" / "latest", on_event=events.append)
    assert contents(tmp_path / "new" / "latest") == FILES
    assert (pulled.kind, pulled.step, pulled.files, pulled.bytes, pulled.fetched_bytes) == ("checkpoint", 200, 3, 5001, 5001)
    assert pulled.url == f"{url}@200"
    assert "every byte verified" in pulled.line
    assert any(isinstance(event, Progress) and event.finished for event in events)
    assert pull(f"{url}@100", tmp_path / "a").step == 100
    assert pull(f"{url}@best", tmp_path / "b").step == 100
    (tmp_path / "c").mkdir()
    assert pull(f"{url}@latest", tmp_path / "c").step == 200


def test_what_is_there_already_is_left_and_anything_else_refused(url: str, tmp_path: Path) -> None:
    store = MemoryStore(url)
    make_run(store)
    make_checkpoint(store, 100, FILES)
    target = tmp_path / "checkpoint"
    pull(url, target)
    again = pull(url, target)
    assert again.fetched_bytes == 0
    assert "5.00 kB of it was there already" in again.line
    (target / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"holds mine\.txt, which does not belong to it; give a new or empty directory"):
        pull(url, target)
    (target / "mine.txt").unlink()
    (target / "model.pt").write_bytes(b"x" * 5000)
    with pytest.raises(UsageError, match=r"model\.pt differs"):
        pull(url, target)
    assert (target / "model.pt").read_bytes() == b"x" * 5000
    (target / "model.pt").unlink()
    with pytest.raises(UsageError, match=r"model\.pt is missing"):
        pull(url, target)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="no directory"):
        pull(url, tmp_path / "file")


def test_a_damaged_checkpoint_leaves_nothing_and_the_older_one_is_taken_unless_a_step_was_named(url: str, tmp_path: Path) -> None:
    store = MemoryStore(url)
    make_run(store)
    make_checkpoint(store, 100, FILES)
    newest = make_checkpoint(store, 200, FILES)
    store.put(newest.file_key("model.pt"), b"x" * 5000)
    events: list[Event] = []
    assert pull(url, tmp_path / "a", on_event=events.append).step == 100
    warnings = [event.text for event in events if isinstance(event, Message) and event.level == "warning"]
    assert any("step 200" in text and "model.pt" in text for text in warnings)
    with pytest.raises(NoValidCheckpoint, match=r"model\.pt"):
        pull(f"{url}@200", tmp_path / "b")
    with pytest.raises(DamagedCheckpoint, match=r"model\.pt"):
        pull(url, tmp_path / "b", strict=True)
    assert os.listdir(tmp_path) == ["a"]


def test_going_on_without_a_checkpoint_is_a_decision_that_has_to_be_told(url: str, tmp_path: Path) -> None:
    make_run(MemoryStore(url))
    events: list[Event] = []
    for error in (None, Denied("listing: forbidden"), Unreachable("no answer")):
        store = FaultStore(MemoryStore(url))
        if error is not None:
            store.fail("head", error, times=None)
            with pytest.raises(type(error)):
                pull(store, tmp_path / "x")
        pulled = pull(store, tmp_path / "x", allow_fresh=True, on_event=events.append)
        assert (pulled.files, pulled.step) == (0, None)
        assert pulled.line == f"{url}: nothing was pulled"
    texts = [event.text for event in events if isinstance(event, Message)]
    assert [text.partition("although ")[2] for text in texts] == [
        f"pulling {url}: the run has no checkpoint yet",
        "listing: forbidden",
        "no answer",
    ]
    assert os.listdir(tmp_path) == []


def test_a_run_without_a_checkpoint_and_a_place_without_anything_say_so(url: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=f"^pulling {url}: there is no object of this name, and none below it; stagekit ls "):
        pull(url, tmp_path / "x")
    make_run(MemoryStore(url))
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        pull(url, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_data_set_has_no_checkpoints_to_choose_from(tmp_path: Path) -> None:
    place = f"memory://staging-{next(_numbers)}/digits"
    make_dataset(open_store(place))
    for asked in (f"{place}@5", f"{place}@latest", f"{place}@best"):
        words = rf" {asked}: {place} is a data set, and only a run has checkpoints; name {place} alone$"
        with pytest.raises(CheckpointError, match="^pulling" + words):
            pull(asked, tmp_path / "out")
        with pytest.raises(CheckpointError, match="^verifying" + words):
            verify(asked)
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_arrives_whole_and_can_be_read(url: str, tmp_path: Path) -> None:
    manifest = make_dataset(MemoryStore(url))
    pulled = pull(url, tmp_path / "digits")
    assert pulled.kind == "dataset"
    assert contents(tmp_path / "digits") == {info.key: bytes(MemoryStore(url).get(info.key)) for info in MemoryStore(url).list()}
    assert Dataset(str(tmp_path / "digits")).digest == manifest.digest
    assert [sample["__key__"] for sample in Dataset(str(tmp_path / "digits"))] == [f"{number:06d}" for number in range(24)]
    assert pull(url, tmp_path / "digits").fetched_bytes == 0
    assert os.listdir(tmp_path) == ["digits"]


def test_a_data_sets_pull_that_broke_goes_on_and_fetches_nothing_twice(url: str, tmp_path: Path) -> None:
    manifest = make_dataset(MemoryStore(url))
    broken = FaultStore(MemoryStore(url))
    broken.fail("get", Unreachable("the link is down"), manifest.shards[2].name, times=None)
    with pytest.raises(Unreachable):
        pull(broken, tmp_path / "digits")
    assert not (tmp_path / "digits").exists()
    (tmp_path / ".digits.pull" / "stranger").write_text("from an older version")
    whole = FaultStore(MemoryStore(url))
    pulled = pull(whole, tmp_path / "digits")
    assert pulled.fetched_bytes < pulled.bytes
    fetched = {call.key for call in whole.calls if call.operation == "get"}
    assert manifest.shards[2].name in fetched
    assert manifest.shards[0].name not in fetched
    assert "stranger" not in contents(tmp_path / "digits")


@pytest.mark.parametrize("etags", [True, False])
def test_the_digests_of_samples_come_too_where_there_are_any(tmp_path: Path, etags: bool) -> None:
    """They carry their own checksum, which counts where the store has none, and let a full verification of the copy name the sample."""
    url = f"memory://staging-{next(_numbers)}/run" if etags else str(tmp_path / "published")
    with ShardWriter(url, samples_per_shard=3) as writer:
        for number in range(9):
            writer.write({"__key__": f"{number}", "txt": f"number {number}"})
    store = open_store(url)
    names = [samples_name(record.name) for record in writer.dataset.shards]
    pulled = pull(url, tmp_path / "copy")
    there = {info.key: bytes(store.get(info.key)) for info in store.list()}
    assert names[0] in there
    assert contents(tmp_path / "copy") == there
    assert "14 files" in pulled.line
    assert ", every byte verified" in pulled.line

    with (tmp_path / "copy" / writer.dataset.shards[1].name).open("r+b") as file:
        file.seek(4 * 512 + 100)
        file.write(b"x")
    (fault,) = verify(tmp_path / "copy", deep=True).faults
    assert fault.samples == (2,)

    # A copy from before, and a data set without one of them, are whole as they are.
    shutil.rmtree(tmp_path / "copy")
    store.delete(names[1])
    pull(url, tmp_path / "copy")
    assert contents(tmp_path / "copy").keys() == there.keys() - {names[1]}
    store.put(names[1], there[names[1]])
    assert pull(url, tmp_path / "copy").fetched_bytes == len(there[names[1]])
    assert contents(tmp_path / "copy") == there

    # One that is damaged where it lies is no more than it is there, and the sentence says so where no etag vouches for the copy.
    store.put(names[0], there[names[0]][:-1] + b"!")
    again = pull(url, tmp_path / "again")
    assert again.unproven == (0 if etags else 1)
    store.put(names[0], b"of another shard")
    assert names[0] not in contents(tmp_path / pull(url, tmp_path / "third").directory)


def test_keys_that_may_not_list_get_a_data_set_without_the_digests_of_samples(tmp_path: Path, url: str) -> None:
    with ShardWriter(url) as writer:
        writer.write({"__key__": "a", "txt": "a"})
    store = FaultStore(open_store(url))
    store.fail("head", Denied("HEAD: 403"), "shards/000000.samples")
    pull(store, tmp_path / "copy")
    assert contents(tmp_path / "copy").keys() == {info.key for info in open_store(url).list()} - {"shards/000000.samples"}


def test_a_damaged_data_set_is_refused_with_the_shards_name(url: str, tmp_path: Path) -> None:
    manifest = make_dataset(MemoryStore(url))
    MemoryStore(url).put(manifest.shards[0].name, bytes(manifest.shards[0].bytes))
    with pytest.raises(BadDigest, match=manifest.shards[0].name):
        pull(url, tmp_path / "digits")
    assert not (tmp_path / "digits").exists()


def test_space_is_looked_at_before_the_first_byte(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset(MemoryStore(url))
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    store = FaultStore(MemoryStore(url))
    with pytest.raises(OutOfSpace, match=r"needs .* and 10 B are free; make space"):
        pull(store, tmp_path / "digits")
    assert not [call for call in store.calls if call.operation == "get" and call.key.endswith(".tar")]
    assert os.listdir(tmp_path) == []


def test_a_second_pull_to_the_same_place_says_so(url: str, tmp_path: Path) -> None:
    make_dataset(MemoryStore(url))
    (tmp_path / ".digits.pull").mkdir()
    handle = os.open(tmp_path / ".digits.pull", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"another pull to .* is running"):
            pull(url, tmp_path / "digits")
    finally:
        os.close(handle)
    assert pull(url, tmp_path / "digits").files == 11


def test_a_mounted_bucket_is_no_target(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset(MemoryStore(url))
    lines = f"1 0 0:2 / / rw - ext4 x rw\n2 1 0:1 / {tmp_path} rw - fuse.rclone contabo:bucket rw\n"
    table = mounts.MountTable(mounts.parse_mountinfo(lines.encode()))
    monkeypatch.setattr(mounts.MountTable, "read", classmethod(lambda cls: table))
    with pytest.raises(MountRefused, match=r"pulling to .* is refused.*fuse\.rclone"):
        pull(url, tmp_path / "digits")
