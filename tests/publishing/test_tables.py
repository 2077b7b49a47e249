"""Tables, from a file to a published data set: the same bytes whatever the workers, bad rows, changes, memory."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import stagekit
from stagekit.cli import main
from stagekit.dataset import Dataset
from stagekit.errors import PublishError, SourceError
from stagekit.progress import Event, Stage
from stagekit.publishing import outline, publish, source_of

from .conftest import read_by_webdataset, tree


def records(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{number}", "text": f"number {number} " * (number % 50), "label": number % 3} for number in range(count)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("id,text,label\n" + "".join(f'{row["id"]},"{row["text"]}",{row["label"]}\n' for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=333)
    return path


def write_gz(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    return path


def stagekit_shard(*arguments: str | Path) -> int:
    return main(["shard", *map(str, arguments)])


FILES: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "a.jsonl": write,
    "a.jsonl.gz": write_gz,
    "a.csv": write_csv,
    "a.parquet": write_parquet,
}


@pytest.mark.parametrize("name", FILES)
def test_the_same_objects_whatever_the_number_of_workers(tmp_path: Path, name: str) -> None:
    path = FILES[name](tmp_path / name, records(1000))
    for workers in (1, 2, 3):
        stagekit.shard(path, tmp_path / f"out{workers}", shard_size=100_000, workers=workers, key="id")
    assert len(Dataset(tmp_path / "out1").shards) > 6
    assert tree(tmp_path / "out1") == tree(tmp_path / "out2") == tree(tmp_path / "out3")


def test_webdataset_reads_the_rows(tmp_path: Path) -> None:
    rows = records(50)
    stagekit.shard(write(tmp_path / "a.jsonl", rows), tmp_path / "out", shard_size=20_000)
    shards = [str(tmp_path / "out" / shard.name) for shard in Dataset(tmp_path / "out").shards]
    assert len(shards) > 2
    read = read_by_webdataset(shards)
    assert [sample["__key__"] for sample in read] == [f"{number:09d}" for number in range(50)]
    assert [json.loads(sample["json"]) for sample in read] == rows  # type: ignore[arg-type]  # bytes


def test_the_plan_is_what_is_published(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", records(1000))
    plan = outline(source_of(path), shard_size=100_000).plan
    done = publish(source_of(path), tmp_path / "out", shard_size=100_000)
    assert [(shard.name, shard.bytes, len(shard.samples)) for shard in plan.shards] == [
        (record.name, record.bytes, record.samples) for record in done.manifest.shards
    ]
    assert plan.fields == done.manifest.fields
    assert max(shard.bytes for shard in plan.shards) <= 100_000
    # and the same as if each sample were planned by itself
    rows = outline(source_of(path), shard_size=100_000).plan.shards[0].samples
    assert [sample.key for sample in rows] == [f"{number:09d}" for number in range(len(rows))]


def test_a_row_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": 1}, {"a": "x" * 50_000}, {"a": 2}])
    done = publish(source_of(path), tmp_path / "out", shard_size=20_000)
    assert [record.samples for record in done.manifest.shards] == [1, 1, 1]
    assert "larger than the shard size of 20.0 kB, in a larger shard of its own: 000000001" in " ".join(done.outline.notes)


def test_a_second_run_does_nothing_and_a_changed_table_is_refused_or_added_to(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", records(100))
    first = publish(source_of(path), tmp_path / "out", samples_per_shard=40)
    before = tree(tmp_path / "out")
    assert publish(source_of(path), tmp_path / "out", samples_per_shard=40).unchanged
    write(path, records(130))
    with pytest.raises(PublishError, match="it holds another data set"):
        publish(source_of(path), tmp_path / "out", samples_per_shard=40)
    grown = publish(source_of(path), tmp_path / "out", samples_per_shard=40, update=True)
    assert [record.samples for record in grown.manifest.shards] == [40, 40, 20, 30]
    assert grown.manifest.shards[:3] == first.manifest.shards
    after = tree(tmp_path / "out")
    assert {name: after[name] for name in before if name.startswith("shards/")} == {
        name: data for name, data in before.items() if name.startswith("shards/")
    }
    assert [json.loads(sample["json"]) for sample in Dataset(tmp_path / "out")] == records(130)


def test_a_bad_row_ends_the_run_or_is_skipped_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", records(5))
    lines = path.read_text().splitlines()
    lines[2] = "{broken"
    path.write_text("\n".join(lines))
    assert stagekit_shard(path, tmp_path / "out") == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines()[-1].startswith(f"stagekit: error: reading {path}, line 3: it is no JSON (")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert stagekit_shard(path, tmp_path / "out", "--on-bad", "skip") == 0
    out, err = capsys.readouterr()
    assert "  4 samples in 1 shard, " in out
    assert "  skipped: 1 bad, listed above" in out
    assert "  left out: 1 that cannot be packed" in out
    assert f"skipped 000000002: reading {path}, line 3: it is no JSON (" in err
    assert "--on-bad" not in err, "it was given"
    assert [sample["__key__"] for sample in Dataset(tmp_path / "out")] == ["000000000", "000000001", "000000003", "000000004"]


def test_a_row_that_is_bad_when_it_is_listed_is_skipped_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", [{"id": "a"}, {"name": "b"}, {"id": "a"}, {"id": "c"}])
    assert stagekit_shard(path, tmp_path / "out", "--key", "id") == 1
    assert f"reading {path}, line 2: it has no column 'id'; it has name" in capsys.readouterr().err
    assert stagekit_shard(path, tmp_path / "out", "--key", "id", "--on-bad", "skip") == 0
    out, err = capsys.readouterr()
    assert "left out: 2 that cannot be packed" in out
    assert f"skipped {path}, line 2: it has no column 'id'" in err
    assert f"skipped {path}, line 3: the key 'a' is that of {path}, line 1 already" in err
    assert [sample["__key__"] for sample in Dataset(tmp_path / "out")] == ["a", "c"]


def test_the_command_packs_files_and_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.jpg").write_bytes(b"\xff\xd8one")
    path = write(tmp_path / "a.jsonl", [{"image": "one.jpg", "text": "a picture"}, {"image": None, "text": " "}])
    assert stagekit_shard(path, tmp_path / "files", "--file-column", "image") == 0
    assert [dict(sample) for sample in Dataset(tmp_path / "files")] == [
        {"__key__": "000000000", "image.jpg": b"\xff\xd8one", "json": b'{"text":"a picture"}'},
        {"__key__": "000000001", "json": b'{"text":" "}'},
    ]
    assert stagekit_shard(path, tmp_path / "documents", "--text-field", "text") == 0
    assert "left out: 1 blank documents" in capsys.readouterr().out
    assert [dict(sample) for sample in Dataset(tmp_path / "documents")] == [{"__key__": "000000000", "txt": b"a picture"}]


def test_options_that_do_not_fit_are_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    assert stagekit_shard(tmp_path / "images", tmp_path / "out", "--key", "id") == 2
    assert "key, file_columns and text_field are for tables" in capsys.readouterr().err
    assert stagekit_shard(write(tmp_path / "a.jsonl", [{"a": 1}]), tmp_path / "out", "--source-format", "xml") == 2


def test_a_table_that_changes_while_it_is_published_publishes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", records(1000))
    source = source_of(path)

    def append(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "shard":
            path.write_text(path.read_text() + "\n")

    with pytest.raises(SourceError, match="it was written to after the source was listed, so its rows may be others"):
        publish(source, tmp_path / "out", shard_size=100_000, workers=1, on_bad="skip", on_event=append)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_threads_of_an_executor_may_share_one_table(tmp_path: Path, name: str) -> None:
    path = FILES[name](tmp_path / name, records(1000))
    stagekit.shard(path, tmp_path / "alone", shard_size=50_000, workers=1)
    with ThreadPoolExecutor(4) as executor:
        stagekit.shard(path, tmp_path / "together", shard_size=50_000, executor=executor)
    assert tree(tmp_path / "together") == tree(tmp_path / "alone")


def test_an_interrupted_run_goes_on_with_the_shards_that_are_missing(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    path = write(tmp_path / "a.jsonl", records(1000))
    stagekit.shard(path, tmp_path / "alone", shard_size=100_000)
    done: list[str] = []

    def interrupt(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "shard":
            done.append(event.subject)
            if len(done) == 3:
                raise Interrupted

    with pytest.raises(Interrupted):
        publish(source_of(path), tmp_path / "out", shard_size=100_000, workers=1, on_event=interrupt)
    assert not (tmp_path / "out" / "manifest.json").exists()
    result = publish(source_of(path), tmp_path / "out", shard_size=100_000, workers=2)
    assert (result.kept, result.sent) == (3, len(result.manifest.shards) - 3)
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


_PEAK = """
import resource, sys
from stagekit.publishing import publish, source_of
publish(source_of(sys.argv[1]), sys.argv[2], shard_size="4MiB", workers=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    """Ten times the rows, the same peak but for the bytes that the listing keeps of each."""

    def peak_kib(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(f'{{"n": {number}}}\n' for number in range(count)))
        done = subprocess.run([sys.executable, "-c", _PEAK, path, tmp_path / f"out{count}"], capture_output=True, text=True, check=True)
        return int(done.stdout)

    few, many = 20_000, 200_000
    assert peak_kib(many) - peak_kib(few) < 24 * (many - few) // 1024
