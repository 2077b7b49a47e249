"""The decisions of ``stagekit run`` apart from its processes."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from stagekit.cli import main
from stagekit.config import home_directory
from stagekit.errors import CheckpointError, ManifestError, OutOfSpace, UsageError
from stagekit.processes import Process
from stagekit.progress import Event, Message
from stagekit.runs import Run
from stagekit.runs.home import known_runs
from stagekit.runs.layout import Checkpoint, CheckpointManifest, CheckpointName, FileRecord
from stagekit.runs.sync import create
from stagekit.saves.find import Watch, look
from stagekit.store.directory import DirectoryStore
from stagekit.wrapping.collect import Collector, named
from stagekit.wrapping.note import Note, notes
from stagekit.wrapping.resuming import Start, place_of
from stagekit.wrapping.wrapper import Settings, overdue, run_command, spool_for

from ..made import make_checkpoint


def test_a_limit_and_a_silence_end_a_command() -> None:
    settings = Settings(watch=(), stall_s=1800, limit_s=7200)
    assert overdue(settings, 7199, 1799) is None
    assert overdue(settings, 7200, 0) == ("overtime", "the command has run for 2.0 h, and --max-hours allows no more")
    assert overdue(settings, 1800, 1800) == ("stalled", "the command has printed nothing and written nothing below --watch for 30 min")
    assert overdue(Settings(watch=()), 1e9, 1e9) is None


def test_watched_directories_have_names_of_their_own() -> None:
    assert named([Path("/a/out"), Path("/b/out"), Path("/c"), Path("/")]) == {
        "out": Path("/a/out"),
        "out-2": Path("/b/out"),
        "c": Path("/c"),
        "root": Path("/"),
    }


def test_saves_are_pinned_on_the_disk_that_they_are_on(tmp_path: Path) -> None:
    assert spool_for([tmp_path], tmp_path / "home" / "spool") == tmp_path / "home" / "spool"
    memory = Path("/dev/shm")
    assert memory.stat().st_dev != tmp_path.stat().st_dev
    assert spool_for([memory], tmp_path / "home" / "spool") == memory / ".stagekit-spool"
    assert spool_for([tmp_path], memory / "home" / "spool") == tmp_path / ".stagekit-spool"


def checkpoint(*paths: str, **identity: str | int) -> Checkpoint:
    files = tuple(FileRecord(path, 1, "0" * 64) for path in paths)
    return Checkpoint(CheckpointManifest(CheckpointName(1, 40, 1, "0123abcd"), files, identity=identity), "s3://b/run")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (checkpoint("model.bin", "trainer_state.json"), "/one/checkpoint-40"),
        (checkpoint("a/b.bin"), "/one/checkpoint-40"),
        (checkpoint("last.ckpt"), "/one/last.ckpt"),
        (checkpoint("last.ckpt", saved_as="version_0/last.ckpt", saved_in="two"), "/two/version_0/last.ckpt"),
        (checkpoint("x", saved_as="iter_40", saved_in="three"), "/one/iter_40"),
        (checkpoint("x", "y", saved_as="../../etc"), "/one/checkpoint-40"),
        (checkpoint("x", "y", saved_as="/etc"), "/one/checkpoint-40"),
    ],
)
def test_where_a_checkpoint_is_put_back(made: Checkpoint, expected: str) -> None:
    assert place_of(made, {"one": Path("/one"), "two": Path("/two")}) == Path(expected)


def test_what_the_command_is_told(tmp_path: Path) -> None:
    assert Start().variables == {"STAGEKIT_RESUME_DIR": "", "STAGEKIT_RESUME_FILE": ""}
    assert Start(tmp_path, 3).variables == {"STAGEKIT_RESUME_DIR": str(tmp_path), "STAGEKIT_RESUME_FILE": ""}
    file = tmp_path / "last.ckpt"
    assert Start(file, 3).variables == {"STAGEKIT_RESUME_DIR": str(tmp_path), "STAGEKIT_RESUME_FILE": str(file)}


def note(tmp_path: Path) -> Note:
    process = Process("host", "boot", "pid:[1]", 7, "1")
    return Note(
        "000001-0123abcd", "s3://b/run", None, {"out": tmp_path}, ("*.npz",), 30.0, 2, tmp_path / "logs", "python x.py", process, 25.0
    )


def test_a_note_comes_back_and_tells_whether_it_is_over(tmp_path: Path) -> None:
    first = note(tmp_path)
    held = first.hold()
    first.write()
    assert notes() == [first]
    assert not first.is_over()
    with pytest.raises(BlockingIOError):
        first.hold()
    os.close(held)
    assert first.is_over()
    (tmp_path / "logs").mkdir()
    first.remove()
    assert notes() == []
    assert not (tmp_path / "logs").exists()
    assert first.is_over()


def test_a_note_that_cannot_be_read_makes_teardown_unsure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note(tmp_path).write()
    (path,) = (home_directory() / "wrapped").glob("*.json")
    path.write_text("{")
    with pytest.raises(ManifestError, match=r"000001-0123abcd\.json is damaged"):
        notes()
    assert main(["teardown"]) == 4
    assert "the note of a stagekit run cannot be read" in capsys.readouterr().out


def test_what_cannot_be_meant_is_refused_before_anything_happens(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no command; put it behind two dashes"):
        run_command([], str(tmp_path / "run"), Settings(watch=("out",)))
    with pytest.raises(UsageError, match="nothing is watched"):
        run_command(["true"], str(tmp_path / "run"), Settings(watch=()))
    with pytest.raises(UsageError, match="--stall 0: the command would be ended at once"):
        run_command(["true"], str(tmp_path / "run"), Settings(watch=("out",), stall_s=0.0))
    with pytest.raises(UsageError, match="--stall needs to see what the command prints, and --no-logs leaves that to the terminal"):
        run_command(["true"], str(tmp_path / "run"), Settings(watch=("out",), stall_s=60.0, logs=False))
    for root, named_run in (
        ("s3://bucket", "s3://bucket/NAME"),
        ("s3://me@bucket/", "s3://me@bucket/NAME"),
        ("rclone:far:", "rclone:far:NAME"),
    ):
        sentence = (
            f"{root.rstrip('/')}: a whole bucket cannot be a run, as nothing else could lie beside it; give the run a name: {named_run}"
        )
        with pytest.raises(UsageError) as raised:
            run_command(["true"], root, Settings(watch=(str(tmp_path / "out"),)))
        assert str(raised.value) == sentence
        with pytest.raises(UsageError, match="a whole bucket cannot be a run"):
            Run(root)
    for everything in ("/", "~", str(Path.home().parent)):
        with pytest.raises(UsageError, match=r"--watch .*: that is all of /.*; name the directory that the command saves"):
            run_command(["true"], str(tmp_path / "run"), Settings(watch=(everything,)))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_would_hide_others_is_refused_and_so_is_a_space(tmp_path: Path) -> None:
    settings = Settings(watch=(str(tmp_path / "out"),))
    with pytest.raises(UsageError, match=r"--to '.*/runs/first ': it begins or ends with a space"):
        run_command(["true"], f"{tmp_path}/runs/first ", settings)
    make_checkpoint(DirectoryStore(tmp_path / "runs" / "first"), 1, {"a": b"x"})
    create(DirectoryStore(tmp_path / "runs" / "first"))
    with pytest.raises(UsageError) as raised:
        run_command(["true"], f"{tmp_path}/runs", settings)
    assert str(raised.value) == (
        f"--to {tmp_path}/runs: the run {tmp_path}/runs/first lies below it and would be seen by nobody; give this run a name of its own: "
        f"{tmp_path}/runs/NAME"
    )
    assert run_command(["true"], f"{tmp_path}/runs/second", settings).code == 0
    assert run_command(["true"], f"{tmp_path}/runs/second", settings).code == 0


def test_a_start_that_is_refused_leaves_teardown_nothing_to_wonder_about(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must"):
        run_command(["true"], str(tmp_path / "run"), Settings(watch=(str(tmp_path / "out"),), resume="must"))
    assert known_runs() == []


def test_a_bucket_without_its_scheme_is_told_to_be_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[Event] = []
    run_command(["true"], "my-bucket/run", Settings(watch=("out",)), on_event=told.append)
    assert [event.text for event in told if isinstance(event, Message) and "is the directory" in event.text] == [
        f"--to my-bucket/run is the directory {tmp_path}/my-bucket/run of this machine; a bucket is written s3://my-bucket/run"
    ]


def watching(run: Run, out: Path, told: list[Event], *, patterns: tuple[str, ...], quiet_s: float, **clocks: Any) -> Collector:
    """A collector for ``run`` of what is saved in ``out``, in words to ``told``, without logs."""
    return Collector(
        run,
        {"out": out},
        patterns=patterns,
        quiet_s=quiet_s,
        world_size=None,
        logs=None,
        printed=(),
        on_event=told.append,
        **clocks,
    )


def test_looking_takes_half_of_the_time_that_is_left_and_what_was_found_is_pinned(tmp_path: Path) -> None:
    for step in range(1, 9):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "out" / f"checkpoint-{step}" / "state.json").write_text("[]")
    left_s, told = math.inf, list[Event]()

    def ask() -> float:
        """SIGTERM has come, and each question takes a second."""
        nonlocal left_s
        left_s = max(0.0, left_s - 1)
        return left_s

    with Run(str(tmp_path / "run")) as run:
        collector = watching(run, tmp_path / "out", told, patterns=(), quiet_s=30, left_s=ask)
        left_s = 21
        collector.scan(still=True)
        pinned = collector.submitted
        assert 0 < pinned < 8
        assert collector.unsaved == {}
        (blind,) = collector.blind
        assert blind.startswith(f"the time after SIGTERM was over before all below {tmp_path}/out was looked at, from {tmp_path}/out/check")
        left_s = 3  # enough for a look at none, and for nothing else
        collector.scan(still=True)
        assert collector.submitted == pinned
        left_s = math.inf
        collector.scan(still=True)
        assert (collector.submitted, collector.blind, collector.unsaved) == (8, [], {})
        run.drain()
        assert len(run.checkpoints()) == 8


def test_saves_that_are_rotated_away_before_they_are_quiet_are_told_now_and_then(tmp_path: Path) -> None:
    out = tmp_path / "out"
    told: list[Event] = []
    with Run(str(tmp_path / "run")) as run:
        collector = watching(run, out, told, patterns=("*.npz",), quiet_s=30, monotonic=lambda: 0)
        out.mkdir()
        for step in range(1, 6):
            (out / f"step-{step}.npz").write_bytes(b"x")
            collector.scan()
            (out / f"step-{step}.npz").unlink()
        collector.scan()
        collector.scan(still=True)
    texts = [event.text for event in told if isinstance(event, Message)]
    assert texts[0] == (
        f"{out}/step-1.npz was removed or replaced before it had been seen quiet for 30 s, and was not sent; "
        "a shorter --quiet, or a trainer that keeps more, brings them into the bucket"
    )
    assert "step-2" in texts[1]
    for number, count in ((1, "(2 such saves so far)"), (2, "(4 such saves so far)"), (3, "(5 such saves in all)")):
        assert count in texts[number]
    assert len(texts) == 4


def test_a_save_that_is_written_over_in_place_counts_as_replaced(tmp_path: Path) -> None:
    end = b"PK\x05\x06" + bytes(18)
    watch = Watch(30.0, lambda: 0.0)
    missed = 0
    # Its end, twice; then one that grows, and has no end yet; then it is cut short, and grows again.
    for content in (b"PK" + end, b"PK second" + end, b"PK", b"PK 3", b"PK 3, longer", b"PK 4", b"PK 4, longer"):
        (tmp_path / "last.pt").write_bytes(content)
        watch.finished([look(tmp_path, ["*.pt"])])
        missed += len(watch.missed)
    assert missed == 3, "the first two, and the one that was cut short"


def test_a_save_that_never_gets_quiet_is_told_once(tmp_path: Path) -> None:
    told: list[Event] = []
    now_s = 0.0
    with Run(str(tmp_path / "run")) as run:
        collector = watching(run, tmp_path, told, patterns=("*.npz",), quiet_s=30, monotonic=lambda: now_s)
        for size in range(1, 40):
            (tmp_path / "last.npz").write_bytes(bytes(size))
            now_s = 20.0 * size
            collector.scan()
    (text,) = (event.text for event in told if isinstance(event, Message))
    assert text == (
        f"{tmp_path}/last.npz keeps changing and has not been quiet for 30 s yet, so it is not sent; "
        "save into a new file and rename it, give each step a name of its own, or a shorter --quiet"
    )


def test_a_save_that_stands_still_and_lacks_what_the_one_before_has_is_waited_for(tmp_path: Path) -> None:
    told: list[Event] = []
    now_s = 0.0
    with Run(str(tmp_path / "run")) as run:
        collector = watching(run, tmp_path / "out", told, patterns=("ck-*",), quiet_s=30, monotonic=lambda: now_s)

        def look(step: int, *names: str) -> int:
            nonlocal now_s
            for name in names:
                path = tmp_path / "out" / f"ck-{step}" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"x")
            for _ in range(3):
                collector.scan()
                now_s += 31
            return collector.submitted

        assert look(1, "a.raw", "b.raw") == 1
        assert look(2, "a.raw") == 1, "its trainer is slow, or was killed behind a shell"
        assert look(3, "a.raw", "b.raw") == 3, "2 was all there was to it"
        assert look(4, "a.raw") == 3
        assert look(4, "b.raw") == 4
        assert look(5, "0.raw", "1.raw", "a.raw", "b.raw") == 5
        assert look(6, "a.raw", "b.raw", "0.raw") == 5, "names that differ in numbers only are counted"
        assert look(6, "1.raw") == 6
    texts = [event.text for event in told if isinstance(event, Message) and event.level == "warning"]
    assert [text.partition(" lacks b.raw, which the save before it has")[0] for text in texts] == [
        f"{tmp_path}/out/ck-2",
        f"{tmp_path}/out/ck-4",
        f"{tmp_path}/out/ck-6 lacks 1.raw, which the save before it has, so it is waited for; it is sent once a later one is begun",
    ]


def test_a_last_save_that_is_shorter_costs_no_older_one(tmp_path: Path) -> None:
    told: list[Event] = []
    with Run(str(tmp_path / "run"), keep_last=1) as run:
        collector = watching(run, tmp_path / "out", told, patterns=("ck-*",), quiet_s=0, monotonic=lambda: 0.0)
        for step, content in ((1, b"weights"), (2, b"weights"), (3, b"wei")):
            (tmp_path / "out" / f"ck-{step}").mkdir(parents=True)
            (tmp_path / "out" / f"ck-{step}" / "a.raw").write_bytes(content)
            collector.scan(still=step == 3)
            run.drain()
    assert [one.step for one in run.checkpoints()] == [3, 2]
    assert any("ck-3, a.raw, is shorter than in the save before" in event.text for event in told if isinstance(event, Message))


def test_a_save_that_is_gone_before_there_is_room_to_pin_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []

    def full(*_: object, **__: object) -> None:
        raise OutOfSpace("the disk is full")

    with Run(str(tmp_path / "run")) as run:
        collector = watching(run, tmp_path / "out", told, patterns=("*.npz",), quiet_s=0, monotonic=lambda: 0.0)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "step-1.npz").write_bytes(b"x")
        monkeypatch.setattr(run, "submit", full)
        collector.scan()
        (tmp_path / "out" / "step-1.npz").unlink()
        collector.scan()
        collector.scan()
    texts = [event.text for event in told if isinstance(event, Message)]
    assert texts[1:] == [f"{tmp_path}/out/step-1.npz was removed before it could be pinned, and is in no bucket: the disk is full"]


def test_the_same_step_of_two_generations_is_told_apart_by_content(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    make_checkpoint(DirectoryStore(url), 5, {"w.npz": b"old"})
    newer = make_checkpoint(DirectoryStore(url), 5, {"w.npz": b"new"}, generation=2)
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    with Run(url) as run:
        collector = Collector(
            run, {"out": tmp_path / "out"}, patterns=(), quiet_s=0, world_size=None, logs=None, printed=(), on_event=lambda _: None
        )
        for content, here in ((b"old", False), (b"new", True)):
            (tmp_path / "out" / "checkpoint-5" / "w.npz").write_bytes(content)
            collector.before(run.checkpoints())
            newest = run.latest()
            assert newest is not None
            assert newest.name == newer
            assert (collector.is_here(newest) is not None) is here


@pytest.mark.parametrize(("sessions", "left"), [((), []), (("0123abcd",), []), (("fedcba98",), ["checkpoint-6", "checkpoint-7"])])
def test_what_lies_here_is_not_ahead_of_what_another_machine_has_saved_since(
    tmp_path: Path, sessions: tuple[str, ...], left: list[str]
) -> None:
    url = str(tmp_path / "run")
    newest = make_checkpoint(DirectoryStore(url), 5, {"w.npz": b"of the other machine"}, generation=2)
    for step in (4, 6, 7):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "out" / f"checkpoint-{step}" / "w.npz").write_bytes(b"of this one")
    with Run(url) as run:
        collector = Collector(
            run, {"out": tmp_path / "out"}, patterns=(), quiet_s=0, world_size=None, logs=None, printed=(), on_event=lambda _: None
        )
        known = [newest.owner if session == "0123abcd" else session for session in sessions]
        fresh, ahead = collector.before(run.checkpoints(), sessions=known)
        assert [found.name for found in collector.abandoned] == left
        assert [found.name for found in ahead] == ([] if left else ["checkpoint-6", "checkpoint-7"])
        assert [found.name for found in fresh] == ([] if left else ["checkpoint-6", "checkpoint-7"])
        collector.scan(still=True)
        assert collector.submitted == (0 if left else 2)


def test_a_finished_save_that_cannot_be_pinned_once_nobody_writes_is_told(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.npz").write_bytes(b"x")
    told: list[Event] = []
    with Run(str(tmp_path / "run")) as run:
        spool, _ = run._begin()
        spool.over = lambda: True
        collector = watching(run, tmp_path / "out", told, patterns=("*.npz",), quiet_s=0)
        collector.scan()
        assert collector.unsaved == {}, "it may be being rotated away"
        collector.scan(still=True)
        assert list(collector.unsaved) == [tmp_path / "out" / "a.npz"]
        assert "the time for it was over; it stays where it is" in collector.unsaved[tmp_path / "out" / "a.npz"]
