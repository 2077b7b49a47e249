"""JSON lines as a source: keys, fields, places, and whatever can be wrong with a row."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.errors import DuplicateKey, KeyNotAllowed, SourceError, UsageError
from stagekit.shards.plan import plan
from stagekit.sources.jsonl import JsonLines
from stagekit.sources.rows import RowRules, RowSource

from .reading import content


def write(path: Path, *rows: Any) -> Path:
    """A file of one row a line: bytes as they are, everything else as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def jsonl(path: Path, **rules: Any) -> RowSource:
    return RowSource(str(path), JsonLines(), RowRules(**rules))


def fails(source: RowSource, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        source.listing()
    assert type(caught.value) is kind
    return str(caught.value)


def test_a_row_is_a_sample_with_its_own_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"x": 1.0,  "y":"\xc3\xa9"}', b"", b'  {"x":1e300}\r', b'{"z": []}')
    assert content(jsonl(path)) == {
        "000000000": {"json": b'{"x": 1.0,  "y":"\xc3\xa9"}'},
        "000000001": {"json": b'{"x":1e300}'},
        "000000002": {"json": b'{"z": []}'},
    }


def test_a_file_without_a_newline_at_its_end_and_with_a_mark_at_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}')
    assert content(jsonl(path)) == {"000000000": {"json": b'{"a": 1}'}, "000000001": {"json": b'{"a": 2}'}}


def test_a_column_with_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"id": "b/1", "x": 1}, {"id": 7, "x": 2})
    assert content(jsonl(path, key="id")) == {"b/1": {"json": b'{"id": "b/1", "x": 1}'}, "7": {"json": b'{"id": 7, "x": 2}'}}


def test_files_that_rows_name(tmp_path: Path) -> None:
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "a.b.JPG").write_bytes(b"jpeg")
    (tmp_path / "img" / "mask").write_bytes(b"")
    path = write(
        tmp_path / "a.jsonl",
        {"image": "img/a.b.JPG", "Mask": "./img/mask", "label": 3},
        {"image": None, "Mask": "img/mask", "label": 4},
        {"image": "img/a.b.JPG", "Mask": ""},
    )
    assert content(jsonl(path, files=("image", "Mask"))) == {
        "000000000": {"image.jpg": b"jpeg", "json": b'{"label":3}', "mask": b""},
        "000000001": {"json": b'{"label":4}', "mask": b""},
        "000000002": {"image.jpg": b"jpeg"},
    }


def test_a_large_file_that_a_row_names_is_read_in_pieces(tmp_path: Path) -> None:
    data = os.urandom(9 * 2**20)
    (tmp_path / "large.bin").write_bytes(data)
    path = write(tmp_path / "a.jsonl", {"file": "large.bin"})
    assert content(jsonl(path, files=("file",))) == {"000000000": {"file.bin": data}}


def test_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "été\n"}, {"text": " \n"}, {"text": ""}, {"text": None}, {"text": "b", "more": 1})
    source = jsonl(path, text="text")
    listing = source.listing()
    assert content(source, listing) == {"000000000": {"txt": "été\n".encode()}, "000000004": {"txt": b"b"}}
    assert listing.skipped == {"blank documents": 3}


def test_a_folder_of_files(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", {"n": 1}, {"n": 2})
    write(tmp_path / "a" / "x.1.ndjson", {"n": 3})
    write(tmp_path / "a" / "empty.jsonl")
    write(tmp_path / ".hidden.jsonl", {"n": 4})
    write(tmp_path / ".git" / "x.jsonl", {"n": 5})
    write(tmp_path / "README.md", {"n": 6})
    source = jsonl(tmp_path)
    listing = source.listing()
    assert content(source, listing) == {
        "a/x.1/000000000": {"json": b'{"n": 3}'},
        "b/000000000": {"json": b'{"n": 1}'},
        "b/000000001": {"json": b'{"n": 2}'},
    }
    assert listing.skipped == {"dot-files": 2, "files of another kind": 1}


COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_files_hold_the_same(tmp_path: Path, suffix: str) -> None:
    plain = write(tmp_path / "a.jsonl", *({"n": number} for number in range(1000)))
    packed = tmp_path / f"a.jsonl{suffix}"
    packed.write_bytes(COMPRESSORS[suffix](plain.read_bytes()))
    expected, found = jsonl(plain).listing(), jsonl(packed).listing()
    assert content(jsonl(packed), found, per_shard=333) == content(jsonl(plain), expected, per_shard=333)
    assert plan(found.samples, shard_size=10_000).digest == plan(expected.samples, shard_size=10_000).digest


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_compressed_file_that_was_cut(tmp_path: Path, suffix: str) -> None:
    packed = tmp_path / f"a.jsonl{suffix}"
    packed.write_bytes(COMPRESSORS[suffix](b"".join(b'{"n": %d}\n' % number for number in range(1000)))[:-40])
    message = fails(jsonl(packed), SourceError)
    assert message.startswith(f"reading {packed}: it is damaged, or no file of this kind (")
    packed.write_bytes(b'{"n": 1}\n')
    assert str(packed) in fails(jsonl(packed), SourceError)


# ------------------------------------------------------------------------------------------------------------ what is wrong with a row


BROKEN = {
    b'{"a": 1, "b" 2}': "it is no JSON (Expecting ':' delimiter at character 14)",
    b'{"a": 1} x': "it is no JSON (something follows the value at character 9",
    b"x": "it is no JSON (Expecting value at character 1)",
    b'{"a": NaN}': "it is no JSON (NaN is a number of no JSON reader but Python's)",
    b'{"a": [0.5, -1e999]}': "its number -1e999 is too large, and infinity to those who read it",
    b'{"a": {"b": "x\\uD83Dy"}}': "its text holds half a character (a lone surrogate, \\ud83d)",
    b'{"a": "\xff"}': "byte 8 of it is not UTF-8",
    b"[1, 2]": "it holds JSON, but no object ({…}): '[1, 2]'",
    b"[" * 100_000: "nested too deeply",
}


@pytest.mark.parametrize("row", BROKEN)
@pytest.mark.parametrize("key", [None, "id"])
def test_a_row_that_is_broken(tmp_path: Path, row: bytes, key: str | None) -> None:
    path = write(tmp_path / "a.jsonl", b"", {"id": "a"}, row, {"id": "b"})
    source = jsonl(path, key=key)
    if key is None:  # it is parsed when it is read
        found = content(source)
        assert list(found) == ["000000000", "000000001", "000000002"]
        message = found["000000001"]
    else:
        message = fails(source, SourceError)
    assert isinstance(message, str)
    assert message.startswith(f"reading {path}, line 3: ")
    assert BROKEN[row] in message
    assert message.endswith(" (--on-bad skip counts such rows and goes on)")
    if key is None:
        skipped = content(jsonl(path, on_bad="skip"))["000000001"]
        assert skipped == message.removesuffix(" (--on-bad skip counts such rows and goes on)"), "it is skipped already"


def test_a_whole_character_in_two_escapes_is_none_that_is_broken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"id": "a", "n": 1e99, "t": "\\ud83d\\ude00"}')
    assert content(jsonl(path, key="id"))["a"] == {"json": b'{"id": "a", "n": 1e99, "t": "\\ud83d\\ude00"}'}


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no key": ({"key": "id"}, {"x": 1}, "it has no column 'id'; it has x"),
    "a null as key": ({"key": "id"}, {"id": None}, "its key column 'id' holds nothing; a key is text or a whole number"),
    "a number with a point as key": ({"key": "id"}, {"id": 1.5}, "its key column 'id' holds float; "),
    "a truth as key": ({"key": "id"}, {"id": True}, "its key column 'id' holds bool; "),
    "no text": ({"text": "text"}, {"id": "x"}, "it has no column 'text'; it has id"),
    "a number as text": ({"text": "text"}, {"text": 5}, "its column 'text' holds int, and a document is text"),
    "half a character": ({"text": "text"}, {"text": "a\ud800"}, "its text holds half a character (a lone surrogate, \\ud800)"),
    "no file column": ({"files": ["file"]}, {"id": "x"}, "it has no column 'file'"),
    "a file that is not there": ({"files": ["file"]}, {"file": "gone.jpg"}, "gone.jpg, which is not there"),
    "a file outside": (
        {"files": ["file"]},
        {"file": "x/../../a.jpg"},
        "names 'x/../../a.jpg', which lies outside the folder of the table (",
    ),
    "an absolute path": ({"files": ["file"]}, {"file": "/etc/passwd"}, "names '/etc/passwd', which lies outside the folder of the table ("),
    "a folder": ({"files": ["file"]}, {"file": "."}, "which is no file"),
    "a number as path": ({"files": ["file"]}, {"file": 1}, "its file column 'file' holds int; a path is text"),
    "two fields of one name": (
        {"files": ["A", "a"]},
        {"A": "ok.txt", "a": "ok.txt"},
        "two of its columns become the field 'a.txt'; rename one",
    ),
    "no field": ({"files": ["file"]}, {"file": None}, "it holds no value"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_row_that_cannot_be_a_sample(tmp_path: Path, case: str) -> None:
    rules, row, expected = WRONG[case]
    rules = {name: tuple(value) if isinstance(value, list) else value for name, value in rules.items()}
    (tmp_path / "ok.txt").write_text("ok")
    good = {"id": "good", "text": "good", "file": "ok.txt", "A": "ok.txt", "a": None}
    path = write(tmp_path / "a.jsonl", good, row, good | {"id": "last"})
    message = fails(jsonl(path, **rules), SourceError)
    assert message.startswith(f"reading {path}, line 2: ")
    assert expected in message
    assert message.endswith(" (--on-bad skip counts such rows and goes on)")
    source = jsonl(path, on_bad="skip", **rules)
    listing = source.listing()
    assert len(content(source, listing)) == 2
    assert [(bad.path, expected in bad.reason) for bad in listing.bad] == [(f"{path}, line 2", True)]


def test_a_key_that_a_shard_cannot_hold(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"id": "a"}, {"id": "b.c"})
    message = fails(jsonl(path, key="id"), KeyNotAllowed)
    assert message.startswith(f"reading {path}, line 2: a shard cannot hold 'b.c.json': the key 'b.c' has a dot in its last component")
    source = jsonl(path, key="id", on_bad="skip")
    assert list(content(source)) == ["a"]


def test_a_key_that_comes_twice(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"id": "x"}, {"id": "y"})
    write(tmp_path / "b.jsonl", {"id": "z"}, {"id": "x", "second": True}, {"id": "y"})
    message = fails(jsonl(tmp_path, key="id"), DuplicateKey)
    assert (
        message
        == f"reading {tmp_path}/b.jsonl, line 2: the key 'x' is that of {tmp_path}/a.jsonl, line 1 already; give each row its own key"
    )
    source = jsonl(tmp_path, key="id", on_bad="skip")
    listing = source.listing()
    assert [bad.path for bad in listing.bad] == [f"{tmp_path}/b.jsonl, line 2", f"{tmp_path}/b.jsonl, line 3"]
    assert content(source, listing) == {key: {"json": b'{"id": "%s"}' % key.encode()} for key in "xyz"}


def test_keys_that_are_nearly_the_same_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"id": "Cat"}, {"id": "dog"}, {"id": "cat"}, {"id": "e\u0301"}, {"id": "\u00e9"})
    made = plan(jsonl(path, key="id").listing().samples, shard_size=10**6)
    assert made.near_duplicates == (("Cat", "cat"), ("e\u0301", "\u00e9"))


def test_nothing_to_read(tmp_path: Path) -> None:
    assert fails(jsonl(tmp_path / "gone.jsonl"), SourceError) == f"reading {tmp_path}/gone.jsonl: there is no such file; check the path"
    path = write(tmp_path / "a.jsonl", b"", b" ")
    assert fails(jsonl(path), SourceError) == f"reading {path}: there is no row in it; name the table that holds the data"
    write(path, {"text": ""})
    assert "there is no row in it (left out: 1 blank documents); " in fails(jsonl(path, text="text"), SourceError)
    (tmp_path / "folder").mkdir()
    assert "no file in it ends with .jsonl or .ndjson; " in fails(jsonl(tmp_path / "folder"), SourceError)
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "it is no file that could be read twice; write it to a file first" in fails(jsonl(tmp_path / "pipe.jsonl"), SourceError)


@pytest.mark.parametrize("rules", [{"files": "image"}, {"on_bad": "ignore"}, {"text": "a", "files": ("b",)}])
def test_rules_that_cannot_be_meant(rules: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RowRules(**rules)


# ------------------------------------------------------------------------------------------------------------ a source that changes


@pytest.mark.parametrize("how", ["grow", "rewrite", "vanish"])
def test_a_table_that_changed_after_it_was_listed(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "a.jsonl", {"n": 1}, {"n": 2})
    source = jsonl(path)
    samples = source.listing().samples
    planned = list(samples)
    before = path.stat()
    if how == "grow":
        path.write_bytes(path.read_bytes() + b'{"n": 3}\n')
    elif how == "rewrite":
        write(path, {"n": 3}, {"n": 4})
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    else:
        path.unlink()
    expected = "it was there when the source was listed and is gone" if how == "vanish" else "it was written to after the source was listed"
    for read in (lambda: source.read(planned[0]), lambda: list(source.read_in_order(samples[:])), lambda: list(samples)):
        with pytest.raises(SourceError, match=f"reading {path}: {expected}"):
            read()


def test_a_table_that_is_written_to_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"n": number} for number in range(1000)))
    source = jsonl(path)
    reading = source.read_in_order(source.listing().samples[:])
    next(reading)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(SourceError, match="it was written to after the source was listed"):
        list(reading)


def test_a_file_that_a_row_names_changed_after_it_was_listed(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.bin").write_bytes(b"12")
    path = write(tmp_path / "t.jsonl", {"file": "a.bin"}, {"file": "b.bin"}, {"file": "a.bin"})
    source = jsonl(path, files=("file",))
    listing = source.listing()
    planned = list(listing.samples)
    (tmp_path / "b.bin").write_bytes(b"123")
    with pytest.raises(SourceError, match=r"b\.bin: it grew from 2 to 3 bytes after the folder was listed"):
        source.read(planned[1])
    (_, first), (_, error), (_, third) = list(source.read_in_order(listing.samples[:]))  # type: ignore[misc]
    assert "it grew from 2 to 3 bytes" in str(error)
    assert [[(name, size) for name, size, _ in payload] for payload in (first, third)] == [[("file.bin", 2)]] * 2


# ------------------------------------------------------------------------------------------------------------ many rows


def test_what_a_worker_gets_of_a_shard_is_small(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"n": number} for number in range(20_000)))
    made = plan(jsonl(path).listing().samples, shard_size=2**22)
    assert [len(shard.samples) for shard in made.shards] == [4095, 4095, 4095, 4095, 3620]
    assert max(len(pickle.dumps(shard)) for shard in made.shards) < 1000


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.one_of(st.none(), st.integers(0, 2000)), min_size=1, max_size=700).filter(
        lambda rows: any(row is not None for row in rows)
    ),
    per_shard=st.integers(1, 300),
    rules=st.sampled_from([{}, {"key": "id"}, {"text": "text"}]),
)
def test_shards_begin_at_the_right_row_whatever_the_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int | None], per_shard: int, rules: dict[str, str]
) -> None:
    """Empty lines and blank documents in between, more rows than there are places that are remembered."""
    lines = [b"" if size is None else {"id": f"k{number}", "text": "x" * size} for number, size in enumerate(rows)]
    path = write(tmp_path_factory.mktemp("rows") / "a.jsonl", *lines)
    kept = [line for line in lines if isinstance(line, dict) and (line["text"] or "text" not in rules)]
    if not kept:
        return
    found = content(jsonl(path, **rules), per_shard=per_shard)
    values = [fields["txt" if "text" in rules else "json"] for fields in found.values() if isinstance(fields, dict)]
    assert values == [line["text"].encode() if "text" in rules else json.dumps(line).encode() for line in kept]
    if "key" in rules:
        assert list(found) == [line["id"] for line in kept]
