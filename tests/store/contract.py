"""One test per sentence of ``stagekit.store.base``. Every store's test file runs all of them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagekit.errors import BucketNotFound, Conflict, InvalidReply, NotFound, StoreError, UsageError
from stagekit.store.base import ObjectInfo, Store

PART = 5 * 2**20
"""The smallest part that every S3 server accepts before the last one."""

ODD_KEYS = (
    "a/ä ü.txt",
    "a/plus+and%2Fpercent",
    "a/what?why#here&there=1",
    "a/日本語/🙂",
    "a/-dash",
    "a/_under",
    "a/~tilde",
    "a/comma,;'\"!",
)
BAD_KEYS = ("", "/absolute", "a//b", "../up", "a/../../up", "a/./b", ".", "..", "folder/", "nul\0", "x" * 1025, "lone\udc80")


def keys_of(found: Iterator[ObjectInfo]) -> list[str]:
    return [info.key for info in found]


def run_apart(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in a new interpreter, where a fork meets no threads of pytest."""
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120)


class StoreContract:
    """Derived classes give a fixture ``store``: empty, and opened below a folder, so that what lies beside it would show."""

    many = 1005
    """Objects that need more than one page of a listing."""

    # ------------------------------------------------------------------------------------------------------------------ put and get

    def test_what_was_put_is_there(self, store: Store) -> None:
        info = store.put("folder/a.bin", b"0123456789")
        assert (info.key, info.size) == ("folder/a.bin", 10)
        assert bytes(store.get("folder/a.bin")) == b"0123456789"
        head = store.head("folder/a.bin")
        assert (head.key, head.size) == ("folder/a.bin", 10)
        assert info.etag == head.etag

    def test_put_takes_bytes_of_every_kind(self, store: Store) -> None:
        for kind in (bytes, bytearray, memoryview):
            store.put("a", kind(b"some bytes of " + kind.__name__.encode()))
            assert bytes(store.get("a")) == b"some bytes of " + kind.__name__.encode()

    def test_an_object_may_be_empty(self, store: Store) -> None:
        assert store.put("empty", b"").size == 0
        assert store.head("empty").size == 0
        assert bytes(store.get("empty")) == b""
        assert bytes(store.get("empty", 0, 0)) == b""

    def test_put_replaces_what_was_there_and_the_etag_changes(self, store: Store) -> None:
        first = store.put("a", b"first")
        second = store.put("a", b"second, and longer")
        assert bytes(store.get("a")) == b"second, and longer"
        assert first.etag != second.etag
        assert store.head("a").etag == second.etag

    def test_put_if_absent_creates_and_never_replaces(self, store: Store) -> None:
        if not store.conditional_create():
            with pytest.raises(UsageError, match="exclusively"):
                store.put("claim", b"mine", if_absent=True)
            assert keys_of(store.list()) == []
            return
        store.put("claim", b"mine", if_absent=True)
        with pytest.raises(Conflict, match="claim: the object exists already"):
            store.put("claim", b"yours", if_absent=True)
        assert bytes(store.get("claim")) == b"mine"

    def test_only_one_of_several_concurrent_creators_succeeds(self, store: Store) -> None:
        if not store.conditional_create():
            assert store.conditional_create() is False  # remembered
            return
        together = threading.Barrier(8)

        def create(number: int) -> bool:
            together.wait()
            try:
                store.put("claim", str(number).encode(), if_absent=True)
            except Conflict:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = [number for number, success in enumerate(pool.map(create, range(8))) if success]
        assert len(won) == 1
        assert bytes(store.get("claim")) == str(won[0]).encode()

    def test_asking_for_exclusive_creation_leaves_nothing_behind(self, store: Store) -> None:
        store.conditional_create()
        store.checks_digest()
        assert keys_of(store.list()) == []
        assert list(store.open_uploads()) == []

    def test_get_gives_exactly_the_range(self, store: Store) -> None:
        store.put("a", b"0123456789")
        for start, length, expected in (
            (0, None, b"0123456789"),
            (0, 10, b"0123456789"),
            (0, 1, b"0"),
            (9, 1, b"9"),
            (3, 4, b"3456"),
            (3, None, b"3456789"),
            (10, None, b""),
            (10, 0, b""),
            (4, 0, b""),
        ):
            assert bytes(store.get("a", start, length)) == expected, (start, length)

    def test_a_range_beyond_the_end_is_an_invalid_reply_that_is_not_transient(self, store: Store) -> None:
        store.put("a", b"0123456789")
        for start, length in ((0, 11), (5, 6), (10, 1), (11, None), (11, 0), (1000, 5), (1000, None)):
            with pytest.raises(InvalidReply, match=r"a: .* beyond its end at 10") as caught:
                store.get("a", start, length)
            assert not caught.value.transient

    def test_a_negative_range_is_refused(self, store: Store) -> None:
        store.put("a", b"0123456789")
        for start, length in ((-1, 5), (0, -5)):
            with pytest.raises(UsageError, match="must not be negative"):
                store.get("a", start, length)

    def test_a_large_object_comes_whole_and_in_ranges(self, store: Store) -> None:
        data = os.urandom(3 * 2**20 + 17)
        store.put("large", data)
        assert bytes(store.get("large")) == data
        assert bytes(store.get("large", 2**20 + 1, 2**21)) == data[2**20 + 1 : 2**20 + 1 + 2**21]
        assert bytes(store.get("large", 3 * 2**20)) == data[3 * 2**20 :]

    def test_if_match_reads_only_the_object_that_was_meant(self, store: Store) -> None:
        store.put("a", b"0123456789")
        etag = store.head("a").etag
        assert etag is not None
        assert bytes(store.get("a", 2, 3, if_match=etag)) == b"234"
        assert bytes(store.get("a", 4, 0, if_match=etag)) == b""
        store.put("a", b"abcdefghijk")
        for start, length in ((2, 3), (0, None), (4, 0)):
            with pytest.raises(Conflict, match="a: the object was replaced"):
                store.get("a", start, length, if_match=etag)

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        store.put("folder/a", b"")
        for key in ("nothing", "folder", "folder/a/b", "folder/nothing"):
            for call in (store.head, store.get):
                with pytest.raises(NotFound, match=f"{key}: there is no such object") as caught:
                    call(key)
                assert isinstance(caught.value, FileNotFoundError)
                assert str(store.location) in str(caught.value)
                assert not caught.value.transient

    def test_no_key_leaves_the_store(self, store: Store) -> None:
        for key in BAD_KEYS:
            for call in (store.head, store.get, store.delete, lambda key: store.put(key, b"x")):
                with pytest.raises(UsageError, match="is no object key"):
                    call(key)
            with pytest.raises(UsageError, match="is no object key"), store.multipart(key, part_size=PART):
                pass
        assert keys_of(store.list()) == []

    def test_keys_are_taken_as_they_stand(self, store: Store) -> None:
        for key in ODD_KEYS:
            store.put(key, key.encode())
        for key in ODD_KEYS:
            assert bytes(store.get(key)) == key.encode()
            assert store.head(key).key == key
        assert keys_of(store.list()) == sorted(ODD_KEYS)
        assert keys_of(store.list("a/日本語/")) == ["a/日本語/🙂"]
        for key in ODD_KEYS:
            store.delete(key)
        assert keys_of(store.list()) == []

    # -------------------------------------------------------------------------------------------------------------------- list, delete

    def test_list_is_in_ascending_order_of_key_by_utf8_bytes(self, store: Store) -> None:
        keys = ["a", "a.txt", "a0/x", "b-/y", "b/c/d", "b/c.d", "b/ca", "b0", "B", "ä", "z", "é/1", "Z/2", "b/c/", "~"]
        keys = [key for key in keys if not key.endswith("/")]
        for key in keys:
            store.put(key, key.encode())
        listed = list(store.list())
        assert [info.key for info in listed] == sorted(keys, key=str.encode)
        assert all(info.size == len(info.key.encode()) for info in listed)

    def test_list_and_head_agree(self, store: Store) -> None:
        store.put("a/b", b"12345")
        listed, head = next(store.list()), store.head("a/b")
        assert (listed.key, listed.size, listed.etag) == (head.key, head.size, head.etag)

    def test_a_prefix_is_exact(self, store: Store) -> None:
        for key in ("run-1/a", "run-10/b", "run-1", "run-1.txt"):
            if key != "run-1":  # a directory holds no object "run-1" beside "run-1/a"
                store.put(key, b"")
        assert keys_of(store.list("run-1/")) == ["run-1/a"]
        assert keys_of(store.list("run/")) == []
        assert keys_of(store.list()) == ["run-1.txt", "run-1/a", "run-10/b"]

    def test_a_prefix_without_its_slash_is_refused(self, store: Store) -> None:
        for call in (lambda: list(store.list("run-1")), lambda: store.children("run-1"), lambda: list(store.open_uploads("run-1"))):
            with pytest.raises(UsageError, match="must be empty or end in '/'"):
                call()

    def test_nothing_below_a_prefix_yields_nothing(self, store: Store) -> None:
        assert list(store.list()) == []
        assert list(store.list("none/")) == []
        children = store.children("none/")
        assert (children.objects, children.folders) == ((), ())
        assert list(store.open_uploads()) == []

    def test_list_yields_all_pages(self, store: Store) -> None:
        keys = [f"many/{number:05d}" for number in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        assert keys_of(store.list("many/")) == keys
        assert keys_of(store.list()) == keys
        assert len(store.children("many/").objects) == self.many

    def test_children_are_the_objects_and_folders_directly_below(self, store: Store) -> None:
        for key in ("top", "a/1", "a/2", "a/b/3", "a/b/c/4", "a.b/5", "ä/6"):
            store.put(key, b"x")
        children = store.children()
        assert [info.key for info in children.objects] == ["top"]
        assert children.folders == ("a.b/", "a/", "ä/")
        children = store.children("a/")
        assert [(info.key, info.size) for info in children.objects] == [("a/1", 1), ("a/2", 1)]
        assert children.folders == ("a/b/",)

    def test_delete_removes_and_may_be_repeated(self, store: Store) -> None:
        store.put("folder/a", b"1")
        store.put("folder/b", b"2")
        store.delete("folder/a")
        store.delete("folder/a")
        store.delete("never/was")
        with pytest.raises(NotFound):
            store.head("folder/a")
        assert keys_of(store.list()) == ["folder/b"]
        store.delete("folder/b")
        assert keys_of(store.list()) == []
        assert store.children().folders == ()

    # ----------------------------------------------------------------------------------------------------------------------- multipart

    def test_parts_in_any_order_make_the_object(self, store: Store) -> None:
        parts = [os.urandom(PART), os.urandom(PART), os.urandom(1000)]
        with store.multipart("folder/large", part_size=PART) as upload:
            assert upload.part_size == PART
            for number in (2, 0, 1):
                upload.put_part(number, memoryview(parts[number]))
        assert (upload.info.key, upload.info.size) == ("folder/large", 2 * PART + 1000)
        assert bytes(store.get("folder/large")) == b"".join(parts)
        assert store.head("folder/large").size == 2 * PART + 1000
        assert list(store.open_uploads()) == []

    def test_parts_may_come_from_several_threads(self, store: Store) -> None:
        parts = [bytes([number]) * PART for number in range(4)]
        with store.multipart("large", part_size=PART) as upload, ThreadPoolExecutor(4) as pool:
            list(pool.map(upload.put_part, range(4), parts))
        assert bytes(store.get("large")) == b"".join(parts)

    def test_nothing_is_visible_before_the_block_ends(self, store: Store) -> None:
        with store.multipart("large", part_size=PART) as upload:
            upload.put_part(0, b"x" * PART)
            with pytest.raises(StoreError, match="not finished"):
                _ = upload.info
            with pytest.raises(NotFound):
                store.head("large")
            assert keys_of(store.list()) == []
            assert store.children().folders == ()
        assert keys_of(store.list()) == ["large"]

    def test_complete_shows_the_object_and_may_be_repeated(self, store: Store) -> None:
        with store.multipart("large", part_size=PART) as upload:
            upload.put_part(0, b"12345")
            assert upload.complete().size == 5
            assert bytes(store.get("large")) == b"12345"
            assert upload.complete() == upload.info
        assert bytes(store.get("large")) == b"12345"

    def test_an_upload_without_parts_makes_an_empty_object(self, store: Store) -> None:
        with store.multipart("empty", part_size=PART):
            pass
        assert store.head("empty").size == 0
        assert list(store.open_uploads()) == []

    def test_an_exception_in_the_block_finishes_nothing(self, store: Store) -> None:
        for stopped_by in (ValueError, KeyboardInterrupt, SystemExit):
            with pytest.raises(stopped_by), store.multipart("large", part_size=PART) as upload:
                upload.put_part(0, b"x" * PART)
                upload.put_part(1, b"y")
                raise stopped_by
        with pytest.raises(NotFound):
            store.head("large")
        assert keys_of(store.list()) == []
        assert list(store.open_uploads()) == []

    def test_an_upload_replaces_only_at_its_end(self, store: Store) -> None:
        store.put("a", b"old")
        with pytest.raises(ValueError, match="stop"), store.multipart("a", part_size=PART) as upload:
            upload.put_part(0, b"new")
            assert bytes(store.get("a")) == b"old"
            raise ValueError("stop")
        assert bytes(store.get("a")) == b"old"
        with store.multipart("a", part_size=PART) as upload:
            upload.put_part(0, b"new")
        assert bytes(store.get("a")) == b"new"

    def test_parts_that_make_no_object_are_refused(self, store: Store) -> None:
        for sizes, words in (
            ({1: 10}, "part 0 was never sent"),
            ({0: PART, 2: 10}, "part 1 was never sent"),
            ({0: 10, 1: 10}, f"part 0 has 10 bytes instead of {PART}"),
            ({0: PART + 1}, f"part 0 has {PART + 1} bytes, more than the {PART} of a part"),
            ({-1: 10}, "part -1 does not exist"),
        ):
            with pytest.raises(UsageError, match=words), store.multipart("large", part_size=PART) as upload:
                for number, size in sizes.items():
                    upload.put_part(number, bytes(size))
        assert keys_of(store.list()) == []
        assert list(store.open_uploads()) == []

    def test_a_part_may_be_sent_again(self, store: Store) -> None:
        with store.multipart("large", part_size=PART) as upload:
            upload.put_part(1, b"wrong")
            upload.put_part(1, b"right")
            upload.put_part(0, b"x" * PART)
        assert bytes(store.get("large", PART)) == b"right"

    def test_an_unfinished_upload_is_found_and_dropped(self, store: Store) -> None:
        key = "folder/large & odd+%2F.bin"
        block = store.multipart(key, part_size=PART)
        block.__enter__().put_part(0, b"x" * PART)
        (found,) = store.open_uploads()
        assert found.key == key
        assert [upload.key for upload in store.open_uploads("folder/")] == [key]
        assert list(store.open_uploads("fold/")) == []
        store.abort_upload(found)
        assert list(store.open_uploads()) == []
        store.abort_upload(found)  # one that is gone is no error
        with pytest.raises(StoreError, match="large"):
            block.__exit__(None, None, None)
        assert keys_of(store.list()) == []

    # ------------------------------------------------------------------------------------------------------------------ the store itself

    def test_the_message_names_operation_and_location(self, store: Store) -> None:
        with pytest.raises(NotFound, match=r"^reading "):
            store.get("x")
        with pytest.raises(NotFound, match=r"^looking up "):
            store.head("x")

    def test_a_store_can_be_pickled(self, store: Store) -> None:
        store.put("a", b"123")
        copy = pickle.loads(pickle.dumps(store))
        assert copy.location == store.location
        assert bytes(copy.get("a")) == b"123"
        copy.put("b", b"456")
        assert bytes(store.get("b")) == b"456"

    def test_a_store_serves_many_threads(self, store: Store) -> None:
        def there_and_back(number: int) -> bool:
            data = f"{number} ".encode() * 5000
            store.put(f"t/{number}", data)
            return bytes(store.get(f"t/{number}")) == data and bytes(store.get(f"t/{number}", 10, 100)) == data[10:110]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(there_and_back, range(32)))

    def test_a_store_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert type(store).__name__ in repr(store)
        assert isinstance(store.conditional_create(), bool)
        assert isinstance(store.checks_digest(), bool)


class SharedContract:
    """For stores that outlive a process: what other processes, killed and forked ones, see and leave behind."""

    def test_killing_an_upload_leaves_no_object(self, store: Store) -> None:
        script = (
            "import pickle, sys\n"
            "store = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
            f"with store.multipart('folder/large', part_size={PART}) as upload:\n"
            f"    upload.put_part(0, b'x' * {PART})\n"
            "    print('sent', flush=True)\n"
            "    sys.stdin.read()\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", script, pickle.dumps(store).hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == "sent\n"
            child.send_signal(signal.SIGKILL)
            child.wait()
        assert keys_of(store.list()) == []
        with pytest.raises(NotFound):
            store.head("folder/large")
        (left,) = store.open_uploads()
        assert left.key == "folder/large"
        store.abort_upload(left)
        assert list(store.open_uploads()) == []

    def test_forked_readers_get_their_own_objects(self, store: Store) -> None:
        """Eight children forked from a process whose connections are warm read eight different objects at the same time."""
        for number in range(8):
            store.put(f"object-{number}", bytes([number]) * 300_000)
        done = run_apart(Path(__file__).with_name("forked.py").read_text(), pickle.dumps(store).hex())
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.split() == ["right"] * 8


class BucketContract:
    """For stores that have buckets. Derived classes give a fixture ``missing``: a store in a bucket that does not exist."""

    def test_a_missing_bucket_is_never_an_empty_one(self, missing: Store) -> None:
        calls: list[Callable[[], object]] = [
            lambda: missing.head("a"),
            lambda: missing.get("a"),
            lambda: missing.get("a", 3, 5),
            lambda: missing.put("a", b""),
            lambda: list(missing.list()),
            lambda: list(missing.list("a/")),
            lambda: missing.children(),
            lambda: list(missing.open_uploads()),
            lambda: self._upload(missing),
        ]
        for call in calls:
            with pytest.raises(BucketNotFound, match=r"there is no bucket|does not exist") as caught:
                call()
            assert not isinstance(caught.value, FileNotFoundError)
            assert not caught.value.transient

    @staticmethod
    def _upload(store: Store) -> None:
        with store.multipart("a", part_size=PART) as upload:
            upload.put_part(0, b"x")
