"""Verification: a whole data set or run is whole, and each kind of damage is named with its place."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from stagekit.dataset import Dataset
from stagekit.errors import BucketNotFound, CheckpointError, CorruptShard, Denied, ManifestError, Unreachable
from stagekit.indexing.scan import scan
from stagekit.looked import Looked
from stagekit.progress import Progress
from stagekit.report import RunInfo, info, ls
from stagekit.runs import Run
from stagekit.runs.layout import RUN_JSON, SupersededRecord
from stagekit.shards.index import BlockTable
from stagekit.shards.manifest import MANIFEST, WIDS, Manifest, blocks_name, index_name, samples_name
from stagekit.store.base import Data, ObjectInfo, Store, WrappedStore
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore
from stagekit.verification import Fault, verify
from stagekit.wrapping.logs import Logs

from .made import make_checkpoint, make_dataset, make_run

_numbers = itertools.count()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(f"memory://verification-{next(_numbers)}/place")


def flip(store: Store, key: str, offset: int) -> None:
    data = bytearray(store.get(key))
    data[offset] ^= 1
    store.put(key, bytes(data))


def only(findings: tuple[Fault, ...]) -> Fault:
    assert len(findings) == 1, [finding.line for finding in findings]
    return findings[0]


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_data_set_is_whole(store: MemoryStore, deep: bool) -> None:
    manifest = make_dataset(store)
    events: list[Progress] = []
    report = verify(store, deep=deep, on_event=lambda event: events.append(event) if isinstance(event, Progress) else None)
    assert report.ok
    assert report.findings == ()
    assert report.kind == "dataset"
    assert (report.bytes, report.objects) == (manifest.bytes, 9)
    assert ("every byte read" in report.line) is deep
    assert "whole" in report.line
    assert events[-1] == Progress("verify", manifest.bytes, manifest.bytes, finished=True)


def test_a_flipped_bit_is_named_by_shard_block_and_offset_and_only_a_deep_look_sees_it(store: MemoryStore) -> None:
    manifest = make_dataset(store)
    name = manifest.shards[1].name
    table = BlockTable.from_bytes(store.get(blocks_name(name)), source="test")
    block = table.blocks[2]
    flip(store, name, block.offset + 700)
    assert verify(store).ok
    report = verify(store, deep=True)
    fault = only(report.findings)
    assert not report.ok
    assert (fault.what, fault.shard, fault.block, fault.offset) == ("bytes", name, 2, block.offset)
    assert fault.expected == block.digest.hex()
    assert fault.found not in (None, fault.expected)
    for words in (str(store.location / name), "block 2", f"offset {block.offset:,}", block.digest.hex(), str(fault.found)):
        assert words in fault.line
    assert "1 fault" in report.line


def test_every_damaged_block_is_named(store: MemoryStore) -> None:
    manifest = make_dataset(store)
    table = BlockTable.from_bytes(store.get(blocks_name(manifest.shards[0].name)), source="test")
    for block in table.blocks:
        flip(store, manifest.shards[0].name, block.offset)
    assert [fault.block for fault in verify(store, deep=True).faults] == list(range(len(table.blocks)))


def test_damage_behind_the_last_block_is_found(store: MemoryStore) -> None:
    manifest = make_dataset(store)
    flip(store, manifest.shards[0].name, manifest.shards[0].bytes - 1)
    fault = only(verify(store, deep=True).findings)
    assert "the end of the archive" in fault.line
    assert manifest.shards[0].sha256 in fault.line


def test_a_bit_that_flips_on_the_way_is_a_note(store: MemoryStore) -> None:
    manifest = make_dataset(store)
    faulty = FaultStore(store)
    faulty.corrupt(manifest.shards[0].name, offset=100)
    report = verify(faulty, deep=True)
    assert report.ok
    assert "arrived damaged once" in only(report.findings).line


@pytest.mark.parametrize("deep", [False, True])
def test_a_cut_shard_has_its_size_told_and_with_deep_the_blocks_that_are_cut_off(store: MemoryStore, deep: bool) -> None:
    manifest = make_dataset(store)
    record = manifest.shards[0]
    table = BlockTable.from_bytes(store.get(blocks_name(record.name)), source="test")
    store.put(record.name, bytes(store.get(record.name))[: table.blocks[1].offset + 10])
    faults = verify(store, deep=deep).faults
    assert faults[0].what == "size"
    assert (faults[0].expected, faults[0].found) == (str(record.bytes), str(table.blocks[1].offset + 10))
    cut = [fault.block for fault in faults[1:]]
    assert cut == (list(range(1, len(table.blocks))) if deep else [])
    assert all("is cut off" in fault.line for fault in faults[1:])


DATASET_DAMAGE: dict[str, tuple[Callable[[MemoryStore, Manifest], None], str, str]] = {
    "shard missing": (lambda store, manifest: store.delete(manifest.shards[2].name), "missing", "the shard is missing, with 4 samples"),
    "index missing": (lambda store, manifest: store.delete(index_name(manifest.shards[0].name)), "missing", "the side file is missing"),
    "index damaged": (lambda store, manifest: flip(store, index_name(manifest.shards[0].name), 3), "bytes", "the side file differs"),
    "blocks missing": (lambda store, manifest: store.delete(blocks_name(manifest.shards[0].name)), "missing", "the side file is missing"),
    "blocks damaged": (lambda store, manifest: flip(store, blocks_name(manifest.shards[0].name), 40), "bytes", "the side file differs"),
    "wids missing": (lambda store, manifest: store.delete(WIDS), "missing", "wids reader is missing"),
    "wids of another": (lambda store, manifest: flip(store, WIDS, 5), "bytes", "not the index that belongs"),
    "manifest damaged": (lambda store, manifest: flip(store, MANIFEST, 50), "manifest", "is no valid manifest"),
}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("damage", DATASET_DAMAGE)
def test_damage_to_a_data_set_is_named(store: MemoryStore, damage: str, deep: bool) -> None:
    harm, what, words = DATASET_DAMAGE[damage]
    harm(store, make_dataset(store))
    report = verify(store, deep=deep)
    fault = only(report.faults)
    assert fault.what == what
    assert words in fault.line
    assert str(store.location) in fault.line


def test_what_no_reader_needs_is_a_note(store: MemoryStore) -> None:
    make_dataset(store)
    store.put("shards/000009.tar", b"leftover")
    with pytest.raises(RuntimeError, match="killed"), store.multipart("shards/000010.tar", part_size=5):
        report = verify(store)
        raise RuntimeError("killed")
    assert report.ok
    assert [finding.what for finding in report.findings] == ["leftover", "unfinished"]
    assert "billed until it is aborted" in report.findings[1].line


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_run_is_whole_and_shared_files_are_read_once(store: MemoryStore, deep: bool) -> None:
    make_run(store)
    first = make_checkpoint(store, 100, {"model.pt": b"m" * 5000, "rng.pt": b"r1"})
    make_checkpoint(store, 200, {"model.pt": b"m" * 5000, "rng.pt": b"r2", "empty": b""}, shared={"model.pt": first.file_key("model.pt")})
    report = verify(store, deep=deep)
    assert report.findings == ()
    assert report.kind == "run"
    assert report.bytes == 5004


def test_each_kind_of_damage_to_a_run_is_named(store: MemoryStore) -> None:
    make_run(store)
    first = make_checkpoint(store, 100, {"model.pt": b"m" * 5000, "a.txt": b"a", "b.txt": b"bb"})
    make_checkpoint(store, 200, {"model.pt": b"m" * 5000}, shared={"model.pt": first.file_key("model.pt")})
    third = make_checkpoint(store, 300, {"x": b"x"})
    fourth = make_checkpoint(store, 400, {"x": b"x"})
    make_checkpoint(store, 500, {"x": b"x"}, commit=False)
    flip(store, first.file_key("model.pt"), 4321)
    store.delete(first.file_key("a.txt"))
    store.put(first.file_key("b.txt"), b"b")
    flip(store, third.manifest_key, 60)
    store.put(fourth.manifest_key, store.get(make_checkpoint(store, 401, {"x": b"x"}).manifest_key))
    store.delete(RUN_JSON)
    report = verify(store, deep=True)
    lines = "\n".join(fault.line for fault in report.faults)
    assert "model.pt of steps 100, 200 is not what was saved" in lines
    assert "a.txt (1 B) of step 100 is missing" in lines
    assert "b.txt of step 100 has 1 bytes and should have 2" in lines
    assert f"{third.manifest_key} is damaged" in lines
    assert "is the manifest of" in lines
    assert f"{RUN_JSON}: the run's record is missing" in lines
    assert len(report.faults) == 6
    note = only(tuple(finding for finding in report.findings if finding.weight == "note"))
    assert "step 500 was never committed" in note.line
    assert "model.pt" not in "\n".join(fault.line for fault in verify(store).faults)


def test_a_commit_whose_manifest_has_vanished_is_a_fault() -> None:
    store = MemoryStore(f"memory://verification-{next(_numbers)}/run")
    with Run(store) as run:
        for step in (1, 2):
            with run.checkpoint(step=step) as directory:
                (directory / "model.pt").write_bytes(b"weights")
        run.drain()
        newest = run.checkpoints()[0].name
    store.delete(newest.manifest_key)
    for deep in (False, True):
        assert "step 2: it was committed, and" in only(verify(store, deep=deep).faults).line


def test_what_is_left_of_a_step_that_policy_dropped_is_not_on_its_way() -> None:
    url = f"memory://verification-{next(_numbers)}/run"
    store = MemoryStore(url)
    make_checkpoint(store, 100, {"x": b"x"})
    name = make_checkpoint(store, 200, {"x": b"x"}, commit=False)
    make_checkpoint(store, 300, {"x": b"x"}, commit=False)
    store.put(name.superseded_key, SupersededRecord(200, "newer saves were waiting", ()).to_bytes())
    notes = [finding.line for finding in verify(store).findings if finding.weight == "note"]
    assert ["step 300 was never committed" in line for line in notes] == [True]
    told = info(url)
    assert isinstance(told, RunInfo)
    assert [one.step for one in told.unfinished] == [300]
    assert [entry.note for entry in ls(url) if entry.kind == "checkpoint"][1:] == [
        "dropped by policy, with files that are not removed yet",
        "not committed",
    ]


def test_one_checkpoint_can_be_verified_alone() -> None:
    url = f"memory://verification-{next(_numbers)}/run"
    store = MemoryStore(url)
    make_run(store)
    first = make_checkpoint(store, 100, {"x": b"x"})
    make_checkpoint(store, 200, {"x": b"x"})
    store.delete(first.file_key("x"))
    assert verify(f"{url}@200").ok
    assert verify(f"{url}@latest").kind == "checkpoint"
    report = verify(f"{url}@100")
    assert not report.ok
    assert report.url == f"{url}@100"
    with pytest.raises(CheckpointError, match=r"step 300.*100, 200"):
        verify(f"{url}@300")


def test_nothing_there_is_an_error_and_never_whole(store: MemoryStore) -> None:
    store.put("other.txt", b"x")
    with pytest.raises(ManifestError, match=r"neither a data set nor a run.*stagekit ls"):
        verify(store)
    store.put("index.json", b'{"chunks": []}')  # another package's
    with pytest.raises(ManifestError, match=r"neither a data set nor a run.*stagekit ls"):
        verify(store)
    entry = {"raw_data": {"basename": "shard.00000.mds", "bytes": 9}, "samples": 1}
    store.put("index.json", json.dumps({"version": 2, "shards": [entry]}).encode())
    with pytest.raises(ManifestError, match=r"it holds MosaicML's format, .* --format mds that made it, given again, compares every file"):
        verify(store)


@pytest.mark.parametrize(
    ("operation", "key"), [("head", "*"), ("get", MANIFEST), ("get", "*.idx"), ("get", "*.tar"), ("head", "*.tar"), ("list", "*")]
)
@pytest.mark.parametrize("error", [Denied("may not"), Unreachable("no answer"), BucketNotFound("no bucket")])
def test_what_cannot_be_seen_is_raised_and_never_reported_as_whole_or_missing(
    store: MemoryStore, operation: str, key: str, error: Exception
) -> None:
    make_dataset(store)
    faulty = FaultStore(store)
    faulty.fail(operation, error, key, times=None)  # type: ignore[arg-type]  # one of its operations
    with pytest.raises(type(error)):
        verify(faulty, deep=True)


def test_a_store_that_may_not_list_unfinished_uploads_leaves_a_note(store: MemoryStore) -> None:
    make_dataset(store)
    faulty = FaultStore(store)
    faulty.fail("open_uploads", Denied("may not"))
    report = verify(faulty)
    assert report.ok
    assert "may not list unfinished uploads" in only(report.findings).line


def test_the_loader_and_verify_agree_about_a_damaged_block(store: MemoryStore) -> None:
    from stagekit.dataset import Dataset

    manifest = make_dataset(store)
    flip(store, manifest.shards[1].name, 700)
    fault = only(verify(store, deep=True).findings)
    with pytest.raises(CorruptShard, match=str(fault.found)):
        list(Dataset(store))


class _Interrupted(Exception):
    pass


class _Counting(WrappedStore):
    """Counts ranged reads of tars by key; ``stop_at`` ends the look in the middle, as Ctrl-C would."""

    def __init__(self, inner: Store, stop_at: str = "") -> None:
        super().__init__(inner)
        self.read: Counter[str] = Counter()
        self.stop_at = stop_at

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        if key == self.stop_at:
            raise _Interrupted
        if key.endswith(".tar"):
            self.read[key] += 1
        return self.inner.get(key, start, length, if_match=if_match)


def test_an_interrupted_deep_look_goes_on_and_a_finished_one_starts_afresh(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "data")
    names = [record.name for record in make_dataset(store).shards]
    with pytest.raises(_Interrupted):
        verify(_Counting(store, names[2]), deep=True, threads=1)
    # The second shard was replaced meanwhile, by one with a flipped bit: its etag is another one.
    flip(store, names[1], 700)
    counting = _Counting(store)
    report = verify(counting, deep=True, threads=1)
    assert names[0] not in counting.read
    assert counting.read[names[1]]
    assert counting.read[names[2]]
    assert only(report.faults).shard == names[1]
    assert report.read_before == 1
    assert "1 of the shards by an interrupted look before" in report.line
    assert report.bytes == sum(record.bytes for record in Dataset(store).shards)
    counting = _Counting(store)
    assert verify(counting, deep=True).read_before == 0
    assert set(counting.read) == set(names)


def test_afresh_reads_everything(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "data")
    names = [record.name for record in make_dataset(store).shards]
    with pytest.raises(_Interrupted):
        verify(_Counting(store, names[2]), deep=True, threads=1)
    counting = _Counting(store)
    assert verify(counting, deep=True, afresh=True).read_before == 0
    assert set(counting.read) == set(names)


def test_what_was_read_counts_for_a_day_and_survives_a_cut_line(tmp_path: Path) -> None:
    info = ObjectInfo("shards/000000.tar", 3, "etag")
    now_s = 1000.0
    first = Looked(tmp_path, "s3://b/a", "digest", clock=lambda: now_s)
    first.add(info)
    first.add(ObjectInfo("shards/000001.tar", 3, None))
    (path,) = (tmp_path / "verify").iterdir()
    path.write_text(path.read_text() + '["shards/0000')
    assert Looked(tmp_path, "s3://b/a", "digest", clock=lambda: now_s + 3600).has(info)
    assert not Looked(tmp_path, "s3://b/a", "digest", clock=lambda: now_s + 25 * 3600).has(info)
    assert not Looked(tmp_path, "s3://b/a", "other", clock=lambda: now_s).has(info)
    assert not Looked(tmp_path, "s3://b/a", "digest", clock=lambda: now_s).has(ObjectInfo(info.key, 3, "another"))
    first.finish()
    assert not Looked(tmp_path, "s3://b/a", "digest", clock=lambda: now_s).has(info)


def test_the_very_samples_that_are_damaged_are_named(store: MemoryStore) -> None:
    manifest = make_dataset(store)
    name = manifest.shards[0].name
    block = BlockTable.from_bytes(store.get(blocks_name(name)), source="test").blocks[1]
    store.put(samples_name(name), scan([store.get(name)], source="test").built.sample_digests)
    third = block.size // 3
    flip(store, name, block.offset + third + 512)  # the first byte of the second sample's payload
    fault = only(verify(store, deep=True).faults)
    assert fault.detail.startswith("block 1 at offset")
    assert "samples 3 to 5 of the shard, 000003 to 000005), of which damaged: 4 (000004): expected xxh3-128" in fault.detail
    assert (fault.samples, fault.record["samples"]) == ((4,), (4,))
    flip(store, name, block.offset + 2 * third + 10)  # in the third one's header
    fault = only(verify(store, deep=True).faults)
    assert "of which damaged: 4 (000004), 5 (its header too)" in fault.detail
    assert fault.samples == (4, 5)
    store.put(samples_name(name), b"damaged")
    assert only(verify(store, deep=True).faults).samples is None
    store.delete(samples_name(name))  # as in a data set that an older release made
    assert verify(store).findings == ()
    assert "of which damaged" not in only(verify(store, deep=True).faults).detail


def test_the_samples_of_a_damaged_block_are_named(store: MemoryStore) -> None:
    manifest = make_dataset(store)
    name = manifest.shards[0].name
    table = BlockTable.from_bytes(store.get(blocks_name(name)), source="test")
    flip(store, name, table.blocks[1].offset + 600)
    assert "samples 3 to 5 of the shard, 000003 to 000005" in only(verify(store, deep=True).faults).detail
    flip(store, name, table.blocks[1].offset + 600)
    flip(store, name, table.blocks[1].offset + (table.blocks[1].size // 3) + 10)  # in the second sample's header
    assert "samples 3 to 5 of the shard, unreadable behind 000003" in only(verify(store, deep=True).faults).detail


def test_the_logs_of_a_run_are_looked_at_as_well(store: MemoryStore, tmp_path: Path) -> None:
    make_run(store)
    make_checkpoint(store, 1, {"model.bin": b"weights"})
    now, log = [0.0], tmp_path / "stdout.log"
    logs = Logs(lambda: store, "000001-0123abcd", lambda event: None, lambda: now[0])
    for text in ("epoch 1\n", "epoch 1\nepoch 2\n"):
        log.write_text(text)
        logs.offer({"stdout.log": log})
        assert logs.bring(last=True)
    keys = sorted(info.key for info in store.list("logs/") if "stdout" in info.key)
    assert len(keys) == 2
    assert verify(store).findings == verify(store, deep=True).findings == ()

    part = bytes(store.get(keys[1]))
    flip(store, keys[1], 0)
    assert verify(store).ok
    found = only(verify(store, deep=True).findings)
    assert (found.weight, found.what) == ("fault", "bytes")
    assert "the log stdout.log is not what was sent" in found.detail
    store.put(keys[1], part[:-1])
    assert "a part of the log stdout.log has 7 bytes and should have 8" in only(verify(store).findings).detail
    store.delete(keys[1])
    for deep in (False, True):
        missing = only(verify(store, deep=deep).findings)
        assert (missing.what, missing.subject) == ("missing", str(store.location / keys[1]))
