"""Who holds a file, and what becomes of it when the holder goes or the file is replaced (``stagekit.locks``)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from stagekit.locks import held, hold, is_at, is_held


def test_it_is_held_by_one_and_seen_by_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        is_held(path)
    with held(path, os.O_RDWR | os.O_CREAT) as descriptor:
        assert is_held(path)
        assert is_at(descriptor, path)
        with pytest.raises(BlockingIOError):
            hold(path)
    assert not is_held(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_directory_is_held_as_it_is_and_shared_locks_stand_beside_each_other(tmp_path: Path) -> None:
    with held(tmp_path, os.O_DIRECTORY, shared=True), held(tmp_path, shared=True):
        assert not is_held(tmp_path)  # nobody has it for itself
        with pytest.raises(BlockingIOError):
            hold(tmp_path)


def test_a_lock_is_a_forked_childs_as_well_and_gone_with_the_last_of_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = hold(path, os.O_RDWR | os.O_CREAT)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(descriptor)
    assert is_held(path)
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)
    assert not is_held(path)


@pytest.mark.parametrize("again", [True, False])
def test_what_was_removed_while_it_was_waited_for_is_opened_anew_or_missing(tmp_path: Path, again: bool) -> None:
    path = tmp_path / "file"
    first = hold(path, os.O_RDWR | os.O_CREAT)
    found: list[int | OSError] = []

    def wait() -> None:
        try:
            found.append(hold(path, os.O_RDWR | (os.O_CREAT if again else 0), wait=True))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    deadline = time.monotonic() + 60
    while sum(os.path.realpath(one) == str(path) for one in Path("/proc/self/fd").iterdir()) < 2:  # it has opened what is removed now
        assert time.monotonic() < deadline
    path.unlink()
    os.close(first)
    thread.join(60)
    [one] = found
    if again:
        assert isinstance(one, int)
        assert is_at(one, path)
        os.close(one)
    else:
        assert isinstance(one, FileNotFoundError)
