"""The process between ``stagekit run`` and its command: signals once, exit codes as they are, and nothing that outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stagekit.errors import UsageError, WorkerDied
from stagekit.wrapping.child import Child, exit_code_of

ROOT = Path(__file__).parents[2]

# Says what it gets, and ends at the word "end" in the file given.
LISTENER = """
import os, signal, sys, time
def got(number, frame):
    print(signal.Signals(number).name, flush=True)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), got)
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


def eventually(holds: Callable[[], bool], what: str = "") -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what or "it never happened"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def ended(child: Child) -> int:
    deadline = time.monotonic() + 60
    while (code := child.wait(1.0)) is None:
        assert time.monotonic() < deadline
    return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def begin(*command: str, grace_s: float = 20.0, logged: bool = True, stdout: int = 1) -> Child:
        logs = (tmp_path / "stdout.log", tmp_path / "stderr.log") if logged else None
        children.append(Child(command, environ=os.environ, grace_s=grace_s, logs=logs, stdout=stdout))
        return children[-1]

    yield begin
    for child in children:
        child.kill(0)
        child.close()


def printed(tmp_path: Path) -> str:
    path = tmp_path / "stdout.log"
    return path.read_text() if path.exists() else ""


def test_what_it_prints_is_kept_and_shown_and_its_code_comes_back(
    start: Callable[..., Child], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start("bash", "-c", "echo out; echo err >&2; exit 7")
    assert ended(child) == 7
    assert (tmp_path / "stdout.log").read_text() == "out\n"
    assert (tmp_path / "stderr.log").read_text() == "err\n"
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out\n", "err\n")


def test_its_standard_output_can_go_to_standard_error(start: Callable[..., Child], capfd: pytest.CaptureFixture[str]) -> None:
    assert ended(start("bash", "-c", "echo out", stdout=2)) == 0
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "out\n")


def test_a_command_that_is_not_there_is_a_usage_error(start: Callable[..., Child]) -> None:
    with pytest.raises(UsageError, match=r"starting no-such-program: No such file or directory; check the name, or give its path"):
        start("no-such-program")


def test_a_command_that_is_killed_tells_the_signal(start: Callable[..., Child]) -> None:
    assert exit_code_of(ended(start("bash", "-c", "kill -9 $$"))) == 137
    assert exit_code_of(3) == 3


def test_each_signal_arrives_once(start: Callable[..., Child], tmp_path: Path) -> None:
    child = start(sys.executable, "-c", LISTENER, str(tmp_path / "end"))
    eventually(lambda: printed(tmp_path) == "ready\n")
    names = ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"]
    for number, name in enumerate(names, 1):
        child.send(getattr(signal, name))
        eventually(lambda number=number: len(printed(tmp_path).split()) == number + 1)  # type: ignore[misc]
    (tmp_path / "end").touch()
    assert ended(child) == 0
    assert printed(tmp_path).split() == ["ready", *names]


def test_a_bash_script_that_does_not_pass_signals_on_cannot_keep_them_from_the_trainer(start: Callable[..., Child], tmp_path: Path) -> None:
    (tmp_path / "listener.py").write_text(LISTENER)
    (tmp_path / "train.sh").write_text(f"trap '' USR1\n{sys.executable} {tmp_path}/listener.py {tmp_path}/end\necho after\n")
    child = start("bash", str(tmp_path / "train.sh"))
    eventually(lambda: printed(tmp_path) == "ready\n")
    child.send(signal.SIGUSR1)
    eventually(lambda: "SIGUSR1" in printed(tmp_path))
    (tmp_path / "end").touch()
    assert ended(child) == 0
    assert printed(tmp_path) == "ready\nSIGUSR1\nafter\n"


def test_one_that_hangs_at_sigterm_is_killed_after_the_grace_with_all_it_started(start: Callable[..., Child], tmp_path: Path) -> None:
    # A worker in a session of its own, as torchrun's are.
    program = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); "
    program += "w = subprocess.Popen(['sleep', '600'], start_new_session=True); print(w.pid, flush=True); time.sleep(600); time.sleep(600)"
    child = start(sys.executable, "-c", program)
    eventually(lambda: printed(tmp_path).endswith("\n"))
    worker = int(printed(tmp_path))
    assert is_alive(worker)
    child.end(0.3)
    assert ended(child) == -signal.SIGKILL
    assert "asked" in printed(tmp_path)
    assert not is_alive(worker)


SAVER = """
import signal, sys, time
from pathlib import Path
def save(number, frame):
    print("asked", flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    Path(sys.argv[1] + ".saved").write_text("whole")
    sys.exit(int(sys.argv[2]))
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.02)
"""


@pytest.mark.parametrize("code", [0, 143, 1])
def test_what_bash_leaves_behind_at_sigterm_gets_it_once_and_has_the_time_to_save(
    start: Callable[..., Child], tmp_path: Path, code: int
) -> None:
    go = tmp_path / "go"
    child = start("bash", "-c", f"{sys.executable} -c '{SAVER}' {go} {code}; echo after")
    eventually(lambda: printed(tmp_path) == "ready\n")
    child.send(signal.SIGTERM)
    child.kill(60)
    eventually(lambda: "asked" in printed(tmp_path))
    eventually(lambda: not is_alive(child.pid))  # bash is gone, and what would end its leftovers is looking on
    for _ in range(3):
        assert child.wait(0.1) is None
    go.touch()
    assert ended(child) == -signal.SIGTERM
    assert printed(tmp_path) == "ready\nasked\n"
    assert (child.cut_ns is not None) == (code == 1), "a trainer that ended well, or as one that was asked to, has saved all of it"


def test_one_that_dies_of_a_signal_was_cut_off_however_well_its_helpers_end(start: Callable[..., Child], tmp_path: Path) -> None:
    helper = "import sys; print('ready', flush=True); sys.stdin.read()"
    program = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {helper!r}], stdin=subprocess.PIPE, process_group=0); "
    )
    child = start(sys.executable, "-c", program + "time.sleep(600)")
    eventually(lambda: printed(tmp_path) == "ready\n")
    child.send(signal.SIGTERM)
    assert ended(child) == -signal.SIGTERM
    assert child.cut_ns is not None


def test_what_bash_leaves_behind_is_killed_when_the_time_is_over_and_hears_what_is_said_later(
    start: Callable[..., Child], tmp_path: Path
) -> None:
    program = f"{sys.executable} -c '{SAVER}' {tmp_path}/never 0 & trap 'exit 3' USR1; while true; do sleep 0.02; done"
    child = start("bash", "-c", program)
    eventually(lambda: printed(tmp_path) == "ready\n")
    os.kill(child.pid, signal.SIGUSR1)  # not passed on: bash ends, and its trainer knows nothing of it
    eventually(lambda: not is_alive(child.pid))
    child.end(0.2)
    assert ended(child) == 3
    assert printed(tmp_path) == "ready\nasked\n"
    assert child.cut_ns is not None


@pytest.mark.parametrize(
    ("script", "cut"),
    [("exit 0", False), ("exit 1", True), ("kill -9 $$", True), ("sleep 600 & exit 0", False), ("(exit 137)", True)],
)
def test_whether_it_was_cut_off(start: Callable[..., Child], script: str, cut: bool) -> None:
    child = start("bash", "-c", script)
    ended(child)
    assert (child.cut_ns is not None) == cut


def test_what_the_command_leaves_behind_ends_with_it(start: Callable[..., Child], tmp_path: Path) -> None:
    child = start("bash", "-c", "setsid sleep 600 & echo $!; exit 4")
    assert ended(child) == 4
    eventually(lambda: not is_alive(int(printed(tmp_path))))


PARENT = """
import os, sys, time
from pathlib import Path
from stagekit.wrapping.child import Child
logs = Path(sys.argv[1], "stdout.log"), Path(sys.argv[1], "stderr.log")
child = Child(sys.argv[3:], environ=os.environ, grace_s=float(sys.argv[2]), logs=logs, stdout=2)
print(child.pid, child.guardian_pid, flush=True)
time.sleep(600)
"""


def parent(tmp_path: Path, grace_s: float, *command: str) -> tuple[subprocess.Popen[str], int, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), str(grace_s), *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    pid, guardian = map(int, process.stdout.readline().split())
    return process, pid, guardian


def test_when_the_one_who_started_it_is_killed_the_command_gets_sigterm_and_may_finish(tmp_path: Path) -> None:
    with parent(tmp_path, 60, sys.executable, "-c", LISTENER, str(tmp_path / "end"))[0] as process:
        eventually(lambda: printed(tmp_path) == "ready\n")
        process.kill()
        eventually(lambda: printed(tmp_path).split() == ["ready", "SIGTERM"])
        (tmp_path / "end").touch()


def test_when_the_one_who_started_it_is_killed_one_that_hangs_is_killed_too(tmp_path: Path) -> None:
    process, pid, guardian = parent(tmp_path, 0.3, "bash", "-c", "trap '' TERM; echo ready; sleep 600; sleep 600")
    with process:
        eventually(lambda: printed(tmp_path) == "ready\n")
        process.kill()
        eventually(lambda: not is_alive(pid) and not is_alive(guardian))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# A shell that dies of SIGTERM, and a worker that does not.
TREE = ("bash", "-c", "bash -c 'trap \"\" TERM; echo $$; sleep 600; sleep 600'; echo after")


def test_when_the_guardian_is_killed_all_that_the_command_started_is_ended_and_that_is_told(
    start: Callable[..., Child], tmp_path: Path
) -> None:
    child = start(*TREE, grace_s=0.3)
    eventually(lambda: printed(tmp_path).endswith("\n"))
    worker = int(printed(tmp_path))
    inner = parent_of(child.pid)
    assert parent_of(inner) == child.guardian_pid
    os.kill(inner, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="was killed, so the command was ended with SIGTERM"):
        ended(child)
    assert not is_alive(child.pid)
    assert not is_alive(worker)


def test_when_the_one_who_started_it_is_killed_with_the_process_below_it_nothing_survives(tmp_path: Path) -> None:
    process, pid, guardian = parent(tmp_path, 0.3, *TREE)
    with process:
        eventually(lambda: printed(tmp_path).endswith("\n"))
        os.kill(guardian, signal.SIGKILL)
        process.kill()
        eventually(lambda: not is_alive(pid) and not is_alive(int(printed(tmp_path).split()[0])))


def test_a_kill_of_all_that_is_called_stagekit_does_not_meet_the_guardian(start: Callable[..., Child]) -> None:
    child = start("sleep", "600")
    for pid in (child.guardian_pid, parent_of(child.pid)):
        assert b"stagekit" not in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[2]


def test_a_terminal_that_is_gone_does_not_stop_the_training(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = Child(
        ["bash", "-c", "for i in 1 2 3 4 5; do echo line $i; done"],
        environ=os.environ,
        grace_s=5,
        logs=(tmp_path / "stdout.log", tmp_path / "stderr.log"),
        stdout=writer,
    )
    os.close(writer)
    os.close(reader)
    assert ended(child) == 0
    assert printed(tmp_path).count("line") == 5
