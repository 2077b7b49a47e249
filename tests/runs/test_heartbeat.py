"""The last sign of life of a training: whole at any moment, seldom enough to be told of every step, and worth nothing when unreadable."""

from __future__ import annotations

from pathlib import Path

from stagekit.processes import Process
from stagekit.runs.heartbeat import EVERY_S, Pulse, last_heartbeat
from stagekit.runs.home import known_runs, remember

URL = "s3://bucket/run"


def test_a_step_is_noted_every_few_seconds(tmp_path: Path) -> None:
    now = [0.0]
    pulse = Pulse(URL, home=tmp_path, clock=lambda: 1_700_000_000.0 + now[0], monotonic=lambda: now[0])
    assert last_heartbeat(URL, tmp_path) is None
    for step in range(1, 12):
        pulse.beat(step)
        now[0] += 1.0
    found = last_heartbeat(URL, tmp_path)
    assert found is not None
    assert (found.url, found.step, found.time_s, found.process) == (URL, 11, 1_700_000_010.0, Process.current())
    assert EVERY_S == 5.0
    pulse.beat(12)
    assert last_heartbeat(URL, tmp_path) == found, "5 s have not passed"
    pulse.last()
    ended = last_heartbeat(URL, tmp_path)
    assert ended is not None
    assert ended.step == 12


def test_a_note_that_is_damaged_or_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    Pulse(URL, home=tmp_path).beat(1)
    (note,) = tmp_path.glob("runs/*.heartbeat")
    note.write_text("{")
    assert last_heartbeat(URL, tmp_path) is None
    (tmp_path / "file").write_text("")
    Pulse(URL, home=tmp_path / "file").beat(1)
    assert last_heartbeat(URL, tmp_path / "file") is None


def test_what_is_known_of_a_run_grows(tmp_path: Path) -> None:
    remember(URL, None, tmp_path / "spool", working=tmp_path, datasets={"aa": "s3://bucket/one"}, home=tmp_path)
    (tmp_path / "second").mkdir()
    remember(URL, None, tmp_path / "spool", working=tmp_path / "second", datasets={"bb": "s3://bucket/two"}, home=tmp_path)
    Pulse(URL, home=tmp_path).beat(1)
    (known,) = known_runs(tmp_path)
    assert known.working == (tmp_path, tmp_path / "second")
    assert known.datasets == {"aa": "s3://bucket/one", "bb": "s3://bucket/two"}
    (tmp_path / "second").rmdir()
    remember(URL, None, tmp_path / "spool", home=tmp_path)
    assert known_runs(tmp_path)[0].working == (tmp_path, tmp_path / "second"), "it may have been moved"
