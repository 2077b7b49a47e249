"""Results made by whoever wants them, and by another thread while nobody does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from stagekit.torch.pipeline import Ahead


def ahead(results: Iterator[int], *, brief_s: float, most: int = 3) -> Ahead[int]:
    return Ahead(results, ahead=most, stop=lambda: None, brief_s=brief_s)


@pytest.mark.parametrize("brief_s", [0.0, 1e9])
def test_results_come_in_order_each_once(brief_s: float) -> None:
    made = ahead(iter(range(500)), brief_s=brief_s)
    assert list(made) == list(range(500))
    made.close()


def test_who_takes_them_at_once_makes_them() -> None:
    makers = []

    def results() -> Iterator[int]:
        for number in range(500):
            makers.append(threading.current_thread())
            yield number

    made = ahead(results(), brief_s=1e9)
    assert list(made) == list(range(500))
    # The other thread makes at most three behind the first one, and is not asked again.
    assert makers.count(threading.current_thread()) >= 497
    made.close()


def test_while_nobody_takes_them_another_thread_makes_some_and_no_more() -> None:
    drawn: list[int] = []
    changed = threading.Condition()

    def results() -> Iterator[int]:
        for number in range(50):
            with changed:
                drawn.append(number)
                changed.notify()
            yield number

    def wait_for(count: int) -> None:
        with changed:
            assert changed.wait_for(lambda: len(drawn) >= count, 30)

    made = ahead(results(), brief_s=0.0)
    taken = iter(made)
    for number in range(6):
        assert next(taken) == number
        # Three are made ahead, and again when fewer than two of them are left.
        wait_for(number + 1 + 2)
        assert len(drawn) <= number + 1 + 3
    assert list(taken) == list(range(6, 50))
    made.close()


@pytest.mark.parametrize("brief_s", [0.0, 1e9])
def test_an_error_comes_in_its_place(brief_s: float) -> None:
    def results() -> Iterator[int]:
        yield from range(5)
        raise ValueError("five")

    made = ahead(results(), brief_s=brief_s)
    got = []
    with pytest.raises(ValueError, match="five"):
        for number in made:
            got.append(number)  # noqa: PERF402
    assert got == list(range(5))
    made.close()


@pytest.mark.parametrize("brief_s", [0.0, 1e9])
def test_closing_drops_what_was_not_taken_and_closes_the_results(brief_s: float) -> None:
    closed = []

    def results() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.append(True)

    made = ahead(results(), brief_s=brief_s)
    taken = iter(made)
    for _ in range(3):
        next(taken)
    made.close()
    made.close()
    assert closed == [True]
    assert list(taken) == []


def test_closing_ends_a_thread_that_waits_inside_the_results() -> None:
    waiting, wake = threading.Event(), threading.Event()

    def results() -> Iterator[int]:
        yield from range(2)
        waiting.set()
        wake.wait(30)

    made = Ahead(results(), ahead=3, stop=wake.set, brief_s=0.0)
    taken = iter(made)
    next(taken)
    next(taken)
    assert waiting.wait(60)
    made.close()
    assert list(taken) == []
