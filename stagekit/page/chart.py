"""Charts as SVG that is part of the page: columns, and a timeline. A mark's title tells its numbers, which the page has in a table, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .markup import Markup, joined, tag

_WIDTH, _HEIGHT = 400.0, 210.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 8.0, 10.0, 24.0
_LANE = 46.0
_WIDEST = 34.0


@dataclass(frozen=True, slots=True)
class Column:
    """One column: parts from below, each a colour and a height, what is written below it, and its title."""

    parts: tuple[tuple[str, float], ...]
    label: str
    title: str

    @property
    def height(self) -> float:
        """Of all parts."""
        return sum(height for _, height in self.parts)


def columns(name: str, values: Sequence[Column], scale: Callable[[float], str], *, step: Callable[[float], float] | None = None) -> Markup:
    """A chart of ``values``. ``scale`` writes the numbers at the side, ``step`` is the distance between them for a highest value."""
    highest = max((one.height for one in values), default=0.0)
    apart = (step or nice_step)(highest)
    top = max(apart, math.ceil(round(highest / apart, 9)) * apart)
    floor, room = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP
    marks: list[Markup] = []
    for number in range(round(top / apart) + 1):
        y = floor - room * number * apart / top
        marks += [_rule(y), tag("text", scale(number * apart), x=_LEFT - 6, y=y + 4, text_anchor="end")]
    slot = (_WIDTH - _LEFT - _RIGHT) / max(1, len(values))
    wide = min(_WIDEST, slot * 0.72)
    every = math.ceil(len(values) * max([7.2 * len(one.label) + 8 for one in values], default=1) / (_WIDTH - _LEFT - _RIGHT)) or 1
    for at, one in enumerate(values):
        middle, y = _LEFT + slot * (at + 0.5), floor
        parts = []
        for colour, height in one.parts:
            if height <= 0:
                continue
            tall = max(room * height / top, 1.0)  # what is not nothing can be seen
            y -= tall
            parts.append(tag("rect", x=middle - wide / 2, y=y, width=wide, height=tall, class_=colour))
        marks.append(tag("g", tag("title", one.title), *parts))
        if (len(values) - 1 - at) % every == 0:
            marks.append(tag("text", one.label, x=middle, y=_HEIGHT - 7, text_anchor="middle"))
    return _drawing(name, _HEIGHT, marks)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something in a lane of a timeline: from ``begin_s`` to ``end_s``, a dot where the two are one."""

    begin_s: float
    end_s: float
    colour: str
    title: str


def timeline(name: str, lanes: Sequence[tuple[str, Sequence[Mark]]], write: Callable[[float, float], str]) -> Markup:
    """``lanes`` under each other over one time axis. ``write`` is given a time and the length of the axis in seconds."""
    every = [moment for _, marks in lanes for one in marks for moment in (one.begin_s, one.end_s)]
    first, last = min(every), max(every)
    length = max(last - first, 1.0)
    height = _TOP + _LANE * len(lanes) + _BOTTOM
    room = _WIDTH - _LEFT - _RIGHT - 16

    def x(moment: float) -> float:
        return _LEFT + 8 + room * (moment - first) / length

    drawn: list[Markup] = []
    for number, (label, marks) in enumerate(lanes):
        y = _TOP + _LANE * (number + 0.5)
        drawn += [_rule(y), tag("text", label, x=_LEFT - 8, y=y + 4, text_anchor="end")]
        for one in marks:
            if one.end_s <= one.begin_s:
                shape = tag("circle", tag("title", one.title), cx=x(one.begin_s), cy=y, r=4.5, class_=one.colour)
            else:
                wide = max(x(one.end_s) - x(one.begin_s), 3.0)
                shape = tag("rect", tag("title", one.title), x=x(one.begin_s), y=y - 9, width=wide, height=18.0, rx=2.0, class_=one.colour)
            drawn.append(shape)
    ticks = (first,) if last - first < 1 else (first, first + length / 2, last)
    for number, moment in enumerate(ticks):
        anchor = "middle" if 0 < number < len(ticks) - 1 else "start" if number == 0 else "end"
        drawn.append(tag("text", write(moment, length), x=x(moment), y=height - 7, text_anchor=anchor))
    return _drawing(name, height, drawn)


def nice_step(highest: float) -> float:
    """The distance between three to six lines up to ``highest``: 1, 2 or 5 and a power of ten."""
    if highest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest / 3))
    return next(factor * power for factor in (1, 2, 5, 10) if highest / (factor * power) <= 5)


def _rule(y: float) -> Markup:
    return tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid")


def _drawing(name: str, height: float, marks: Iterable[Markup]) -> Markup:
    return tag("svg", tag("title", name), joined(*marks), viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}", role="img", aria_label=name)
