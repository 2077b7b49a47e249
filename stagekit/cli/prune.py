"""``stagekit prune``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from .options import Printer, best_of, store_options


@click.command()
@click.argument("url")
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N checkpoints.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep checkpoints whose step is a multiple of N.")
@click.option("--keep-best", metavar="METRIC:min|max:N", help="Keep the best N by a metric, such as val_loss:min:2.")
@click.option("--older-than", metavar="AGE", default="1d", show_default=True, help="Leftovers of dead machines go when they are older.")
@click.option("--dry-run/--no-dry-run", default=None, help="Only tell. The default for a prefix; a run or data set is pruned at once.")
@click.option("--allow-live", is_flag=True, help="Prune a run although a living process may be writing it.")
@store_options()
def command(
    url: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    older_than: str,
    dry_run: bool | None,
    allow_live: bool,
    store: StoreConfig,
    printer: Printer,
) -> None:
    """Remove old checkpoints, and what dead machines left behind.

    URL is a run, a data set, or a prefix with any number of them. Checkpoints are removed only as --keep-last, --keep-every and --keep-best
    say, and never the newest whole one. Attempts that were never committed, unfinished uploads (billed, and in no listing) and shards of a
    replaced data set are removed when they are old enough. What is freed is told first, object by object.
    """
    from ..pruning import survey
    from ..runs.retention import Policy

    policy = Policy(keep_last, keep_every, best_of(keep_best))
    pruning = survey(
        url, policy=policy, older_than=older_than, dry_run=dry_run, allow_live=allow_live, store=store, on_event=printer.on_event
    )
    printer.data(pruning.line, {"event": "freed", "url": pruning.url, "bytes": pruning.bytes, "dry_run": pruning.dry_run})
    for place in pruning.places:
        printer.data("\n".join(place.lines), {"event": "pruned", **place.record})
    pruning.carry_out(printer.on_event)
