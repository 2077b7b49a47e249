"""``stagekit push``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from .options import bulk_options, engine_option, store_options
from .output import Printer


@click.command()
@click.argument("directory", type=click.Path())
@click.argument("url")
@engine_option
@bulk_options
@click.option("--allow-mount", is_flag=True, help="Accept a directory on a mounted bucket.")
@store_options()
def command(
    directory: str,
    url: str,
    engine: str,
    threads: int,
    limit_rate: str | None,
    delete: bool,
    allow_mount: bool,
    store: StoreConfig,
    printer: Printer,
) -> None:
    """Send a folder to a bucket, every file verified there.

    Files go below URL under their own names, hidden ones too. What is there with the same bytes is left, what differs is refused unless
    --delete is given. A push that was interrupted sends what is missing when it is repeated.
    """
    from ..copies.push import push

    pushed = push(
        directory,
        url,
        engine=engine,  # type: ignore[arg-type]  # click lets no other word through
        delete=delete,
        limit_rate=limit_rate,
        store=store,
        threads=threads,
        allow_mount=allow_mount,
        on_event=printer.on_event,
    )
    printer.data(pushed.line, {"event": "pushed", **pushed.record})
