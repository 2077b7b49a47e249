"""The generated part of docs/command-line.md: ``python -m stagekit.cli.reference docs/command-line.md`` writes it again.

A test compares the page with what this would write, so that the two cannot drift apart.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from . import COMMANDS, stagekit
from .exits import MEANINGS
from .options import store_options

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def render() -> str:
    """Options of every command, exit codes, and a section for each command."""
    shared = _shared()
    lines = ["## Options of every command", "", *_table(shared), "", "## Exit codes", "", "| code | means |", "|---|---|"]
    lines += [f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items()]
    context = click.Context(stagekit, info_name="stagekit")
    names = {param.name for param in shared}
    for name in sorted(COMMANDS):
        command = stagekit.get_command(context, name)
        assert command is not None  # the group made the list
        inner = click.Context(command, parent=context, info_name=name)
        lines += ["", f"## stagekit {name}", "", f"`{' '.join(['stagekit', name, *command.collect_usage_pieces(inner)])}`", ""]
        lines += (" ".join(paragraph.split()) + "\n" for paragraph in (command.help or "").split("\n\n"))
        own = [param for param in command.params if isinstance(param, click.Option) and param.name not in names]
        lines += _table(own) if own else ["No options of its own."]
    return "\n".join(lines) + "\n"


def replaced(page: str) -> str:
    """``page`` with its generated part as it must be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{render()}\n{END}{after}"


def _shared() -> list[click.Option]:
    probe = click.command()(store_options()(lambda **_: None))
    return [param for param in probe.params if isinstance(param, click.Option)]


def _table(options: list[click.Option]) -> list[str]:
    rows = ["| option | what it does |", "|---|---|"]
    for option in options:
        record = option.get_help_record(click.Context(stagekit))
        if record is not None:
            flags = record[0]
            # The rest of the record is worded differently by each release of click.
            text = option.help or ""
            if option.show_default is True:
                text += f" [default: {option.default}]"
            rows.append("| " + f"`{flags}` | {text}".replace("|", "\\|").replace("` \\| ", "` | ") + " |")
    return rows


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(replaced(target.read_text()))
