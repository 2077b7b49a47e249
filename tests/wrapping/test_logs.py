"""Logs in the bucket: what was added is added, what was rewritten is sent anew, and nothing is ever overwritten."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest

from stagekit.errors import Unreachable
from stagekit.progress import Event, Message, Progress
from stagekit.store.base import Data, ObjectInfo
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import FaultStore
from stagekit.wrapping import logs as module
from stagekit.wrapping.logs import EVERY_S, Logs, manifests


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> FaultStore:
    return FaultStore(MemoryStore(f"memory://{uuid.uuid4().hex}/run"))


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def logs(store: FaultStore, clock: Clock, told: list[str]) -> Logs:
    return begin(store, clock, told)


def begin(store: FaultStore, clock: Clock, told: list[str], attempt: str = "000001-0123abcd") -> Logs:
    def listen(event: Event) -> None:
        if isinstance(event, Message):
            told.append(event.text)

    return Logs(lambda: store, attempt, listen, clock)


def keys(store: FaultStore) -> list[str]:
    return [info.key.removeprefix("logs/000001-0123abcd/") for info in store.list("logs/")]


def content(store: FaultStore, path: str) -> bytes:
    ((_, files),) = manifests(store)
    (file,) = (file for file in files if file.path == path)
    return b"".join(bytes(store.get(key)) for key, _ in file.objects)


def test_what_was_added_goes_into_objects_of_its_own(logs: Logs, store: FaultStore, clock: Clock, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    logs.offer({"out/train.log": log})
    log.write_text("one\n")
    assert logs.bring()
    with log.open("a") as file:
        file.write("two\n")
    assert logs.bring(), "it is not due yet"
    assert keys(store) == ["manifest-000001.json", "out/train.log"]
    clock.now = EVERY_S
    assert logs.bring()
    assert keys(store) == ["manifest-000002.json", "out/train.log", "out/train.log.0002"]
    assert bytes(store.get("logs/000001-0123abcd/out/train.log.0002")) == b"two\n"
    assert content(store, "out/train.log") == b"one\ntwo\n"


def test_at_the_end_everything_is_brought_and_nothing_twice(logs: Logs, store: FaultStore, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("one\n")
    logs.offer({"train.log": log})
    logs.bring()
    log.write_text("one\ntwo\n")
    assert logs.bring(last=True)
    before = keys(store)
    assert logs.bring(last=True)
    assert keys(store) == before
    assert content(store, "train.log") == b"one\ntwo\n"


def test_small_files_are_sent_together_and_how_far_that_is_is_told(tmp_path: Path) -> None:
    class Waiting(FaultStore):
        """Takes no file before two are on their way."""

        both = threading.Barrier(2, timeout=60.0)

        def put(self, key: str, data: Data, *, if_absent: bool = False) -> ObjectInfo:
            if key.endswith(("/0", "/1")):
                self.both.wait()
            return super().put(key, data, if_absent=if_absent)

    store = Waiting(MemoryStore(f"memory://{uuid.uuid4().hex}/run"))
    told: list[Event] = []
    files = {f"out/{number}": tmp_path / str(number) for number in range(120)}
    for name, path in files.items():
        path.write_text(name)
    logs = Logs(lambda: store, "000001-0123abcd", told.append, Clock())
    logs.offer(files)
    assert logs.bring(last=True)
    ((_, held),) = manifests(store)
    assert {one.path for one in held} == set(files)
    assert content(store, "out/7") == b"out/7"
    size = sum(map(len, files))
    assert told[-1] == Progress("sending logs", size, size, finished=True)
    assert len(told) == 120


def test_a_file_that_was_rewritten_is_sent_anew_under_another_name(logs: Logs, store: FaultStore, tmp_path: Path) -> None:
    log = tmp_path / "state.json"
    logs.offer({"state.json": log})
    for text in ("[1, 2]", "[3]", "[4, 5, 6, 7]"):
        log.write_text(text)
        assert logs.bring(last=True)
        assert content(store, "state.json") == text.encode()
    assert keys(store) == ["manifest-000003.json", "state.json", "state.json.0002", "state.json.0003"]


def test_an_empty_file_and_one_that_is_gone(logs: Logs, store: FaultStore, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    logs.offer({"empty": tmp_path / "empty", "gone": tmp_path / "gone"})
    assert logs.bring(last=True)
    assert content(store, "empty") == b""
    assert keys(store) == ["manifest-000001.json"]


def test_large_files_go_in_one_object_and_what_is_added_in_pieces(
    logs: Logs, store: FaultStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 10)
    log = tmp_path / "x"
    logs.offer({"x": log})
    log.write_bytes(bytes(25))
    assert logs.bring(last=True)
    assert keys(store) == ["manifest-000001.json", "x"]
    log.write_bytes(bytes(25) + b"1" * 25)
    assert logs.bring(last=True)
    assert keys(store) == ["manifest-000002.json", "x", "x.0002", "x.0003", "x.0004"]
    assert content(store, "x") == bytes(25) + b"1" * 25


def test_another_process_goes_on_where_one_was_killed(logs: Logs, store: FaultStore, clock: Clock, told: list[str], tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("one\n")
    logs.offer({"train.log": log})
    logs.bring()
    log.write_text("one\ntwo\n")
    later = begin(store, clock, told)
    later.offer({"train.log": log})
    assert later.bring(last=True)
    assert keys(store) == ["manifest-000002.json", "train.log", "train.log.0002"]
    assert content(store, "train.log") == b"one\ntwo\n"


def test_a_store_that_fails_is_told_once_and_tried_again(logs: Logs, store: FaultStore, told: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("one\n")
    logs.offer({"train.log": tmp_path / "train.log"})
    store.fail("put", Unreachable("no answer"), times=2)
    assert not logs.bring()
    assert not logs.bring()
    assert told == ["logs are not in the bucket yet, and are tried again: no answer"]
    assert logs.bring()
    assert content(store, "train.log") == b"one\n"


def test_a_damaged_manifest_excuses_nothing(logs: Logs, store: FaultStore, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("one\n")
    logs.offer({"train.log": tmp_path / "train.log"})
    logs.bring()
    store.put("logs/000001-0123abcd/manifest-000001.json", b"{}")
    assert list(manifests(store)) == []
