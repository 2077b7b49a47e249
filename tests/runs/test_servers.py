"""One run through its whole life on each real server: saved, taken over, pruned, damaged, restored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagekit.errors import BucketNotFound, Fenced, UploadFailed
from stagekit.progress import Event, Message
from stagekit.runs import Run
from stagekit.store import open_store

from ..conftest import S3Place
from .conftest import fill


def test_the_life_of_a_run(any_s3: S3Place, tmp_path: Path) -> None:
    url = f"{any_s3.url}/runs/first"
    events: list[Event] = []

    def run(machine: str, **options: object) -> Run:
        return Run(url, store=any_s3.config, spool_dir=tmp_path / machine, on_event=events.append, **options)  # type: ignore[arg-type]

    assert run("one").restore(tmp_path / "nothing") is None
    first = run("one", keep_last=2)
    large = os.urandom(20 * 2**20)  # two parts
    for step in (1, 2, 3):
        first.submit(fill(tmp_path / f"out-{step}", large if step == 3 else b"%d" % step), step=step, metrics={"loss": 1 / step})
        first.drain()
    assert [one.step for one in first.checkpoints()] == [3, 2]

    second = run("two")
    found = second.restore(tmp_path / "restored")
    assert found is not None
    assert (tmp_path / "restored" / "model.bin").read_bytes() == large
    second.submit(fill(tmp_path / "out-4"), step=4)
    second.close()
    assert any(isinstance(event, Message) and "did not say that it has finished" in event.text for event in events)
    late = first.submit(fill(tmp_path / "out-5"), step=5)
    with pytest.raises(UploadFailed):
        first.drain()  # which returns once it is refused
    with pytest.raises(UploadFailed, match=r"step 5 is not in .*taken over by"):
        first.close()
    assert isinstance(late.error, Fenced)

    store = open_store(url, any_s3.config)
    newest = run("three").latest()
    assert newest is not None
    assert newest.step == 4
    store.delete(newest.name.file_key("model.bin"))
    again = run("three").restore(tmp_path / "older")
    assert again is not None
    assert again.step == 3
    assert (tmp_path / "older" / "model.bin").read_bytes() == large


def test_a_bucket_that_is_not_there_is_no_new_run(any_s3: S3Place, tmp_path: Path) -> None:
    run = Run(f"{any_s3.url}-missing/runs/first", store=any_s3.config, spool_dir=tmp_path / "spool")
    with pytest.raises(BucketNotFound):
        run.restore(tmp_path / "new")
    with pytest.raises(BucketNotFound):
        run.latest()
