"""Parquet and Arrow files as a source, and what Hugging Face's ``datasets`` saves."""

from __future__ import annotations

import datetime
import decimal
import json
import shutil
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from stagekit.errors import MissingExtra, SourceError
from stagekit.location import Location
from stagekit.publishing import source_of
from stagekit.sources.arrow import Arrow, Parquet
from stagekit.sources.base import Source
from stagekit.sources.bucket import Bucket
from stagekit.sources.compressed import opened
from stagekit.sources.rows import RowRules, RowSource
from stagekit.sources.shelf import Disk
from stagekit.store import open_store

from .reading import content


def parquet(path: Path, columns: dict[str, Any] | pyarrow.Table | None = None, *, group: int = 100, **rules: Any) -> RowSource:
    if columns is not None:
        table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
        pyarrow.parquet.write_table(table, path, row_group_size=group)
    return RowSource(str(path), Parquet(), RowRules(**rules))


def fails(source: Source) -> str:
    with pytest.raises(SourceError) as caught:
        source.listing()
    return str(caught.value)


def test_columns_become_json_and_binary_ones_fields(tmp_path: Path) -> None:
    source = parquet(
        tmp_path / "a.parquet",
        {
            "id": [1, 2],
            "JPG": pyarrow.array([b"\xff\xd8\xff", None], pyarrow.binary()),
            "nested": [{"a": [1, None], "b": "é"}, None],
            "when": [datetime.datetime(2026, 1, 2, 3, 4, 5), None],
            "price": [decimal.Decimal("1.50"), None],
            "x": [float("nan"), 0.5],
            "list": [[1.0, float("inf")], []],
        },
    )
    assert content(source) == {
        "000000000": {
            "jpg": b"\xff\xd8\xff",
            "json": (
                '{"id":1,"nested":{"a":[1,null],"b":"é"},"when":"2026-01-02T03:04:05","price":"1.50","x":null,"list":[1.0,null]}'
            ).encode(),
        },
        "000000001": {"json": b'{"id":2,"JPG":null,"nested":null,"when":null,"price":null,"x":0.5,"list":[]}'},
    }


def test_shards_begin_inside_row_groups(tmp_path: Path) -> None:
    source = parquet(tmp_path / "a.parquet", {"n": list(range(1500))}, group=700)
    found = content(source, per_shard=271)
    assert [json.loads(fields["json"])["n"] for fields in found.values() if isinstance(fields, dict)] == list(range(1500))


def test_key_text_and_files(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"wav")
    columns = {"id": ["x", "y"], "text": ["one", " "], "sound": ["a.wav", None]}
    source = parquet(tmp_path / "a.parquet", columns, key="id", text="text")
    listing = source.listing()
    assert content(source, listing) == {"x": {"txt": b"one"}}
    assert listing.skipped == {"blank documents": 1}
    assert content(parquet(tmp_path / "a.parquet", key="id", files=("sound",))) == {
        "x": {"json": b'{"id":"x","text":"one"}', "sound.wav": b"wav"},
        "y": {"json": b'{"id":"y","text":" "}'},
    }


def test_rows_that_cannot_be_samples_are_counted_from_zero_as_their_keys_are(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {"id": ["x", None, "y"], "b": [[b"1"], [], []]}
    assert fails(parquet(path, columns, key="id")).startswith(
        f"reading {path}, row 0: it cannot be written as JSON (a value of the type bytes"
    )
    source = parquet(path, key="id", on_bad="skip")
    listing = source.listing()
    assert content(source, listing) == {"y": {"json": b'{"id":"y","b":[]}'}}
    assert [bad.path for bad in listing.bad] == [f"{path}, row 0", f"{path}, row 1"]


def test_a_folder_of_files(tmp_path: Path) -> None:
    parquet(tmp_path / "b.parquet", {"n": [1]})
    parquet(tmp_path / "a-0.parquet", {"n": [2, 3]})
    assert list(content(parquet(tmp_path))) == ["a-0/000000000", "a-0/000000001", "b/000000000"]


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"no parquet at all")
    assert fails(parquet(path)).startswith(f"reading {path}: it is damaged, or no file of this kind (")
    parquet(path, {"n": list(range(1000))})
    path.write_bytes(path.read_bytes()[:-30])
    assert fails(parquet(path)).startswith(f"reading {path}: it is damaged, or no file of this kind (")
    parquet(path, pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"]))
    assert fails(parquet(path)) == f"reading {path}: it has the column 'a' twice; rename one"


# ------------------------------------------------------------------------------------------------------------ Arrow


def arrow(path: Path, **rules: Any) -> RowSource:
    return RowSource(str(path), Arrow(), RowRules(**rules))


@pytest.mark.parametrize("place", ["disk", "bucket"])
@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("words", [False, True])
def test_arrow_files_of_both_formats(tmp_path: Path, kind: str, place: str, words: bool) -> None:
    """With words in a dictionary that grows, a stream cannot be entered in the middle."""
    write = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    schema = pyarrow.schema([("n", pyarrow.int64()), *([("w", pyarrow.dictionary(pyarrow.int8(), pyarrow.string()))] if words else [])])
    options = pyarrow.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with write(str(tmp_path / "a.arrow"), schema, options=options) as writer:
        for first in range(0, 1000, 300):
            numbers = range(first, min(1000, first + 300))
            columns: list[pyarrow.Array[Any]] = [pyarrow.array(numbers)]
            if words:
                known = [f"w{one}" for one in range(first // 300 + 1)]
                columns.append(pyarrow.DictionaryArray.from_arrays(pyarrow.array([n // 300 for n in numbers], pyarrow.int8()), known))
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
    source = arrow(tmp_path / "a.arrow")
    if place == "bucket":
        source = replace(source, shelf=Bucket(Location.parse(tmp_path)))
    found = content(source, per_shard=170)
    rows = [json.loads(fields["json"]) for fields in found.values() if isinstance(fields, dict)]
    assert rows == [{"n": n, "w": f"w{n // 300}"} if words else {"n": n} for n in range(1000)]


def test_a_cut_arrow_file(tmp_path: Path) -> None:
    table = pyarrow.table({"n": list(range(1000))})
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(whole[:-1500])
    assert "it is damaged, or no file of this kind (" in fails(arrow(tmp_path / "a.arrow"))
    (tmp_path / "a.arrow").write_bytes(whole[:-8])  # between two messages, where Arrow itself sees nothing wrong
    assert "it has no end mark after " in fails(arrow(tmp_path / "a.arrow"))
    (tmp_path / "a.arrow").write_bytes(b"nothing")
    assert "it is damaged, or no file of this kind (" in fails(arrow(tmp_path / "a.arrow"))


# In a process of its own: the package leaves files open and warns.
_SAVE = """
import sys
import datasets
folder = sys.argv[1]
png = bytes.fromhex("89504e470d0a1a0a") + b"rest"
features = datasets.Features({
    "image": datasets.Image(), "sound": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
    "label": datasets.ClassLabel(names=["no", "yes"]), "tokens": datasets.Sequence(datasets.Value("int32")),
})
rows = [
    {"image": {"bytes": png, "path": None}, "sound": {"bytes": b"x", "path": "a/b.FLAC"}, "label": n % 2, "tokens": [n, n + 1]}
    for n in range(5)
]
rows[1]["image"] = None
rows[2]["sound"] = {"bytes": None, "path": "beside.wav"}
made = datasets.Dataset.from_list(rows, features=features)
made.save_to_disk(folder + "/one", num_shards=2)
made.select([4, 0]).save_to_disk(folder + "/selected")
datasets.DatasetDict({"train": made, "test": made}).save_to_disk(folder + "/split")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    subprocess.run([sys.executable, "-W", "ignore", "-c", _SAVE, folder], check=True, capture_output=True)
    for place in ("one", "split/test"):
        (folder / place / "beside.wav").write_bytes(b"wave")
    (folder / "one" / "leftover.arrow").write_bytes(b"of another run")
    return folder


def test_a_saved_dataset_is_read_as_datasets_would(saved: Path) -> None:
    png = b"\x89PNG\r\n\x1a\nrest"
    found = content(arrow(saved / "one"))
    assert list(found) == [f"{number:09d}" for number in range(5)]
    assert found["000000000"] == {"image.png": png, "sound.flac": b"x", "json": b'{"label":0,"tokens":[0,1]}'}
    assert found["000000001"] == {"sound.flac": b"x", "json": b'{"image":null,"label":1,"tokens":[1,2]}'}
    assert found["000000002"] == {"image.png": png, "sound.wav": b"wave", "json": b'{"label":0,"tokens":[2,3]}'}
    assert [
        json.loads(fields["json"])["tokens"][0] for fields in content(arrow(saved / "selected")).values() if isinstance(fields, dict)
    ] == [4, 0]


def test_a_saved_dataset_behind_a_url(saved: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    store = open_store(url)
    for path in saved.rglob("*.*"):
        store.put(path.relative_to(saved).as_posix(), path.read_bytes())
    for name in ("one", "selected"):
        source = source_of(f"{url}/{name}")
        assert isinstance(source, RowSource)
        assert content(source) == content(arrow(saved / name))
    message = fails(source_of(f"{url}/split"))
    assert (
        message
        == f"reading {url}/split: it holds several splits (train, test); shard each into a data set of its own, such as {url}/split/train"
    )
    store.delete("selected/state.json")
    assert f"reading {url}/selected: dataset_info.json and Arrow files say" in fails_to_be_chosen(f"{url}/selected")
    store.put("one/state.json", b"[]")
    assert fails(source_of(f"{url}/one")).startswith(f"reading {url}/one/state.json: it does not list the data set's files")


def test_a_saved_dataset_of_several_splits(saved: Path) -> None:
    message = fails(arrow(saved / "split"))
    assert f"it holds several splits (train, test); shard each into a data set of its own, such as {saved}/split/train" in message
    assert len(content(arrow(saved / "split" / "test"))) == 5


def fails_to_be_chosen(path: Path | str) -> str:
    with pytest.raises(SourceError) as caught:
        source_of(path)
    return str(caught.value)


def test_the_remains_of_saved_datasets_are_no_files(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "split", tmp_path / "split")
    (tmp_path / "split" / "dataset_dict.json").unlink()
    folder = str(tmp_path / "split")
    assert f"it holds Hugging Face data sets in folders (test, train); shard each into a data set of its own, such as {folder}/test" in (
        fails_to_be_chosen(folder)
    )
    (tmp_path / "split" / "test" / "state.json").unlink()
    message = fails_to_be_chosen(f"{folder}/test")
    assert f"reading {folder}/test: dataset_info.json and Arrow files say that it is a Hugging Face data set, and state.json" in message
    assert "is missing. Copy or save it again, whole; --source-format hf takes the rows of the files that are there" in message
    assert len(content(source_of(f"{folder}/test", source_format="hf"))) == 5
    assert not isinstance(source_of(f"{folder}/test", source_format="files"), RowSource)


def test_a_saved_dataset_without_a_row(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"_data_files": []}')
    assert fails(source_of(tmp_path)) == f"reading {tmp_path}: there is no row in it; name the table that holds the data"


@pytest.mark.parametrize(
    "state", ["{", '{"_data_files": {}}', '{"_data_files": [3]}', '{"_data_files": [{"filename": "../x.arrow"}]}', "[]"]
)
def test_a_saved_dataset_that_is_damaged(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    message = fails(arrow(tmp_path))
    assert message.startswith(f"reading {tmp_path}/state.json: it ")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(tmp_path / "a.parquet", {"n": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    with pytest.raises(MissingExtra, match=r"a\.parquet needs the package 'pyarrow', .* pip install '?pyarrow"):
        parquet(tmp_path / "a.parquet").listing()
    with pytest.raises(MissingExtra, match=r"a\.jsonl\.zst needs the package 'pyarrow', .* pip install '?pyarrow"):
        (tmp_path / "a.jsonl.zst").touch()
        with opened(str(tmp_path / "a.jsonl.zst"), Disk().open):
            pass
