"""Listing and describing what is in the bucket."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
from pathlib import Path

import pytest

from stagekit.cli.info import again
from stagekit.errors import BucketNotFound, CheckpointError, Denied, ManifestError, UploadFailed
from stagekit.progress import ignore
from stagekit.report import CheckpointInfo, DatasetInfo, Entry, RunInfo, info, ls
from stagekit.runs import Run
from stagekit.runs.layout import RUN_JSON
from stagekit.runs.sync import SyncSettings
from stagekit.shards.manifest import MANIFEST
from stagekit.store.base import WrappedStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from .made import make_checkpoint, make_dataset, make_run

_numbers = itertools.count()


@pytest.fixture
def url() -> str:
    return f"memory://report-{next(_numbers)}/top"


def test_a_prefix_shows_data_sets_runs_folders_and_objects(url: str) -> None:
    manifest = make_dataset(MemoryStore(f"{url}/digits"))
    make_run(MemoryStore(f"{url}/run"))
    first = make_checkpoint(MemoryStore(f"{url}/run"), 100, {"m": b"m" * 100, "r": b"r"})
    make_checkpoint(MemoryStore(f"{url}/run"), 1200, {"m": b"m" * 100, "r": b"s"}, shared={"m": first.file_key("m")})
    MemoryStore(url).put("notes.txt", b"hello")
    MemoryStore(url).put("raw/a.png", b"x")
    assert ls(url) == [
        Entry("dataset", f"{url}/digits", manifest.bytes, 24, "24 samples, 3 shards"),
        Entry("folder", f"{url}/raw"),
        Entry("run", f"{url}/run", 102, 2, "2 checkpoints, newest step 1,200"),
        Entry("object", f"{url}/notes.txt", 5),
    ]


def test_a_run_shows_its_checkpoints_from_oldest_to_newest_and_what_is_wrong(url: str) -> None:
    store = MemoryStore(url)
    make_run(store)
    make_checkpoint(store, 100, {"m": b"m"}, epoch=1, metrics={"loss": 0.5, "accuracy": 0.9})
    make_checkpoint(store, 50, {"m": b"m"}, generation=2, counter=1)
    damaged = make_checkpoint(store, 200, {"m": b"m"})
    store.put(damaged.manifest_key, b"{")
    make_checkpoint(store, 300, {"m": b"m"}, commit=False)
    entries = ls(url)
    assert [entry.kind for entry in entries] == ["run"] + ["checkpoint"] * 4
    assert entries[0].note == "2 checkpoints, newest step 50, 1 damaged"
    assert [entry.url.rpartition("@")[2] for entry in entries[1:]] == ["100", "200", "300", "50"]
    assert entries[1].note == "1 file, epoch 1, accuracy 0.9, loss 0.5"
    assert entries[2].note.startswith("damaged: ")
    assert entries[3].note == "not committed"


def test_a_damaged_manifest_is_an_entry_that_says_so(url: str) -> None:
    make_dataset(MemoryStore(f"{url}/digits"))
    MemoryStore(f"{url}/digits").put(MANIFEST, b"{}")
    (entry,) = ls(url)
    assert entry.kind == "dataset"
    assert "damaged: " in entry.note
    assert ls(f"{url}/digits") == [entry]


def test_an_empty_place_is_empty_and_one_that_cannot_be_seen_is_an_error(url: str) -> None:
    assert ls(url) == []
    for error in (Denied("may not"), BucketNotFound("no such bucket")):
        faulty = FaultStore(MemoryStore(url))
        faulty.fail("children", error)
        with pytest.raises(type(error)):
            ls(faulty)


def test_a_run_in_a_folder_is_read_through_the_store_that_was_given(url: str) -> None:
    make_run(MemoryStore(f"{url}/run"))
    name = make_checkpoint(MemoryStore(f"{url}/run"), 100, {"m": b"m"})
    faulty = FaultStore(MemoryStore(url))
    assert ls(faulty)[0].count == 1
    assert f"run/{name.manifest_key}" in [call.key for call in faulty.calls if call.operation == "get"]


def test_a_data_set_is_described_with_its_first_samples(url: str) -> None:
    manifest = make_dataset(MemoryStore(url))
    found = info(url, peek=2)
    assert isinstance(found, DatasetInfo)
    assert (found.digest, found.samples, found.bytes, found.shards) == (manifest.digest, 24, manifest.bytes, 3)
    assert [sample["__key__"] for sample in found.peek] == ["000000", "000001"]
    text = "\n".join(found.lines)
    for words in (
        "24",
        manifest.digest,
        "3 shards",
        "txt             24  2.40 kB     100 B",
        "1.02 kB to 2.05 kB",
        "000001: txt '1'… (100 B)",
    ):
        assert words in text
    assert json.loads(json.dumps(found.record))["kind"] == "dataset"
    assert info(url).peek == ()  # type: ignore[union-attr]  # a DatasetInfo again


def test_a_field_that_some_samples_lack_and_the_sizes_of_samples(url: str) -> None:
    from .stream.build import build

    build(MemoryStore(url), [(f"{number}", {"txt": b"x" * 3000, **({"cls": b"7"} if number % 2 else {})}) for number in range(9)])
    found = info(url)
    assert isinstance(found, DatasetInfo)
    at = found.lines.index("field      samples     size  a sample  missing in")
    assert found.lines[at:] == [
        "field      samples     size  a sample  missing in",
        "cls              4      4 B       1 B           5",
        "txt              9  27.0 kB   3.00 kB",
        "sizes      of samples in the tar, headers included",
        "           2.05 kB to 4.10 kB  5  ██████████████████████████████",
        "           4.10 kB to 8.19 kB  4  ████████████████████████",
    ]


def test_a_side_file_that_is_missing_has_no_size_to_tell(url: str) -> None:
    make_dataset(MemoryStore(url))
    MemoryStore(url).delete("shards/000001.tar.idx")
    found = info(url)
    assert isinstance(found, DatasetInfo)
    assert sum(bucket.count for bucket in found.sizes) == 14


def test_peeking_shows_bytes_by_their_size_only(url: str) -> None:
    from .stream.build import build

    build(MemoryStore(url), [("a", {"png": b"\x89PNG\r\n\x1a\n" + bytes(50), "cls": b"7"})])
    found = info(url, peek=5)
    assert isinstance(found, DatasetInfo)
    assert found.peek == ({"__key__": "a", "cls": "'7' (1 B)", "png": "(58 B)"},)


def test_a_run_is_described_and_its_pickles_are_named(url: str) -> None:
    store = MemoryStore(url)
    make_run(store)
    first = make_checkpoint(store, 100, {"model.safetensors": b"m" * 100, "optimizer.pt": b"o"}, epoch=1, metrics={"loss": math.nan})
    files = {"model.safetensors": b"m" * 100, "optimizer.pt": b"p"}
    make_checkpoint(store, 200, files, shared={"model.safetensors": first.file_key("model.safetensors")}, epoch=2)
    make_checkpoint(store, 300, {"x": b"x"}, commit=False)
    found = info(url)
    assert isinstance(found, RunInfo)
    assert (found.bytes, [one.step for one in found.unfinished], found.created_s) == (102, [300], 1_700_000_000.0)
    text = "\n".join(found.lines)
    for words in (
        "2 checkpoints",
        "newest     step 200, epoch 2",
        "@100: 101 B, 2 files, loss nan",
        "unfinished step 300 (generation 1): no commit, so it is on its way or its writer died",
        "pickles    optimizer.pt",
    ):
        assert words in text
    record = json.loads(json.dumps(found.record, allow_nan=False))
    assert record["checkpoints"][0]["metrics"] == {"loss": "nan"}


def test_a_run_tells_when_its_newest_checkpoint_arrived_and_how_fast(tmp_path: Path) -> None:
    with Run(tmp_path / "run", spool_dir=tmp_path / "spool", clock=lambda: 1_000.0, on_event=ignore) as run:
        with run.checkpoint(step=7) as directory:
            (directory / "model.pt").write_bytes(bytes(8_000_000))
    (manifest,) = (tmp_path / "run" / "checkpoints").glob("*/manifest.json")
    os.utime(manifest, (1_004.0, 1_004.0))
    found = info(tmp_path / "run", clock=lambda: 1_304.0)
    assert isinstance(found, RunInfo)
    assert "arrived    verified 5 min ago, 4.0 s after it was saved, 2.00 MB/s" in found.lines
    assert found.record["arrival"] == {"age_s": 300.0, "lag_s": 4.0, "bytes": 8_000_000}


def test_looking_again_and_again_ends_with_ctrl_c() -> None:
    shown: list[int] = []

    def sleep(seconds: float) -> None:
        assert seconds > 0
        if len(shown) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(lambda: shown.append(len(shown)), sleep)
    assert shown == [0, 1, 2]


def test_a_run_tells_what_this_machine_holds_and_which_ranks_are_late(url: str, tmp_path: Path) -> None:
    store = MemoryStore(url)
    settings = SyncSettings(parts_timeout_s=0.05, sleep=lambda _: None)
    ranks = [Run(url, rank=rank, world_size=3, spool_dir=tmp_path / f"{rank}", settings=settings, on_event=ignore) for rank in range(3)]
    session = ranks[0].session()
    ranks[1].join(session)
    for rank in (1, 0):
        with ranks[rank].checkpoint(step=7) as directory:
            (directory / f"rng-{rank}.pt").write_bytes(b"x")
        if rank:
            ranks[1].drain()
    with pytest.raises(UploadFailed):
        ranks[0].drain()
    found = info(url)
    assert isinstance(found, RunInfo)
    text = "\n".join(found.lines)
    assert "pending    step 7 of rank 0 of 3, 1 B, its process lives: step 7 stays uncommitted: rank 2 of 3 did not deliver" in text
    assert "unfinished step 7 (generation 1, delivered by rank 1): no commit" in text
    assert json.loads(json.dumps(found.record))["pending"][0]["step"] == 7
    with pytest.raises(UploadFailed):
        ranks[0].close()
    ranks[1].close()
    assert list(store.list("checkpoints/")), "and telling changed nothing"


def test_a_checkpoint_is_described_file_by_file(url: str) -> None:
    store = MemoryStore(url)
    make_run(store)
    first = make_checkpoint(store, 100, {"m.pt": b"m" * 100}, metrics={"loss": 1.0}, best=("loss", "min"))
    make_checkpoint(store, 200, {"m.pt": b"m" * 100, "log.txt": b"l"}, shared={"m.pt": first.file_key("m.pt")}, metrics={"loss": 2.0})
    found = info(f"{url}@latest")
    assert isinstance(found, CheckpointInfo)
    assert found.url == f"{url}@200"
    text = "\n".join(found.lines)
    assert "m.pt: 100 B (sent by an earlier checkpoint; a pickle: loading it runs code)" in text
    assert "log.txt: 1 B" in text
    best = info(f"{url}@best")
    assert isinstance(best, CheckpointInfo)
    assert best.step == 100
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        info(f"{url}@7")


def test_what_is_called_bin_is_a_pickle_by_a_trainers_name_or_by_its_beginning(url: str) -> None:
    store = MemoryStore(url)
    make_run(store)
    files = {"evil.bin": b"e", "empty.bin": b"", "raw.bin": b"\x00" * 9, "hidden.bin": pickle.dumps({}), "a/pytorch_model.bin": b"x"}
    first = make_checkpoint(store, 100, {**files, "lost.bin": b"\x00lost"})
    store.delete(first.file_key("lost.bin"))
    found = info(url)
    assert isinstance(found, RunInfo)
    assert "pickles    a/pytorch_model.bin, hidden.bin, lost.bin (loading them runs code)" in found.lines
    one = info(f"{url}@100")
    assert isinstance(one, CheckpointInfo)
    assert [file.path for file in one.files if file.pickle] == ["a/pytorch_model.bin", "hidden.bin", "lost.bin"]


def test_a_run_whose_record_is_gone_is_still_a_run(url: str) -> None:
    store = MemoryStore(url)
    make_run(store)
    make_checkpoint(store, 100, {"m.pt": b"m"})
    store.delete(RUN_JSON)
    found = info(url)
    assert isinstance(found, RunInfo)
    assert found.created_s is None


def test_neither_is_an_error_that_names_the_next_command(url: str) -> None:
    store = MemoryStore(url)
    with pytest.raises(
        ManifestError, match=f"{url}: nothing lies there, so it is neither a data set nor a run, which begins with its first"
    ):
        info(WrappedStore(store))
    store.put("notes.txt", b"n")
    with pytest.raises(ManifestError, match=f"neither a data set nor a run.*stagekit ls {url} tells what is there"):
        info(WrappedStore(store))


def test_a_price_says_what_reading_a_data_set_costs(url: str) -> None:
    manifest = make_dataset(MemoryStore(url))
    found = info(url, price_per_gb=1e6)
    assert any(line.startswith(f"price      {manifest.bytes / 1000:,.2f} for each time it is read") for line in found.lines)
    assert not any(line.startswith("price") for line in info(url).lines)
