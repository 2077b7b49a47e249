"""Data sets in MosaicML's format, read by the real ``StreamingDataset``. Runs in an environment of its own (tools/test), since that package
keeps others old."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streaming import StreamingDataset

import stagekit
from stagekit.config import StoreConfig
from stagekit.errors import PublishError, SourceError, UsageError
from stagekit.mds import MdsPublication, index
from stagekit.progress import Event, Progress, Stage
from stagekit.store import open_store

from ..rigs.servers import S3Server

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:streaming"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # what the package leaves open
]


def make_raw(root: Path, samples: int = 120, *, seed: int = 0) -> Path:
    rng = random.Random(seed)
    root.mkdir()
    for number in range(samples):
        (root / f"{number:04d}.png").write_bytes(rng.randbytes(rng.randrange(4000)))
        (root / f"{number:04d}.cls").write_text(f"{number % 7}\n")
        (root / f"{number:04d}.txt").write_text(f"number {number}: é")
        (root / f"{number:04d}.json").write_text(json.dumps({"number": number, "tags": ["a", None]}))
    return root


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_raw(tmp_path_factory.mktemp("source") / "raw")


def expected(root: Path) -> list[dict[str, Any]]:
    return [
        {
            "__key__": path.stem,
            "png": path.read_bytes(),
            "cls": int(path.with_suffix(".cls").read_text()),
            "txt": path.with_suffix(".txt").read_text(),
            "json": json.loads(path.with_suffix(".json").read_text()),
        }
        for path in sorted(root.glob("*.png"))
    ]


def read(**where: Any) -> list[dict[str, Any]]:
    """Every sample, in order, as the package itself reads them, with the files' hashes compared."""
    dataset = StreamingDataset(**where, batch_size=1, shuffle=False, validate_hash="sha256")
    return [dataset[number] for number in range(dataset.num_samples)]


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def stages(told: list[Event], name: str) -> list[str]:
    return [event.subject for event in told if isinstance(event, Stage) and event.name == name]


def test_every_sample_comes_back(raw: Path, tmp_path: Path) -> None:
    done = stagekit.shard_mds(raw, tmp_path / "out", shard_size=40_000)
    assert read(local=str(tmp_path / "out")) == expected(raw)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.mds")]
    assert len(sizes) == len(done.entries) > 5
    assert max(sizes) <= 40_000
    assert len(sizes) < 12, "tars of these files are twice as many"
    assert sorted(tree(tmp_path / "out")) == sorted(["index.json", *(index.name_of(entry) for entry in done.entries)])
    assert done.samples == 120
    assert "from streaming import StreamingDataset" in done.lines[-3]


def test_the_lines_it_prints_stream_it(raw: Path, tmp_path: Path) -> None:
    done = stagekit.shard_mds(raw, tmp_path / "out", columns=["cls:uint8", "json:bytes"])
    printed: list[Any] = []
    exec("\n".join(done.code), {"print": lambda *values: printed.append(values)})
    assert sorted(key for key, *_ in printed) == [sample["__key__"] for sample in expected(raw)]
    assert done.record["columns"] == {"__key__": "str", "cls": "uint8", "json": "bytes", "png": "bytes", "txt": "str"}
    assert {key: tags for key, _, tags, *_ in printed}["0003"] == (raw / "0003.json").read_bytes()


def test_from_a_bucket_and_nothing_is_sent_twice(
    raw: Path, tmp_path: Path, rclone_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = credentials_for(rclone_server)
    url = f"s3://{rclone_server.create_bucket()}/mds"
    first = stagekit.shard_mds(raw, url, shard_size=40_000, store=config)
    assert (first.unchanged, first.sent, first.kept) == (False, len(first.entries), 0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rclone_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", rclone_server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("S3_ENDPOINT_URL", rclone_server.endpoint_url)
    assert read(remote=url, local=str(tmp_path / "local")) == expected(raw)

    told: list[Event] = []
    again = stagekit.shard_mds(raw, url, shard_size=40_000, store=config, on_event=told.append)
    assert (again.unchanged, again.sent, again.sent_bytes) == (True, 0, 0)
    assert "nothing to do" in again.lines[0]
    store = open_store(url, config)
    store.delete("shard.00002.mds")
    mended = stagekit.shard_mds(raw, url, shard_size=40_000, store=config, on_event=told.append)
    assert (mended.unchanged, mended.sent) == (False, 1)
    assert stages(told, "shard") == ["shard.00002.mds"]
    assert bytes(store.get("index.json")) == index.to_bytes(first.entries)


def test_the_same_files_whatever_the_number_of_workers(raw: Path, tmp_path: Path) -> None:
    told: list[Event] = []
    stagekit.shard_mds(raw, tmp_path / "one", shard_size=100_000, workers=1, on_event=told.append)
    stagekit.shard_mds(raw, tmp_path / "two", shard_size=100_000, workers=2)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert isinstance(told[-1], Stage)
    last = [event for event in told if isinstance(event, Progress)][-1]
    assert (last.finished, last.note) == (True, "480 files, 3 of 3 shards")


def test_a_run_that_is_killed_goes_on(raw: Path, tmp_path: Path) -> None:
    """It is stopped behind each of its first shards in turn; what it stored is kept, and the end is that of an undisturbed run."""
    whole = stagekit.shard_mds(raw, tmp_path / "whole", shard_size=40_000)
    out = tmp_path / "out"
    for stop in ("shard.00000.mds", "shard.00003.mds", "confirmed"):
        code = (
            "import os, signal, sys, stagekit\n"
            "def event(event):\n"
            "    if sys.argv[3] in (getattr(event, 'name', ''), getattr(event, 'subject', '')) and event.name != 'kept':\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "stagekit.shard_mds(sys.argv[1], sys.argv[2], shard_size=40_000, on_event=event)\n"
        )
        killed = subprocess.run([sys.executable, "-c", code, str(raw), str(out), stop], capture_output=True, text=True)
        assert killed.returncode == -9, killed.stderr
        assert not (out / "index.json").exists(), "nothing is visible before everything is there"
    told: list[Event] = []
    done = stagekit.shard_mds(raw, out, shard_size=40_000, on_event=told.append)
    assert done.kept == len(whole.entries)
    assert stages(told, "shard") == []
    assert tree(out) == tree(tmp_path / "whole")


def test_a_failure_publishes_nothing(tmp_path: Path) -> None:
    folder = make_raw(tmp_path / "raw", 30)
    (folder / "0020.cls").write_text("cat")
    with pytest.raises(SourceError, match=r"the field 'cls' of the sample '0020' is no int: .*--column cls:bytes"):
        stagekit.shard_mds(folder, tmp_path / "out", shard_size=20_000)
    assert "index.json" not in tree(tmp_path / "out")
    skipped = stagekit.shard_mds(folder, tmp_path / "out", shard_size=20_000, on_bad="skip")
    assert (skipped.samples, [bad.path for bad in skipped.bad]) == (29, ["0020"])
    assert [sample["__key__"] for sample in read(local=str(tmp_path / "out"))] == [f"{n:04d}" for n in range(30) if n != 20]


def test_another_source_is_refused_and_takeover_starts_afresh(raw: Path, tmp_path: Path) -> None:
    other = make_raw(tmp_path / "other", 25, seed=1)
    stagekit.shard_mds(other, tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(
        PublishError, match=r"it holds another data set in MosaicML's format.*Nothing of it was changed.*: rm /.*/out/index\.json, then"
    ):
        stagekit.shard_mds(raw, tmp_path / "out")
    (other / "0003.txt").write_text("changed: é")
    with pytest.raises(PublishError, match=r"its files would be others from the source"):
        stagekit.shard_mds(other, tmp_path / "out")
    assert tree(tmp_path / "out") == before

    (tmp_path / "out" / "index.json").unlink()
    with pytest.raises(PublishError, match=r"--takeover"):
        stagekit.shard_mds(raw, tmp_path / "out")
    stagekit.shard_mds(raw, tmp_path / "out", takeover=True)
    assert read(local=str(tmp_path / "out")) == expected(raw)


def test_a_sample_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    folder = make_raw(tmp_path / "raw", 10)
    (folder / "0000.png").write_bytes(random.Random(3).randbytes(90_000))
    (folder / "0004.png").write_bytes(random.Random(4).randbytes(90_000))
    done = stagekit.shard_mds(folder, tmp_path / "out", shard_size=30_000)
    assert all(entry["samples"] for entry in done.entries)
    assert read(local=str(tmp_path / "out")) == expected(folder)


def test_rows_become_samples(tmp_path: Path) -> None:
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps({"id": f"r{number}", "text": "x" * number}) + "\n" for number in range(900)))
    stagekit.shard_mds(table, tmp_path / "out", shard_size=50_000)
    assert [sample["json"]["id"] for sample in read(local=str(tmp_path / "out"))] == [f"r{number}" for number in range(900)]
    stagekit.shard_mds(table, tmp_path / "texts", text_field="text", key="id")
    assert [sample["txt"] for sample in read(local=str(tmp_path / "texts"))] == ["x" * number for number in range(1, 900)]


def test_class_folders(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "raw" / name).mkdir(parents=True)
        (tmp_path / "raw" / name / "a.png").write_bytes(name.encode())
    stagekit.shard_mds(tmp_path / "raw", tmp_path / "out", labels="dir")
    assert [(sample["__key__"], sample["cls"]) for sample in read(local=str(tmp_path / "out"))] == [("cat/a", 0), ("dog/a", 1)]
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog"]


def test_the_command_says_the_same_as_json(raw: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stagekit", "shard", str(raw)]
    done = subprocess.run([*command, str(tmp_path / "out"), "--format", "mds", "--json"], capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["event"], last["format"], last["samples"], last["unchanged"]) == ("published", "mds", 120, False)
    assert isinstance(stagekit.shard_mds(raw, tmp_path / "out"), MdsPublication)


def test_a_memory_store_and_a_rate(raw: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/out"
    began_s = time.monotonic()
    done = stagekit.shard_mds(raw, url, shard_size=40_000, limit_rate=500_000)
    assert time.monotonic() - began_s > done.bytes / 500_000
    assert (done.samples, done.sent) == (120, len(done.entries))
    with pytest.raises(UsageError, match="one of them"):
        stagekit.shard_mds(raw, url, workers=2, executor="dask://host")
