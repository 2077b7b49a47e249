from __future__ import annotations

from stagekit.histogram import Bucket, buckets, drawn


def test_powers_of_two_with_the_empty_ones_between() -> None:
    assert buckets([1536, 1024, 2047, 2048, 9000]) == (
        Bucket(1024, 2048, 3),
        Bucket(2048, 4096, 1),
        Bucket(4096, 8192, 0),
        Bucket(8192, 16384, 1),
    )
    assert buckets([0, 1]) == (Bucket(0, 1, 1), Bucket(1, 2, 1))
    assert buckets([]) == ()


def test_bars_are_proportional_and_one_is_never_invisible() -> None:
    lines = drawn([Bucket(512, 1024, 3000), Bucket(1024, 2048, 1500), Bucket(2048, 4096, 0), Bucket(4096, 8192, 1)])
    assert lines == [
        "  512 B to 1.02 kB  3,000  " + "█" * 30,
        "1.02 kB to 2.05 kB  1,500  " + "█" * 15,
        "2.05 kB to 4.10 kB      0",
        "4.10 kB to 8.19 kB      1  █",
    ]
    assert drawn([]) == []
