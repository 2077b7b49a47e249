"""Tables behind a URL: the same samples as from a disk, read by ranges."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import random
import tracemalloc
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

import stagekit
from stagekit.config import StoreConfig
from stagekit.dataset import Dataset
from stagekit.errors import SourceError, UsageError
from stagekit.location import Location
from stagekit.publishing import outline, publish, source_of
from stagekit.sources.arrow import Arrow, Parquet
from stagekit.sources.bucket import Bucket, RangedFile
from stagekit.sources.files import FileRules
from stagekit.sources.rows import RowRules, RowSource
from stagekit.sources.text import TextSource
from stagekit.store import open_store
from stagekit.store.base import Data, Store, WrappedStore

from ..rigs.servers import S3Server

ROWS = [{"id": f"r{number}", "text": f"number {number} " * (number % 60), "label": number % 3} for number in range(2000)]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, row_group_size=700)
    return buffer.getvalue()


def arrow(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    return buffer.getvalue()


def csv(rows: list[dict[str, Any]]) -> bytes:
    return ("id,text,label\n" + "".join(f'{row["id"]},"{row["text"]}",{row["label"]}\n' for row in rows)).encode()


TABLES: dict[str, bytes] = {
    "a.jsonl": jsonl(ROWS),
    "a.jsonl.gz": gzip.compress(jsonl(ROWS)),
    "a.csv": csv(ROWS),
    "a.csv.bz2": bz2.compress(csv(ROWS)),
    "a.parquet": parquet(ROWS),
    "a.arrow": arrow(ROWS),
}


def tree(store: Store) -> dict[str, bytes]:
    return {info.key: bytes(store.get(info.key)) for info in store.list()}


@pytest.fixture
def url() -> str:
    """A new place in this process's memory."""
    return f"memory://{uuid.uuid4().hex}"


@pytest.mark.parametrize("name", TABLES)
def test_the_same_shards_as_from_a_disk(
    name: str, tmp_path: Path, moto_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]
) -> None:
    config = credentials_for(moto_server)
    bucket = f"s3://{moto_server.create_bucket()}"
    open_store(bucket, config).put(f"raw/{name}", TABLES[name])
    (tmp_path / name).write_bytes(TABLES[name])
    options: dict[str, Any] = {"shard_size": 200_000, "key": "id"}
    stagekit.shard(f"{bucket}/raw/{name}", f"{bucket}/out", store=config, workers=2, **options)
    stagekit.shard(tmp_path / name, tmp_path / "out", workers=1, **options)
    assert len(Dataset(tmp_path / "out").shards) > 3
    assert tree(open_store(f"{bucket}/out", config)) == tree(open_store(tmp_path / "out"))


def test_files_are_found_relative_to_the_table(url: str, tmp_path: Path) -> None:
    rng = random.Random(2)
    rows = [{"id": n, "image": f"pictures/{n}.PNG", "big": "b.bin" if n == 3 else None} for n in range(60)]
    files = {"tables/rows.jsonl": jsonl(rows), "tables/b.bin": rng.randbytes(3_000_000)}
    files |= {f"tables/pictures/{n}.PNG": rng.randbytes(rng.randrange(5000)) for n in range(60)}
    store = open_store(url)
    for key, data in files.items():
        store.put(key, data)
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(data)
    options: dict[str, Any] = {"key": "id", "file_columns": ["image", "big"], "shard_size": 1_000_000}
    stagekit.shard(f"{url}/tables/rows.jsonl", f"{url}/out", **options)
    stagekit.shard(tmp_path / "tables" / "rows.jsonl", tmp_path / "out", **options)
    assert tree(open_store(f"{url}/out")) == tree(open_store(tmp_path / "out"))
    samples = {sample["__key__"]: sample for sample in Dataset(f"{url}/out")}
    assert samples["3"]["big.bin"] == files["tables/b.bin"]
    assert all(samples[str(n)]["image.png"] == files[f"tables/pictures/{n}.PNG"] for n in range(60))

    store.delete("tables/pictures/7.PNG")
    with pytest.raises(SourceError, match=r"line 8: it names the file memory://\w+/tables/pictures/7.PNG, which is not there"):
        outline(source_of(f"{url}/tables/rows.jsonl", file_columns=["image"]), shard_size=10**6)


def test_a_file_that_was_replaced_since_is_one_bad_sample(url: str) -> None:
    store = open_store(url)
    store.put("t.jsonl", jsonl([{"f": f"{n}.bin"} for n in range(5)]))
    for n in range(5):
        store.put(f"{n}.bin", b"12345")
    source = source_of(f"{url}/t.jsonl", file_columns=["f"])
    listing = source.listing()
    store.put("3.bin", b"123456")
    assert isinstance(source, RowSource)
    read = list(source.read_in_order(listing.samples[:]))
    errors = [error for _, error in read if isinstance(error, SourceError)]  # type: ignore[misc]  # no batches here
    assert len(errors) == 1
    assert "3.bin: it grew from 5 to 6 bytes after the source was listed" in str(errors[0])


def test_a_prefix_of_tables(url: str, tmp_path: Path) -> None:
    store = open_store(url)
    files = {"t/b/x.jsonl": ROWS[:30], "t/a.jsonl": ROWS[30:40], "t/.hidden/c.jsonl": ROWS[:1], "t/._a.jsonl": ROWS[:1]}
    for key, rows in files.items():
        store.put(key, jsonl(rows))
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(jsonl(rows))
    store.put("t/readme.md", b"x")
    (tmp_path / "t" / "readme.md").write_bytes(b"x")
    here = outline(source_of(tmp_path / "t", source_format="jsonl"), shard_size=10**6)
    there = outline(source_of(f"{url}/t", source_format="jsonl"), shard_size=10**6)
    assert there.record == here.record
    assert there.skipped == {"dot-files": 1, "AppleDouble files": 1, "files of another kind": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_table_that_is_replaced_ends_the_run(name: str, url: str) -> None:
    store = open_store(url)
    store.put(name, TABLES[name])
    source = source_of(f"{url}/{name}")
    listing = source.listing()
    store.put(name, TABLES[name][::-1])
    assert isinstance(source, RowSource)
    with pytest.raises(SourceError, match=rf"{name}: it was written to after the source was listed"):
        list(source.read_in_order(listing.samples[:]))
    store.delete(name)
    with pytest.raises(SourceError, match=rf"{name}: it was there when the source was listed and is gone"):
        list(source.read_in_order(listing.samples[:]))


def test_what_cannot_be_read_is_one_sentence(url: str) -> None:
    with pytest.raises(SourceError, match=r"reading memory://\w+/none.jsonl: there is no such file; check the path"):
        source_of(f"{url}/none.jsonl").listing()
    open_store(url).put("bad.parquet", b"PAR1 no")
    with pytest.raises(SourceError, match=r"bad.parquet: it is damaged, or no file of this kind"):
        source_of(f"{url}/bad.parquet").listing()
    open_store(url).put("t/x.txt", b"x")
    with pytest.raises(SourceError, match=r"no file in it ends with \.csv or \.tsv"):
        source_of(f"{url}/t", source_format="csv").listing()
    with pytest.raises(UsageError, match=r"memory://\w+/bad.parquet is read as rows"):
        source_of(f"{url}/bad.parquet", labels="dir")


def test_documents_from_a_url(url: str) -> None:
    open_store(url).put("crawl.jsonl", jsonl([{"text": "one"}, {"text": " "}, {"text": "two"}]))
    published = publish(source_of(f"{url}/crawl.jsonl", source_format="text"), f"{url}/out")
    assert [sample["txt"] for sample in Dataset(f"{url}/out")] == [b"one", b"two"]
    assert published.outline.skipped == {"blank documents": 1}


TEXTS = {"b.txt": "été", "sub/r.v1.TXT": "one " * 400_000, "sub/blank.txt": " \n" * 50_000, "empty.txt": "", "notes.md": "x", ".h.txt": "x"}


def test_text_files_from_a_url(url: str, tmp_path: Path) -> None:
    store = Counting(open_store(url))
    for name, text in TEXTS.items():
        store.put(f"t/{name}", text.encode())
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_text(text)
    there = publish(source_of(f"{url}/t", source_format="text"), f"{url}/out")
    here = publish(source_of(tmp_path / "t", source_format="text"), tmp_path / "out", workers=1)
    assert there.outline.record == here.outline.record
    assert there.outline.skipped == {"blank documents": 2, "dot-files": 1, "not matched by an include pattern": 1}
    assert tree(open_store(f"{url}/out")) == tree(open_store(tmp_path / "out"))
    assert [sample["txt"].decode() for sample in Dataset(f"{url}/out")] == [TEXTS["b.txt"], TEXTS["sub/r.v1.TXT"]]

    below = Bucket(Location.parse(url)).files(f"{url}/t/sub", FileRules(include=("blank.*",)))
    assert [sample.fields[0].ref for sample in below.listing().samples] == ["blank.txt"]

    stagekit.shard(f"{url}/t/b.txt", f"{url}/one")
    assert [(sample["__key__"], sample["txt"]) for sample in Dataset(f"{url}/one")] == [("b", "été".encode())]
    store.put("t/c.jsonl", b"{}")
    with pytest.raises(UsageError, match=r"/t as text: it holds both \.txt and \.jsonl"):
        source_of(f"{url}/t", source_format="text")


class Moving(Bucket):
    """A bucket in which one document goes, and another is replaced, once all are listed."""

    def open(self, path: str, *, straight: bool = True, mark: int | str | None = None, size: int | None = None) -> BinaryIO:
        store = open_store(self.where)
        store.delete("a.txt")
        store.put("b.txt", b"B")
        return super().open(path, straight=straight, mark=mark, size=size)


def test_text_that_is_replaced_or_gone_is_one_bad_document(url: str) -> None:
    for name in "abc":
        open_store(url).put(f"{name}.txt", name.encode())
    source = TextSource(url, "skip", Moving(Location.parse(url)))
    found = source.listing()
    assert [sample.key for sample in found.samples] == ["c"]
    reasons = {bad.path.removeprefix(url): bad.reason for bad in found.bad}
    assert reasons["/a.txt"] == "it was there when the source was listed and is gone; run again"
    assert reasons["/b.txt"].startswith("it was replaced after the source was listed")
    open_store(url).put("a.txt", b"a")
    with pytest.raises(SourceError, match=r"a\.txt: it was there when the source was listed and is gone; run again \(--on-bad skip"):
        replace(source, on_bad="raise").listing()


def test_a_record_batch_is_read_from_where_it_begins(counting: Counting) -> None:
    data = arrow(ROWS * 20)
    counting.put("x", data)

    def opened(path: str, *, straight: bool = True) -> BinaryIO:
        assert straight
        return cast("BinaryIO", io.BufferedReader(RangedFile(counting, path, len(data), straight=True), 256 * 1024))

    rows = list(Arrow().rows("x", 0, 1, opened))
    begin, line, _ = rows[-1]
    assert [row for row in rows if row[0] == begin] == [*Arrow().rows("x", begin, line - (len(ROWS) * 20 % 300 or 300) + 1, opened)]
    counting.ranges.clear()
    list(Arrow().rows("x", begin, 1, opened))
    assert sum(length or 0 for _, length in counting.ranges) < 256 * 1024 + len(data) - begin + 1


@pytest.mark.parametrize("kind", ["stream", "file", "parquet"])
def test_memory_does_not_grow_with_a_record_batch_or_row_group(tmp_path: Path, kind: str) -> None:
    """One of 96 MiB. It waits in a file that is mapped, or is read in pages, and few of its rows are Python's values at a time."""
    table = pyarrow.table({"bin": [bytes([n]) * 2**20 for n in range(96)]})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "a", use_dictionary=False, compression="none", write_batch_size=1)
    else:
        write = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
        with write(str(tmp_path / "a"), table.schema) as writer:
            writer.write_table(table)
        del writer
    del table
    before = pyarrow.total_allocated_bytes()
    format_ = Parquet() if kind == "parquet" else Arrow()
    source = RowSource(str(tmp_path / "a"), format_, RowRules(), Bucket(Location.parse(tmp_path)))
    tracemalloc.start()
    try:
        count = 0
        for read in source.read_in_order(source.listing().samples[:]):
            assert isinstance(read, tuple)
            assert read[1][0][2] == (bytes([count]) * 2**20,)  # type: ignore[index]  # a payload
            assert pyarrow.total_allocated_bytes() - before < (24 if kind == "parquet" else 1) * 2**20
            count += 1
        assert count == 96
        assert tracemalloc.get_traced_memory()[1] < 48 * 2**20
    finally:
        tracemalloc.stop()


class Counting(WrappedStore):
    """Notes which ranges were asked for."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.ranges: list[tuple[int, int | None]] = []

    def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
        self.ranges.append((start, length))
        return super().get(key, start, length, if_match=if_match)


DATA = random.Random(1).randbytes(11 * 2**20)


@pytest.fixture
def counting(url: str) -> Counting:
    store = Counting(open_store(Location.parse(url)))
    store.put("x", DATA)
    return store


def test_a_ranged_file_reads_what_is_asked_for(counting: Counting) -> None:
    with RangedFile(counting, "x", len(DATA), straight=False) as file:
        assert file.seek(-8, io.SEEK_END) == len(DATA) - 8
        assert file.read(100) == DATA[-8:]
        assert file.read(5) == b""
        file.seek(1000)
        file.seek(24, io.SEEK_CUR)
        assert file.tell() == 1024
        assert file.read(100) == DATA[1024:1124]
    assert counting.ranges == [(len(DATA) - 8, 8), (1024, 100)]


def test_a_ranged_file_reads_straight_on_in_pieces(counting: Counting) -> None:
    with RangedFile(counting, "x", len(DATA), straight=True) as file:
        assert file.read(10) == DATA[:10]
        assert len(counting.ranges) == 1, "a header alone costs one small request"
        file.seek(5_000_000)
        assert file.readall() == DATA[5_000_000:]
    lengths = [length for _, length in counting.ranges]
    assert max(length or 10**9 for length in lengths) <= 4 * 2**20, "never the whole object"
    assert sum(length or 0 for length in lengths) <= len(DATA) - 5_000_000 + 256 * 1024


def test_a_ranged_file_notices_another_object(counting: Counting) -> None:
    etag = counting.head("x").etag
    with RangedFile(counting, "x", len(DATA), straight=True, etag=etag) as file:
        assert file.read(3) == DATA[:3]
        counting.put("x", DATA[::-1])
        with pytest.raises(SourceError, match="it was replaced after the source was listed"):
            file.readall()
