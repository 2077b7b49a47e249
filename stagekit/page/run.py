"""A run as a page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..report.values import CheckpointInfo, RunInfo
from ..store.usage import Usage
from ..units import counted, format_count, format_duration, format_rate, format_size
from ..verdict.last import LastVerdict
from .chart import Column, Mark, columns, nice_step, timeline
from .document import document, key, section, table, tiles
from .history import Passage
from .markup import Markup, joined, tag
from .words import moment, on_axis

_CHARTED = 60
_TABLED = 500
_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
_ANSWERS = {"YES": "green", "NO": "red", "CANNOT TELL": "amber"}


def run_page(info: RunInfo, history: Sequence[Passage], verdict: LastVerdict | None, now_s: float) -> str:
    """The page of the run ``info`` at ``now_s``. ``history`` is in the order of its checkpoints, oldest first."""
    began = "" if info.created_s is None else f"Begun {moment(info.created_s)}"
    return document(
        "run",
        info.url,
        began,
        _summary(info, history, now_s),
        *_figures(history),
        _verdict(verdict),
        *_trouble(info),
        *_traffic(info),
        *_checkpoints(history),
        made=f"Made by stagekit info on {moment(now_s)}. Saves are timed by the writer's clock, the rest by the store's.",
    )


def _summary(info: RunInfo, history: Sequence[Passage], now_s: float) -> Markup:
    values = [("Checkpoints", format_count(len(info.checkpoints)), ""), ("Stored", format_size(info.bytes), "shared files once")]
    if history:
        newest = history[-1]
        one = newest.checkpoint
        values.append(("Newest step", format_count(one.step), "" if one.epoch is None else f"epoch {one.epoch}"))
        if newest.verified_s is not None:
            values.append(("Verified", f"{format_duration(max(0.0, now_s - newest.verified_s))} ago", moment(newest.verified_s)))
        lags = [lag for passage in history if (lag := passage.lag_s) is not None]
        if lags:
            values.append(("Lag, median", format_duration(median(lags)), f"at most {format_duration(max(lags))}"))
        rates = [rate for passage in history if (rate := passage.bytes_per_s) is not None]
        if rates:
            values.append(("Throughput, median", format_rate(median(rates)), "from save to commit"))
        whole = sum(passage.sent_bytes + passage.reused_bytes for passage in history)
        if whole:
            reused = sum(passage.reused_bytes for passage in history)
            values.append(("Not sent again", f"{100 * reused / whole:.0f} %", f"{format_size(reused)} of {format_size(whole)}"))
    if info.traffic:
        total = sum(info.traffic.values(), Usage())
        values.append(("Requests", format_count(total.requests), counted(info.trainings, "finished training")))
    return tiles(values)


def _figures(history: Sequence[Passage]) -> list[Markup]:
    """The charts; none for a run without checkpoints."""
    if not history:
        return []
    newest = history[-_CHARTED:]
    left_out = f"The newest {_CHARTED} of {format_count(len(history))}." if len(newest) < len(history) else ""
    note = [tag("p", left_out, class_="soft small")] if left_out else []
    drawn = [
        ("When", _when(newest), [("blue", "saved"), ("amber", "being sent"), ("green", "verified")]),
        ("Lag", _lag(newest), [("amber", "until its files were there"), ("green", "until it was verified")]),
        ("Throughput", _throughput(newest), []),
        ("Sizes", _sizes(newest), [("blue", "sent"), ("pale", "sent by an earlier checkpoint")]),
    ]
    charts = (section(name, chart, *([key(colours)] if colours else []), *note) for name, chart, colours in drawn if chart is not None)
    return [tag("div", *charts, class_="figures")]


def _when(history: Sequence[Passage]) -> Markup | None:
    saves, uploads, verified = [], [], []
    for one in history:
        step = f"step {format_count(one.checkpoint.step)}"
        if one.saved_s is not None:
            saves.append(Mark(one.saved_s, one.saved_s, "blue", f"{step}, saved {moment(one.saved_s)}"))
            if one.upload_s is not None:
                title = f"{step}: {format_size(one.sent_bytes)} in {format_duration(one.upload_s)}"
                uploads.append(Mark(one.saved_s, one.saved_s + one.upload_s, "amber", title))
        if one.verified_s is not None:
            verified.append(Mark(one.verified_s, one.verified_s, "green", f"{step}, verified {moment(one.verified_s)}"))
    if not saves and not verified:
        return None
    return timeline("Saves, uploads and verifications over time", [("saves", saves), ("uploads", uploads), ("verified", verified)], on_axis)


def _lag(history: Sequence[Passage]) -> Markup | None:
    found = [
        Column(
            (("amber", one.upload_s), ("green", one.lag_s - one.upload_s)),
            _label(one.checkpoint),
            f"step {format_count(one.checkpoint.step)}: verified {format_duration(one.lag_s)} after it was saved",
        )
        for one in history
        if one.lag_s is not None and one.upload_s is not None
    ]
    if not found:
        return None

    def step(highest: float) -> float:
        return next((one for one in _SECONDS if highest / one <= 5), nice_step(highest)) if highest > 5 else nice_step(highest)

    return columns("Seconds from save to verification", found, lambda value: format_duration(value) if value else "0", step=step)


def _throughput(history: Sequence[Passage]) -> Markup | None:
    found = []
    for one in history:
        if one.bytes_per_s is not None:
            title = f"step {format_count(one.checkpoint.step)}: {format_size(one.sent_bytes)} at {format_rate(one.bytes_per_s)}"
            found.append(Column((("blue", one.bytes_per_s),), _label(one.checkpoint), title))
    return columns("Bytes a second from save to verification", found, lambda value: format_rate(value) if value else "0") if found else None


def _sizes(history: Sequence[Passage]) -> Markup:
    found = [
        Column(
            (("blue", float(one.sent_bytes)), ("pale", float(one.reused_bytes))),
            _label(one.checkpoint),
            f"step {format_count(one.checkpoint.step)}: {format_size(one.sent_bytes)} sent, {format_size(one.reused_bytes)} there already",
        )
        for one in history
    ]
    return columns("Bytes of each checkpoint", found, lambda value: format_size(value) if value else "0")


def _label(one: CheckpointInfo) -> str:
    return f"{one.step / 1000:g}k" if one.step >= 10_000 and one.step % 100 == 0 else format_count(one.step)


def _verdict(verdict: LastVerdict | None) -> Markup:
    if verdict is None:
        asking = joined("None was given on this machine. ", tag("code", "stagekit teardown"), " tells whether it may be destroyed.")
        return section("Last verdict", tag("p", asking, class_="soft"))
    lines = [
        tag("li", tag("span", weight, class_="soft"), f" {text}", joined("\nfix: ", tag("code", fix)) if fix else "")
        for weight, text, fix in verdict.findings
    ]
    if verdict.more:
        lines.append(tag("li", f"and {counted(verdict.more, 'more finding')}"))
    chip = tag("span", verdict.answer, class_=f"chip {_ANSWERS.get(verdict.answer, 'amber')}")
    said = tag("p", chip, f" on {moment(verdict.time_s)}, about this machine as it was then")
    return section("Last verdict", said, *([tag("ul", *lines, class_="plain")] if lines else []))


def _trouble(info: RunInfo) -> list[Markup]:
    lines = [f"pending: {one.line}" for one in info.pending]
    lines += [f"unfinished: {one.line}" for one in info.unfinished if not one.lending]
    lines += [f"damaged: {problem}" for problem in info.damaged]
    return [section("Not in the bucket", tag("ul", *(tag("li", line) for line in lines), class_="plain"))] if lines else []


def _traffic(info: RunInfo) -> list[Markup]:
    if not info.traffic:
        return []
    price = info.price_per_gb
    rows = [(place, *_spent(usage, price)) for place, usage in info.traffic.items()]
    if len(rows) > 1:
        rows.append(("together", *_spent(sum(info.traffic.values(), Usage()), price)))
    heads = ["Asked of", "Requests", "Sent", "Received", *(["Cost"] if price is not None else [])]
    told = f"What {counted(info.trainings, 'training')} that finished asked of storage."
    return [section("Spent", table(heads, rows, numbers=(1, 2, 3, 4), wide=0), tag("p", told, class_="soft small"))]


def _spent(usage: Usage, price: float | None) -> tuple[str, ...]:
    cost = () if price is None else (f"{usage.cost(price):,.2f}",)
    return format_count(usage.requests), format_size(usage.sent_bytes), format_size(usage.received_bytes), *cost


def _checkpoints(history: Sequence[Passage]) -> list[Markup]:
    if not history:
        return []
    rows = []
    for one in [*reversed(history)][:_TABLED]:
        info = one.checkpoint
        rows.append(
            (
                format_count(info.step),
                "" if info.epoch is None else str(info.epoch),
                "" if one.saved_s is None else moment(one.saved_s),
                "" if one.lag_s is None else format_duration(one.lag_s),
                "" if one.bytes_per_s is None else format_rate(one.bytes_per_s),
                format_size(info.bytes),
                f"{100 * one.reused:.0f} %",
                counted(len(info.files), "file"),
                ", ".join(f"{name} {value:.6g}" for name, value in sorted(info.metrics.items())),
            )
        )
    heads = ("Step", "Epoch", "Saved", "Lag", "Throughput", "Size", "Reused", "Files", "Metrics")
    left_out = len(history) - len(rows)
    note = [tag("p", f"{counted(left_out, 'older one')} left out.", class_="soft small")] if left_out else []
    return [section("Checkpoints", table(heads, rows, numbers=(0, 1, 3, 4, 5, 6), wide=8), *note)]
