"""Worker processes of our own, behind the interface every engine speaks: ``concurrent.futures.Executor``.

The standard library's process pool imports the caller's main module in each worker, so a script without ``if __name__ ==
"__main__"`` starts itself again; its workers outlive a parent that is killed; and a Ctrl-C prints one traceback a worker. Ours are
plain ``python -c`` processes that talk over their standard input and output: they import what a job names and nothing else, end by
themselves when the parent is gone, and take back the upload they were in the middle of.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import IO, Any, TypeVar

from ..errors import StagekitError
from ..progress import Event, Subscriber, ignore

_T = TypeVar("_T")
_BOOT = (
    "import sys, pickle; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from stagekit.publishing.workers import serve; serve(sys.stdin.buffer)"
)
_PATIENCE_S = 5.0  # for a worker to take its upload back before it is killed
_LENGTH = struct.Struct("<Q")


class WorkerProcesses(Executor):
    """``workers`` processes. Unlike other executors it passes each function a keyword argument ``on_event``; what is reported there
    arrives at the ``on_event`` given here, one event at a time.

    Leaving the ``with`` block by an exception stops the processes at once; what they were uploading is taken back.
    """

    def __init__(self, workers: int, on_event: Subscriber = ignore) -> None:
        self._on_event = on_event
        self._report_lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], bytes] | None] = queue.SimpleQueue()
        self._stopping = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        try:
            for number in range(workers):
                self._processes.append(_start())
                thread = threading.Thread(target=self._drive, args=(self._processes[-1],), name=f"stagekit-worker-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        except BaseException:
            self.stop()
            raise

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        future: Future[_T] = Future()
        self._jobs.put((future, pickle.dumps((fn, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            with suppress(queue.Empty):
                while (waiting := self._jobs.get_nowait()) is not None:
                    waiting[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()
            for process in self._processes:
                _end(process)

    def stop(self) -> None:
        """End all workers now. Jobs that are not finished fail."""
        self._stopping = True
        for process in self._processes:
            process.terminate()
        deadline_s = time.monotonic() + _PATIENCE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        self.shutdown(wait=True, cancel_futures=True)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.shutdown(wait=True)
        else:
            self.stop()

    def _drive(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        while (job := self._jobs.get()) is not None:
            future, data = job
            if self._stopping or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            try:
                _write_frame(process.stdin, data)
                while True:
                    kind, value = pickle.loads(_read_frame(process.stdout))
                    if kind != "event":
                        break
                    with self._report_lock:
                        self._on_event(value)
            except (EOFError, OSError):
                future.set_exception(self._died(process))
                continue
            except BaseException as error:
                # A subscriber that raises, or a reply that cannot be read: the job's answer is lost, its process may be anywhere.
                process.kill()
                future.set_exception(error)
                continue
            if kind == "result":
                future.set_result(value)
            else:
                future.set_exception(value)
        with suppress(OSError):
            process.stdin.close()

    def _died(self, process: subprocess.Popen[bytes]) -> StagekitError:
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        hint = " (signal 9 mostly means that memory ran out: fewer workers need less)" if code == -signal.SIGKILL else ""
        return StagekitError(f"a worker process {how}{hint}; nothing was published. Run the same command again: finished shards are kept")


def _start() -> subprocess.Popen[bytes]:
    # The terminal sends Ctrl-C to every process, and the parent decides what it means. A process is born with its parent's mask: from
    # its first instruction on, before there is Python to ignore the signal, it prints no traceback of its own.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process = subprocess.Popen([sys.executable, "-c", _BOOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert process.stdin is not None
    with suppress(OSError):  # a worker that dies at once is reported with its first job
        pickle.dump(sys.path, process.stdin)
        process.stdin.flush()
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(jobs: IO[bytes]) -> None:
    """The worker's main loop: run jobs from ``jobs`` until it ends, and answer on what was standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a job prints must not get between the answers
    signal.signal(signal.SIGTERM, _leave)
    received: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_receive, args=(jobs, received, busy), daemon=True).start()
    lock = threading.Lock()

    def answer(kind: str, value: object) -> None:
        data = pickle.dumps((kind, value), protocol=pickle.HIGHEST_PROTOCOL)
        with lock:
            _write_frame(answers, data)

    def report(event: Event) -> None:
        answer("event", event)

    code = 0
    try:
        while (data := received.get()) is not None:
            try:
                function, args, kwargs = pickle.loads(data)
                kind, value = "result", function(*args, **kwargs, on_event=report)
            except Exception as error:
                kind, value = "error", _sendable(error)
            busy.clear()
            answer(kind, value)
    except BrokenPipeError:
        code = 1
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    finally:
        os._exit(code)  # daemon threads of a store must not hold a worker that has nothing left to do


def _receive(jobs: IO[bytes], received: queue.SimpleQueue[bytes | None], busy: threading.Event) -> None:
    with suppress(EOFError, OSError):
        while True:
            data = _read_frame(jobs)
            busy.set()
            received.put(data)
    received.put(None)
    if busy.is_set():
        # The parent is gone in the middle of a job. The handler's exception unwinds the job, which aborts its upload.
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_PATIENCE_S)
        os._exit(1)


def _leave(number: int, frame: object) -> None:  # noqa: ARG001 - the signature is Python's
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _sendable(error: Exception) -> Exception:
    """``error`` as it is when it survives the way to the parent, with the worker's traceback when nobody raised it on purpose."""
    if not isinstance(error, StagekitError):
        error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        return StagekitError(f"a worker process failed: {type(error).__name__}: {error}")
    return error if isinstance(again, type(error)) else StagekitError(f"a worker process failed: {type(error).__name__}: {error}")


def _write_frame(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _read_frame(pipe: IO[bytes]) -> bytes:
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (size,) = _LENGTH.unpack(header)
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
