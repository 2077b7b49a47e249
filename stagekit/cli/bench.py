"""``stagekit bench``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from .options import DURATION, Number, store_options
from .output import Printer


@click.command()
@click.argument("url")
@click.option(
    "--step-ms", type=Number(min=0, min_open=True), metavar="MS", help="What a training step takes on one batch, to compare with."
)
@click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="How many are to come: tells whether a copy pays, and fits here.")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, metavar="N", help="Samples in a batch.")
@click.option("--seconds", "seconds", type=DURATION, default="10s", show_default=True, metavar="TIME", help="How long to measure.")
@click.option("--threads", type=click.IntRange(min=1), default=4, show_default=True, metavar="N", help="That decode.")
@click.option("--connections", type=click.IntRange(min=1), default=16, show_default=True, metavar="N", help="Reads at the same time.")
@click.option("--raw", is_flag=True, help="Hand out bytes instead of decoding them.")
@click.option("--price-per-gb", type=Number(min=0), metavar="PRICE", help="What a GB costs that leaves the store.")
@store_options()
def command(
    url: str,
    step_ms: float | None,
    epochs: int | None,
    batch_size: int,
    seconds: float,
    threads: int,
    connections: int,
    raw: bool,
    price_per_gb: float | None,
    store: StoreConfig,
    printer: Printer,
) -> None:
    """Tell what limits training on a data set from here: the link, the CPU, or the training step.

    It measures for some seconds, writes nothing, and says whether to stream the data or to copy it here first. It needs PyTorch, with
    which it reads as training does.
    """
    from ..benchmark import bench

    report = bench(
        url,
        batch_size=batch_size,
        step_ms=step_ms,
        epochs=epochs,
        seconds=seconds,
        decode=not raw,
        threads=threads,
        connections=connections,
        price_per_gb=price_per_gb,
        store=store,
        on_event=printer.on_event,
    )
    printer.data("\n".join(report.lines), {"event": "bench", **report.record})
