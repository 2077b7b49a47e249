"""Calls that nobody waits for: ended where they wait, and not tried again."""

from __future__ import annotations

import threading

import pytest

from stagekit.errors import Unreachable
from stagekit.store.abandon import Caller, abandoned, breaking_off, carried, sleep
from stagekit.store.base import Data, WrappedStore
from stagekit.store.memory import MemoryStore
from stagekit.store.retry import RetryStore


def test_a_call_is_broken_off_once_and_later_ones_at_once() -> None:
    caller, broken = Caller(), threading.Event()

    def wait() -> bool:
        with breaking_off(broken.set):
            return broken.wait(30)

    found = []
    thread = threading.Thread(target=carried_by(caller, lambda: found.append(wait())))
    thread.start()
    caller.abandon()
    caller.abandon()
    thread.join(60)
    assert found == [True]
    broken.clear()
    with caller.calling():
        assert abandoned()
        assert wait()
    assert not abandoned()


def carried_by(caller: Caller, function):  # type: ignore[no-untyped-def]  # of any kind
    with caller.calling():
        return carried(function)


def test_what_cannot_be_broken_off_any_more_is_no_error() -> None:
    def closed() -> None:
        raise OSError("the socket is closed")

    caller = Caller()
    with caller.calling(), breaking_off(closed):
        caller.abandon()


def test_without_a_caller_nothing_is_abandoned() -> None:
    with breaking_off(lambda: pytest.fail("called")):
        assert not abandoned()
    sleep(0)
    assert carried(abandoned)() is False


def test_a_pause_between_two_tries_ends_and_nothing_is_tried_again() -> None:
    tries = []

    class Down(WrappedStore):
        def get(self, key: str, start: int = 0, length: int | None = None, *, if_match: str | None = None) -> Data:
            tries.append(key)
            tried.set()
            raise Unreachable("down", retry_after_s=100.0)

    tried = threading.Event()
    store = RetryStore(Down(MemoryStore("memory://abandon/d")), 1000)
    caller, errors = Caller(), []

    def read() -> None:
        try:
            store.get("key")
        except Unreachable as error:
            errors.append(error)

    thread = threading.Thread(target=carried_by(caller, read), daemon=True)
    thread.start()
    assert tried.wait(60)
    caller.abandon()
    thread.join(60)
    assert (len(errors), tries) == (1, ["key"])
