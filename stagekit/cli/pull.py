"""``stagekit pull``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from .options import store_options
from .output import Printer


@click.command()
@click.argument("url")
@click.argument("directory", type=click.Path())
@click.option("--threads", type=click.IntRange(min=1), metavar="N", default=8, show_default=True, help="Requests at the same time.")
@click.option("--allow-mount", is_flag=True, help="Accept a directory on a mounted bucket.")
@click.option("--strict", is_flag=True, help="Stop at a damaged checkpoint instead of taking the next older one.")
@click.option("--allow-fresh", is_flag=True, help="Succeed with nothing when the run has no checkpoint, or it cannot be told.")
@store_options()
def command(
    url: str, directory: str, threads: int, allow_mount: bool, strict: bool, allow_fresh: bool, store: StoreConfig, printer: Printer
) -> None:
    """Copy a run's checkpoint or a data set to a local directory, every byte verified.

    URL is a data set, or a run: RUN, RUN@latest, RUN@best, RUN@1200. DIRECTORY must be new or empty; it appears when everything is there.
    A pull that was interrupted goes on where it was when it is repeated.
    """
    from ..staging import pull

    pulled = pull(
        url,
        directory,
        store=store,
        threads=threads,
        allow_mount=allow_mount,
        strict=strict,
        allow_fresh=allow_fresh,
        on_event=printer.on_event,
    )
    printer.data(pulled.line, {"event": "pulled", **pulled.record})
