"""Runs that cannot be where they are said to be, and spools that cannot be written: told in one sentence, with nothing written."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from stagekit.errors import Denied, LocationError, OutOfSpace, UploadFailed, UsageError
from stagekit.runs import Run
from stagekit.testing.faults import FaultStore

from ..made import make_dataset
from .conftest import fill

Make = Callable[..., Run]
WORDS = r"it is a data set, as it holds manifest\.json; give the run a URL of its own, such as memory://.*/runs/first$"


def save(run: Run, step: int = 1) -> None:
    with run.checkpoint(step=step) as directory:
        (directory / "model.bin").write_bytes(b"weights")


def test_a_data_set_is_no_place_for_a_run(make_run: Make, store: FaultStore, tmp_path: Path) -> None:
    make_dataset(store)
    before = [info.key for info in store.list()]
    run = make_run()
    source = fill(tmp_path / "out")

    def first() -> None:
        run.submit(source, step=1)
        run.drain()

    with pytest.raises(UsageError, match=WORDS):
        first()
    with pytest.raises(UsageError, match=WORDS):
        save(run, 2)
    with pytest.raises(UsageError, match=WORDS):
        run.close()
    assert [info.key for info in store.list()] == before


def test_a_restore_from_a_data_set_is_no_new_run(make_run: Make, store: FaultStore, tmp_path: Path) -> None:
    make_dataset(store)
    with pytest.raises(UsageError, match=WORDS):
        make_run().restore(tmp_path / "new", allow_fresh=True)


def test_what_a_killed_process_left_is_not_sent_into_a_data_set(make_run: Make, store: FaultStore) -> None:
    store.fail("list", Denied("no"), times=None)
    first = make_run(drain_s=0.1)
    with suppress(UploadFailed):  # when it is refused that soon
        save(first)
    with pytest.raises(UploadFailed):
        first.close()
    make_dataset(store)
    with pytest.raises(UsageError, match=WORDS):
        make_run().drain()


def test_the_look_is_taken_once_by_each_process(make_run: Make, store: FaultStore) -> None:
    run = make_run()
    for step in range(3):
        save(run, step)
        run.drain()
    assert [call.key for call in store.calls if call.operation == "head"].count("manifest.json") == 1


@pytest.mark.parametrize("below", ["sub", "checkpoints/000000000001", "logs/a/b"])
def test_a_new_run_is_in_no_other(tmp_path: Path, below: str) -> None:
    outer = Run(tmp_path / "runs" / "first", spool_dir=tmp_path / "spool")
    save(outer)
    outer.close()
    before = sorted((tmp_path / "runs").rglob("*"))
    words = rf"it lies inside the run {tmp_path}/runs/first, where no command would show it; .* such as {tmp_path}/runs/first-\w+$"
    with pytest.raises(UsageError, match=words):
        Run(tmp_path / "runs" / "first" / below).restore(tmp_path / "new", allow_fresh=True)
    inner = Run(tmp_path / "runs" / "first" / below, spool_dir=tmp_path / "spool")
    with suppress(UsageError):  # when it is found out that soon
        save(inner)
    with pytest.raises(UsageError, match=words):
        inner.close()
    assert sorted((tmp_path / "runs").rglob("*")) == before
    save(beside := Run(tmp_path / "runs" / "second", spool_dir=tmp_path / "spool"))
    beside.close()


def test_a_run_that_lies_in_another_since_long_goes_on(tmp_path: Path) -> None:
    for name in ("runs/first/sub", "runs/first", "runs/first/sub"):
        with Run(tmp_path / name, spool_dir=tmp_path / "spool") as run:
            save(run)


def test_none_is_no_place() -> None:
    with pytest.raises(LocationError, match="None is no location; give a directory or a URL such as s3://bucket/prefix"):
        Run(None)  # type: ignore[arg-type]  # as in Run(os.environ.get("RUN_URL"))


def test_a_home_that_cannot_be_written(make_run: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    spool = tmp_path / "file" / "spool"
    words = rf"saving to memory://.*{spool}, where .*cannot be written \(Not a directory\); set STAGEKIT_HOME, or give spool_dir="
    with pytest.raises(UsageError, match=words):
        save(make_run(spool_dir=spool))
    with pytest.raises(UsageError, match=words):
        make_run(spool_dir=spool).submit(fill(tmp_path / "out"), step=1)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_that_the_writer_names(make_run: Make, tmp_path: Path, error: Exception) -> None:
    words = r"saving step 7 of memory://.* to .*spool: the disk is full; free some space, or give spool_dir= on another disk"
    with pytest.raises(OutOfSpace, match=words), make_run().checkpoint(step=7):
        raise error
    assert list((tmp_path / "spool" / "incoming").iterdir()) == []


@pytest.mark.parametrize(("free", "kind"), [(0, OutOfSpace), (10**9, RuntimeError)])
def test_a_full_disk_that_the_writer_hides(make_run: Make, monkeypatch: pytest.MonkeyPatch, free: int, kind: type[Exception]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(kind), make_run().checkpoint(step=7):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 662")


def test_a_full_disk_met_when_the_save_is_recorded(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run._begin()
    monkeypatch.setattr(run._spool, "accept", full)
    with pytest.raises(OutOfSpace, match="the disk is full"):
        save(run)
