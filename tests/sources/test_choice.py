"""Which source a path means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagekit.errors import UsageError
from stagekit.location import Location
from stagekit.publishing import source_of
from stagekit.sources.arrow import Arrow, Parquet
from stagekit.sources.bucket import Bucket
from stagekit.sources.choice import RowOptions, SourceFormat, table_source
from stagekit.sources.delimited import Delimited
from stagekit.sources.folder import FolderSource
from stagekit.sources.jsonl import JsonLines
from stagekit.sources.prefix import PrefixSource
from stagekit.sources.rows import RowRules, RowSource
from stagekit.sources.text import TextSource


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of each kind."""
    for name in (
        "images/a.jpg",
        "images/table.csv",
        "tables/a.parquet",
        "tables/b.parquet",
        "mixed/a.csv",
        "mixed/b.jsonl",
        "saved/state.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("texts/a.txt", "docs/a.jsonl", "both/a.txt", "both/sub/b.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    return tmp_path


AUTO: dict[str, Any] = {
    "a.jsonl": JsonLines(),
    "a.NDJSON.gz": JsonLines(),
    "a.csv.zst": Delimited(),
    "a.tsv": Delimited(),
    "a.b.parquet": Parquet(),
    "a.arrow": Arrow(),
    "saved": Arrow(),
    "a.txt": TextSource,
    "images": None,
    "mixed": None,
    "texts": None,
    "gone": None,
    "a.jpg": None,
}


@pytest.mark.parametrize("name", AUTO)
def test_auto(root: Path, name: str) -> None:
    found = table_source(Location.parse(root / name), "auto", RowOptions(), "raise")
    if isinstance(found, RowSource):
        assert found == RowSource(str(root / name), AUTO[name], RowRules())
    else:
        assert found is None if AUTO[name] is None else isinstance(found, AUTO[name])


NAMED: dict[tuple[str, SourceFormat], Any] = {
    ("tables", "parquet"): RowSource("tables", Parquet(), RowRules()),
    ("tables", "files"): None,
    ("mixed", "csv"): RowSource("mixed", Delimited(), RowRules()),
    ("texts", "text"): TextSource("texts"),
    ("docs", "text"): RowSource("docs", JsonLines(), RowRules(text="text")),
    ("a.jsonl", "text"): RowSource("a.jsonl", JsonLines(), RowRules(text="text")),
    ("a.parquet", "text"): RowSource("a.parquet", Parquet(), RowRules(text="text")),
}


@pytest.mark.parametrize(("name", "source_format"), NAMED)
def test_a_format_that_is_named(root: Path, monkeypatch: pytest.MonkeyPatch, name: str, source_format: SourceFormat) -> None:
    monkeypatch.chdir(root)
    found = table_source(Location.parse(root / name), source_format, RowOptions(), "raise")
    expected = NAMED[name, source_format]
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert type(found) is type(expected)
        assert found.name == str(root / name)
        assert getattr(found, "table", None) == getattr(expected, "table", None)
        assert getattr(found, "rules", None) == getattr(expected, "rules", None)


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("tables", "auto", {}, "say --source-format parquet for a sample from each of their rows, or --source-format files"),
    ("docs", "auto", {}, "it holds nothing but .jsonl or .ndjson files; say --source-format jsonl"),
    ("images", "auto", {"key": "id"}, "key, file_columns and text_field are for tables, and "),
    ("images", "files", {"text_field": "text"}, "is read as files; say which with --source-format jsonl or csv or parquet or hf or text"),
    ("a.jpg", "jsonl", {}, "its name does not end with .jsonl or .ndjson, by which files are told apart; rename it or link to it"),
    ("a.jpg", "text", {}, "as text: its name ends with none of .txt, .jsonl, .ndjson; rename it"),
    ("a.tar", "auto", {}, "it is a tar, which has its samples already; stagekit index makes it a data set where it lies"),
    ("both", "text", {}, "it holds both .txt and .jsonl or .ndjson files; shard them one after the other"),
    ("texts", "text", {"text_field": "body"}, "is read as text files; leave them out"),
    ("a.csv", "parquet", {}, "its name does not end with .parquet"),
    ("a.csv", "xml", {}, "source_format: 'xml' is not one of auto, files, jsonl, csv, parquet, hf, text"),
    ("a.csv", "auto", {"labels": "dir"}, "labels, dots, include, exclude and symlinks are for folders of files, and "),
    ("a.csv", "auto", {"file_columns": "image"}, "file_columns: give a list of columns, not one text"),
    ("a.csv", "auto", {"file_columns": ["image"], "text_field": "text"}, "a document is its text alone; give one of them"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "source_format", "options", "expected"), REFUSED)
def test_what_cannot_be_meant(root: Path, name: str, source_format: SourceFormat, options: dict[str, Any], expected: str) -> None:
    for file in ("a.jpg", "a.csv"):
        (root / file).touch()
    with pytest.raises(UsageError) as caught:
        source_of(root / name, source_format=source_format, **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_behind_a_url_the_name_decides() -> None:
    with pytest.raises(UsageError, match="key, file_columns and text_field are for tables, and s3://bucket/x is read as files"):
        source_of("s3://bucket/x", key="id")
    with pytest.raises(UsageError, match=r"reading s3://bucket/x\.tar: it is a tar, .* stagekit index"):
        source_of("s3://bucket/x.tar")
    with pytest.raises(UsageError, match=r"s3://bucket/x\.txt is read as text files; leave them out"):
        source_of("s3://bucket/x.txt", text_field="body")
    assert isinstance(source_of("s3://bucket/x.csv", source_format="files"), PrefixSource)
    above = Bucket(Location.parse("s3://bucket/a"))
    found = source_of("s3://bucket/a/x.csv.gz", key="id")
    assert found == RowSource("s3://bucket/a/x.csv.gz", Delimited(), RowRules("id"), above)
    assert source_of("s3://bucket/a/x.arrow") == RowSource("s3://bucket/a/x.arrow", Arrow(), RowRules(), above)
    assert source_of("s3://bucket/a", source_format="hf") == RowSource("s3://bucket/a", Arrow(), RowRules(), above)
    assert source_of("s3://bucket/a/x.TXT") == TextSource("s3://bucket/a/x.TXT", shelf=above, single=True)


def test_a_source_that_is_one_already(root: Path) -> None:
    source = FolderSource(str(root / "images"))
    assert source_of(source) is source
    with pytest.raises(UsageError, match="give them to the source itself"):
        source_of(source, key="id")
