"""Stream or copy: the sentence follows from the numbers, and the numbers from each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagekit.advice import stream_or_copy
from stagekit.errors import UsageError


def test_a_slow_link_is_told_in_hours() -> None:
    found = stream_or_copy(size_bytes=200 * 10**9, link_bytes_per_s=10e6)
    assert (found.choice, found.stream_s, found.copy_s, found.pays_from) == ("pull", 20_000, 20_000, 2)
    assert found.text == (
        "streaming, an epoch takes 5.6 h (200 GB at 10.0 MB/s). From 2 epochs on, copy it first (`stagekit pull`, 200 GB of disk), "
        "or let cache_dir= and cache_limit= keep what was read"
    )


def test_known_epochs_are_added_up() -> None:
    found = stream_or_copy(size_bytes=200 * 10**9, link_bytes_per_s=10e6, local_s=1000, epochs=10, free_bytes=10**12)
    assert found.choice == "pull"
    assert (
        "; with the data here it would take 16 min 40 s. 10 epochs take 2.3 days streamed and 8.3 h with a copy. Copy it first"
        in found.text
    )
    few = stream_or_copy(size_bytes=200 * 10**9, link_bytes_per_s=10e6, local_s=1000, epochs=1, free_bytes=10**12)
    assert few.choice == "stream"
    assert few.text.startswith("stream: a copy pays from 2 epochs on, and 1 are to come; streaming, an epoch takes 5.6 h")


def test_a_disk_that_is_too_small_takes_a_cache() -> None:
    found = stream_or_copy(size_bytes=200 * 10**9, link_bytes_per_s=10e6, epochs=5, free_bytes=105 * 10**9)
    assert found.choice == "cache"
    assert found.cached_s == pytest.approx(10_000)
    assert "105 GB of disk are free: cache_dir= and cache_limit= keep what fits, so that later epochs take 2.8 h;" in found.text
    exactly = stream_or_copy(size_bytes=100 * 10**9, link_bytes_per_s=10e6, epochs=5, free_bytes=105 * 10**9)
    assert exactly.choice == "pull"


def test_a_link_that_keeps_up_needs_no_copy() -> None:
    found = stream_or_copy(size_bytes=10**9, link_bytes_per_s=1e9, local_s=60, epochs=100, free_bytes=10**12)
    assert (found.choice, found.pays_from) == ("stream", None)
    assert found.text == "stream: 1.00 GB at 1.00 GB/s come in 1.0 s, and an epoch takes 1 min anyway"


@given(
    size=st.integers(1, 10**15),
    rate=st.floats(1, 1e12),
    local_s=st.floats(0, 1e7),
    epochs=st.integers(1, 10_000),
    free=st.integers(0, 10**15),
)
def test_what_is_advised_is_never_slower_than_streaming(size: int, rate: float, local_s: float, epochs: int, free: int) -> None:
    found = stream_or_copy(size_bytes=size, link_bytes_per_s=rate, local_s=local_s, epochs=epochs, free_bytes=free)
    assert found.stream_s >= found.local_s
    if found.choice == "pull":
        assert free >= size
        assert found.copy_s + epochs * found.local_s <= epochs * found.stream_s * (1 + 1e-9)
    if found.choice == "cache":
        assert found.cached_s is not None
        assert found.cached_s <= found.stream_s
    if found.pays_from is not None and found.pays_from > 1 and epochs == found.pays_from - 1:
        assert found.choice == "stream"


@pytest.mark.parametrize("wrong", [{"size_bytes": 0, "link_bytes_per_s": 1.0}, {"size_bytes": 1, "link_bytes_per_s": 0.0}])
def test_nothing_follows_from_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="is not above 0"):
        stream_or_copy(**wrong)  # type: ignore[arg-type]  # sizes are whole numbers there
