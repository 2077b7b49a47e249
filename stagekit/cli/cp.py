"""``stagekit cp``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from .options import bulk_options, store_options
from .output import Printer


@click.command()
@click.argument("source")
@click.argument("target")
@bulk_options
@store_options()
def command(source: str, target: str, threads: int, limit_rate: str | None, delete: bool, store: StoreConfig, printer: Printer) -> None:
    """Copy objects from one store to another, without a disk in between.

    SOURCE is a prefix, an object, or a model of the Hugging Face Hub (hf://org/name). For two providers write s3://PROFILE@bucket/prefix.
    What is in TARGET with the same bytes is left, what differs is refused unless --delete is given. A copy that was interrupted copies
    what is missing when it is repeated.
    """
    from ..copies.copy import copy

    copied = copy(source, target, delete=delete, limit_rate=limit_rate, store=store, threads=threads, on_event=printer.on_event)
    printer.data(copied.line, {"event": "copied", **copied.record})
