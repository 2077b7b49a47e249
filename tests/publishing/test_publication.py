"""``stagekit.publishing.shard`` and ``publish`` on directories and memory: results, reruns, refusals."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from stagekit.config import StoreConfig
from stagekit.dataset import Dataset
from stagekit.errors import (
    BadDigest,
    Conflict,
    KeyNotAllowed,
    ManifestError,
    OutOfSpace,
    PublishError,
    SourceError,
    StagekitError,
    Unreachable,
    UsageError,
)
from stagekit.location import Location
from stagekit.pace import Pace
from stagekit.progress import Event, Message, Progress, Stage
from stagekit.publishing import Publication, outline, publish, shard, source_of
from stagekit.publishing.claim import Claim, read_claim
from stagekit.shards.plan import PlannedField, PlannedSample
from stagekit.sources.base import Listing, Payload
from stagekit.sources.files import FileRules
from stagekit.sources.folder import FolderSource
from stagekit.store import open_store
from stagekit.store.base import Data, ObjectInfo, Store, WrappedStore
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore

from .conftest import make_raw, read_by_webdataset, tree

SHARD = "160KiB"


def run(raw: Path, dest: Any, **options: Any) -> Publication:
    folder = {name: options.pop(name) for name in ("labels", "dots", "include", "exclude") if name in options}
    on_bad = options.get("on_bad", "raise")
    return publish(source_of(raw, on_bad=on_bad, **folder), dest, **{"shard_size": SHARD, **options})


def memory(tmp_path: Path, name: str) -> MemoryStore:
    """A place in memory that is this test's own; the same one each time."""
    return MemoryStore(f"memory://{tmp_path.name}/{name}")


def keys_sent(store: FaultStore) -> list[str]:
    return [call.key for call in store.calls if call.operation in ("put", "multipart") and not call.key.startswith(".")]


# ---------------------------------------------------------------------------------------------------------------------- the result


def test_the_data_set_has_every_sample_with_its_bytes(raw: Path, tmp_path: Path) -> None:
    dataset = shard(raw, tmp_path / "out", shard_size=SHARD, labels="dir", workers=1)
    samples = list(dataset)
    assert [sample["__key__"] for sample in samples] == sorted(f"class{n % 3}/{n:04d}" for n in range(60))
    for sample in samples:
        assert sample["png"] == (raw / f"{sample['__key__']}.png").read_bytes()
        assert sample["json"] == (raw / f"{sample['__key__']}.json").read_bytes()
        assert sample["cls"] == sample["__key__"][5].encode()
    assert len(dataset) == 60
    assert dataset.fields["cls"] == (60, 60)
    assert len(dataset.shards) == 5
    assert all(record.bytes <= 160 * 1024 for record in dataset.shards)


def test_every_promised_object_is_there_and_nothing_else(raw: Path, tmp_path: Path) -> None:
    done = run(raw, tmp_path / "out", labels="dir")
    names = [record.name for record in done.manifest.shards]
    expected = [*names, *(f"{name}.idx" for name in names), *(f"{name[:-4]}.{end}" for name in names for end in ("blocks", "samples"))]
    assert sorted(tree(tmp_path / "out")) == sorted([*expected, "classes.json", "manifest.json", "wids.json"])
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["class0", "class1", "class2"]


def test_webdataset_reads_the_shards_unchanged(raw: Path, tmp_path: Path) -> None:
    done = run(raw, tmp_path / "out", labels="dir")
    theirs = read_by_webdataset([str(tmp_path / "out" / record.name) for record in done.manifest.shards])
    assert theirs == list(Dataset(tmp_path / "out"))
    assert len(theirs) == 60
    assert theirs[1]["png"] == (raw / f"{theirs[1]['__key__']}.png").read_bytes()


@pytest.mark.parametrize("workers", [2, 3])
def test_the_bytes_do_not_depend_on_the_number_of_workers(raw: Path, tmp_path: Path, workers: int) -> None:
    run(raw, tmp_path / "one", labels="dir", workers=1)
    run(raw, tmp_path / "many", labels="dir", workers=workers)
    assert tree(tmp_path / "one") == tree(tmp_path / "many")


def test_the_plan_is_what_becomes_of_it(raw: Path, tmp_path: Path) -> None:
    plan = outline(source_of(raw), shard_size=160 * 1024).plan
    done = run(raw, tmp_path / "out")
    assert [(s.name, s.bytes, len(s.samples)) for s in plan.shards] == [(r.name, r.bytes, r.samples) for r in done.manifest.shards]
    assert [(tmp_path / "out" / s.name).stat().st_size for s in plan.shards] == [s.bytes for s in plan.shards]


def test_samples_per_shard(raw: Path, tmp_path: Path) -> None:
    done = run(raw, memory(tmp_path, "out"), samples_per_shard=25, shard_size="1GiB")
    assert [record.samples for record in done.manifest.shards] == [25, 25, 10]


def test_a_sample_above_the_shard_size_gets_its_own_shard_and_is_named(raw: Path, tmp_path: Path) -> None:
    (raw / "class0" / "huge.png").write_bytes(bytes(200_000))
    events: list[Event] = []
    done = run(raw, memory(tmp_path, "out"), on_event=events.append)
    (large,) = [record for record in done.manifest.shards if record.bytes > 160 * 1024]
    assert large.samples == 1
    assert any("larger than the shard size" in e.text and "class0/huge" in e.text for e in events if isinstance(e, Message))


def test_any_executor_will_do(raw: Path, tmp_path: Path) -> None:
    run(raw, memory(tmp_path, "one"), workers=1)
    with ThreadPoolExecutor(3) as executor:
        run(raw, memory(tmp_path, "threads"), executor=executor)
    assert tree(memory(tmp_path, "one")) == tree(memory(tmp_path, "threads"))


def test_an_executor_that_breaks_is_one_sentence(raw: Path, tmp_path: Path) -> None:
    class Broken(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool("a child was killed"))
            return future

    with pytest.raises(StagekitError, match=r"the executor that ran the shards broke.*Run the same command again"):
        run(raw, memory(tmp_path, "out"), executor=Broken())


def test_progress_sums_up_to_the_plan_and_stages_follow_the_promised_order(raw: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    done = run(raw, tmp_path / "out", workers=2, on_event=events.append)
    progress = [event for event in events if isinstance(event, Progress)]
    assert [event.done for event in progress if event.finished] == [done.manifest.bytes]
    assert progress[-1].total == done.manifest.bytes
    assert progress[-1].note == f"120 files, {len(done.manifest.shards)} of {len(done.manifest.shards)} shards"
    stages = [(event.name, event.subject) for event in events if isinstance(event, Stage)]
    assert stages[0][0] == "claimed"
    for record in done.manifest.shards:
        assert stages.index(("tar", record.name)) < stages.index(("index", record.name)) < stages.index(("shard", record.name))
    assert [name for name, _ in stages[-2:]] == ["confirmed", "published"]


def test_large_overhead_is_reported_with_the_remedy(tmp_path: Path) -> None:
    make_raw(tmp_path / "raw", largest=200)
    events: list[Event] = []
    run(tmp_path / "raw", memory(tmp_path, "out"), on_event=events.append)
    (note,) = [event.text for event in events if isinstance(event, Message)]
    assert "tar headers and padding add" in note
    assert "put the small fields of a sample into one" in note


def test_keys_that_are_easily_mixed_up_are_reported(raw: Path) -> None:
    for name in ("Straße.txt", "STRASSE.txt", "e\u0301.txt", "\u00e9.txt"):
        (raw / name).write_bytes(b"x")
    (note,) = [note for note in outline(source_of(raw), shard_size=2**20).notes if "normalisation" in note]
    assert r"'e\u0301'; '\xe9'" in note
    assert "2 groups" in note


def test_a_store_that_is_open_already(raw: Path) -> None:
    store = MemoryStore("memory://open/x")
    done = run(raw, store, workers=3)  # memory cannot be reached from other processes: the workers are this one
    assert len(Dataset(store)) == 60
    assert done.sent == len(done.manifest.shards)


def test_the_lines_of_the_summary_stream_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "raw").mkdir()
    for number in range(70):
        (tmp_path / "raw" / f"{number:02d}.txt").write_text(f"text {number}")
    done = run(tmp_path / "raw", tmp_path / "out")
    exec("\n".join(done.code), {})
    printed = capsys.readouterr().out
    assert printed.count("text ") == 64  # one whole batch
    assert "70 samples in 1 shard, " in "\n".join(done.lines)


def test_the_lines_name_the_endpoint_that_was_used(raw: Path) -> None:
    store = MemoryStore("memory://lines/x")
    config = StoreConfig(endpoint_url="https://eu2.example.com", profile="contabo")
    code = run(raw, store, store=config).code
    assert "store=stagekit.StoreConfig(endpoint_url='https://eu2.example.com', profile='contabo')" in code[1]


# --------------------------------------------------------------------------------------------------------------------------- reruns


def test_a_rerun_of_a_finished_data_set_sends_nothing_and_says_so(raw: Path) -> None:
    store = FaultStore(MemoryStore("memory://rerun/x"))
    first = run(raw, store)
    store.calls.clear()
    again = run(raw, store)
    assert {call.operation for call in store.calls} <= {"list", "get", "head"}
    assert again.unchanged
    assert again.lines[0] == "nothing to do: memory://rerun/x holds this data set already"
    assert again.manifest == first.manifest
    assert (again.sent, again.kept, again.sent_bytes) == (0, len(first.manifest.shards), 0)


@pytest.mark.parametrize("stage", ["tar", "index", "shard", "confirmed"])
def test_after_an_error_at_any_stage_a_rerun_sends_only_what_is_missing(raw: Path, tmp_path: Path, stage: str) -> None:
    class Stop(Exception):
        pass

    seen = 0

    def stop(event: Event) -> None:
        nonlocal seen
        if isinstance(event, Stage) and event.name == stage:
            seen += 1
            if stage == "confirmed" or seen == 3:
                raise Stop

    store = FaultStore(memory(tmp_path, "out"))
    with pytest.raises(Stop):
        run(raw, store, on_event=stop, workers=1)
    assert "manifest.json" not in tree(memory(tmp_path, "out"))
    with pytest.raises(ManifestError):
        Dataset(memory(tmp_path, "out"))
    finished = [name for name in tree(memory(tmp_path, "out")) if name.endswith(".blocks")]
    store.calls.clear()
    done = run(raw, store, workers=1)
    assert done.kept == len(finished)
    assert not any(key.startswith(name.removesuffix(".blocks")) for name in finished for key in keys_sent(store))
    run(raw, memory(tmp_path, "undisturbed"), workers=1)
    assert tree(memory(tmp_path, "out")) == tree(memory(tmp_path, "undisturbed"))


def test_a_shard_whose_source_changed_before_the_rerun_is_sent_again(raw: Path, tmp_path: Path) -> None:
    store = FaultStore(memory(tmp_path, "out"))
    store.fail("put", Unreachable("no answer", transient=False), "wids.json")
    with pytest.raises(Unreachable):
        run(raw, store)
    path = raw / "class0" / "0000.png"
    path.write_bytes(bytes(reversed(path.read_bytes())))
    store.calls.clear()
    done = run(raw, store)
    assert done.sent == 1
    # The old commit goes before the new tar comes, so that a kill in between leaves no block table beside another tar.
    touched = [
        (c.operation, c.key) for c in store.calls if c.key.startswith("shards/000000") and c.operation in ("delete", "put", "multipart")
    ]
    assert touched == [
        ("delete", "shards/000000.blocks"),
        ("put", "shards/000000.tar"),
        ("put", "shards/000000.tar.idx"),
        ("put", "shards/000000.samples"),
        ("put", "shards/000000.blocks"),
    ]
    run(raw, memory(tmp_path, "undisturbed"))
    assert tree(memory(tmp_path, "out")) == tree(memory(tmp_path, "undisturbed"))


class _Md5Etags(FaultStore):
    """A store with S3's etags in front of a directory, or with opaque ones of the same look."""

    honest = True

    def head(self, key: str) -> ObjectInfo:
        import hashlib

        info = super().head(key)
        data = bytes(self.inner.get(key)) + (b"" if self.honest else b"encrypted")
        return ObjectInfo(key, info.size, hashlib.md5(data).hexdigest())

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        if if_match is not None and if_match != self.head(key).etag:
            raise Conflict(f"reading {key}: its etag is another one now")
        return super().get(key, start, length)


@pytest.mark.parametrize("honest", [True, False])
def test_a_tar_that_was_damaged_in_the_store_is_not_kept(raw: Path, tmp_path: Path, honest: bool) -> None:
    store = _Md5Etags(DirectoryStore(tmp_path / "out"))
    store.honest = honest
    store.fail("put", Unreachable("no answer", transient=False), "wids.json")
    with pytest.raises(Unreachable):
        run(raw, store)
    damaged = tmp_path / "out" / "shards" / "000002.tar"
    damaged.write_bytes(b"\1" + damaged.read_bytes()[1:])
    store.calls.clear()
    done = run(raw, store)
    assert [key for key in keys_sent(store) if key.endswith(".tar")] == ["shards/000002.tar"]
    assert done.sent == 1
    run(raw, tmp_path / "undisturbed")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize("lost", ["shards/000001.tar", "shards/000001.tar.idx", "shards/000001.blocks"])
def test_what_got_lost_from_a_published_data_set_is_sent_again(raw: Path, tmp_path: Path, lost: str) -> None:
    run(raw, tmp_path / "out")
    before = tree(tmp_path / "out")
    (tmp_path / "out" / lost).unlink()
    events: list[Event] = []
    done = run(raw, tmp_path / "out", on_event=events.append)
    assert any("missing or damaged: sent again" in event.text for event in events if isinstance(event, Message))
    assert done.sent == 1
    assert tree(tmp_path / "out") == before


def test_a_changed_source_is_refused_and_nothing_is_changed(raw: Path, tmp_path: Path) -> None:
    run(raw, memory(tmp_path, "out"))
    before = tree(memory(tmp_path, "out"))
    path = raw / "class0" / "0000.png"
    path.write_bytes(bytes(reversed(path.read_bytes())))
    with pytest.raises(
        PublishError, match=r"holds another data set \(60 samples.*1 shard would be another one.*Choose another destination"
    ):
        run(raw, memory(tmp_path, "out"))
    (raw / "class0" / "new.png").write_bytes(b"x")
    with pytest.raises(PublishError, match="its shards are cut differently or hold other samples"):
        run(raw, memory(tmp_path, "out"))
    assert tree(memory(tmp_path, "out")) == before


def test_other_options_are_another_data_set(raw: Path, tmp_path: Path) -> None:
    run(raw, memory(tmp_path, "out"))
    with pytest.raises(PublishError, match="holds another data set"):
        run(raw, memory(tmp_path, "out"), shard_size="32KiB")


# -------------------------------------------------------------------------------------------------------------- claims and destinations


def claim_of(plan: str, **changes: Any) -> bytes:
    return json.dumps(json.loads(Claim.mine(plan).to_bytes()) | changes).encode()


def interrupted(raw: Path, store: Store) -> None:
    """Leave what a run leaves that ended before its manifest."""
    faulty = FaultStore(store)
    faulty.fail("put", Unreachable("no answer", transient=False), "wids.json")
    with pytest.raises(Unreachable):
        run(raw, faulty, workers=1)


def test_the_claim_is_there_while_the_run_writes_and_goes_with_the_manifest(raw: Path) -> None:
    store = MemoryStore("memory://claims/a")
    claims: list[Claim | None] = []
    digest = outline(source_of(raw), shard_size=160 * 1024).plan.digest

    def watch(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "tar":
            claims.append(read_claim(store))

    run(raw, store, on_event=watch)
    assert {claim.plan for claim in claims if claim} == {digest}
    assert all(claim is not None and claim.state() == "running" for claim in claims)
    assert read_claim(store) is None


def test_an_error_leaves_a_claim_that_says_the_run_has_ended(raw: Path) -> None:
    store = MemoryStore("memory://claims/b")
    interrupted(raw, store)
    claim = read_claim(store)
    assert claim is not None
    assert claim.state() == "dead"


def test_a_claim_alone_of_a_run_that_has_ended_keeps_nobody_from_other_options(raw: Path, tmp_path: Path) -> None:
    store = memory(tmp_path, "out")
    store.put(".claim.json", claim_of("another plan", running=False))
    run(raw, store)
    run(raw, memory(tmp_path, "undisturbed"))
    assert tree(store) == tree(memory(tmp_path, "undisturbed"))


def test_another_plan_is_refused_while_its_run_is_alive_even_with_takeover(raw: Path) -> None:
    store = MemoryStore("memory://claims/c")
    store.put(".claim.json", claim_of("another plan"))
    for takeover in (False, True):
        with pytest.raises(PublishError, match=rf"process {os.getpid()} on .* is publishing other data.*wait until it has ended"):
            run(raw, store, takeover=takeover)
    assert [info.key for info in store.list()] == [".claim.json"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"running": False}, "which has ended"),
        ({"pid": 2**22 + 1}, "which has ended"),
        ({"started": "1"}, "which has ended"),
        ({"boot_id": "elsewhere"}, "which cannot be asked from here"),
        ({"pid_namespace": "pid:[1]"}, "which cannot be asked from here"),
    ],
)
def test_leftovers_of_another_plan_are_refused_until_taken_over(raw: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    store = memory(tmp_path, "out")
    interrupted(make_raw(tmp_path / "other", 90, seed=1), store)
    store.put(".claim.json", claim_of("another plan", **changes))
    before = tree(memory(tmp_path, "out"))
    with pytest.raises(PublishError, match=rf"unfinished shards of other data.*{words}.*--takeover"):
        run(raw, store)
    assert tree(memory(tmp_path, "out")) == before
    run(raw, store, takeover=True)
    run(raw, memory(tmp_path, "undisturbed"))
    assert tree(memory(tmp_path, "out")) == tree(memory(tmp_path, "undisturbed"))


@pytest.mark.parametrize("data", [b"not json", b"[]", b"{}", b'{"plan": 1}'])
def test_a_claim_that_cannot_be_read_is_nobody_s(raw: Path, data: bytes) -> None:
    store = MemoryStore(f"memory://claims/{data.hex()}")
    store.put(".claim.json", data)
    with pytest.raises(PublishError, match=r"claim cannot be read.*--takeover"):
        run(raw, store)
    assert run(raw, store, takeover=True).sent


def test_a_dead_run_of_the_same_plan_is_continued_without_asking(raw: Path, tmp_path: Path) -> None:
    store = memory(tmp_path, "out")
    interrupted(raw, store)
    digest = outline(source_of(raw), shard_size=160 * 1024).plan.digest
    store.put(".claim.json", claim_of(digest, pid=2**22 + 1))
    done = run(raw, store)
    assert done.sent == 0
    assert done.kept == len(done.manifest.shards)


def test_a_second_run_of_the_same_plan_is_harmless(raw: Path, tmp_path: Path) -> None:
    """The second one starts when the first has two shards, finishes, and the first one finds everything done."""
    store = FaultStore(memory(tmp_path, "out"))
    second: list[Publication] = []

    def begin_the_second(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "shard" and event.subject == "shards/000001.tar" and not second:
            second.append(run(raw, memory(tmp_path, "out"), workers=1))

    first = run(raw, store, workers=1, on_event=begin_the_second)
    assert second[0].kept == 2
    assert first.manifest == second[0].manifest
    run(raw, memory(tmp_path, "undisturbed"))
    assert tree(memory(tmp_path, "out")) == tree(memory(tmp_path, "undisturbed"))
    # What the second one published was not replaced, not even by the same bytes.
    assert not any(call.operation == "put" and call.key == "shards/000004.tar" for call in store.calls)


def test_two_runs_that_both_believe_they_hold_the_claim_do_not_mix(raw: Path, tmp_path: Path) -> None:
    other = make_raw(tmp_path / "other", 90, seed=1)
    store = MemoryStore("memory://claims/race")

    def lose_the_claim(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "shard" and event.subject == "shards/000001.tar":
            store.put(".claim.json", claim_of(outline(source_of(other), shard_size=160 * 1024).plan.digest))

    with pytest.raises(PublishError, match=r"has claimed this destination for other data.*nothing was published"):
        run(raw, store, on_event=lose_the_claim, workers=1)
    assert not any(info.key == "manifest.json" for info in store.list())


def test_a_shard_that_somebody_replaced_is_noticed_before_the_manifest(raw: Path) -> None:
    store = MemoryStore("memory://claims/replaced")

    def replace(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "shard" and event.subject == "shards/000003.tar":
            store.put("shards/000001.tar", bytes(len(store.get("shards/000001.tar"))))

    with pytest.raises(PublishError, match=r"shards/000001\.tar is not what was stored there.*nothing was published"):
        run(raw, store, on_event=replace, workers=1)


class _Cutting(WrappedStore):
    """A server that says yes and keeps a byte less of every tar."""

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        return self.inner.put(key, bytes(data)[:-1] if key.endswith(".tar") else data, if_absent=if_absent)


def test_a_server_that_silently_cuts_what_it_stores_is_caught(raw: Path, tmp_path: Path) -> None:
    store = memory(tmp_path, "cutting")
    with pytest.raises(BadDigest, match=r"shards/000000\.tar: \d+ bytes were sent and the store holds \d+; repeat the command"):
        run(raw, _Cutting(store))
    assert not [key for key in tree(store) if key.endswith(("manifest.json", ".blocks"))]


def test_a_shard_that_got_lost_is_noticed_before_the_manifest(raw: Path) -> None:
    store = MemoryStore("memory://claims/lost")

    def lose(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "shard" and event.subject == "shards/000003.tar":
            store.delete("shards/000001.tar.idx")

    with pytest.raises(PublishError, match=r"shards/000001\.tar\.idx is not what was stored there"):
        run(raw, store, on_event=lose, workers=1)


def test_a_listing_that_lags_behind_is_not_believed(raw: Path) -> None:
    store = FaultStore(MemoryStore("memory://claims/lag"))
    store.hide("shards/000001.*")
    assert run(raw, store, workers=1).sent


def test_a_published_data_set_cannot_be_overwritten_in_a_race(raw: Path, tmp_path: Path) -> None:
    """Another data set's manifest appears just before ours is written."""
    other = MemoryStore("memory://claims/other")
    run(make_raw(tmp_path / "other", 9, seed=1), other)
    store = MemoryStore("memory://claims/late")

    def publish_theirs(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "confirmed":
            store.put("manifest.json", other.get("manifest.json"))

    with pytest.raises(PublishError, match=r"holds another data set.*it was published while this run was writing"):
        run(raw, store, on_event=publish_theirs)
    assert store.get("manifest.json") == other.get("manifest.json")


def test_foreign_objects_are_named_and_left_alone(raw: Path) -> None:
    store = MemoryStore("memory://foreign/x")
    store.put("thesis/draft.tex", b"precious")
    with pytest.raises(PublishError, match=r"holds 'thesis/draft\.tex', which is no part of a data set.*memory://foreign/x/dataset"):
        run(raw, store, takeover=True)
    assert [info.key for info in store.list()] == ["thesis/draft.tex"]


def test_shards_that_nobody_claims_are_removed_only_on_demand(raw: Path, tmp_path: Path) -> None:
    store = memory(tmp_path, "out")
    interrupted(make_raw(tmp_path / "other", 90, seed=1), store)
    store.delete(".claim.json")
    with pytest.raises(PublishError, match=r"shards without a manifest.*--takeover"):
        run(raw, store)
    run(raw, store, takeover=True)
    run(raw, memory(tmp_path, "undisturbed"))
    assert tree(memory(tmp_path, "out")) == tree(memory(tmp_path, "undisturbed"))


@pytest.mark.parametrize(
    ("source", "dest", "words"),
    [
        ("raw", "raw/out", "the destination lies inside the source"),
        ("raw/class0", "raw", "the source lies inside the destination"),
        ("raw", "raw", "are the same place"),
        ("link", "raw/out", "the destination lies inside the source"),
    ],
)
def test_source_and_destination_inside_each_other(raw: Path, tmp_path: Path, source: str, dest: str, words: str) -> None:
    (tmp_path / "link").symlink_to(raw)
    with pytest.raises(PublishError, match=words):
        run(tmp_path / source, tmp_path / dest)
    assert not (raw / "out").exists()


# ------------------------------------------------------------------------------------------------------------------------ bad input


class ChangingSource(FolderSource):
    """A folder in which files change between the listing and the reading of them."""

    def listing(self) -> Listing:
        listing = super().listing()
        for name in ("class1/0004.png", "class2/0005.png"):
            path = Path(self.path, name)
            path.write_bytes(path.read_bytes() + b"more")
        Path(self.path, "class0/0003.json").unlink()
        return listing


def test_a_file_that_changes_is_named_and_nothing_is_published(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"class0/0003\.json: it was there when the folder was listed and is gone"):
        publish(ChangingSource(str(raw)), memory(tmp_path, "out"), shard_size=SHARD, workers=1)
    assert "manifest.json" not in tree(memory(tmp_path, "out"))


def test_on_bad_skip_counts_lists_and_goes_on(raw: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    source = ChangingSource(str(raw), FileRules(on_bad="skip"))
    done = publish(source, memory(tmp_path, "out"), shard_size=SHARD, workers=1, on_bad="skip", on_event=events.append)
    assert sorted(bad.path for bad in done.bad) == ["class0/0003", "class1/0004", "class2/0005"]
    assert done.manifest.samples == 57
    keys = {sample["__key__"] for sample in Dataset(memory(tmp_path, "out"))}
    assert len(keys) == 57
    assert not keys & {"class0/0003", "class1/0004", "class2/0005"}
    assert len([event for event in events if isinstance(event, Message) and event.text.startswith("skipped class")]) == 3
    assert any(line.strip() == "skipped: 3 bad, listed above" for line in done.lines)


def test_what_the_listing_leaves_out_is_listed_too(raw: Path, tmp_path: Path) -> None:
    (raw / "README").write_text("x")
    events: list[Event] = []
    done = run(raw, memory(tmp_path, "out"), on_bad="skip", on_event=events.append)
    assert [bad.path for bad in done.bad] == ["README"]
    assert any(e.text.startswith("skipped README: no extension") for e in events if isinstance(e, Message))


class LargeThenSpoiled:
    """One large sample that fails after a part of it was passed on, between two good ones."""

    name = "a list"
    location = None
    readers = 1

    def listing(self) -> Listing:
        return Listing([PlannedSample(key, (PlannedField("bin", 3_000_000, key),)) for key in ("a", "b", "c")])

    def read(self, sample: PlannedSample) -> Payload:
        def pieces() -> Iterator[Data]:
            yield bytes(2_000_000)
            if sample.key == "b":
                raise SourceError("reading b: it shrank")
            yield bytes(1_000_000)

        return [("bin", 3_000_000, pieces())]


def test_a_sample_that_fails_in_the_middle_is_left_out_of_its_shard(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="reading b"):
        publish(LargeThenSpoiled(), memory(tmp_path, "raising"), workers=1)
    done = publish(LargeThenSpoiled(), memory(tmp_path, "out"), workers=1, on_bad="skip")
    assert [sample["__key__"] for sample in Dataset(memory(tmp_path, "out"))] == ["a", "c"]
    assert [bad.path for bad in done.bad] == ["b"]


def test_a_shard_of_which_nothing_is_left_is_not_there(tmp_path: Path) -> None:
    done = publish(LargeThenSpoiled(), memory(tmp_path, "out"), workers=1, on_bad="skip", samples_per_shard=1)
    assert [record.name for record in done.manifest.shards] == ["shards/000000.tar", "shards/000002.tar"]
    assert [sample["__key__"] for sample in Dataset(memory(tmp_path, "out"))] == ["a", "c"]
    assert "shards/000001.tar" not in tree(memory(tmp_path, "out"))
    again = publish(LargeThenSpoiled(), memory(tmp_path, "out"), workers=1, on_bad="skip", samples_per_shard=1)
    assert again.unchanged


class AllSpoiled(LargeThenSpoiled):
    def read(self, sample: PlannedSample) -> Payload:
        raise SourceError(f"reading {sample.key}: permission denied")


def test_a_source_of_which_nothing_can_be_read_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="reading a list: not one sample could be read; nothing was published"):
        publish(AllSpoiled(), memory(tmp_path, "out"), workers=1, on_bad="skip")
    assert "manifest.json" not in tree(memory(tmp_path, "out"))


def test_a_file_beyond_ustar_is_refused_before_a_byte_is_written(raw: Path, tmp_path: Path) -> None:
    with (raw / "class0" / "huge.bin").open("wb") as file:
        file.truncate(8 * 2**30)  # sparse
    with pytest.raises(KeyNotAllowed, match=r"class0/huge\.bin.*8 GiB"):
        run(raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_sentence_and_a_rerun_completes(raw: Path, tmp_path: Path) -> None:
    store = FaultStore(memory(tmp_path, "out"))
    store.fail("put", OutOfSpace(f"writing {tmp_path}/out/shards/000002.tar: no space left on the disk; free some and run again"), "*2.tar")
    with pytest.raises(OutOfSpace, match="no space left"):
        run(raw, store, workers=1)
    assert "manifest.json" not in tree(memory(tmp_path, "out"))
    run(raw, store, workers=1)
    run(raw, memory(tmp_path, "undisturbed"))
    assert tree(memory(tmp_path, "out")) == tree(memory(tmp_path, "undisturbed"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers: 0 is below 1"),
        ({"shard_size": "many"}, "shard_size: 'many' is not a size"),
        ({"shard_size": 0}, "shard_size: 0 bytes"),
        ({"samples_per_shard": 0}, "samples_per_shard: 0"),
        ({"limit_rate": "0"}, "limit_rate: '0' is not above 0"),
        ({"workers": 2, "executor": ThreadPoolExecutor(1)}, "workers and executor: give one"),
        ({"limit_rate": "1MB/s", "executor": ThreadPoolExecutor(1)}, "limit_rate and executor"),
    ],
)
def test_options_that_cannot_be_meant(raw: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(raw, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_folder_options_are_refused_for_other_sources(raw: Path) -> None:
    with pytest.raises(
        UsageError, match="source_format, key, file_columns and text_field are for paths and URLs; give them to the source itself"
    ):
        source_of(LargeThenSpoiled(), labels="dir")
    with pytest.raises(UsageError, match="labels: 'file'"):
        source_of(raw, labels="file")  # type: ignore[arg-type]  # the mistake that is tested


def test_a_worker_s_error_arrives_as_it_was(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"class1/0001\.png: it shrank from"):
        publish(_Shrinking(str(raw)), tmp_path / "out", shard_size=SHARD, workers=2)
    assert "manifest.json" not in tree(tmp_path / "out")


class _Shrinking(FolderSource):
    def listing(self) -> Listing:
        listing = super().listing()
        Path(self.path, "class1/0001.png").write_bytes(b"")
        return listing


def test_limit_rate_bounds_what_all_workers_send(tmp_path: Path) -> None:
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(f'{{"n": {number}}}\n' for number in range(700)))
    plan = outline(source_of(table), shard_size=64 * 1024).plan
    assert len(plan.shards) > 10
    began_s = time.monotonic()
    publish(source_of(table), tmp_path / "out", shard_size="64KiB", workers=2, limit_rate=plan.bytes / 2)
    assert time.monotonic() - began_s > 2


def test_a_pace_lets_no_burst_through() -> None:
    now = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    pace = Pace(1000, clock=lambda: now, sleep=sleep)
    for _ in range(10):
        pace.wait(500)
    assert now == pytest.approx(4.5)  # the last 500 bytes may still be on their way
    now += 100
    pace.wait(1000)
    pace.wait(1)
    assert slept[-1] == pytest.approx(1.0)  # a pause was not saved up


def test_two_places_on_disk_are_the_same_data_set(raw: Path, tmp_path: Path) -> None:
    first = run(raw, tmp_path / "a")
    shutil.move(raw, tmp_path / "elsewhere")
    second = run(tmp_path / "elsewhere", tmp_path / "b")
    assert first.manifest.digest == second.manifest.digest
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_location_names(raw: Path, tmp_path: Path) -> None:
    done = run(raw, Location.parse(tmp_path / "out"))
    assert done.record["url"] == str(tmp_path / "out")
    assert isinstance(open_store(tmp_path / "out"), DirectoryStore)


@pytest.mark.parametrize("kind", ["directory", "URL"])
def test_a_data_set_is_no_raw_data(raw: Path, tmp_path: Path, kind: str) -> None:
    dest = str(tmp_path / "digits") if kind == "directory" else f"memory://{tmp_path.name}/digits"
    run(raw, dest)
    with pytest.raises(
        UsageError, match=rf"packing {dest}: it is a published data set already; stagekit pull {dest} DIRECTORY copies it.*swapped"
    ):
        source_of(dest)
    assert publish(source_of(dest, source_format="files"), f"memory://{tmp_path.name}/other", shard_size="10MiB").manifest.samples > 0


@pytest.mark.parametrize("content", [b"{}", b"not JSON", b'{"format": "other"}'])
def test_a_manifest_of_another_kind_is_raw_data(raw: Path, content: bytes) -> None:
    (raw / "manifest.json").write_bytes(content)
    assert source_of(raw).listing().samples
