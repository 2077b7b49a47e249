"""``stagekit doctor``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from .exits import Exit
from .options import LOOKING_S, store_options
from .output import Printer


@click.command()
@click.argument("places", nargs=-1, metavar="[PATH|URL]...")
@click.option("--read-only", is_flag=True, help="Write nothing, and leave out what only a write can tell.")
@store_options(retry_s=LOOKING_S)
def command(places: tuple[str, ...], read_only: bool, store: StoreConfig, printer: Printer) -> Exit:
    """Tell what this machine and a store can do, what will fail, and what to change.

    One screen to paste into a bug report; it holds no secrets. Below each URL scratch objects are written and removed again. Exit code 1
    means that something will fail.
    """
    from ..diagnosis import doctor

    found = doctor(places, read_only=read_only, store=store, on_event=printer.on_event)
    printer.data("\n".join(found.lines), {"event": "diagnosis", **found.record})
    return Exit.DONE if found.healthy else Exit.FAILED
