"""What docs/reliability.md says was done is what the tests do: its numbers are counted here, from the tests themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import test_ending, test_faults, test_kill, test_restore, test_retention
from .proxied import SERVERS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def cases(test: Callable[..., Any]) -> int:
    """How many cases pytest makes of a test: the product of its parametrizations."""
    marks: list[Any] = getattr(test, "pytestmark", [])
    return math.prod(len(mark.args[1]) for mark in marks if mark.name == "parametrize")


def rows() -> list[tuple[str, int]]:
    """What was done, and how often. Each test fails when it did less, or when a checkpoint was lost."""
    stages = cases(test_kill.test_killed_at_a_stage) + cases(test_kill.test_killed_when_saves_were_dropped)
    stages += cases(test_kill.test_a_rank_that_is_killed_when_it_has_delivered) + cases(test_restore.test_a_killed_restore_leaves_no_target)
    faults = {**test_faults.ANSWERS, **test_faults.CONNECTIONS, **test_faults.UPLOADS, **test_faults.DOWNLOADS}
    return [
        ("killed at a named stage of saving, removing and restoring", stages),
        (
            "killed before and after a request: claim, lease, `run.json`, a file, the manifest, deletions, looks",
            cases(test_kill.test_killed_at_a_request),
        ),
        ("`kill -9` at a random moment, on a directory, now and then on a new disk", test_kill.ROUNDS),
        ("`kill -9` at a random moment, on servers that fail now and then", test_kill.ROUNDS_EACH * len(SERVERS)),
        *((kind, test_faults.PER_CASE * len(SERVERS)) for kind in faults),
        (
            "a listing that hides the newest checkpoint, its owner, or everything; with and without conditional create",
            cases(test_restore.test_a_listing_that_lags_hides_no_newest_checkpoint),
        ),
        (
            "removing old checkpoints, interrupted at any point",
            cases(test_retention.test_a_crash_at_any_point_leaves_whole_checkpoints_and_a_rerun_finishes),
        ),
        (
            "no thread can be started while the interpreter ends (Python 3.12 and later)",
            cases(test_ending.test_a_drain_at_exit_needs_no_new_thread),
        ),
    ]


def test_the_page_tells_what_the_tests_count() -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.endswith("| 0 |")]
    assert table == [f"| {what} | {count} | 0 |" for what, count in rows()]


def test_at_least_fifty_kills_at_random() -> None:
    assert test_kill.ROUNDS + test_kill.ROUNDS_EACH * len(SERVERS) >= 50
