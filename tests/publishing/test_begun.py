"""What this machine notes of a publication: from its first shard until its manifest is there, and nothing where it was refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagekit.config import StoreConfig, home_directory
from stagekit.errors import Denied, ManifestError, PublishError, Unreachable
from stagekit.location import Location
from stagekit.publishing import shard
from stagekit.publishing.begun import Begun, begun, note_begun, note_ended
from stagekit.publishing.writer import ShardWriter
from stagekit.store.directory import DirectoryStore
from stagekit.testing.faults import FaultStore


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    return folder


def test_a_publication_that_fails_is_noted_until_it_is_repeated(raw: Path, tmp_path: Path) -> None:
    store = FaultStore(DirectoryStore(str(tmp_path / "data")))
    store.fail("put", Unreachable("no answer"), "manifest.json", times=None)
    with pytest.raises(Unreachable):
        shard(raw, store, workers=1)
    assert begun() == [Begun(str(tmp_path / "data"), None)]
    shard(raw, str(tmp_path / "data"), workers=1)
    assert begun() == []


def test_a_destination_that_is_somebody_elses_leaves_no_note_and_takes_none_away(raw: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    ShardWriter(str(data)).__enter__().write({"__key__": "a", "txt": b"a"})
    assert [one.url for one in begun()] == [str(data)]
    with pytest.raises(PublishError, match="is publishing other data"):
        shard(raw, str(data), workers=1)
    assert [one.url for one in begun()] == [str(data)], "that of the one who writes there"
    note_ended(Location.parse(str(data)))
    with pytest.raises(PublishError, match="is publishing other data"):
        shard(raw, str(data), workers=1)
    assert begun() == []


def test_a_destination_that_may_not_be_written_leaves_no_note(raw: Path, tmp_path: Path) -> None:
    store = FaultStore(DirectoryStore(str(tmp_path / "data")))
    store.fail("put", Denied("access denied"), times=None)
    with pytest.raises(Denied):
        shard(raw, store, workers=1)
    assert begun() == []


def test_a_writer_notes_nothing_once_it_has_published_or_taken_back(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "one")) as writer:
        writer.write({"__key__": "a", "txt": b"a"})
        assert len(begun()) == 1
    assert begun() == []
    with pytest.raises(RuntimeError, match="stop"), ShardWriter(str(tmp_path / "two")) as writer:
        writer.write({"__key__": "a", "txt": b"a"})
        raise RuntimeError("stop")
    assert begun() == []


def test_how_the_store_is_reached_is_noted_and_damage_is_told() -> None:
    config = StoreConfig(endpoint_url="http://127.0.0.1:9", profile="there")
    assert note_begun(Location.parse("s3://bucket/data"), config) is True
    assert note_begun(Location.parse("s3://bucket/data"), config) is False
    assert begun() == [Begun("s3://bucket/data", config)]
    assert note_begun(Location.parse("memory://data"), None) is True
    assert len(begun()) == 1, "what is in this process's memory is nobody's business later"
    (note,) = home_directory().glob("publications/*.json")
    note.write_text("{")
    with pytest.raises(ManifestError, match="does not say which publication was begun"):
        begun()
