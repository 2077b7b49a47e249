"""A scripted failure happens at the call it names and at no other, and a kill point leaves what was there before it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from stagekit.errors import Throttled, Unreachable
from stagekit.progress import Event, Message, Stage
from stagekit.store.base import Store
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import Call, FaultStore
from stagekit.testing.kill import KILLED, KillAt, KillingStore


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def store(inner: MemoryStore) -> FaultStore:
    return FaultStore(inner)


def test_without_rules_it_is_the_store_inside(store: FaultStore, inner: MemoryStore) -> None:
    store.put("a/one", b"1")
    with store.multipart("a/two", part_size=5 * 2**20) as upload:
        assert upload.part_size == 5 * 2**20
        upload.put_part(0, b"22")
    assert upload.info.size == 2
    assert upload.complete() == upload.info
    assert bytes(store.get("a/two")) == b"22" == bytes(inner.get("a/two"))
    assert store.head("a/one") == inner.head("a/one")
    assert list(store.list()) == list(inner.list())
    assert store.children() == inner.children()
    store.delete("a/one")
    assert [one.key for one in inner.list()] == ["a/two"]
    assert list(store.open_uploads()) == []
    assert isinstance(store, Store)


def test_calls_are_on_record(store: FaultStore) -> None:
    store.put("a", b"123")
    with store.multipart("b", part_size=5 * 2**20) as upload:
        upload.put_part(0, b"22")
    store.get("a", 1, 2)
    list(store.list())
    assert store.calls == [
        Call("put", "a", length=3),
        Call("multipart", "b"),
        Call("put_part", "b", 0, 2),
        Call("complete", "b"),
        Call("get", "a", 1, 2),
        Call("list", ""),
    ]


def test_a_call_fails_so_many_times_after_so_many_that_do_not(store: FaultStore, inner: MemoryStore) -> None:
    store.fail("put", Throttled("slow down"), "shards/*", skip=1, times=2)
    outcomes = []
    for number in range(5):
        try:
            store.put("other", b"")
            store.put(f"shards/{number}", b"")
            outcomes.append("stored")
        except Throttled:
            outcomes.append("failed")
    assert outcomes == ["stored", "failed", "failed", "stored", "stored"]
    assert [one.key for one in inner.list("shards/")] == ["shards/0", "shards/3", "shards/4"]


def test_a_lost_reply_fails_although_the_call_was_carried_out(store: FaultStore, inner: MemoryStore) -> None:
    store.fail("put", Unreachable("cut"), after=True)
    with pytest.raises(Unreachable, match="cut"):
        store.put("a", b"1")
    assert bytes(inner.get("a")) == b"1"


@pytest.mark.parametrize("operation", ["multipart", "put_part", "complete"])
def test_a_multipart_upload_that_fails_anywhere_leaves_nothing(store: FaultStore, inner: MemoryStore, operation: str) -> None:
    store.fail(operation, Unreachable("cut"))  # type: ignore[arg-type]  # pytest hands a plain str
    with pytest.raises(Unreachable, match="cut"):
        with store.multipart("a", part_size=5 * 2**20) as upload:
            upload.put_part(0, b"1")
    assert list(inner.list()) == []
    assert list(inner.open_uploads()) == []


def test_the_reading_calls_and_the_removing_ones_fail_too(store: FaultStore) -> None:
    store.put("a", b"1")
    store.fail("*", Unreachable("cut"), times=None)
    for call in (
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: list(store.list()),
        lambda: store.children(),
        lambda: store.delete("a"),
        lambda: list(store.open_uploads()),
    ):
        with pytest.raises(Unreachable, match="cut"):
            call()


def test_one_bit_of_what_is_read_flips(store: FaultStore) -> None:
    store.put("a", bytes(10))
    store.corrupt("a", offset=5, times=2)
    assert bytes(store.get("a", 0, 5)) == bytes(5)
    assert bytes(store.get("a", 4, 3)) == b"\0\1\0"
    assert bytes(store.get("a")) == b"\0\0\0\0\0\1\0\0\0\0"
    assert bytes(store.get("a")) == bytes(10)


def test_hidden_keys_are_in_no_listing_and_still_there(store: FaultStore) -> None:
    for key in ("hidden/one", "half/one", "half/two", "three"):
        store.put(key, b"1")
    store.hide("hidden/*")
    store.hide("half/one")
    store.hide("three")
    assert [one.key for one in store.list()] == ["half/two"]
    assert (store.children().folders, store.children().objects) == (("half/",), ())
    assert store.head("hidden/one").size == 1


def test_a_pickled_copy_has_the_rules_and_counts_for_itself(store: FaultStore) -> None:
    store.corrupt("a", offset=0)
    store.put("a", b"\0")
    copy = pickle.loads(pickle.dumps(store))
    assert bytes(copy.get("a")) == bytes(store.get("a")) == b"\1"
    store.fail("put", Unreachable("cut"))
    with pytest.raises(Unreachable, match="cut"):
        pickle.loads(pickle.dumps(store)).put("a", b"")
    killing = pickle.loads(pickle.dumps(KillingStore(store, "delete")))
    assert killing.head("a").size == 1


def test_kill_at_ends_the_process_at_its_stage_only() -> None:
    codes: list[int] = []
    seen: list[Event] = []
    listener = KillAt("shard-*", "shards/*.tar", skip=1, then=seen.append, exit=codes.append)
    for event in (
        Message("shard-sent"),
        Stage("shard-sent", "shards/0.tar"),
        Stage("manifest-sent", "shards/1.tar"),
        Stage("shard-sent", "manifest.json"),
    ):
        listener(event)
    assert codes == []
    listener(Stage("shard-verified", "shards/1.tar"))
    assert codes == [KILLED]
    assert len(seen) == 5


KILLED_WRITER = """
import sys
from stagekit.store.directory import DirectoryStore
from stagekit.testing.kill import KillingStore
store = KillingStore(DirectoryStore(sys.argv[1]), "put", "b*", after=sys.argv[2] == "after")
try:
    for key in ("a", "b", "c"):
        store.put(key, b"1")
finally:
    print("cleaned up")
"""


@pytest.mark.parametrize(("moment", "left"), [("before", ["a"]), ("after", ["a", "b"])])
def test_a_killing_store_ends_the_process_and_nothing_is_cleaned_up(tmp_path: Path, moment: str, left: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_WRITER), str(tmp_path / "store"), moment], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (KILLED, "", "")
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == left


def test_a_killing_store_lets_the_first_calls_pass(inner: MemoryStore) -> None:
    codes: list[int] = []
    store = KillingStore(inner, "delete", skip=2, exit=codes.append)
    for _ in range(2):
        store.delete("a")
    assert codes == []
    store.delete("a")
    assert codes == [KILLED]
