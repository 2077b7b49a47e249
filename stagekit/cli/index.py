"""``stagekit index``."""

from __future__ import annotations

from typing import Literal

import click

from ..config import StoreConfig
from .options import store_options
from .output import Printer


@click.command()
@click.argument("tars", nargs=-1, required=True)
@click.argument("dest")
@click.option(
    "--repeated-keys",
    type=click.Choice(["refuse", "allow"]),
    default="refuse",
    show_default=True,
    help="What to do with a key that is in two tars: end, or count it and go on.",
)
@click.option(
    "--on-bad",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="What to do with a tar that is missing, damaged or none: end, or list it and go on without it.",
)
@click.option("--threads", type=click.IntRange(min=1), default=16, show_default=True, metavar="N", help="Ranges fetched at a time.")
@click.option("--takeover", is_flag=True, help="Continue where a run on another machine, which has ended, was indexing other tars.")
@click.option("--allow-mount", is_flag=True, help="Accept tars on a mounted bucket.")
@store_options()
def command(
    tars: tuple[str, ...],
    dest: str,
    repeated_keys: Literal["refuse", "allow"],
    on_bad: Literal["raise", "skip"],
    threads: int,
    takeover: bool,
    allow_mount: bool,
    store: StoreConfig,
    printer: Printer,
) -> None:
    """Make existing WebDataset tars a data set, without rewriting them.

    TARS are patterns such as 's3://bucket/shard-{000000..000099}.tar' (quoted, else the shell expands them), single tars, or prefixes,
    which mean all tars below. DEST is where the manifest, the indices and the block tables go: the tars' own prefix, or any other place.
    Each tar is read once. The same command goes on where it was interrupted, and does nothing when it is done.
    """
    from ..indexing import index_shards

    done = index_shards(
        tars,
        dest,
        repeated_keys=repeated_keys,
        on_bad=on_bad,
        threads=threads,
        takeover=takeover,
        allow_mount=allow_mount,
        store=store,
        on_event=printer.on_event,
    )
    printer.data("\n".join(done.lines), {"event": "indexed", **done.record})
