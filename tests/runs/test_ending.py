"""How a process ends with saves pending: every ordinary way drains, and none of them ends with 0 when something stayed behind."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from stagekit.runs import catalog
from stagekit.runs.ending import Termination
from stagekit.runs.spool import pending
from stagekit.store.directory import DirectoryStore

ROOT = Path(__file__).parents[2]
BEFORE = """
    import logging, os, signal, sys, threading, time
    from pathlib import Path
    from stagekit.errors import Denied
    from stagekit.runs import Run
    from stagekit.store.directory import DirectoryStore
    from stagekit.testing.faults import FaultStore

    store = FaultStore(DirectoryStore(sys.argv[1]))
    opened = threading.Event()
    run = Run(store, drain_s=30)

    def slowly(call):
        time.sleep(0.2)

    def save(step):
        with run.checkpoint(step=step) as directory:
            (directory / "model.bin").write_bytes(b"weights")
"""


def start(tmp_path: Path, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BEFORE) + textwrap.dedent(code), str(tmp_path / "run")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(tmp_path: Path, code: str) -> tuple[int, str, str]:
    process = start(tmp_path, code)
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


def steps(tmp_path: Path) -> list[int]:
    return [one.step for one in catalog.read_all(DirectoryStore(tmp_path / "run")).checkpoints]


SLOW = 'store.act("put", slowly, "*/files/*", times=None)\n'
REFUSED = 'store.fail("put", Denied("uploading: not allowed"), "*/files/*", times=None)\n'


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("pass", 0, ""),
        ("raise RuntimeError('out of memory')", 1, "RuntimeError: out of memory"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('stopped')", 1, "stopped"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_every_ordinary_end_drains_and_keeps_its_code(tmp_path: Path, end: str, code: int, words: str) -> None:
    returned, _, errors = ended(tmp_path, SLOW + "save(1); save(2)\n" + end)
    assert returned == code, errors
    assert words in errors
    assert "not in" in errors
    assert "yet (14 B); sending for at most" in errors
    assert "for at most 30 s, ctrl-C leaves at once" in errors
    assert steps(tmp_path) == [2, 1]
    assert pending() == []


@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 1), ("raise RuntimeError('x')", 1), ("sys.exit(0)", 1), ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", 130)],
)
def test_no_end_is_a_success_when_something_stayed_behind(tmp_path: Path, end: str, code: int) -> None:
    returned, out, errors = ended(tmp_path, REFUSED + "import atexit\natexit.register(print, 'handler')\nsave(1)\n" + end)
    assert returned == code, errors
    assert "stagekit: step 1 is not in" in errors
    assert "local copies are kept in" in errors
    assert "uploading: not allowed" in errors
    assert out == "handler\n", "the program's own exit handlers run, once"
    assert [entry.step for entry in pending()] == [1]


def test_a_second_ctrl_c_leaves_at_once_and_lists_what_is_unsynced(tmp_path: Path) -> None:
    hang = 'store.act("put", lambda call: threading.Event().wait(), "*/files/*", times=None)\n'
    process = start(tmp_path, hang + "save(7)\nsys.stdout.write('saved\\n'); sys.stdout.flush()\ntime.sleep(60)")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "saved\n"
    process.send_signal(signal.SIGINT)
    seen = ""
    while "ctrl-C leaves at once" not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, seen + errors
    assert "interrupted: step 7 is not in" in errors
    assert [entry.step for entry in pending()] == [7]


def test_after_a_hard_exit_the_next_start_finishes_and_says_so(tmp_path: Path) -> None:
    returned, _, _ = ended(tmp_path, 'store.act("put", lambda call: threading.Event().wait(), "*/files/*")\nsave(1)\nos._exit(9)')
    assert returned == 9
    assert steps(tmp_path) == []
    returned, _, errors = ended(tmp_path, "run.drain()")
    assert returned == 0
    assert "the last process here ended before step 1 was in" in errors
    assert steps(tmp_path) == [1]


def test_a_drain_at_exit_needs_no_new_thread(tmp_path: Path) -> None:
    """From Python 3.12 on none can be started while the interpreter ends; here the same is brought about on any version."""
    code = """
        import atexit
        released = threading.Event()
        store.act("put", lambda call: released.wait(30), "run.json")

        def no_more_threads():  # runs before the drain, which was registered earlier
            def refuse(*_):
                raise RuntimeError("can't create new thread at interpreter shutdown")
            threading.Thread.start = refuse
            released.set()

        with run.checkpoint(step=1) as directory:
            for number in range(3):
                (directory / f"{number}.bin").write_bytes(b"small")
            (directory / "model.bin").write_bytes(bytes(40 * 2**20))  # three parts
        atexit.register(no_more_threads)
    """
    returned, _, errors = ended(tmp_path, textwrap.dedent(code))
    assert returned == 0, errors
    assert steps(tmp_path) == [1]
    assert pending() == []


@pytest.mark.parametrize("end", ["run.close()", "pass", "raise RuntimeError('out of memory')", "sys.exit(3)"])
def test_sigterm_while_the_end_is_draining_sends_the_newest_first_and_leaves_in_time(tmp_path: Path, end: str) -> None:
    code = """
        run.grace_s = 8
        store.act("put", lambda call: opened.set() or time.sleep(2), "*/000000000001-*/files/*")
        store.act("put", lambda call: time.sleep(600), "*/000000000002-*/files/*", times=None)
        for step in (1, 2, 3):
            save(step)
        opened.wait()
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True  # others are waited for before the end begins
        timer.start()
        END
    """
    began_s = time.monotonic()
    returned, _, errors = ended(tmp_path, textwrap.dedent(code).replace("END", end))
    assert returned == 143, errors
    assert time.monotonic() - began_s < 20
    assert steps(tmp_path) == [3, 1]
    assert "step 2 is not in" in errors
    assert [entry.step for entry in pending()] == [2]


def test_a_forked_worker_ends_without_uploading_or_draining(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        over = threading.Event()
        store.act("put", lambda call: over.wait(60) and time.sleep(1), "*/files/*", times=None)
        save(1)
        child = os.fork()
        if child == 0:
            sys.exit(5)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{status} {run.status().pending}\\n")
        over.set()
        """
    )
    returned, out, errors = ended(tmp_path, code)
    assert returned == 0, errors
    assert out == "5 (1,)\n", "the child ended by itself, at once, and the save is still the parent's"
    assert errors.count("ctrl-C leaves at once") == 1
    assert steps(tmp_path) == [1]


def test_a_run_that_nobody_saved_to_says_nothing_at_the_end(tmp_path: Path) -> None:
    assert ended(tmp_path, "run.latest()") == (0, "", "")


# ------------------------------------------------------------------------------------------------------------------- SIGTERM


def test_the_handler_sets_a_flag_chains_the_old_one_and_goes_away() -> None:
    told: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: told.append("old"))
    try:
        old = signal.getsignal(signal.SIGTERM)
        now = 100.0
        termination = Termination(25.0, lambda: told.append("hurry"), monotonic=lambda: now)
        assert (termination.requested, termination.left_s) == (False, math.inf)
        signal.raise_signal(signal.SIGTERM)
        assert termination.requested
        now = 110.0
        assert termination.left_s == 12.0, "three seconds are for the way out"
        signal.raise_signal(signal.SIGTERM)
        assert termination.left_s == 12.0, "a second one does not move the deadline"
        assert told == ["hurry", "old", "old"]
        termination.close()
        assert signal.getsignal(signal.SIGTERM) is old
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored_and_other_threads_change_nothing() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        Termination(25.0, lambda: None).close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    thread = threading.Thread(target=lambda: Termination(25.0, lambda: None).close())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_a_step_boundary_the_process_ends_in_time(tmp_path: Path) -> None:
    code = """
        from stagekit.runs.ending import Termination
        save(1)
        run.drain()
        termination = Termination(0.3, lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    """
    returned, _, errors = ended(tmp_path, textwrap.dedent(code))
    assert returned == 143
    assert "the training had not ended in" in errors
    assert steps(tmp_path) == [1]


def test_a_forked_worker_ends_by_the_signal_as_if_there_were_no_handler(tmp_path: Path) -> None:
    code = """
        from stagekit.runs.ending import Termination
        termination = Termination(20, lambda: print("hurry"))
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b"x")  # before that, Python itself may drop a signal
            time.sleep(60)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        sys.stdout.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    """
    returned, out, errors = ended(tmp_path, textwrap.dedent(code))
    assert (returned, out) == (0, str(-signal.SIGTERM)), errors
