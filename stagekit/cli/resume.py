"""``stagekit resume``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from ..progress import Message
from . import main
from .options import STORE_OPTIONS, Printer, given, store_options


@click.command()
@click.argument("run")
@click.option("--attempt", "number", type=click.IntRange(min=1), metavar="N", help="The attempt that is meant. [default: the newest]")
@click.option("--diff", is_flag=True, help="Print only the recorded changes of the code, for git apply.")
@click.option("--exec", "execute", is_flag=True, help="Start the recorded command here, under stagekit run.")
@store_options(beside=True)
@click.pass_context
def command(
    context: click.Context, run: str, number: int | None, diff: bool, execute: bool, store: StoreConfig, printer: Printer
) -> int | None:
    """Tell how a run was last started, or start it here in the same way.

    Printed are the directory, the commit to check out, packages that are missing or differ here, and the line to start it with. With --exec
    that line is run in the current directory.
    """
    from ..wrapping.again import again

    found = again(run, number, store=store, on_event=printer.on_event)
    if diff:
        changes = found.attempt.code.changes if found.attempt.code else ""
        printer.data(changes.removesuffix("\n"), {"event": "diff", "changes": changes})
        return None
    if not execute:
        printer.data("\n".join(found.lines), {"event": "attempt", **found.record})
        return None
    for text in found.differences:
        printer.on_event(Message(text, "warning"))
    # What is said of the store here holds for the new start, and so does the place where the run was found.
    return main(["run", *found.options_at(run), *given(context, only=STORE_OPTIONS), "--", *found.to_start()])
