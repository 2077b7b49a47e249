"""A store that is away makes few lines, and none of its failed tries is lost from the count."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest

from stagekit.cli.output import JsonPrinter, LinePrinter
from stagekit.outages import Outages
from stagekit.progress import ANSWERED, Event, Message, Stage
from stagekit.runs.run import log


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def failed(number: int, store: str = "s3://b") -> Message:
    return Message(f"writing {store}/runs/x/{number}: nothing accepts connections; trying again in 2.0 s", "warning", repeating=store)


def back(store: str = "s3://b") -> Stage:
    return Stage(ANSWERED, store)


def shown(events: list[tuple[float, Event]]) -> list[str]:
    clock, told = Clock(), []
    outages = Outages(clock=clock)
    for clock.now_s, event in events:
        told.append(outages.told(event))
    return [event.text for event in [*told, *outages.rest()] if isinstance(event, Message)]


def test_an_outage_is_a_line_when_it_begins_some_while_it_lasts_and_one_when_it_is_over() -> None:
    events: list[tuple[float, Event]] = [(second, failed(second)) for second in range(0, 400, 2)]
    events.insert(3, (5, Message("saves come faster than the network takes them", "warning")))
    events += [(401, back()), (401, back()), (402, Message("going on"))]
    assert shown(events) == [
        failed(0).text,
        "saves come faster than the network takes them",
        f"s3://b keeps failing, 90 more tries in 3 min; the last: {failed(180).text}",
        f"s3://b keeps failing, 90 more tries in 3 min; the last: {failed(360).text}",
        "s3://b answers again after 6 min 41 s; 19 more tries failed meanwhile",
        "going on",
    ]


def test_a_single_stumble_is_one_line_and_a_later_one_another() -> None:
    assert shown([(0, failed(0)), (1, back()), (300, failed(1)), (301, back())]) == [failed(0).text, failed(1).text]
    forgotten = [(0, failed(0)), (1000, failed(1))]  # what answered it had not to be asked again, so nobody told
    assert shown(list(forgotten)) == [failed(0).text, failed(1).text]


def test_a_store_that_comes_and_goes_is_one_outage() -> None:
    events = [(float(second), event) for second in range(0, 240, 2) for event in (failed(second), back())]
    told = shown(list(events))
    assert len(told) <= 8
    assert told[0] == failed(0).text
    counted = sum(int(number) for line in told for number in re.findall(r"(\d+) more tr", line))
    assert 80 <= counted <= 119


def test_each_store_has_its_own_lines_and_what_is_away_at_the_end_is_told() -> None:
    events = [(0, failed(0)), (0, failed(1, "s3://c")), (1, failed(2)), (2, failed(3, "s3://c")), (3, back("s3://c"))]
    assert shown(list(events)) == [
        failed(0).text,
        failed(1, "s3://c").text,
        "s3://c answers again after 3.0 s; 1 more try failed meanwhile",
        "s3://b did not answer to the end: 1 more try failed",
    ]


def test_the_printers(caplog: pytest.LogCaptureFixture) -> None:
    err, out = io.StringIO(), io.StringIO()
    events = [*(failed(number) for number in range(9)), back()]
    with LinePrinter(io.StringIO(), err, prefix="stagekit: ") as people, JsonPrinter(out) as program:
        for event in events:
            people.on_event(event)
            program.on_event(event)
        people.on_event(failed(9, "s3://c"))
        people.on_event(failed(10, "s3://c"))
    lines = err.getvalue().splitlines()
    assert lines[0] == f"stagekit: warning: {failed(0).text}"
    assert [line.partition(" after ")[0] for line in lines[1:2]] == ["stagekit: s3://b answers again"]
    assert lines[2:] == [
        f"stagekit: warning: {failed(9, 's3://c').text}",
        "stagekit: warning: s3://c did not answer to the end: 1 more try failed",
    ]
    assert len([record for record in map(json.loads, out.getvalue().splitlines()) if record["event"] == "message"]) == 9
    with caplog.at_level(logging.WARNING, "stagekit"):
        for number in range(5):
            log(failed(number, "s3://of-a-run-in-python"))
    assert len(caplog.records) == 1
