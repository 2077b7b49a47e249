"""The two printers: lines for people, JSON for programs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from stagekit.cli.output import JsonPrinter, LinePrinter, columns, error_line, open_printer, progress_text
from stagekit.progress import Message, Progress, Stage


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_progress_without_a_terminal_is_a_line_now_and_then_and_always_the_last() -> None:
    out, err, clock = io.StringIO(), io.StringIO(), Clock()
    printer = LinePrinter(out, err, every_s=10, clock=clock)
    for second in range(25):
        clock.now_s = float(second)
        printer.on_event(Progress("upload step 1200", second * 100_000_000, 3_000_000_000))
    printer.on_event(Progress("upload step 1200", 3_000_000_000, 3_000_000_000, finished=True))
    assert out.getvalue() == ""
    assert err.getvalue().splitlines() == [
        "upload step 1200: 1.00 GB of 3.00 GB (33 %), 100 MB/s, 20 s left",
        "upload step 1200: 2.00 GB of 3.00 GB (66 %), 100 MB/s, 10 s left",
        "upload step 1200: 3.00 GB, 125 MB/s",
    ]


def test_two_tasks_do_not_hide_each_other() -> None:
    err, clock = io.StringIO(), Clock()
    printer = LinePrinter(io.StringIO(), err, every_s=10, clock=clock)
    for second in (0, 11):
        clock.now_s = float(second)
        printer.on_event(Progress("a", second, 100, unit="files"))
        printer.on_event(Progress("b", second, None, unit="samples", note="retrying"))
    assert err.getvalue().splitlines() == ["a: 11 of 100 files (11 %), 1 files/s, 1 min 29 s left", "b: 11 samples, 1 samples/s (retrying)"]


def test_messages_go_to_standard_error_with_their_level_and_data_to_standard_output() -> None:
    out, err = io.StringIO(), io.StringIO()
    with LinePrinter(out, err) as printer:
        printer.on_event(Message("starting"))
        printer.on_event(Message("slow", "warning"))
        printer.on_event(Stage("manifest", "x"))
        printer.data("s3://b/run", {"event": "entry"})
    assert err.getvalue() == "starting\nwarning: slow\n"
    assert out.getvalue() == "s3://b/run\n"


def test_a_terminal_is_not_sent_what_a_name_holds_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    name = "esc\x1b[31m\x9b2J\x07\x7f\ttab\nline"
    out, err = io.StringIO(), io.StringIO()
    with LinePrinter(out, err) as printer:
        printer.on_event(Message(name))
        printer.on_event(Progress(name, 1, 1, unit="files", finished=True))
        printer.data(name, {})
    error_line("UsageError", name, as_json=False)
    plain = "esc\\x1b[31m\\x9b2J\\x07\\x7f\ttab\nline"
    assert out.getvalue() == f"{plain}\n"
    assert err.getvalue() == f"{plain}\n{plain}: 1 file\n"
    assert capsys.readouterr().err == f"stagekit: error: {plain}\n"


def test_json_is_one_object_a_line_and_progress_is_thinned_out() -> None:
    out, clock = io.StringIO(), Clock()
    printer = JsonPrinter(out, every_s=1, clock=clock)
    for tenth in range(21):
        clock.now_s = tenth / 10
        printer.on_event(Progress("t", tenth, 20, finished=tenth == 20))
    printer.on_event(Message("m", "warning"))
    printer.on_event(Stage("manifest", "s"))
    printer.data("not shown", {"event": "entry", "url": "u"})
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [record["done"] for record in records[:3]] == [0, 10, 20]
    assert records[2] == {"event": "progress", "task": "t", "done": 20, "total": 20, "unit": "bytes", "note": "", "finished": True}
    assert records[3:] == [
        {"event": "message", "level": "warning", "text": "m"},
        {"event": "stage", "name": "manifest", "subject": "s"},
        {"event": "entry", "url": "u"},
    ]


def test_an_error_is_one_line_or_one_object() -> None:
    out, err = io.StringIO(), io.StringIO()
    error_line("Denied", "may not", as_json=False, stdout=out, stderr=err)
    assert (out.getvalue(), err.getvalue()) == ("", "stagekit: error: may not\n")
    error_line("Denied", "may not", as_json=True, stdout=out, stderr=err)
    assert json.loads(out.getvalue()) == {"event": "error", "error": "Denied", "message": "may not"}


def test_columns_are_aligned_and_never_wrapped() -> None:
    assert columns([["a", "1"], ["long name", "1,000"]], right=[1]) == ["a              1", "long name  1,000"]
    assert columns([]) == []


@pytest.mark.parametrize(
    ("event", "rate", "text"),
    [
        (Progress("t", 0, 0), None, "t: 0 B of 0 B"),
        (Progress("t", 5, 5, finished=True), None, "t: 5 B"),
        (Progress("t", 3, 5, unit="shards", finished=True), None, "t: 3 of 5 shards (60 %)"),
        (Progress("t", 1500, None, unit="samples"), 20.0, "t: 1,500 samples, 20 samples/s"),
    ],
)
def test_progress_reads_well(event: Progress, rate: float | None, text: str) -> None:
    assert progress_text(event, rate) == text


TERMINAL = """
import sys
from stagekit.cli.output import open_printer
from stagekit.progress import Message, Progress
with open_printer(as_json=False) as printer:
    printer.on_event(Progress("upload", 1_000_000, 2_000_000))
    printer.on_event(Message("careful", "warning"))
    printer.data("a result", {})
"""


@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal_progress_is_drawn_and_no_color_is_obeyed(no_color: bool) -> None:
    leader, follower = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"} | ({"NO_COLOR": "1"} if no_color else {})
    process = subprocess.Popen([sys.executable, "-c", TERMINAL], stderr=follower, stdout=subprocess.PIPE, env=environment)
    os.close(follower)
    assert process.stdout is not None
    out = process.stdout.read()
    drawn = b""
    try:
        while piece := os.read(leader, 65536):
            drawn += piece
    except OSError:
        pass  # Linux says so when the other end is closed
    finally:
        os.close(leader)
        process.stdout.close()
    assert process.wait(timeout=30) == 0
    assert out == b"a result\n"
    assert b"upload" in drawn
    assert b"1.00 MB of 2.00 MB (50 %)" in drawn
    assert b"warning: careful" in drawn
    assert (b"\x1b[33m" in drawn) is not no_color


def test_the_printer_fits_where_it_prints() -> None:
    assert isinstance(open_printer(as_json=True), JsonPrinter)
    assert isinstance(open_printer(as_json=False, stderr=io.StringIO()), LinePrinter)
