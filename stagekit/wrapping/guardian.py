"""The processes between ``stagekit run`` and the command: ``python -I -S guardian.py CONTROL STATUS OPTIONS`` (three open files).

There are two, one below the other, so that what the command started is ended also when one of them is killed together with
``stagekit run``: the outer does nothing but wait for the inner one. They need the standard library only.
The inner one starts the command as the leader of a session of its own, so that a terminal's ctrl-C reaches only ``stagekit run``, which
passes it on.
It copies what the command prints to files and on to the terminal. Nothing outlives it that the command started: processes that lost their
parent become its children, and are ended with the command.

When ``stagekit run`` ends in whichever way, ``kill -9`` included, its end of the control pipe closes. Then the command gets SIGTERM, and
SIGKILL after the grace: nobody would see its saves any more, and a GPU would be paid for nothing.

Control (lines)  ``signal N``: send it to the command's process group, once · ``end SECONDS``: SIGTERM now, SIGKILL to all
                 after that long · ``kill SECONDS``: only the latter
Status (lines)   ``started PID`` · ``failed ERRNO`` · ``exited CODE CUT``: CODE is negative for a signal. CUT is 0 when the command
                 ended by itself, as it wanted to or was asked to; else when it was cut off, and after it what it had left behind, in
                 nanoseconds since 1970: what was written later is whole, as its writer ended by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_SHELLS = ("bash", "dash", "sh", "zsh", "ksh", "busybox")
_SUBREAPER, _DEATH_SIGNAL = 36, 1
_LEFT_ALONE_S, _LEFT_ENDING_S = 2.0, 5.0  # for what the command left behind: to end by itself, then after SIGTERM


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _copy(source: int, log: str, target: int) -> None:
    """Everything from ``source`` to the end of the file ``log`` and to ``target``. A target that takes nothing any more is left alone."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while data := os.read(source, 2**16):
        with contextlib.suppress(OSError):  # a full disk must not stop the training
            os.write(file, data)
        try:
            while data:
                data = data[os.write(target, data) :]
        except OSError:
            target = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.close(file)


def _children() -> dict[int, list[int]]:
    """All living processes by their parents, as ``/proc`` tells; none where there is no ``/proc``."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:  # noqa: PTH123 - no pathlib here
                fields = file.read().rpartition(")")[2].split()
                if fields[0] not in ("Z", "X"):
                    children.setdefault(int(fields[1]), []).append(int(name))
    return children


def _is_shell(pid: int) -> bool:
    """Whether ``pid`` runs a shell, which saves nothing itself."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in _SHELLS
    return False


def _descendants() -> list[int]:
    """All processes below this one."""
    children = _children()
    found: list[int] = []
    below = [os.getpid()]
    while below:
        nearest = children.get(below.pop(), [])
        found += nearest
        below += nearest
    return found


def _signal_all(number: int) -> None:
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class _Guard:
    def __init__(self, control: int, status: int, options: dict[str, object], argv: list[str]) -> None:
        self.control, self.status, self.argv = control, status, argv
        self.grace_s = float(str(options["grace_s"]))
        self.logs = options["logs"]
        self.stdout = int(str(options["stdout"]))
        self.kill_at: float | None = None
        self.asked: set[int] = set()
        self.started: set[int] | None = None  # what a shell had below itself when it was first sent a signal, and has not ended well
        self.cut_ns = 0
        self.code: int | None = None
        self.pid = 0
        self.pending = b""

    def tell(self, words: str) -> None:
        with contextlib.suppress(OSError):  # stagekit run is gone
            os.write(self.status, f"{words}\n".encode())

    def start(self) -> list[threading.Thread]:
        pipes = [os.pipe(), os.pipe()] if self.logs else []
        try:
            self.child = subprocess.Popen(
                self.argv,
                stdout=pipes[0][1] if pipes else self.stdout,
                stderr=pipes[1][1] if pipes else None,
                start_new_session=True,
                preexec_fn=lambda: _prctl(_DEATH_SIGNAL, signal.SIGTERM),
            )
        except OSError as error:
            self.tell(f"failed {error.errno}")
            sys.exit(1)
        self.pid = self.child.pid
        self.tell(f"started {self.pid}")
        threads = []
        for (reader, writer), log, target in zip(pipes, self.logs or (), (self.stdout, 2), strict=False):  # type: ignore[call-overload]
            os.close(writer)
            threads.append(threading.Thread(target=_copy, args=(reader, log, target), daemon=True))
            threads[-1].start()
        return threads

    def to_group(self, number: int) -> None:
        if number != signal.SIGKILL:
            if not self.asked and _is_shell(self.pid):
                self.started = set(_children().get(self.pid, [])) or None
            self.asked.add(number)
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        else:  # the group's number may be another's by now
            for pid in filter(self.is_in_group, _descendants()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def is_in_group(self, pid: int) -> bool:
        """Whether ``pid`` has had the signals that were passed on."""
        with contextlib.suppress(ProcessLookupError):
            return os.getpgid(pid) == self.pid
        return True  # it is gone

    def was_cut(self, status: int) -> bool:
        """Whether a process ended neither well nor by handling a signal that it was sent."""
        code = os.waitstatus_to_exitcode(status)
        return code != 0 and code - 128 not in self.asked

    def end(self, grace_s: float) -> None:
        if self.kill_at is None:
            self.to_group(signal.SIGTERM)
        self.kill(grace_s)

    def kill(self, grace_s: float) -> None:
        self.kill_at = min(self.kill_at or float("inf"), time.monotonic() + grace_s)

    def hear(self) -> None:
        data = os.read(self.control, 4096)
        if not data:
            self.control = -1
            self.end(self.grace_s)
            return
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            verb, value = line.decode().split()
            if verb == "signal":
                self.to_group(int(value))
            elif verb == "end":
                self.end(float(value))
            else:
                self.kill(float(value))

    def guard(self, woken: int) -> None:
        """Until the command has ended."""
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
                self.cut_ns = time.time_ns() if self.was_cut(status) else 0
                return
            self.listen(woken, None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic()))
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.to_group(signal.SIGKILL)
                _signal_all(signal.SIGKILL)
                self.kill_at += 1.0  # what was just being started is met the next time

    def listen(self, woken: int, timeout_s: float | None) -> None:
        """Wait for a word from ``stagekit run``, or for a signal, and follow it."""
        ready, _, _ = select.select([fd for fd in (self.control, woken) if fd >= 0], [], [], timeout_s)
        if woken in ready:
            os.read(woken, 4096)
        if self.control in ready:
            self.hear()

    def end_the_rest(self, woken: int, alone_s: float = _LEFT_ALONE_S, ending_s: float = _LEFT_ENDING_S) -> None:
        """End what the command left behind: after ``alone_s`` with SIGTERM, ``ending_s`` later with SIGKILL.

        Where the command had been given a time to end in, they have it as well: bash is gone at once, and its trainer saves. What had
        the command's signal does not get another one.
        """
        begun_s, asked = time.monotonic(), set[int]()
        while left := self.rest():
            now_s = time.monotonic()
            given = self.kill_at is not None
            if now_s >= (self.kill_at if self.kill_at is not None else begun_s + alone_s + ending_s):
                _signal_all(signal.SIGKILL)
            elif given or now_s >= begun_s + alone_s:
                for pid in left:
                    if pid not in asked and not (given and self.is_in_group(pid)):
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.kill(pid, signal.SIGTERM)
                asked.update(left)
            self.listen(woken, 0.02)

    def rest(self) -> list[int]:
        """What lives of what the command left behind, after taking leave of those that have ended."""
        left = _descendants()
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if self.cut_ns and self.was_cut(status):
                    self.cut_ns, self.started = time.time_ns(), None
                elif self.started is not None:
                    self.started.discard(pid)
        if self.started == set() and self.code is not None and -self.code in self.asked:
            self.cut_ns = 0  # the shell died of the signal, and all that it had started ended well: nobody who saves was cut off
        return left


def main() -> None:
    """Guard one command."""
    control, status = int(sys.argv[1]), int(sys.argv[2])
    with open(int(sys.argv[3]), "rb") as told:  # noqa: PTH123 - no pathlib here
        options = json.loads(told.read())
    for number in (control, status):
        os.set_inheritable(number, False)
    # Handlers that do nothing, not SIG_IGN: the command would inherit that. What was ignored before stays so, as under nohup.
    for name in (*_PASSED_ON, "SIGCHLD"):
        if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), lambda *_: None)
    guard = _Guard(control, status, options, options["command"])
    _prctl(_SUBREAPER, 1)
    if inner := os.fork():
        _, ended = os.waitpid(inner, 0)
        if os.WIFSIGNALED(ended):  # what it guarded has this process for its parent now
            guard.control = -1  # nobody speaks any more
            guard.end_the_rest(-1, 0.0, guard.grace_s)
        return
    _prctl(_SUBREAPER, 1)  # a fork does not inherit it
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threads = guard.start()
    guard.guard(woken)
    guard.end_the_rest(woken)
    for thread in threads:
        thread.join(_LEFT_ENDING_S)
    guard.tell(f"exited {guard.code} {guard.cut_ns}")


if __name__ == "__main__":
    main()
