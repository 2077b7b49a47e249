"""A training that asks about itself: its own saves are waited for, its run stays open, and a store that is down holds it up for seconds."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest

from stagekit.config import StoreConfig
from stagekit.errors import Denied, Unreachable, UploadFailed
from stagekit.runs import Run
from stagekit.runs.sync import SyncSettings
from stagekit.store.directory import DirectoryStore
from stagekit.testing.faults import FaultStore
from stagekit.verdict import teardown

NEVER = SyncSettings(retry_after_s=lambda failures: 3600.0)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"model")
    return folder


def wait_for_an_error(run: Run) -> None:
    deadline = time.monotonic() + 60
    while not run.status().errors:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_this_process_has_pending_is_waited_for_and_its_run_stays_open(out: Path, tmp_path: Path) -> None:
    store = FaultStore(DirectoryStore(str(tmp_path / "bucket")))
    store.fail("put", Unreachable("no answer"), "checkpoints/*", times=1)
    with Run(store, settings=NEVER, on_event=lambda event: None) as run:
        run.submit(out, step=1)
        wait_for_an_error(run)
        asked = teardown(durable=[tmp_path / "bucket"], check=True)
        assert asked.answer == "NO", "a check only looks"
        assert [finding.row for finding in asked.findings if finding.weight == "NO"] == ["in flight", "steps", "file"]
        assert run.status().pending == (1,)
        assert teardown(durable=[tmp_path / "bucket"]).answer == "YES"
        assert run.status().synced
        (out / "model.bin").write_bytes(b"better")
        run.submit(out, step=2)
        assert teardown(durable=[tmp_path / "bucket"]).answer == "YES"
    assert [one.step for one in run.checkpoints()] == [2, 1]


def test_what_is_refused_is_told_and_holds_nobody_up(out: Path, tmp_path: Path) -> None:
    store = FaultStore(DirectoryStore(str(tmp_path / "bucket")))
    store.fail("put", Denied("writing is forbidden"), "checkpoints/*", times=None)
    run = Run(store, settings=NEVER, drain_s=0, on_event=lambda event: None)
    run.submit(out, step=1)
    verdict = teardown(durable=[tmp_path / "bucket"])
    assert verdict.answer == "NO"
    (told,) = [finding for finding in verdict.findings if finding.row == "in flight"]
    assert "its last try failed: writing is forbidden" in told.what
    with pytest.raises(UploadFailed):
        run.close()


def test_a_store_that_is_down_is_told_within_ten_seconds(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = StoreConfig(endpoint_url=f"http://127.0.0.1:{port}")
    runs = [Run(f"s3://bucket/{name}", store=config, drain_s=0, settings=NEVER, on_event=lambda event: None) for name in ("a", "b")]
    for run in runs:
        run.submit(out, step=1)
    began_s = time.monotonic()
    verdict = teardown()
    assert time.monotonic() - began_s < 10.0
    assert verdict.answer == "NO", "what is pending is certain, whatever the store says"
    assert [finding.row for finding in verdict.findings if finding.weight == "NO"] == ["in flight"] * 2
    assert [finding.row for finding in verdict.findings if finding.weight == "CANNOT TELL"].count("bucket") == 2
    for run in runs:
        with contextlib.suppress(UploadFailed):
            run.close()


def test_steps_that_this_process_did_not_save_would_be_lost(out: Path, tmp_path: Path) -> None:
    with Run(str(tmp_path / "bucket"), on_event=lambda event: None) as run:
        run.submit(out, step=100)
        run.heartbeat(130)
        verdict = teardown(durable=[tmp_path / "bucket"])
        assert verdict.answer == "NO"
        (told,) = [finding for finding in verdict.findings if finding.weight == "NO"]
        assert (told.row, "you lose 30 steps" in told.what) == ("steps", True)
        run.submit(out, step=130)
        assert teardown(durable=[tmp_path / "bucket"]).answer == "YES"
