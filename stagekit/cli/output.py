"""Two printers for what the library reports: one for people, one writing JSON lines.

Results go to standard output, everything else to standard error. On a terminal progress is drawn in place; elsewhere it is a line now
and then, so that a log stays readable. With ``--json`` everything is one JSON object a line on standard output, each with an ``event``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from ..outages import Outages
from ..progress import Event, Message, Progress, Stage
from ..units import counted, format_count, format_duration, format_rate, format_size

if TYPE_CHECKING:
    from rich.progress import TaskID

Record = Mapping[str, Any]

LINE_EVERY_S = 10.0
JSON_EVERY_S = 1.0


class Printer(Protocol):
    """What a command prints through. A with-block, so that a live display is gone before an error is printed. Usable from any thread."""

    def on_event(self, event: Event) -> None:
        """Show one event of the library. Progress is thinned out; the last event of a task is always shown."""

    def data(self, text: str, record: Record) -> None:
        """One result: ``text`` for people, ``record`` (with an ``event`` in it) for programs. Always shown, on standard output."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def open_printer(*, as_json: bool, beside: bool = False, stdout: TextIO | None = None, stderr: TextIO | None = None) -> Printer:
    """The printer for this invocation: JSON when asked for, live on a terminal, lines elsewhere and ``beside`` another program's output."""
    out, err = stdout or sys.stdout, stderr or sys.stderr
    if as_json:
        return JsonPrinter(out)
    if beside:
        return LinePrinter(out, err, prefix="stagekit: ")
    if err.isatty() and (live := LivePrinter(out, err)).draws:
        return live
    return LinePrinter(out, err)


def error_line(kind: str, message: str, *, as_json: bool, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
    """The one line with which a command fails. ``kind`` is the name of the error's class."""
    if as_json:
        print(json.dumps({"event": "error", "error": kind, "message": message}), file=stdout or sys.stdout, flush=True)
    else:
        print(f"stagekit: error: {harmless(message)}", file=stderr or sys.stderr, flush=True)


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def harmless(text: str) -> str:
    """``text`` with control characters spelled out: keys and names may come from strangers, and a terminal obeys what it is sent."""
    return text.translate(_CONTROLS)


def columns(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """``rows`` as lines with aligned columns, two spaces apart; those in ``right`` are aligned right. Never wrapped: lines are data."""
    table = [list(row) for row in rows]
    if not table:
        return []
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def format_amount(amount: float, unit: str) -> str:
    """``1.5 GB`` for bytes, ``1,797 samples`` for the rest."""
    return format_size(amount) if unit == "bytes" else counted(round(amount), unit.removesuffix("s"), unit)


class _Rate:
    """How fast a task is, from the first event seen to the latest."""

    def __init__(self, event: Progress, now_s: float) -> None:
        self.start_s, self.start_done = now_s, event.done

    def of(self, event: Progress, now_s: float) -> float | None:
        elapsed = now_s - self.start_s
        gained = event.done - self.start_done
        return gained / elapsed if elapsed > 0.05 and gained > 0 else None


class LinePrinter:
    """Text without a terminal: one line per task every ``every_s``, and one when it ends."""

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        *,
        every_s: float = LINE_EVERY_S,
        prefix: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._err, self._every_s, self._prefix, self._clock = stdout, stderr, every_s, prefix, clock
        self._lock = threading.Lock()
        self._outages = Outages(clock=clock)
        self._rates: dict[str, _Rate] = {}
        self._shown_s: dict[str, float] = {}

    def on_event(self, event: Event) -> None:
        told = self._outages.told(event)
        if told is not None:
            self._show(told)

    def _show(self, event: Event) -> None:
        if isinstance(event, Stage):
            return  # stages are for programs and tests
        with self._lock:
            if isinstance(event, Message):
                self._line(event.text if event.level == "info" else f"{event.level}: {event.text}")
                return
            now_s = self._clock()
            rate = self._rates.setdefault(event.task, _Rate(event, now_s))
            last_s = self._shown_s.setdefault(event.task, now_s)
            if event.finished or now_s - last_s >= self._every_s:
                self._shown_s[event.task] = now_s
                self._line(progress_text(event, rate.of(event, now_s)))
            if event.finished:
                del self._rates[event.task], self._shown_s[event.task]

    def data(self, text: str, record: Record) -> None:  # noqa: ARG002 - people read the text, programs the record
        with self._lock:
            print(harmless(text), file=self._out, flush=True)

    def _line(self, text: str) -> None:
        print(f"{self._prefix}{harmless(text)}", file=self._err, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for message in self._outages.rest():
            self._show(message)


def progress_text(event: Progress, rate: float | None) -> str:
    """``upload step 1200: 1.20 GB of 3.40 GB (35 %), 100 MB/s, 22 s left``."""
    text = f"{event.task}: {format_amount(event.done, event.unit)}"
    if event.total is not None and not (event.finished and event.done == event.total):
        total = format_amount(event.total, event.unit)
        share = f" ({100 * event.done // event.total} %)" if event.total else ""
        done = format_size(event.done) if event.unit == "bytes" else format_count(event.done)
        text = f"{event.task}: {done} of {total}{share}"
    if rate is not None:
        text += f", {format_rate(rate) if event.unit == 'bytes' else f'{format_count(round(rate))} {event.unit}/s'}"
        if event.total is not None and not event.finished and event.done < event.total:
            text += f", {format_duration((event.total - event.done) / rate)} left"
    return f"{text} ({event.note})" if event.note else text


class LivePrinter:
    """Text on a terminal: a bar per task, drawn in place. Colours follow ``NO_COLOR``."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        self._out = stdout
        self._console = Console(file=stderr, highlight=False, soft_wrap=True)
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
        )
        self._lock = threading.Lock()
        self._outages = Outages()
        self._tasks: dict[str, tuple[TaskID, _Rate]] = {}

    @property
    def draws(self) -> bool:
        """Whether the terminal lets text be drawn in place; one that calls itself dumb does not."""
        return not self._console.is_dumb_terminal

    def on_event(self, event: Event) -> None:
        told = self._outages.told(event)
        if told is not None:
            self._show(told)

    def _show(self, event: Event) -> None:
        if isinstance(event, Stage):
            return
        with self._lock:
            if isinstance(event, Message):
                style = {"info": "", "warning": "yellow", "error": "red"}[event.level]
                text = event.text if event.level == "info" else f"{event.level}: {event.text}"
                self._console.print(harmless(text), style=style, markup=False)
                return
            now_s = time.monotonic()
            if event.task not in self._tasks:
                self._bars.start()
                task = self._bars.add_task(harmless(event.task), total=event.total, text="")
                self._tasks[event.task] = task, _Rate(event, now_s)
            task, rate = self._tasks[event.task]
            text = progress_text(event, rate.of(event, now_s)).removeprefix(f"{event.task}: ")
            total = event.done if event.finished and event.total is None else event.total
            self._bars.update(task, completed=event.done, total=total, text=harmless(text))
            if event.finished:
                del self._tasks[event.task]

    def data(self, text: str, record: Record) -> None:  # noqa: ARG002 - people read the text, programs the record
        with self._lock:
            if self._out.isatty():
                self._console.print(harmless(text), markup=False)  # above the bars, which share the screen with it
            else:
                print(harmless(text), file=self._out, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for message in self._outages.rest():
            self._show(message)
        self._bars.stop()


class JsonPrinter:
    """One JSON object a line, flushed at once. Progress of one task at most every ``every_s`` seconds, and its end."""

    def __init__(self, stdout: TextIO, *, every_s: float = JSON_EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._every_s, self._clock = stdout, every_s, clock
        self._lock = threading.Lock()
        self._shown_s: dict[str, float] = {}

    def on_event(self, event: Event) -> None:
        with self._lock:
            match event:
                case Message(text=text, level=level):
                    self._write({"event": "message", "level": level, "text": text})
                case Stage(name=name, subject=subject):
                    self._write({"event": "stage", "name": name, "subject": subject})
                case Progress():
                    now_s = self._clock()
                    if not event.finished and now_s - self._shown_s.get(event.task, -self._every_s) < self._every_s:
                        return
                    self._shown_s[event.task] = now_s
                    if event.finished:
                        del self._shown_s[event.task]
                    self._write(
                        {
                            "event": "progress",
                            "task": event.task,
                            "done": event.done,
                            "total": event.total,
                            "unit": event.unit,
                            "note": event.note,
                            "finished": event.finished,
                        }
                    )

    def data(self, text: str, record: Record) -> None:  # noqa: ARG002 - people read the text, programs the record
        with self._lock:
            self._write(record)

    def _write(self, record: Record) -> None:
        print(json.dumps(record, allow_nan=False), file=self._out, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass
