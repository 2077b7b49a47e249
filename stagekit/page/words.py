"""Moments, for people."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(time_s: float) -> str:
    """``2026-11-30 18:42:07 UTC``."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def on_axis(time_s: float, length_s: float) -> str:
    """The same on an axis of ``length_s`` seconds: only what is needed to tell its moments apart."""
    long = "%Y-%m-%d" if length_s > 20 * 86400 else "%m-%d %H:%M" if length_s > 7200 else "%H:%M:%S"
    return datetime.fromtimestamp(time_s, UTC).strftime(long)
