from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagekit.errors import UsageError
from stagekit.units import counted, format_count, format_duration, format_rate, format_size, parse_duration, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("256MiB", 256 * 2**20),
        ("256 mib", 256 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("1kB", 1000),
        ("1KiB", 1024),
        (".5 TB", 500_000_000_000),
        ("2TiB", 2 * 2**40),
        ("7b", 7),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 parsec", "1e6", "1,5GB", "0x10"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"shard_size: .* is not a size such as 256MiB or 80GB"):
        parse_size(text, name="shard_size")


@pytest.mark.parametrize(("text", "meant"), [("16", "16GB or 16MB (or 16B)"), (" 1.5 ", "1.5GB or 1.5MB (or 1.5B)"), ("4095", "4095GB")])
def test_a_size_whose_unit_was_forgotten_is_refused(text: str, meant: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"disk: {text!r} has no unit and would be bytes; write {meant}")):
        parse_size(text, name="disk")
    with pytest.raises(UsageError, match=r"limit: '20/s' has no unit and would be bytes; write 20GB/s or 20MB/s \(or 20B/s\)"):
        parse_rate("20/s", name="limit")
    assert [parse_size("0"), parse_size(16), parse_size("16B"), parse_rate(20), parse_rate("20B/s")] == [0, 16, 16, 20, 20]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10min", 600), ("90s", 90), ("1.5h", 5400), ("250ms", 0.25), (12, 12), ("2 days", 172800), ("3", 3), ("1 hour", 3600)],
)
def test_durations(text: str | float, expected: float) -> None:
    assert parse_duration(text) == expected


def test_what_is_no_duration_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="every: 'soon' is not a duration such as 90s, 10min or 2h"):
        parse_duration("soon", name="every")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("20MB/s", 20e6), ("40Mbit/s", 5e6), ("40Mbps", 5e6), ("40MBps", 40e6), (1000, 1000), ("1GiB/s", 2**30), ("8 kbit/s", 1000)],
)
def test_rates(text: str | float, expected: float) -> None:
    assert parse_rate(text) == expected


def test_what_is_no_rate_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="limit: 'fast' is not a rate such as 20MB/s or 40Mbit/s"):
        parse_rate("fast", name="limit")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1500, "1.50 kB"), (12_345, "12.3 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"),
     (80e9, "80.0 GB"), (-1500, "-1.50 kB"), (5e15, "5.00 PB"), (99_950, "100 kB")],
)  # fmt: skip
def test_sizes_for_people(size: float, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (0.42, "0.4 s"), (9.94, "9.9 s"), (14.2, "14 s"), (59.4, "59 s"), (60, "1 min"), (125, "2 min 5 s"), (3599.6, "60 min"),
     (3600, "1.0 h"), (20160, "5.6 h"), (276480, "3.2 days"), (math.inf, "unknown"), (math.nan, "unknown")],
)  # fmt: skip
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_rates_and_counts_for_people() -> None:
    assert format_rate(10e6) == "10.0 MB/s"
    assert format_count(1797) == "1,797"
    assert [counted(number, "file") for number in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    assert [counted(number, "entry", "entries") for number in (1, 2)] == ["1 entry", "2 entries"]


@given(st.integers(min_value=0, max_value=10**15))
def test_a_size_for_people_is_within_half_a_percent(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.005)
