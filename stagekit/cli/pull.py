"""``stagekit pull`` and its alias ``stage``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from .options import SIZE, bulk_options, engine_option, store_options
from .output import Printer


@click.command()
@click.argument("url")
@click.argument("directory", type=click.Path())
@engine_option
@bulk_options
@click.option(
    "--disk", type=SIZE, metavar="SIZE", help="One budget for pulls in progress, cached blocks and pinned checkpoints, such as 80GiB."
)
@click.option("--link-hf", metavar="ORG/NAME", help="Make the copy known to Hugging Face's cache, for from_pretrained without a network.")
@click.option("--allow-mount", is_flag=True, help="Accept a directory on a mounted bucket.")
@click.option("--strict", is_flag=True, help="Stop at a damaged checkpoint instead of taking the next older one.")
@click.option("--allow-fresh", is_flag=True, help="Succeed with nothing when the run has no checkpoint, or it cannot be told.")
@store_options()
def command(
    url: str,
    directory: str,
    engine: str,
    threads: int,
    limit_rate: str | None,
    delete: bool,
    disk: int | None,
    link_hf: str | None,
    allow_mount: bool,
    strict: bool,
    allow_fresh: bool,
    store: StoreConfig,
    printer: Printer,
) -> None:
    """Copy a run's checkpoint, a data set or any prefix to a local directory, verified.

    URL is a data set, or a run (RUN, RUN@latest, RUN@best, RUN@1200), or any prefix or object. A new or empty DIRECTORY appears when
    everything is there; beside files that are there already, plain objects are added. A pull that was interrupted goes on where it was
    when it is repeated.
    """
    from ..copies.pull import pull

    pulled = pull(
        url,
        directory,
        engine=engine,  # type: ignore[arg-type]  # click lets no other word through
        delete=delete,
        limit_rate=limit_rate,
        disk=disk,
        link_hf=link_hf,
        store=store,
        threads=threads,
        allow_mount=allow_mount,
        strict=strict,
        allow_fresh=allow_fresh,
        on_event=printer.on_event,
    )
    printer.data(pulled.line, {"event": "pulled", **pulled.record})
