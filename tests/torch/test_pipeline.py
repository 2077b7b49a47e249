"""Ordered work in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from stagekit.torch.pipeline import Pipeline


def summed(groups: Iterator[list[int]], work: Callable[[list[int]], int] = sum, **options: int) -> Pipeline[int, int, int]:
    return Pipeline(groups, work, sum, threads=options.get("threads", 3), ahead=options.get("ahead", 2), stop_groups=lambda: None)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_results_come_in_order_each_once(threads: int) -> None:
    with summed(([number] * (number % 5) for number in range(200)), threads=threads) as pipeline:
        assert list(pipeline) == [number * (number % 5) for number in range(200)]


def test_a_group_is_worked_on_by_all_threads_at_once() -> None:
    together = threading.Barrier(4, timeout=30)

    def work(part: list[int]) -> int:
        together.wait()  # would time out if one thread did it all
        return sum(part)

    with summed(iter([[1] * 8]), work, threads=4) as pipeline:
        assert list(pipeline) == [8]


def test_no_more_groups_are_drawn_than_allowed() -> None:
    drawn: list[int] = []

    def groups() -> Iterator[list[int]]:
        for number in range(100):
            drawn.append(number)
            yield [number]

    with summed(groups(), ahead=3) as pipeline:
        results = iter(pipeline)
        for taken in range(1, 20):
            next(results)
            assert len(drawn) <= taken + 3


def test_the_first_error_of_a_group_is_raised_in_its_place() -> None:
    def work(part: list[int]) -> int:
        if 7 in part or 8 in part:
            raise ValueError(str(part[0]))
        return sum(part)

    got = []
    with summed(iter([[1, 2, 3], [6, 7, 8], [9]]), work) as pipeline:
        with pytest.raises(ValueError, match="7"):
            for result in pipeline:
                got.append(result)  # noqa: PERF402
    assert got == [6]


def test_an_error_of_the_groups_comes_after_the_groups_before_it() -> None:
    def groups() -> Iterator[list[int]]:
        yield [1]
        yield [2]
        raise RuntimeError("no more")

    got = []
    with summed(groups()) as pipeline:
        with pytest.raises(RuntimeError, match="no more"):
            for result in pipeline:
                got.append(result)  # noqa: PERF402
    assert got == [1, 2]


def test_an_error_while_putting_together() -> None:
    def broken(parts: list[int]) -> int:
        raise OSError("cannot")

    with Pipeline(iter([[1, 2]]), sum, broken, threads=2, stop_groups=lambda: None) as pipeline:
        with pytest.raises(OSError, match="cannot"):
            list(pipeline)


def test_closing_ends_a_thread_that_waits_inside_the_groups() -> None:
    wake = threading.Event()
    closed = threading.Event()

    def groups() -> Iterator[list[int]]:
        try:
            yield [1]
            wake.wait(30)
            yield [2]
        finally:
            closed.set()

    pipeline = Pipeline(groups(), sum, sum, threads=2, stop_groups=wake.set)
    assert next(iter(pipeline)) == 1
    pipeline.close()
    pipeline.close()
    assert closed.wait(60)
