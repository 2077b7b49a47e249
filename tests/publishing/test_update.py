"""``update``: new samples go into new shards, published ones stay as they are."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from stagekit.dataset import Dataset
from stagekit.errors import PublishError
from stagekit.progress import Event
from stagekit.publishing import Publication, publish, source_of
from stagekit.store.base import Data, ObjectInfo, Store, WrappedStore
from stagekit.store.memory import MemoryStore
from stagekit.verification import verify

from .conftest import make_raw, tree


def run(raw: Path, dest: Any, **options: Any) -> Publication:
    return publish(source_of(raw), dest, shard_size="64KiB", **options)


def grow(raw: Path, count: int = 30) -> None:
    """More samples, whose keys sort among the old ones."""
    extra = make_raw(raw.parent / "extra", count, seed=9)
    for path in sorted(extra.rglob("*.*")):
        shutil.move(path, raw / path.parent.name / f"{path.name[:3]}b{path.name[3:]}")


def keys(dest: Any) -> list[str]:
    return [sample["__key__"] for sample in Dataset(dest)]


def test_new_samples_go_into_further_shards_and_nothing_else_is_touched(raw: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    run(raw, dest)
    before = tree(dest)
    old = Dataset(dest)
    grow(raw)
    done = run(raw, dest, update=True)
    after = tree(dest)
    rewritten = {name for name in before if before[name] != after[name]}
    assert rewritten == {"manifest.json", "wids.json"}
    assert done.manifest.shards[: len(old.shards)] == tuple(old.shards)
    assert done.sent == len(done.manifest.shards) - len(old.shards) > 1
    assert len(keys(dest)) == 90
    assert sorted(keys(dest)) == sorted(set(keys(dest)))
    assert verify(str(dest), deep=True).ok
    assert any("30 new samples" in line for line in done.lines)
    assert done.lines[0].startswith(f"updated {dest}: {done.sent} shards sent")
    assert not (dest / ".claim.json").exists()


def test_an_update_of_nothing_new_does_nothing(raw: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    run(raw, dest)
    before = tree(dest)
    assert run(raw, dest, update=True).unchanged
    grow(raw)
    run(raw, dest, update=True)
    grown = tree(dest)
    again = run(raw, dest, update=True)
    assert again.unchanged
    assert again.lines[0].startswith("nothing to do")
    assert tree(dest) == grown != before


def test_an_update_of_nothing_at_all_is_a_publication(raw: Path, tmp_path: Path) -> None:
    assert run(raw, tmp_path / "out", update=True).sent
    assert tree(tmp_path / "out") == _undisturbed(raw)


def _undisturbed(raw: Path) -> dict[str, bytes]:
    store = MemoryStore(f"memory://update/{raw.parent.name}")
    run(raw, store)
    return tree(store)


def test_several_updates(raw: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    run(raw, dest)
    for number in range(3):
        (raw / "class0" / f"new{number}.png").write_bytes(bytes([number]) * 3000)
        assert run(raw, dest, update=True).sent == 1
    assert len(keys(dest)) == 63
    assert verify(str(dest), deep=True).ok


def _remove(raw: Path) -> None:
    for name in ("0003.png", "0003.json"):
        (raw / "class0" / name).unlink()


def _resize(raw: Path) -> None:
    (raw / "class0" / "0003.png").write_bytes(b"other")


def _rewrite(raw: Path) -> None:
    path = raw / "class0" / "0003.png"
    path.write_bytes(bytes(len(path.read_bytes())))


def _another_field(raw: Path) -> None:
    (raw / "class0" / "0003.txt").write_text("a caption")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_remove, "1 published sample is gone from the source (class0/0003)"),
        (_resize, "1 published sample is changed in the source (class0/0003)"),
        (_another_field, "1 published sample is changed in the source (class0/0003)"),
        (_rewrite, "published samples have other content in the source now, among those of shards/000000.tar (class0/0000 to "),
    ],
)
def test_changed_and_removed_samples_are_refused(raw: Path, tmp_path: Path, change: Any, words: str) -> None:
    dest = tmp_path / "out"
    run(raw, dest)
    before = tree(dest)
    grow(raw)
    change(raw)
    with pytest.raises(PublishError, match=r"--update only adds samples; it rewrites none\. Nothing was changed\.") as refused:
        run(raw, dest, update=True)
    assert words in str(refused.value)
    assert tree(dest) == before


class _Stop(Exception):
    pass


@pytest.mark.parametrize("stage", ["claimed", "tar", "index", "shard", "confirmed"])
def test_an_interrupted_update_leaves_the_old_data_set_and_continues(raw: Path, tmp_path: Path, stage: str) -> None:
    dest = tmp_path / "out"
    run(raw, dest)
    published = tree(dest)
    grow(raw)
    shutil.copytree(dest, tmp_path / "straight")
    run(raw, tmp_path / "straight", update=True)

    def stop(event: Event) -> None:
        if getattr(event, "name", "") == stage:
            raise _Stop

    with pytest.raises(_Stop):
        run(raw, dest, update=True, on_event=stop, workers=1)
    assert {name: tree(dest)[name] for name in published} == published
    assert len(Dataset(dest)) == 60
    assert run(raw, dest, update=True).kept >= 60 // 10
    assert tree(dest) == tree(tmp_path / "straight")


def test_what_a_dead_update_left_is_removed_only_on_demand_and_the_data_set_never(raw: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    run(raw, dest)
    published = tree(dest)
    grow(raw)

    def stop(event: Event) -> None:
        if getattr(event, "name", "") == "confirmed":
            raise _Stop

    with pytest.raises(_Stop):
        run(raw, dest, update=True, on_event=stop, workers=1)
    (raw / "class0" / "another.png").write_bytes(b"one more")
    with pytest.raises(PublishError, match="it holds the unfinished shards of other data"):
        run(raw, dest, update=True)
    run(raw, dest, update=True, takeover=True)
    assert {name: data for name, data in tree(dest).items() if name in published and name.startswith("shards/")} == {
        name: data for name, data in published.items() if name.startswith("shards/")
    }
    assert len(keys(dest)) == 91
    assert verify(str(dest), deep=True).ok


class _UpdatedMeanwhile(WrappedStore):
    """Another update commits just before this one does."""

    def __init__(self, inner: Store, manifest: bytes) -> None:
        super().__init__(inner)
        self.manifest = manifest

    def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
        if key.endswith(".blocks"):
            self.inner.put("manifest.json", self.manifest)
        return self.inner.put(key, data, if_absent=if_absent)


def test_an_update_does_not_replace_another_one(raw: Path, tmp_path: Path) -> None:
    store = MemoryStore(f"memory://update/{tmp_path.name}/race")
    run(raw, store)
    other = make_raw(tmp_path / "other", 5, seed=3)
    elsewhere = MemoryStore(f"memory://update/{tmp_path.name}/elsewhere")
    run(other, elsewhere)
    theirs = bytes(elsewhere.get("manifest.json"))
    grow(raw)
    with pytest.raises(PublishError, match=r"its manifest was replaced or removed while this run was writing; nothing was published"):
        run(raw, _UpdatedMeanwhile(store, theirs), update=True)
    assert bytes(store.get("manifest.json")) == theirs


def test_class_names_that_shift_are_a_change(raw: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    publish(source_of(raw, labels="dir"), dest)
    (raw / "class9").mkdir()
    (raw / "class9" / "a.png").write_bytes(b"x")
    publish(source_of(raw, labels="dir"), dest, update=True)
    assert json.loads((dest / "classes.json").read_text()) == ["class0", "class1", "class2", "class9"]
    (raw / "class00").mkdir()
    (raw / "class00" / "a.png").write_bytes(b"x")
    before = tree(dest)
    with pytest.raises(
        PublishError, match=r"of its classes moved \('class00' came\): 'class1' was class 1 and would be 2, since .* Nothing was"
    ):
        publish(source_of(raw, labels="dir"), dest, update=True)
    with pytest.raises(PublishError, match=r"were published with their classes \(--labels dir\), and the source is read without now, and"):
        publish(source_of(raw), dest, update=True)
    shutil.rmtree(raw / "class00")
    (raw / "class1" / "later.png").write_bytes(b"x")
    for path in (raw / "class9").iterdir():
        path.write_bytes(b"y")
    with pytest.raises(PublishError, match=r"published samples have other content in the source now"):
        publish(source_of(raw, labels="dir"), dest, update=True)
    assert tree(dest) == before


def write_rows(path: Path, numbers: Any) -> Path:
    """Rows with a key of their own, every third with a file."""
    rows = [{"id": f"r{n}", "file": f"{n % 5}.bin" if n % 3 == 0 else None, "text": "x" * (n % 70)} for n in numbers]
    for n in range(5):
        (path.parent / f"{n}.bin").write_bytes(bytes([n]) * 100 * n)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_that_come_in_between_are_added(tmp_path: Path) -> None:
    options: dict[str, Any] = {"shard_size": 30_000}
    rules: dict[str, Any] = {"key": "id", "file_columns": ["file"]}
    table = write_rows(tmp_path / "rows.jsonl", [n for n in range(200) if n % 4])
    publish(source_of(table, **rules), tmp_path / "out", **options)
    before = {name: data for name, data in tree(tmp_path / "out").items() if name.startswith("shards/")}
    done = publish(source_of(write_rows(table, range(260)), **rules), tmp_path / "out", update=True, **options)
    assert before.items() <= tree(tmp_path / "out").items()
    samples = {sample["__key__"]: sample for sample in Dataset(tmp_path / "out")}
    assert samples.keys() == {f"r{n}" for n in range(260)}
    assert all(json.loads(sample["json"])["text"] == "x" * (int(key[1:]) % 70) for key, sample in samples.items())
    assert all(
        sample["file.bin"] == bytes([n % 5]) * 100 * (n % 5)
        for n, sample in ((int(key[1:]), one) for key, one in samples.items())
        if n % 3 == 0
    )
    assert verify(str(tmp_path / "out"), deep=True).ok
    assert "110 new samples" in done.lines[0]

    write_rows(table, [n for n in range(300) if n not in (5, 77)])
    with pytest.raises(PublishError, match=r"2 published samples are gone from the source \(r5, r77\)"):
        publish(source_of(table, **rules), tmp_path / "out", update=True, **options)


def test_an_update_keeps_no_sample_as_an_object(tmp_path: Path) -> None:
    def peak_bytes(rows: int) -> int:
        table = tmp_path / f"{rows}.jsonl"
        out = tmp_path / f"out{rows}"
        table.write_text("".join(f'{{"n": {n}}}\n' for n in range(rows)))
        publish(source_of(table), out, shard_size="512KiB")
        with table.open("a") as file:
            file.write('{"n": "new"}\n')
        tracemalloc.start()
        try:
            publish(source_of(table), out, shard_size="512KiB", update=True)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak_bytes(1_000), peak_bytes(9_000)
    assert many - few < 8_000 * 250, "a sample's objects are 600 bytes and more"
