from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stagekit.errors import NotFound, StagekitError, Throttled
from stagekit.progress import Event, Message, Subscriber, ignore
from stagekit.publishing import workers
from stagekit.publishing.workers import WorkerProcesses

from .conftest import make_raw, wait_for_the_end_of

# Jobs have to be importable by the workers, so these are from installed modules or from this one, which travels by path.


def pid(*, on_event: Subscriber = ignore) -> int:
    on_event(Message(f"I am {os.getpid()}"))
    print("this must not get between the answers")
    return os.getpid()


def fail(error: Exception, *, on_event: Subscriber = ignore) -> None:
    raise error


def die(code: int, *, on_event: Subscriber = ignore) -> None:
    os.kill(os.getpid(), code)


def refuse_to_end(*, on_event: Subscriber = ignore) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    on_event(Message(str(os.getpid())))
    threading.Event().wait()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this module where a worker finds it: pytest's importlib mode gives it a name that only pytest knows."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def test_jobs_run_in_other_processes_and_report_from_there() -> None:
    events: list[Event] = []
    with WorkerProcesses(2, events.append) as pool:
        futures = [pool.submit(pid) for _ in range(6)]
        pids = {future.result(30) for future in futures}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2
    assert {event.text for event in events if isinstance(event, Message)} == {f"I am {one}" for one in pids}
    assert len(events) == 6
    wait_for_the_end_of(list(pids))


def test_errors_arrive_as_they_were() -> None:
    with WorkerProcesses(1) as pool:
        with pytest.raises(NotFound, match="there is no such thing") as missing:
            pool.submit(fail, NotFound("there is no such thing")).result(30)
        assert isinstance(missing.value, FileNotFoundError)
        with pytest.raises(Throttled) as throttled:
            pool.submit(fail, Throttled("slow down", retry_after_s=3)).result(30)
        assert (throttled.value.transient, throttled.value.retry_after_s) == (True, 3)
        with pytest.raises(ZeroDivisionError) as unexpected:
            pool.submit(fail, ZeroDivisionError("nobody meant this")).result(30)
        assert "test_workers.py" in unexpected.value.__notes__[0]


def test_a_worker_that_is_killed_is_one_sentence_with_the_remedy() -> None:
    with WorkerProcesses(1) as pool:
        future = pool.submit(die, 9)
        with pytest.raises(StagekitError, match=r"was killed by signal 9.*memory ran out.*Run the same command again"):
            future.result(30)


def test_leaving_by_an_exception_ends_the_workers_at_once() -> None:
    with pytest.raises(RuntimeError, match="enough"):
        with WorkerProcesses(2) as pool:
            one = pool.submit(pid).result(30)
            raise RuntimeError("enough")
    wait_for_the_end_of([one])


def test_a_worker_that_does_not_end_by_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving takes seconds, also when a store does not answer a worker that wants to take its upload back."""
    monkeypatch.setattr(workers, "_PATIENCE_S", 0.1)
    begun: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with pytest.raises(RuntimeError, match="enough"):
        with WorkerProcesses(1, begun.put) as pool:
            pool.submit(refuse_to_end)
            event = begun.get(timeout=30)
            raise RuntimeError("enough")
    assert isinstance(event, Message)
    wait_for_the_end_of([int(event.text)])


def test_a_job_that_cannot_be_pickled_fails_where_it_is_submitted() -> None:
    with WorkerProcesses(1) as pool, pytest.raises((AttributeError, TypeError), match="pickle"):
        pool.submit(lambda: None)


def test_a_subscriber_that_raises_fails_the_job() -> None:
    def refuse(event: Event) -> None:
        raise RuntimeError("I do not want to hear it")

    with WorkerProcesses(1, refuse) as pool, pytest.raises(RuntimeError, match="I do not want"):
        pool.submit(pid).result(30)


SCRIPT = """
import sys
import warnings
from stagekit.publishing import shard
print("begun")
print(len(shard(sys.argv[1], sys.argv[2], shard_size="16KiB", workers=2)))
"""


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    """The standard library's process pools would run it again in every worker."""
    (tmp_path / "script.py").write_text(SCRIPT)
    raw = make_raw(tmp_path / "raw", 9)
    done = subprocess.run([sys.executable, "script.py", raw, "out"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["begun", "9"]
    assert not done.stderr
