"""Pulling any prefix, by any engine: nothing is believed, nothing is lost, nothing that is there is touched."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from stagekit.config import StoreConfig
from stagekit.progress import Event, Message
from stagekit.staging import pull
from stagekit.store import open_store
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore
from stagekit.transfer.bulk.choice import EngineName

from .conftest import S3Place
from .made import make_checkpoint, make_dataset, make_run

_numbers = itertools.count()
ENGINES: tuple[EngineName, ...] = ("builtin", "s5cmd", "rclone")
OBJECTS = {
    "config.json": b"{}",
    "deep/er/ü and 'quotes\".bin": os.urandom(70_000),
    "deep/[a-b]*?.txt": b"glob characters",
    "empty": b"",
    "large.safetensors": os.urandom(9_000_000),
    "with space/+%2F#": b"plus",
}


@pytest.fixture
def url() -> str:
    return f"memory://pull-{next(_numbers)}/model"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Message)]


def fill(url: str, objects: dict[str, bytes] = OBJECTS, config: StoreConfig | None = None) -> None:
    store = open_store(url, config)
    for key, data in objects.items():
        store.put(key, data)


def test_every_engine_brings_prefixes_data_sets_and_checkpoints_from_every_server(any_s3: S3Place, tmp_path: Path) -> None:
    fill(f"{any_s3.url}/model", config=any_s3.config)
    manifest = make_dataset(open_store(f"{any_s3.url}/digits", any_s3.config), size=20_000)
    run = open_store(f"{any_s3.url}/runs/a", any_s3.config)
    make_run(run)
    make_checkpoint(run, 7, {"model.pt": b"m" * 3_000_000, "sub dir/ü.txt": b"u"})
    for engine in ENGINES:
        events: list[Event] = []
        pulled = pull(f"{any_s3.url}/model", tmp_path / engine / "m", engine=engine, store=any_s3.config, on_event=events.append)
        assert contents(tmp_path / engine / "m") == OBJECTS, engine
        assert (pulled.kind, pulled.engine, pulled.files, pulled.unproven) == ("objects", engine, 6, 0)
        assert texts(events) == [], engine  # what the engine claimed was true, and nothing was left over
        pull(f"{any_s3.url}/digits", tmp_path / engine / "d", engine=engine, store=any_s3.config, on_event=events.append)
        assert len(contents(tmp_path / engine / "d")) == len(manifest.shards) * 3 + 2
        pull(f"{any_s3.url}/runs/a@7", tmp_path / engine / "c", engine=engine, store=any_s3.config, on_event=events.append)
        assert contents(tmp_path / engine / "c") == {"model.pt": b"m" * 3_000_000, "sub dir/ü.txt": b"u"}
        assert texts(events) == [], engine
        assert sorted(os.listdir(tmp_path / engine)) == ["c", "d", "m"]


def test_a_prefix_arrives_at_once_and_a_second_pull_fetches_nothing(url: str, tmp_path: Path) -> None:
    fill(url)
    pulled = pull(url, tmp_path / "new" / "model")
    assert contents(tmp_path / "new" / "model") == OBJECTS
    assert (pulled.kind, pulled.files, pulled.fetched_bytes) == ("objects", 6, pulled.bytes)
    store = FaultStore(MemoryStore(url))
    again = pull(store, tmp_path / "new" / "model")
    assert again.fetched_bytes == 0
    assert [call.key for call in store.calls if call.operation == "get" and call.key in OBJECTS] == []


def test_a_single_object_comes_under_its_name(url: str, tmp_path: Path) -> None:
    fill(url)
    pulled = pull(f"{url}/config.json", tmp_path / "one")
    assert contents(tmp_path / "one") == {"config.json": b"{}"}
    assert pulled.url == f"{url}/config.json"
