"""Sizes, durations and rates: text to numbers at the edge, numbers to text for people."""

from __future__ import annotations

import math
import re
from operator import index

from .errors import UsageError

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    **{prefix + "b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{prefix + "ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_DURATION_UNITS = {
    "": 1.0,
    **dict.fromkeys(("ms",), 0.001),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_LEAST_BARE = 4096
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int, *, name: str = "size") -> int:
    """Bytes from ``"256MiB"``, ``"1.5 GB"``, ``"4096"`` or a number. ``kB MB GB TB`` are powers of 1000, ``KiB MiB GiB TiB`` of 1024.

    Raises ``UsageError`` for anything else, naming ``name``; also for text such as ``"16"``, whose unit was forgotten.
    """
    number = _parse(str(text), _SIZE_UNITS, name, "a size such as 256MiB or 80GB")
    _refuse_without_unit(text, text, number, name)
    return round(number)


def parse_duration(text: str | float, *, name: str = "duration") -> float:
    """Seconds from ``"10min"``, ``"90s"``, ``"1.5h"``, ``"250ms"`` or a number of seconds. Raises ``UsageError`` naming ``name``."""
    return _parse(str(text), _DURATION_UNITS, name, "a duration such as 90s, 10min or 2h")


def parse_rate(text: str | float, *, name: str = "rate") -> float:
    """Bytes per second from ``"20MB/s"``, ``"40Mbit/s"``, ``"40Mbps"`` or a number of bytes per second.

    Raises ``UsageError`` naming ``name``, also for text such as ``"20"``, whose unit was forgotten.
    """
    stripped = str(text).strip()
    if stripped.endswith("bps"):  # a small b is a bit, as links are sold; MBps are bytes
        stripped = stripped.removesuffix("bps") + "bit"
    stripped = stripped.removesuffix("/s").removesuffix("ps").strip()
    bits = re.fullmatch(r"(.*?)bit", stripped, re.IGNORECASE)
    if bits:
        return _parse(bits.group(1) + "B", _SIZE_UNITS, name, "a rate such as 20MB/s or 40Mbit/s") / 8
    number = _parse(stripped, _SIZE_UNITS, name, "a rate such as 20MB/s or 40Mbit/s")
    _refuse_without_unit(text, stripped, number, name, "/s")
    return number


def check_whole(value: object, *, name: str, minimum: int, unit: str = "") -> None:
    """Nothing for a whole number of at least ``minimum``, numpy's included. Raises ``UsageError`` naming ``name``."""
    try:
        number = index(value)  # type: ignore[arg-type]  # what is no whole number is what is asked here
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise UsageError(f"{name}: {value!r} is no whole number")
    if number < minimum:
        raise UsageError(f"{name}: {value} is below {minimum}{unit}")


def _parse(text: str, units: dict[str, int] | dict[str, float], name: str, expected: str) -> float:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    factor = units.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{name}: {text!r} is not {expected}")
    return float(match.group(1)) * factor


def _refuse_without_unit(given: object, number: object, value: float, name: str, per: str = "") -> None:
    """A few bytes are nobody's limit, so a small number that somebody typed lacks its unit. A program's number is what it says."""
    if isinstance(given, str) and str(number).strip()[-1].isdigit() and 0 < value < _LEAST_BARE:
        text = str(number).strip()
        raise UsageError(f"{name}: {given!r} has no unit and would be bytes; write {text}GB{per} or {text}MB{per} (or {text}B{per})")


def format_size(size_bytes: float) -> str:
    """``1.5 GB``: powers of 1000, three significant digits, as disks and links are sold."""
    value, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    if unit == "B" or abs(value) >= 99.95:
        return f"{value:.0f} {unit}"
    return f"{value:.{1 if abs(value) >= 9.995 else 2}f} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """``10.0 MB/s``."""
    return format_size(bytes_per_s) + "/s"


def format_duration(seconds: float) -> str:
    """``0.4 s``, ``14 s``, ``2 min 5 s``, ``5.6 h``, ``3.2 days``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def format_count(number: int) -> str:
    """``1,797``."""
    return f"{number:,}"


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 shard``, ``1,200 shards``."""
    return f"{format_count(number)} {one if number == 1 else many or one + 's'}"
