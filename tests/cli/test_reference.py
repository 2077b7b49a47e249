"""The command reference is what the commands say of themselves."""

from __future__ import annotations

import re
from pathlib import Path

from stagekit import cli
from stagekit.cli import COMMANDS
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


def test_the_page_names_the_events_of_each_command() -> None:
    rows = re.findall(r"^\| (`[a-z]+`(?: · `[a-z]+`)*) \| (.+) \|$", PAGE.read_text().partition("And as results:")[2], re.MULTILINE)
    named: dict[str, set[str]] = {}
    for commands, events in rows:
        of_each = events.split(" · ") if "·" in commands else [events]
        for command, text in zip(commands.split(" · "), of_each, strict=True):
            named[command.strip("`")] = set(re.findall(r"`(\w+)`", text))
    named["stage"] = named["pull"]  # another name for it
    assert set(named) == set(COMMANDS)
    for command in set(COMMANDS) - {"stage"}:
        written = set(re.findall(r'"event": "(\w+)"', (Path(cli.__file__).parent / f"{command}.py").read_text()))
        assert written <= named[command], command
