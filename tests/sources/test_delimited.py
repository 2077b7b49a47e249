"""CSV and TSV as a source: quotes, newlines inside values, headers, rows that do not fit."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.errors import SourceError
from stagekit.sources.delimited import Delimited
from stagekit.sources.jsonl import JsonLines
from stagekit.sources.rows import RowRules, RowSource

from .reading import content


def table(path: Path, data: bytes | str = "", **rules: Any) -> RowSource:
    if data:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return RowSource(str(path), Delimited(), RowRules(**rules))


def values(source: RowSource, **options: Any) -> list[dict[str, str]]:
    """Each sample's JSON."""
    return [json.loads(fields["json"]) for fields in content(source, **options).values() if isinstance(fields, dict)]


def fails(source: RowSource) -> str:
    with pytest.raises(SourceError) as caught:
        source.listing()
    return str(caught.value)


def test_rows_become_json_with_text_values(tmp_path: Path) -> None:
    source = table(tmp_path / "a.csv", 'id,name,note\r\n1,"Ada ""the"" first",\r\n\r\n2,"two\r\nlines, one value",é\r\n')
    assert content(source) == {
        "000000000": {"json": b'{"id":"1","name":"Ada \\"the\\" first","note":""}'},
        "000000001": {"json": '{"id":"2","name":"two\\r\\nlines, one value","note":"é"}'.encode()},
    }


def test_tabs(tmp_path: Path) -> None:
    assert values(table(tmp_path / "a.tsv", "a\tb\n1,5\t2\n")) == [{"a": "1,5", "b": "2"}]
    assert "the header has tabs and no commas; name the file .tsv" in fails(table(tmp_path / "a.csv", "a\tb\n1\t2\n"))
    assert "the header has commas and no tabs; name the file .csv" in fails(table(tmp_path / "a.tsv", "a,b\n1,2\n"))


def test_separators_that_are_none_here(tmp_path: Path) -> None:
    data = 'id;t\n1;"a;b"\n2;c,d\n'
    message = fails(table(tmp_path / "a.csv", data))
    assert f"reading {tmp_path}/a.csv: the header has semicolons and no commas, by which columns are told apart" in message
    assert "the header has bars and no tabs" in fails(table(tmp_path / "a.tsv", "id|t\n1|2\n"))
    command = message.partition("convert the file with: python ")[2].removesuffix(" < OLD > NEW.csv")
    converted = subprocess.run([sys.executable, *shlex.split(command)], input=data, capture_output=True, text=True, check=True).stdout
    assert values(table(tmp_path / "b.csv", converted)) == [{"id": "1", "t": "a;b"}, {"id": "2", "t": "c,d"}]
    assert values(table(tmp_path / "c.csv", "id,a;b\n1,2\n")) == [{"id": "1", "a;b": "2"}]


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32"])
def test_other_encodings(tmp_path: Path, encoding: str) -> None:
    for source in (
        table(tmp_path / "a.csv", "id,t\n1,2\n".encode(encoding)),
        replace(table(tmp_path / "a.jsonl", '{"id": 1}\n'.encode(encoding)), table=JsonLines()),
    ):
        message = fails(source)
        assert message == (
            f"reading {source.path}: it is in {encoding}, as what Excel calls Unicode is, and not in UTF-8; convert it with: "
            f"iconv -f {encoding} -t UTF-8 OLD > NEW"
        )


def test_a_mark_at_the_start_and_no_newline_at_the_end(tmp_path: Path) -> None:
    assert values(table(tmp_path / "a.csv", "\ufeffa,b\n1,2")) == [{"a": "1", "b": "2"}]


def test_keys_files_and_documents(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(b"png")
    text = "id,image,caption\nx/1,one.png,first\nx/2,,\n"
    assert content(table(tmp_path / "a.csv", text, key="id", files=("image",))) == {
        "x/1": {"image.png": b"png", "json": b'{"id":"x/1","caption":"first"}'},
        "x/2": {"json": b'{"id":"x/2","caption":""}'},
    }
    source = table(tmp_path / "a.csv", text, key="id", text="caption")
    listing = source.listing()
    assert content(source, listing) == {"x/1": {"txt": b"first"}}
    assert listing.skipped == {"blank documents": 1}


def test_a_value_of_a_megabyte(tmp_path: Path) -> None:
    assert values(table(tmp_path / "a.csv", f"a,b\n{'x' * 2**20},2\n")) == [{"a": "x" * 2**20, "b": "2"}]


BAD = {
    b"1": "it has 1 values, and the header names 2 columns",
    b"1,2,3": "it has 3 values, and the header names 2 columns",
    b'"1"x,2': "its quotes or line ends do not fit (",
    b"\xff,2": "it is not UTF-8",
    b"1\r2,3": "its quotes or line ends do not fit (",
}


@pytest.mark.parametrize("row", BAD)
def test_a_row_that_does_not_fit(tmp_path: Path, row: bytes) -> None:
    path = tmp_path / "a.csv"
    data = b'a,b\n"two\nlines",0\n' + row + b"\nlast,1\n"
    message = fails(table(path, data))
    assert message.startswith(f"reading {path}, line 4: {BAD[row]}")
    source = table(path, data, on_bad="skip")
    listing = source.listing()
    assert values(source, listing=listing) == [{"a": "two\nlines", "b": "0"}, {"a": "last", "b": "1"}]
    assert [bad.path for bad in listing.bad] == [f"{path}, line 4"]
    assert list(content(source)) == ["000000000", "000000002"]


def test_a_quote_that_is_never_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    assert fails(table(path, 'a,b\n1,2\n"3,4\n5,6\n')).startswith(f"reading {path}, line 3: its quotes or line ends do not fit (")


HEADERS = {
    b"\n1,2\n": "line 1 is no header: it is empty; ",
    b"a,,c\n1,2,3\n": "line 1 is no header: a column has no name; ",
    b"a,b,a\n1,2,3\n": "the header has the column 'a' twice; rename one",
    b"a,\xff\n1,2\n": "line 1 is no header (",
    b'"a"b,c\n': "line 1 is no header (",
}


@pytest.mark.parametrize("data", HEADERS)
def test_a_header_that_is_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.csv"
    assert fails(table(path, data)).startswith(f"reading {path}: {HEADERS[data]}")


def test_a_header_alone(tmp_path: Path) -> None:
    assert "there is no row in it" in fails(table(tmp_path / "a.csv", "a,b\n"))
    (tmp_path / "b.csv").touch()
    assert "line 1 is no header: it is empty" in fails(table(tmp_path / "b.csv"))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x00"), max_size=8), min_size=2, max_size=2),
        min_size=1,
        max_size=600,
    ),
    per_shard=st.integers(1, 300),
    packed=st.booleans(),
)
def test_whatever_the_csv_module_writes_is_read_from_every_place(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], per_shard: int, packed: bool
) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["a", "b"], *rows])
    data = text.getvalue().encode()
    path = tmp_path_factory.mktemp("csv") / ("a.csv.gz" if packed else "a.csv")
    source = table(path, gzip.compress(data) if packed else data)
    assert values(source, per_shard=per_shard) == [{"a": a, "b": b} for a, b in rows]
