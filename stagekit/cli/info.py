"""``stagekit info``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

from ..config import StoreConfig
from ..progress import Message
from .options import LOOKING_S, Number, store_options
from .output import Printer

_EVERY_S = 5.0


@click.command()
@click.argument("url")
@click.option(
    "--peek",
    type=click.IntRange(min=0),
    metavar="N",
    help="Also show the first N samples of a data set; 0 keeps them out of --html's page.",
)
@click.option("--urls", is_flag=True, help="Print the URLs of a data set's shards, one a line, and nothing else.")
@click.option("--price-per-gb", type=Number(min=0), metavar="PRICE", help="What a GB costs that leaves the store.")
@click.option("--html", type=click.Path(), metavar="FILE", help="Write a page of a run or data set as well, in place of an older one.")
@click.option("--watch", is_flag=True, help=f"Look again every {_EVERY_S:g} s, until ctrl-C.")
@store_options(retry_s=LOOKING_S)
def command(
    url: str, peek: int | None, urls: bool, price_per_gb: float | None, html: str | None, watch: bool, store: StoreConfig, printer: Printer
) -> None:
    """Tell what a data set, a run or a checkpoint holds.

    URL is a data set, a run, or one checkpoint of a run: RUN@1200, RUN@latest, RUN@best.
    """
    from ..report import DatasetInfo, info

    def show() -> None:
        found = info(url, peek=peek, price_per_gb=price_per_gb, urls=urls, html=html, store=store, on_event=printer.on_event)
        if watch and sys.stdout.isatty():
            click.clear()
        lines = found.urls if isinstance(found, DatasetInfo) and urls else found.lines
        printer.data("\n".join(lines), {"event": found.kind, **found.record})

    show()
    if html is not None:
        printer.on_event(Message(f"{html} is a page of it, to be opened in a browser"))
    if watch:
        again(show)


def again(show: Callable[[], None], sleep: Callable[[float], None] = time.sleep) -> None:
    """``show()`` every few seconds, for ever: an error or ctrl-C ends it."""
    while True:
        sleep(_EVERY_S)
        show()
