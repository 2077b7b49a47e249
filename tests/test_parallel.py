"""Many calls at once, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.parallel import Beside, each


@settings(max_examples=50)
@given(st.lists(st.integers(), max_size=40), st.integers(1, 6))
def test_results_come_in_the_order_of_the_items(items: list[int], threads: int) -> None:
    assert list(each(lambda item: item * 2, items, threads=threads)) == [item * 2 for item in items]


def test_calls_run_at_the_same_time() -> None:
    barrier = threading.Barrier(4, timeout=20)
    assert len(list(each(lambda _: barrier.wait(), range(4), threads=4))) == 4


def test_an_error_comes_in_its_place_and_stops_the_rest() -> None:
    started: list[int] = []

    def call(item: int) -> int:
        started.append(item)
        if item == 3:
            raise ValueError("item three")
        return item

    results = each(call, range(1000), threads=1)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="item three"):
        next(results)
    assert len(started) == 4


def test_an_error_of_the_items_comes_after_those_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    results = each(lambda item: item, items(), threads=2)
    assert next(results) == 1
    with pytest.raises(OSError, match="no more"):
        next(results)


def test_items_are_drawn_lazily() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            drawn.append(item)
            yield item

    results = each(lambda item: item, items(), threads=2)
    next(results)
    results.close()  # type: ignore[attr-defined]  # it is a generator
    assert len(drawn) <= 2 * 4 + 2


def test_something_beside_gives_its_value_or_its_error_when_it_is_asked_for() -> None:
    going_on = threading.Event()
    beside = Beside(lambda: going_on.wait(60))
    going_on.set()
    assert beside.get() is True
    failed: Beside[float] = Beside(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.get()
