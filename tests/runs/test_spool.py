"""Pinned copies: nothing a trainer does to its own files afterwards harms them, or it is noticed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from stagekit.config import StoreConfig
from stagekit.errors import CheckpointError, OutOfSpace, SourceError, UsageError
from stagekit.runs import spool as spools
from stagekit.runs.layout import CheckpointName
from stagekit.runs.spool import Entry, Spool, is_alive, pending

from .conftest import fill

BIG = os.urandom(3 * 2**20)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


def entry(step: int = 5, run: str = "s3://b/run") -> Entry:
    return Entry(
        run=run, store=StoreConfig(endpoint_url="http://localhost:1"), step=step, counter=1, metrics={"loss": float("nan")}, epoch=2
    )


def content(pinned: Entry) -> dict[str, bytes]:
    return {file.path: pinned.file_path(file).read_bytes() for file in pinned.files}


def test_making_a_spool_touches_nothing(tmp_path: Path, spool: Spool) -> None:
    assert list(tmp_path.iterdir()) == []
    assert pending(tmp_path / "spool") == []
    assert spool.adopt("s3://b/run") == []
    assert list(tmp_path.iterdir()) == []


def test_rmtree_rotation_and_renames_after_the_pin_do_no_harm(tmp_path: Path, spool: Spool) -> None:
    source = fill(tmp_path / "out", BIG)
    pinned = spool.pin(source, entry())
    shutil.rmtree(source)
    fill(source, b"the next step's weights")
    assert content(pinned) == {"model.bin": BIG, "sub/config.json": b"{}"}
    for file in pinned.files:
        pinned.check(file)


@pytest.mark.usefixtures("no_reflinks")
def test_large_files_take_no_space_and_small_ones_cannot_be_rewritten(tmp_path: Path, spool: Spool) -> None:
    source = fill(tmp_path / "out", BIG)
    pinned = spool.pin(source, entry())
    model, config = pinned.files
    assert pinned.file_path(model).stat().st_nlink == 2
    assert pinned.file_path(config).stat().st_nlink == 1
    (source / "sub" / "config.json").write_bytes(b"[]")
    pinned.check(config)
    assert content(pinned)["sub/config.json"] == b"{}"


@pytest.mark.usefixtures("no_reflinks")
def test_a_rewrite_in_place_is_noticed_and_the_file_is_copied_from_then_on(tmp_path: Path, spool: Spool) -> None:
    source = fill(tmp_path / "out", BIG)
    first = spool.pin(source, entry(1))
    with (source / "model.bin").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(SourceError, match=r"step 1: .*model\.bin was rewritten in place before it had been sent"):
        first.check(first.files[0])
    second = spool.pin(source, entry(2))
    with (source / "model.bin").open("r+b") as file:
        file.write(b"y")
    second.check(second.files[0])
    assert content(second)["model.bin"] == b"x" + BIG[1:]
    assert second.file_path(second.files[0]).stat().st_nlink == 1


@pytest.mark.usefixtures("no_reflinks")
def test_a_pin_does_not_end_in_the_tick_of_the_last_write(tmp_path: Path) -> None:
    source = fill(tmp_path / "out", BIG)
    now_ns = (source / "model.bin").stat().st_mtime_ns + 1
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        waits.append(seconds)
        now_ns += int(seconds * 1e9)

    spool = Spool(tmp_path / "spool", sleep=sleep, now_ns=lambda: now_ns)
    spool.pin(source, entry())
    assert len(waits) == 1, "a later write in that tick would leave the file's time as it is"
    spool.pin(source, entry(2))
    assert len(waits) == 1, "the tick is over"


@pytest.mark.usefixtures("no_reflinks")
def test_an_inode_number_that_went_to_a_new_file_is_linked_again(tmp_path: Path, spool: Spool) -> None:
    source = fill(tmp_path / "out", BIG)
    first = spool.pin(source, entry(1))
    spool.remove(first)
    with (source / "model.bin").open("r+b") as file:
        file.write(b"x")  # nothing of it is pending any more
    second = spool.pin(source, entry(2))
    assert second.file_path(second.files[0]).stat().st_nlink == 2


def test_a_pinned_copy_that_vanished_is_told(tmp_path: Path, spool: Spool) -> None:
    pinned = spool.pin(fill(tmp_path / "out"), entry())
    pinned.file_path(pinned.files[0]).unlink()
    with pytest.raises(SourceError, match="is gone"):
        pinned.check(pinned.files[0])


def test_a_single_file_links_and_links_to_folders(tmp_path: Path, spool: Spool) -> None:
    (tmp_path / "epoch3.ckpt").write_bytes(b"three")
    assert content(spool.pin(tmp_path / "epoch3.ckpt", entry())) == {"epoch3.ckpt": b"three"}
    source = fill(tmp_path / "out")
    (source / "last.ckpt").symlink_to(tmp_path / "epoch3.ckpt")
    (source / "again").symlink_to(source / "sub", target_is_directory=True)
    (source / "more").symlink_to(source / "sub", target_is_directory=True)
    pinned = content(spool.pin(source, entry()))
    assert pinned["last.ckpt"] == b"three"
    assert pinned["again/config.json"] == pinned["more/config.json"] == b"{}"


def test_what_cannot_be_saved_is_refused_by_name_and_leaves_nothing(tmp_path: Path, spool: Spool) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="holds no file"):
        spool.pin(empty, entry())
    with pytest.raises(UsageError, match="neither a directory nor a file"):
        spool.pin(tmp_path / "missing", entry())
    circle = fill(tmp_path / "circle")
    (circle / "sub" / "up").symlink_to(circle, target_is_directory=True)
    with pytest.raises(UsageError, match="a folder it lies in"):
        spool.pin(circle, entry())
    pipe = fill(tmp_path / "pipe")
    os.mkfifo(pipe / "fifo")
    with pytest.raises(UsageError, match="fifo is no regular file"):
        spool.pin(pipe, entry())
    dangling = fill(tmp_path / "dangling")
    (dangling / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SourceError, match="link: No such file"):
        spool.pin(dangling, entry())
    cases = fill(tmp_path / "cases")
    (cases / "MODEL.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"differ in upper and lower case only.*rename it"):
        spool.pin(cases, entry())
    assert pending(spool.directory) == []
    assert not any((spool.directory / "incoming").glob("*")) if (spool.directory / "incoming").exists() else True


def test_what_is_not_what_was_found_complete_is_not_pinned(tmp_path: Path, spool: Spool) -> None:
    source = fill(tmp_path / "out")
    found = {"model.bin": 7, "sub/config.json": 2}
    assert len(spool.pin(source, entry(), holding=found).files) == 2
    (source / "sub" / "config.json").unlink()  # its trainer rotates it away
    with pytest.raises(SourceError, match=r"step 5: .*out changed after it was found complete, so it is not saved"):
        spool.pin(source, entry(), holding=found)
    assert len(list(spool.directory.glob("entries/*"))) == 1
    assert list(spool.directory.glob("incoming/*")) == []


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, spool: Spool) -> None:
    def full() -> bool:
        raise OSError(28, "No space left on device")

    spool.over = full
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere,
        pytest.raises(OutOfSpace, match=r"free some, or .*--spool\)\. Pinning takes next to none where the spool is on the file system"),
    ):
        spool.pin(fill(Path(elsewhere) / "out"), entry())
    assert pending(spool.directory) == []
    assert not any((spool.directory / "incoming").glob("*"))


@pytest.mark.usefixtures("no_reflinks")
def test_a_full_disk_has_room_for_links_to_small_files(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        spool = Spool(disk / "spool")
        source = disk / "out"
        source.mkdir()
        (source / "weights.bin").write_bytes(bytes(900_000))
        pinned = spool.pin(source, entry(1))
        assert pinned.file_path(pinned.files[0]).stat().st_nlink == 2
        shutil.rmtree(source)
        assert content(pinned) == {"weights.bin": bytes(900_000)}
        source.mkdir()
        (source / "more.bin").write_bytes(bytes(40_000))
        with contextlib.suppress(OSError), (disk / "rest").open("wb", buffering=0) as rest:
            while True:
                rest.write(bytes(4096))
        words = r"no space in .*spool to pin .*out; free some, or give another disk \(spool_dir=, --spool\)$"
        with pytest.raises(OutOfSpace, match=words):
            spool.pin(source, entry(2))
        assert [one.step for one in pending(spool.directory)] == [1]
        spool.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_file_that_is_being_written_is_refused(tmp_path: Path, spool: Spool) -> None:
    source = fill(tmp_path / "out")
    pieces = iter((b"more", b""))

    def write() -> bool:
        with (source / "model.bin").open("ab") as file:
            file.write(next(pieces, b""))
        return False

    spool.over = write
    with pytest.raises(SourceError, match="changed while it was copied"):
        spool.pin(source, entry())
    assert pending(spool.directory) == []


def test_a_copy_for_which_there_is_no_time_is_given_up_between_its_pieces(tmp_path: Path, spool: Spool) -> None:
    pieces = iter((False, True))
    spool.over = lambda: next(pieces)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        with pytest.raises(
            SourceError, match=r"model\.bin was not copied to the end, since the time for it was over; it stays where it is"
        ):
            spool.pin(fill(Path(other) / "out", bytes(20 * 2**20)), entry())
    assert pending(spool.directory) == []
    assert not any((spool.directory / "incoming").glob("*"))


def test_a_record_comes_back_as_it_was(tmp_path: Path, spool: Spool) -> None:
    pinned = spool.pin(fill(tmp_path / "out"), entry())
    pinned.name = CheckpointName(3, 5, 1, spool.session)
    pinned.files[0].sha256 = "ab" * 32
    pinned.error = "no"
    pinned.best = ("loss", "min")
    spool.save(pinned)
    [read] = pending(spool.directory)
    assert read.to_bytes() == pinned.to_bytes()
    assert read.store == StoreConfig(endpoint_url="http://localhost:1")
    assert read.origin == read.session == spool.session


def test_a_record_that_cannot_be_read_is_never_passed_over(tmp_path: Path, spool: Spool) -> None:
    pinned = spool.pin(fill(tmp_path / "out"), entry())
    (pinned.directory / "record.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"cannot be read.*Look at its files/ before you remove it"):
        pending(spool.directory)


def test_only_the_saves_of_dead_processes_are_adopted(tmp_path: Path, spool: Spool) -> None:
    pinned = spool.pin(fill(tmp_path / "out"), entry())
    other = Spool(spool.directory)
    assert is_alive(pinned)
    assert other.adopt("s3://b/run") == []
    spool.close()
    assert not is_alive(pinned)
    assert other.adopt("s3://b/other") == []
    [adopted] = other.adopt("s3://b/run")
    assert adopted.session == other.session
    assert adopted.origin == pinned.origin
    assert Spool(spool.directory).adopt("s3://b/run") == []
    other.close()


CHILD = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from stagekit.runs.spool import Entry, Spool
    spool = Spool(Path(sys.argv[1]))
    entry = Entry(run="s3://b/run", store=None, step=7, counter=1)
    spool.pin(Path(sys.argv[2]), entry)
    spool.reserve().joinpath("half.bin").write_bytes(b"never finished")
    print("pinned", flush=True)
    sys.stdin.read()
    os._exit(9)
    """
)


def test_a_dead_process_leaves_whole_entries_and_its_rubbish_is_removed(tmp_path: Path) -> None:
    source = fill(tmp_path / "out")
    directory = tmp_path / "spool"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory), str(source)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "pinned\n"
    own = Spool(directory)
    assert is_alive(pending(directory)[0])
    assert own.adopt("s3://b/run") == []
    assert list(directory.glob("incoming/*"))
    child.kill()
    child.communicate()
    [adopted] = own.adopt("s3://b/run")
    assert content(adopted) == {"model.bin": b"weights", "sub/config.json": b"{}"}
    assert not list(directory.glob("incoming/*"))
    own.remove(adopted)
    own.close()
    assert not [path for path in directory.rglob("*") if path.is_file()]


def test_a_forked_child_does_not_drop_its_parents_lock(tmp_path: Path, spool: Spool) -> None:
    pinned = spool.pin(fill(tmp_path / "out"), entry())
    child = os.fork()
    if child == 0:
        os._exit(0 if is_alive(pinned) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    code = "import sys; from stagekit.runs import spool; sys.exit(not spool.is_alive(spool.pending(spool.Path(sys.argv[1]))[0]))"
    assert subprocess.run([sys.executable, "-c", code, str(spool.directory)], check=False).returncode == 0


def test_the_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEKIT_HOME", str(tmp_path / "state"))
    assert spools.default_dir() == tmp_path / "state" / "spool"
    monkeypatch.delenv("STAGEKIT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert spools.default_dir() == tmp_path / ".local" / "state" / "stagekit" / "spool"
