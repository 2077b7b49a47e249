from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagekit.errors import BucketNotFound, Denied, NotFound, OutOfSpace, StoreError, Unreachable, UsageError
from stagekit.store.base import OpenUpload, Store
from stagekit.store.directory import STAGING, DirectoryStore

from .contract import BucketContract, SharedContract, StoreContract, keys_of, run_apart


class TestDirectoryStore(StoreContract, SharedContract, BucketContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        (tmp_path / "beside").write_bytes(b"other")
        return DirectoryStore(tmp_path / "base folder")

    @pytest.fixture
    def missing(self, tmp_path: Path) -> Store:
        return DirectoryStore(tmp_path / "unmounted", create=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def hidden(root: Path) -> list[str]:
    return [str(path) for path in root.rglob("*") if STAGING in path.parts]


def test_opening_makes_nothing_and_reading_finds_nothing(root: Path) -> None:
    store = DirectoryStore(root)
    assert list(store.list()) == []
    with pytest.raises(NotFound):
        store.get("a")
    store.delete("a")
    assert not root.exists()
    store.put("a", b"1")
    assert (root / "a").read_bytes() == b"1"


def test_nothing_hidden_is_left_behind(root: Path) -> None:
    store = DirectoryStore(root)
    store.put("a/b", b"1")
    store.put("c", b"2", if_absent=True)
    with store.multipart("d/e", part_size=4) as upload:
        upload.put_part(0, b"1")
        assert hidden(root) != []
        assert keys_of(store.list()) == ["a/b", "c"]
        assert keys_of(DirectoryStore(root.parent).list()) == ["root/a/b", "root/c"]
        assert [found.key for found in DirectoryStore(root.parent).open_uploads()] == ["root/d/e"]
    assert hidden(root) == []


def test_an_upload_is_dropped_from_the_store_above(root: Path) -> None:
    block = DirectoryStore(root).multipart("a", part_size=4)
    block.__enter__()
    above = DirectoryStore(root.parent)
    (found,) = above.open_uploads()
    above.abort_upload(found)
    assert hidden(root) == []
    with pytest.raises(StoreError, match="a: there is no such object"):
        block.__exit__(None, None, None)


def test_the_staging_folder_is_no_place_for_objects(root: Path) -> None:
    with pytest.raises(UsageError, match="holds objects on their way in"):
        DirectoryStore(root).put(f"a/{STAGING}/b", b"")
    for upload_id in ("../../etc", f"{STAGING}/..", "a/b", f"/{STAGING}/x"):
        with pytest.raises(UsageError, match="is no upload of this store"):
            DirectoryStore(root).abort_upload(OpenUpload("a", upload_id))


def test_no_key_leaves_through_a_symbolic_link(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root.mkdir()
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    store = DirectoryStore(root)
    for call in (
        lambda: store.get("folder/secret"),
        lambda: store.head("folder/secret"),
        lambda: store.put("folder/new", b""),
        lambda: store.delete("folder/secret"),
        lambda: list(store.list("folder/")),
        lambda: store.get("file"),
    ):
        with pytest.raises(Denied, match="is a symbolic link, and objects are not reached through links"):
            call()
    assert keys_of(store.list()) == []
    store.put("file", b"mine")  # takes the link's place and does not write through it
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"
    assert bytes(store.get("file")) == b"mine"


def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    DirectoryStore(tmp_path / "link").put("a", b"1")
    assert (root / "a").read_bytes() == b"1"


def test_special_files_are_no_objects(root: Path) -> None:
    root.mkdir()
    os.mkfifo(root / "pipe")
    store = DirectoryStore(root)
    with pytest.raises(NotFound, match="pipe: this is no regular file"):
        store.get("pipe")
    assert keys_of(store.list()) == []


def test_a_name_is_an_object_or_a_folder(root: Path) -> None:
    store = DirectoryStore(root)
    store.put("a", b"1")
    store.put("b/c", b"2")
    for key in ("a/x", "b"):
        with pytest.raises(UsageError, match="cannot hold an object and, below its name, further objects"):
            store.put(key, b"")
    assert bytes(store.get("a")) == b"1"
    assert hidden(root) == []


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="file is not a directory"):
        list(DirectoryStore(tmp_path / "file").list())


def test_a_root_that_cannot_be_made() -> None:
    """The kernel says ENOENT for it, which must not pass for an object that is not there."""
    store = DirectoryStore("/proc/no-such-place")
    for write in (lambda: store.put("a", b"1"), store.conditional_create):
        with pytest.raises(UsageError, match=r"the directory /proc/no-such-place cannot be made there; choose another place"):
            write()


def test_a_name_that_is_too_long(root: Path) -> None:
    with pytest.raises(UsageError, match=r"the file system cannot hold this name \(File name too long\)"):
        DirectoryStore(root).put("n" * 300, b"")
    assert not root.exists() or hidden(root) == []


def test_a_directory_without_a_missing_root(tmp_path: Path) -> None:
    with pytest.raises(BucketNotFound, match="unmounted does not exist; check the path and that its disk is mounted"):
        DirectoryStore(tmp_path / "unmounted", create=False).put("a", b"")


def test_a_full_disk_is_told_and_leaves_nothing(root: Path) -> None:
    """A limit on the size of files stands for the disk: the kernel refuses the write half-way, as it does on a full disk."""
    script = (
        "import resource, signal, sys\n"
        "from stagekit.errors import OutOfSpace\n"
        "from stagekit.store.directory import DirectoryStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "store = DirectoryStore(sys.argv[1])\n"
        "try:\n"
        "    store.put('folder/large', bytes(200_000))\n"
        "except OutOfSpace as error:\n"
        "    print(error)\n"
    )
    done = run_apart(script, str(root))
    assert "folder/large: the file is larger than the file system or the limit of this process allows" in done.stdout, done.stderr
    assert list(DirectoryStore(root).list()) == []
    assert hidden(root) == []


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, OutOfSpace, "the disk is full; free some space, nothing of this object was kept"),
        (errno.EDQUOT, OutOfSpace, "the quota is used up"),
        (errno.EACCES, Denied, "this user may not do that"),
        (errno.EROFS, Denied, "mounted read-only"),
        (errno.EIO, Unreachable, "does not answer properly"),
        (errno.EMFILE, StoreError, "Too many open files"),
    ],
)
def test_each_refusal_of_the_kernel_has_words(root: Path, number: int, kind: type[StoreError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught, DirectoryStore(root)._errors("writing", "a/b"):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind
    assert f"writing {root}/a/b: " in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_writers_and_deleters_in_one_folder_do_not_disturb_each_other(root: Path) -> None:
    store = DirectoryStore(root)

    def work(number: int) -> None:
        for turn in range(20):
            store.put(f"folder/{number}", str(turn).encode())
            assert bytes(store.get(f"folder/{number}")) == str(turn).encode()
            store.delete(f"folder/{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert list(root.iterdir()) == []
