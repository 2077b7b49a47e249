"""Tars to a data set where they lie: complete or not at all, never rewritten, read once, and read back exactly."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

import stagekit
from stagekit.copies.pull import pull
from stagekit.dataset import Dataset
from stagekit.errors import CorruptShard, DuplicateKey, ManifestError, PublishError, SourceError, Unreachable, UsageError
from stagekit.indexing import Indexed, index_shards
from stagekit.progress import Event, Message, Progress, Stage
from stagekit.publishing import shard
from stagekit.publishing.claim import CLAIM, Claim
from stagekit.report import info
from stagekit.shards.manifest import MANIFEST
from stagekit.store.base import Store
from stagekit.store.directory import DirectoryStore
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore
from stagekit.torch import StreamLoader
from stagekit.verification import verify

from ..publishing.conftest import make_raw, read_by_webdataset, tree
from .tars import FORMATS, expected, put_tars, samples, tar


@pytest.fixture(params=["memory", "directory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty place."""
    if request.param == "memory":
        return MemoryStore(f"memory://{tmp_path.name}/base")
    return DirectoryStore(tmp_path / "base")


def url(store: Store, below: str = "") -> str:
    return str(store.location / below)


def flat(made: list[list[tuple[str, bytes]]]) -> list[dict[str, Any]]:
    return [sample for files in made for sample in expected(files)]


def only_tars(store: Store) -> dict[str, bytes]:
    return {key: data for key, data in tree(store).items() if key.endswith(".tar")}


# ------------------------------------------------------------------------------------------------------------------ reading it back


@pytest.mark.parametrize("beside", [True, False])
def test_the_samples_are_those_that_were_packed(base: Store, beside: bool) -> None:
    made = put_tars(base, 4, folder="ds/")
    before = only_tars(base)
    dest = url(base, "ds" if beside else "elsewhere")
    dataset = stagekit.index(url(base, "ds/shard-{000000..000003}.tar"), dest)
    assert list(dataset) == list(Dataset(dest)) == flat(made)
    assert only_tars(base) == before
    names = [(record.name, record.url) for record in dataset.shards]
    tars = [f"shard-{number:06d}.tar" for number in range(4)]
    if beside:
        assert names == [(name, None) for name in tars]
    else:
        assert names == [(f"shards/{name}", url(base, f"ds/{name}")) for name in tars]
    assert {key for key in tree(base) if not key.endswith(".tar")} == {
        key
        for name, _ in names
        for folder in ("ds/" if beside else "elsewhere/",)
        for end in (name + ".idx", name[:-4] + ".blocks", name[:-4] + ".samples", "manifest.json", "wids.json")
        for key in (folder + end,)
    }
    assert verify(dest, deep=True).ok
    assert list(pickle.loads(pickle.dumps(dataset))) == flat(made)


def test_the_digest_does_not_depend_on_names_and_places(base: Store) -> None:
    put_tars(base, 2, folder="a/")
    put_tars(base, 2, folder="b/deeper/")
    there = stagekit.index(url(base, "a/"), url(base, "a"))
    apart = stagekit.index(url(base, "a/"), url(base, "index/a"))
    other = stagekit.index(url(base, "b/"), url(base, "index/b"))
    assert there.digest == apart.digest == other.digest
    wids = json.loads(bytes(base.get("index/b/wids.json")))
    assert [one["url"] for one in wids["shardlist"]] == [url(base, f"b/deeper/shard-{number:06d}.tar") for number in range(2)]


def test_it_reads_what_the_webdataset_package_reads(tmp_path: Path) -> None:
    """Keys, fields and bytes, of tars in every format and with everything that is no field."""
    paths = []
    for number, format in enumerate(FORMATS):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w|", format=format) as archive:
            for name, data in [
                (f"./{number}/a.b/img{number}.JPG", b"1" * 600),
                (f"./{number}/a.b/img{number}.seg.png", b"2"),
                ("README", b"no sample"),
                (f"{number}/{'long/' * 12}ü{number}.txt", b"3"),
                ("__meta__/info.json", b"{}"),
                (f"z{number}.cls", b""),
            ]:
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime, entry.uname = len(data), 12.25, "bigdata"
                archive.addfile(entry, io.BytesIO(data))
            entry = tarfile.TarInfo(f"link{number}.jpg")
            entry.type, entry.linkname = tarfile.SYMTYPE, "x.jpg"
            archive.addfile(entry)
            if format != tarfile.USTAR_FORMAT:
                entry = tarfile.TarInfo(f"{number}/{'n' * 150}.json")
                entry.size = 2
                archive.addfile(entry, io.BytesIO(b"{}"))
        path = tmp_path / f"{number}.tar"
        path.write_bytes(out.getvalue())
        paths.append(str(path))
    dataset = stagekit.index(paths, tmp_path / "index")
    assert list(dataset) == read_by_webdataset(paths)
    assert len(dataset) == 11


_WRITE = """
import sys, webdataset
with webdataset.ShardWriter(sys.argv[1], maxcount=20, verbose=0) as writer:
    for number in range(50):
        writer.write({"__key__": f"d/{number:03d}", "cls": number % 3, "json": {"n": number}, "bin": bytes(number * 40)})
"""


def test_what_the_webdataset_package_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", _WRITE, str(tmp_path / "w-%06d.tar")], check=True)
    dataset = stagekit.index(f"{tmp_path}/w-{{000000..000002}}.tar", tmp_path)
    assert [record.samples for record in dataset.shards] == [20, 20, 10]
    assert list(dataset) == read_by_webdataset([str(path) for path in sorted(tmp_path.glob("*.tar"))])
    assert [sample["json"] for sample in dataset] == [json.dumps({"n": number}).encode() for number in range(50)]


def test_loaders_shuffle_and_resume_exactly(base: Store) -> None:
    made = put_tars(base, 5, each=10, folder="ds/")
    stagekit.index(url(base, "ds/"), url(base, "index"))
    options: dict[str, Any] = {"batch_size": 4, "seed": 3, "decode": None, "drop_last": False, "window": 2}
    undisturbed = [batch["__key__"] for batch in StreamLoader(url(base, "index"), **options)]
    keys = [key for batch in undisturbed for key in batch if key]
    assert sorted(keys) == sorted(sample["__key__"] for sample in flat(made))
    assert keys != sorted(keys)
    for stop in (0, 1, 5, len(undisturbed) - 1, len(undisturbed)):
        loader = StreamLoader(url(base, "index"), **options)
        taken: list[list[str]] = []
        for batch in loader:
            if len(taken) == stop:
                break
            taken.append(batch["__key__"])
            state = loader.state_dict()
            if len(taken) == stop:
                break
        if not stop:
            continue
        resumed = StreamLoader(url(base, "index"), **options)
        resumed.load_state_dict(state)
        rest = [] if stop == len(undisturbed) else [batch["__key__"] for batch in resumed]
        assert taken + rest == undisturbed
    in_order = StreamLoader(url(base, "index"), batch_size=1, shuffle=False, decode=None)
    read = [{"__key__": batch["__key__"][0], **{name: batch[name][0] for name in batch if name[:2] != "__"}} for batch in in_order]
    assert [{name: value for name, value in sample.items() if value is not None} for sample in read] == flat(made)


def test_damage_is_reported_where_the_tar_lies(base: Store) -> None:
    put_tars(base, 1, folder="ds/")
    dataset = stagekit.index(url(base, "ds/"), url(base, "index"))
    body = bytearray(base.get("ds/shard-000000.tar"))
    body[700] ^= 1
    base.put("ds/shard-000000.tar", bytes(body))
    with pytest.raises(CorruptShard, match=r"ds/shard-000000.tar") as caught:
        list(dataset)
    assert "index/shards" not in str(caught.value)
    report = verify(url(base, "index"), deep=True)
    assert [fault.subject for fault in report.faults] == [url(base, "ds/shard-000000.tar")]
    base.delete("ds/shard-000000.tar")
    report = verify(url(base, "index"))
    assert [(fault.what, fault.subject) for fault in report.faults] == [("missing", url(base, "ds/shard-000000.tar"))]


def test_a_pulled_copy_stands_alone(base: Store, tmp_path: Path) -> None:
    made = put_tars(base, 2, folder="ds/")
    dataset = stagekit.index(url(base, "ds/"), url(base, "index"))
    pull(url(base, "index"), tmp_path / "copy")
    for key in list(tree(base)):
        base.delete(key)
    copy = Dataset(tmp_path / "copy")
    assert list(copy) == flat(made)
    assert copy.digest == dataset.digest
    assert [record.url for record in copy.shards] == [None, None]
    assert verify(tmp_path / "copy", deep=True).ok


def test_info_tells_where_the_tars_lie(base: Store) -> None:
    put_tars(base, 2, folder="ds/")
    stagekit.index(url(base, "ds/"), url(base, "index"))
    found = info(url(base, "index"), peek=1)
    assert "elsewhere  2 of 2 shards, the first at " + url(base, "ds/shard-000000.tar") in found.lines
    stagekit.index(url(base, "ds/"), url(base, "ds"))
    assert not any(line.startswith("elsewhere") for line in info(url(base, "ds")).lines)


def test_a_bucket_cannot_lead_readers_to_paths_of_their_machine(tmp_path: Path) -> None:
    class Bucket(MemoryStore):
        @property
        def location(self) -> Any:
            return stagekit.Location("s3", "bucket", "index")

    local = DirectoryStore(tmp_path)
    put_tars(local, 1, folder="ds/")
    stagekit.index(url(local, "ds/"), url(local, "index"))
    store = Bucket("memory://bucket/index")
    store.put(MANIFEST, local.get(f"index/{MANIFEST}"))
    with pytest.raises(ManifestError, match="a path on some machine; copy the tars to a bucket"):
        Dataset(store)


# ------------------------------------------------------------------------------------------------------------------ running it again


def run(store: Store, *, tars: Store | None = None, **options: Any) -> Indexed:
    return index_shards(tars or store, store, **options)


def test_every_byte_is_read_once(base: Store) -> None:
    base.put("a.tar", tar([(f"{number}.bin", bytes(2**20)) for number in range(20)]))
    base.put("b.tar", tar(samples(100, 3)))
    watched = FaultStore(base)
    run(base, tars=watched)
    for key in ("a.tar", "b.tar"):
        ranges = sorted((call.start or 0, call.length or 0) for call in watched.calls if call.operation == "get" and call.key == key)
        ends = [start + length for start, length in ranges]
        assert [start for start, _ in ranges] == [0, *ends[:-1]]
        assert ends[-1] == base.head(key).size
    assert {call.operation for call in watched.calls} == {"list", "head", "get"}


def test_a_second_run_reads_nothing(base: Store) -> None:
    put_tars(base)
    first = run(base)
    assert (first.read, first.kept, first.unchanged) == (3, 0, False)
    before = tree(base)
    watched = FaultStore(base)
    again = run(watched)
    assert again.unchanged
    assert again.manifest.digest == first.manifest.digest
    assert tree(base) == before
    assert not [call for call in watched.calls if call.operation in ("put", "multipart", "delete")]
    assert not [call for call in watched.calls if call.operation == "get" and call.key.endswith(".tar")]
    assert again.lines[0].startswith("nothing to do: ")


@pytest.mark.parametrize("store", ["memory", "directory"])
@pytest.mark.parametrize("failing", range(16))
def test_an_interrupted_run_goes_on_without_reading_a_tar_again(tmp_path: Path, store: str, failing: int) -> None:
    """Whichever write fails, nothing is published, and what was read is not read again."""
    base: Store = MemoryStore(f"memory://{tmp_path.name}") if store == "memory" else DirectoryStore(tmp_path / "base")
    put_tars(base)
    undisturbed = MemoryStore(f"memory://{tmp_path.name}-undisturbed")
    put_tars(undisturbed)
    run(undisturbed)
    broken = FaultStore(base)
    broken.fail("put", Unreachable("the cable is out"), skip=failing)
    if failing == 15:
        run(broken)  # there are no more writes than that
        assert tree(base) == tree(undisturbed)
        return
    with pytest.raises(Unreachable, match="the cable is out"):
        run(broken, threads=1)
    assert MANIFEST not in tree(base)
    journals = [key for key in tree(base) if key.endswith(".journal")]
    watched = FaultStore(base)
    again = run(watched)
    assert (again.kept, again.read) == (len(journals), 3 - len(journals))
    read = {call.key for call in watched.calls if call.operation == "get" and call.key.endswith(".tar")}
    assert not {key.removesuffix(".journal").removeprefix(".indexing/") for key in journals} & read
    assert {key: value for key, value in tree(base).items() if not _differs_by_time(key)} == tree(undisturbed)


def _differs_by_time(key: str) -> bool:
    return key.startswith(".indexing/")


def test_a_tar_that_changed_meanwhile_is_read_again(base: Store) -> None:
    put_tars(base)
    broken = FaultStore(base)
    broken.fail("put", Unreachable("the cable is out"), MANIFEST)
    with pytest.raises(Unreachable):
        run(broken)
    replaced = samples(100, 8)
    base.put("shard-000001.tar", tar(replaced))
    again = run(base)
    assert (again.read, again.kept) == (1, 2)
    assert [sample["__key__"] for sample in Dataset(base)][8:16] == [f"{number:06d}" for number in range(100, 108)]
    assert set(tree(base)) == {
        *(f"shard-00000{number}{end}" for number in range(3) for end in (".tar", ".tar.idx", ".samples", ".blocks")),
        "manifest.json",
        "wids.json",
    }


@pytest.mark.parametrize("damage", ["journal", "index", "blocks", "no blocks"])
def test_a_damaged_journal_or_side_file_counts_as_none(base: Store, damage: str) -> None:
    put_tars(base)
    broken = FaultStore(base)
    broken.fail("put", Unreachable("the cable is out"), MANIFEST)
    with pytest.raises(Unreachable):
        run(broken)
    key = {
        "journal": ".indexing/shard-000001.tar.journal",
        "index": "shard-000001.tar.idx",
        "blocks": "shard-000001.blocks",
        "no blocks": "shard-000001.blocks",
    }[damage]
    whole = bytes(base.get(key))
    if damage == "no blocks":
        base.delete(key)
    else:
        base.put(key, whole[:-3])
    assert run(base).read == 1
    assert verify(url(base), deep=True).ok


def test_a_tar_that_is_replaced_while_it_is_read(base: Store) -> None:
    put_tars(base)
    watched = FaultStore(base)
    watched.act("get", lambda call: base.put("shard-000001.tar", tar(samples(50, 9))), "shard-000001.tar")
    with pytest.raises(SourceError, match=r"shard-000001.tar: it was replaced or removed while it was read .* run again"):
        run(watched)
    assert MANIFEST not in tree(base)
    assert run(base).read >= 1


def test_a_tar_that_is_replaced_after_it_was_read(base: Store) -> None:
    put_tars(base)

    def replace(event: Event) -> None:
        if event == Stage("shard", "shard-000002.tar"):
            base.put("shard-000000.tar", tar(samples(50, 9)))

    with pytest.raises(SourceError, match=r"shard-000000.tar: it was replaced or removed after it was read; nothing was published"):
        run(base, on_event=replace, threads=1)
    assert MANIFEST not in tree(base)
    again = run(base)
    assert (again.read, again.kept) == (1, 2)


def test_lost_side_files_are_made_again(base: Store) -> None:
    put_tars(base)
    run(base)
    before = tree(base)
    base.delete("shard-000001.tar.idx")
    base.put("shard-000002.blocks", b"rubbish")
    base.delete("wids.json")
    told: list[Event] = []
    mended = run(base, on_event=told.append)
    assert mended.read == 2
    assert tree(base) == before
    texts = [event.text for event in told if isinstance(event, Message)]
    assert sum("missing or damaged: made again" in text for text in texts) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda base: base.put("shard-000001.tar", tar(samples(8, 9))), "shard-000001.tar has changed since"),
        (lambda base: base.put("shard-000003.tar", tar(samples(50, 9))), "shard-000003.tar is no part of it"),
        (lambda base: base.delete("shard-000002.tar"), "shard-000002.tar is part of it and was not named"),
    ],
)
def test_a_complete_data_set_of_other_tars_is_left_as_it_is(base: Store, change: Any, words: str) -> None:
    put_tars(base)
    run(base)
    change(base)
    before = tree(base)
    with pytest.raises(
        PublishError, match=f"it holds another data set .*{words}. Nothing of it was changed.*index anew after: .*manifest.json"
    ):
        run(base)
    assert tree(base) == before


def test_a_data_set_of_our_own_is_recognised(tmp_path: Path) -> None:
    shard(make_raw(tmp_path / "raw"), tmp_path / "out", shard_size="160KiB")
    before = tree(tmp_path / "out")
    assert index_shards(f"{tmp_path}/out/shards/", tmp_path / "out").unchanged
    assert tree(tmp_path / "out") == before


def test_our_own_shards_indexed_anew_are_the_same_data_set(tmp_path: Path) -> None:
    """Side files and digest: the cut rule and the digests are one."""
    shard(make_raw(tmp_path / "raw", 300, largest=200_000), tmp_path / "out", shard_size="12MiB")
    before = tree(tmp_path / "out")
    assert sum(len(shard["block_samples"]) for shard in json.loads(before["manifest.json"])["shards"]) > 3
    (tmp_path / "out" / "manifest.json").unlink()
    index_shards(f"{tmp_path}/out/shards/", tmp_path / "out")
    assert tree(tmp_path / "out") == before


# ------------------------------------------------------------------------------------------------------------------ repeated keys


def test_a_key_in_two_tars(base: Store) -> None:
    base.put("a.tar", tar(samples(0, 6)))
    base.put("b.tar", tar(samples(4, 6)))
    with pytest.raises(DuplicateKey) as caught:
        run(base)
    assert f"the key '000004' is in {url(base, 'a.tar')} (sample 4, offset " in str(caught.value)
    assert f"and again in {url(base, 'b.tar')} (sample 0, offset 0), and 2 keys in all more than once" in str(caught.value)
    assert "--repeated-keys allow" in str(caught.value)
    assert MANIFEST not in tree(base)
    watched = FaultStore(base)
    allowed = run(watched, repeated_keys="allow")
    assert (allowed.read, allowed.kept, allowed.repeated) == (0, 2, 2)
    assert not [call for call in watched.calls if call.operation == "get" and call.key.endswith(".tar")]
    assert "  2 samples with a key that an earlier tar has too" in allowed.lines
    assert [sample["__key__"] for sample in Dataset(base)] == [f"{number:06d}" for number in (*range(6), *range(4, 10))]


def test_keys_are_compared_in_several_passes(base: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagekit.indexing.run._KEYS_AT_ONCE", 3)
    put_tars(base)
    assert run(base).repeated == 0
    base.delete(MANIFEST)
    base.put("z.tar", tar(samples(23, 3)))
    with pytest.raises(DuplicateKey, match="the key '000023' is in"):
        run(base)
    assert run(base, repeated_keys="allow").repeated == 1


def test_equal_hashes_are_no_equal_keys(base: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys in two tars, with one hash: looked at, and not taken for a repetition."""
    monkeypatch.setattr("stagekit.indexing.scan.key_hash", lambda key: 7 if key in ("000001", "000009") else int(key) + 100)
    put_tars(base)
    assert run(base).repeated == 0


# ------------------------------------------------------------------------------------------------------------------ bad tars


def test_bad_tars_are_named_or_left_out(base: Store) -> None:
    made = put_tars(base, 2)
    base.put("shard-000002.tar", b"<html>busy</html>")
    base.put("shard-000003.tar", tar(samples(50, 3))[:2000])
    pattern = url(base, "shard-{000000..000004}.tar")
    with pytest.raises(SourceError, match=r"shard-000004.tar: it is not there; check the pattern, or leave out what is missing"):
        index_shards(pattern, base)
    assert set(tree(base)) == {f"shard-00000{number}.tar" for number in range(4)}
    with pytest.raises(CorruptShard, match=r"shard-000002.tar is no tar but a web page.*Or leave this tar out with --on-bad skip"):
        run(base)
    told: list[Event] = []
    done = index_shards(pattern, base, on_bad="skip", on_event=told.append)
    assert [(bad.url, bad.reason.partition(" ")[2][:30]) for bad in done.bad] == [
        (url(base, "shard-000002.tar"), "is no tar but a web page or XM"),
        (url(base, "shard-000003.tar"), done.bad[1].reason.partition(" ")[2][:30]),
        (url(base, "shard-000004.tar"), "is not there"),
    ]
    assert "is damaged at offset" in done.bad[1].reason
    assert sum(isinstance(event, Message) and event.text.startswith("left out ") for event in told) == 3
    assert list(Dataset(base)) == flat(made)
    assert index_shards(pattern, base, on_bad="skip").unchanged
    with pytest.raises(PublishError, match="is no part of it"):
        run(base)


def test_nothing_but_bad_tars(base: Store) -> None:
    base.put("a.tar", b"")
    with pytest.raises(SourceError, match="not one tar could be used; nothing was published"):
        run(base, on_bad="skip")


def test_a_failing_tar_stops_the_others(base: Store) -> None:
    base.put("a.tar", b"")
    base.put("b.tar", tar([(f"{number}.bin", bytes(2**20)) for number in range(40)]))
    failed = threading.Event()
    watched = FaultStore(base)
    watched.act("get", lambda call: call.start and failed.wait(60), "b.tar", times=None)
    with pytest.raises(CorruptShard, match=r"a.tar is empty"):
        run(watched, threads=2)
    failed.set()
    for thread in threading.enumerate():
        if thread.name.startswith("stagekit-"):
            thread.join(60)
    assert not [key for key in tree(base) if key.startswith(("b.", ".indexing")) and key != "b.tar"]


# ------------------------------------------------------------------------------------------------------------------ what is there already


def test_what_others_put_there_is_never_replaced(base: Store) -> None:
    put_tars(base)
    base.put("wids.json", b'{"name": "mine"}')
    with pytest.raises(PublishError, match=r"it holds a wids.json of somebody else.*Choose another destination, such as .*/indexed"):
        run(base)
    base.delete("wids.json")
    base.put("shard-000001.tar.idx", b"12345678")
    with pytest.raises(PublishError, match=r"shard-000001.tar.idx is there and was not made from this tar as it is now"):
        run(base)
    assert bytes(base.get("shard-000001.tar.idx")) == b"12345678"
    base.put("manifest.json", b'{"version": 3}')
    with pytest.raises(ManifestError, match="is no valid manifest"):
        run(base)
    dest = MemoryStore(f"memory://{base.location.name}-{id(base)}/indexed") if base.location.scheme == "memory" else None
    done = index_shards(url(base) + "/", dest or url(base, "indexed"))
    assert done.read == 3


def claim(store: Store, plan: str, **values: Any) -> None:
    store.put(CLAIM, json.dumps(json.loads(Claim.mine(plan).to_bytes()) | values).encode())


def test_claims(base: Store) -> None:
    put_tars(base)
    claim(base, "index-of-other-tars")
    with pytest.raises(PublishError, match="is writing other data there right now"):
        run(base)
    claim(base, "a plan of shard", running=False)
    with pytest.raises(PublishError, match="it holds an unfinished publication"):
        run(base)
    claim(base, "index-of-other-tars", boot_id="another machine")
    with pytest.raises(PublishError, match=r"cannot be asked from here.*--takeover"):
        run(base)
    assert run(base, takeover=True).read == 3
    assert CLAIM not in tree(base)
    base.delete(MANIFEST)
    claim(base, "index-of-other-tars", running=False)
    assert run(base).read == 3  # its journals are gone


def test_another_run_of_the_same_plan_is_harmless(base: Store) -> None:
    put_tars(base)

    def other(event: Event) -> None:
        if event == Stage("confirmed", url(base)):
            assert run(base).read == 0  # it uses what this one has read

    assert run(base, on_event=other).read == 3
    assert verify(url(base), deep=True).ok


def test_another_data_set_published_meanwhile_wins(base: Store) -> None:
    put_tars(base)
    put_tars(base, 1, folder="more/", each=3, seed=9)

    def other(event: Event) -> None:
        if event == Stage("confirmed", url(base)):
            base.delete(CLAIM)
            index_shards(url(base, "more/"), base)

    with pytest.raises(PublishError, match="it was published while this run was writing"):
        run(base, tars=MemoryTars(base), on_event=other)
    assert len(Dataset(base)) == 3


class MemoryTars(FaultStore):
    """A store that lists only what lies at its top."""

    def list(self, prefix: str = "") -> Any:
        return (one for one in super().list(prefix) if "/" not in one.key)


# ------------------------------------------------------------------------------------------------------------------ telling


def test_what_is_told(base: Store) -> None:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w|") as archive:
        for name, kind in (("a.jpg", tarfile.REGTYPE), ("b.jpg", tarfile.SYMTYPE), ("c.jpg", tarfile.SYMTYPE), ("README", tarfile.REGTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "a.jpg"
            archive.addfile(entry)
    base.put("a.tar", body.getvalue())
    told: list[Event] = []
    done = run(base, on_event=told.append)
    assert "  no part of any sample: 2 symbolic links, such as 'b.jpg'" in done.lines
    assert "  no part of any sample: 1 file without a key and an extension, such as 'README'" in done.lines
    assert done.record["skipped_members"] == {"symbolic link": 2}
    json.dumps(done.record)
    last = [event for event in told if isinstance(event, Progress)][-1]
    assert (last.done, last.total, last.note, last.finished) == (len(body.getvalue()), len(body.getvalue()), "1 of 1 tars", True)
    assert [event.name for event in told if isinstance(event, Stage)] == ["claimed", "shard", "confirmed", "published"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repeated_keys": "maybe"}, "repeated_keys: 'maybe' is neither"),
        ({"on_bad": "cry"}, "on_bad: 'cry' is neither"),
        ({"threads": 0}, "threads: 0 is below 1"),
    ],
)
def test_options_that_cannot_be_meant(base: Store, options: dict[str, Any], words: str) -> None:
    put_tars(base, 1)
    with pytest.raises(UsageError, match=words):
        run(base, **options)
