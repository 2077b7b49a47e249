"""The command reference is what the commands say of themselves."""

from __future__ import annotations

from pathlib import Path

from stagekit.cli.reference import render, replaced

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == replaced(page), "write it again: python -m stagekit.cli.reference docs/command-line.md"


def test_a_changed_page_is_noticed() -> None:
    page = PAGE.read_text()
    assert replaced(page.replace("--deep", "--deeper")) == page


def test_options_and_exit_codes_are_there() -> None:
    text = render()
    for words in (
        "| `--endpoint-url URL` |",
        "| 4 | teardown: CANNOT TELL; fit: no GPU to compare with |",
        "## stagekit verify\n",
        "`stagekit pull [OPTIONS] URL DIRECTORY`",
    ):
        assert words in text
    assert text.count("--json") == 1
