"""``stagekit ls``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from ..location import Location
from ..progress import Message
from .options import LOOKING_S, store_options
from .output import Printer, columns


@click.command()
@click.argument("url")
@store_options(retry_s=LOOKING_S)
def command(url: str, store: StoreConfig, printer: Printer) -> None:
    """List data sets, runs and checkpoints below a URL.

    At a run it lists the run's checkpoints, each with the address that pull, info and verify take; elsewhere what lies directly below.
    """
    from ..contents import misnamed
    from ..report import ls

    entries = ls(url, store=store, on_event=printer.on_event)
    lines = columns([entry.cells for entry in entries], right=[1])
    for line, entry in zip(lines, entries, strict=True):
        printer.data(line, {"event": "entry", **entry.record})
    if not entries:
        location = Location.parse(url)
        printer.on_event(Message(f"nothing lies below {location}{misnamed(location)}"))
