"""``stagekit demo``."""

from __future__ import annotations

from pathlib import Path

import click

from ..config import StoreConfig
from ..progress import Message
from ..units import format_duration
from .exits import Exit, Terminated
from .options import Printer, store_options


@click.command()
@click.argument("url", required=False)
@click.option("--keep", is_flag=True, help="Leave the server and the data for looking around, and print how.")
@click.option(
    "--directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=Path("stagekit-demo"),
    show_default=True,
    help="Where the demo works. It must not exist.",
)
@store_options()
def command(url: str | None, keep: bool, directory: Path, store: StoreConfig, printer: Printer) -> Exit:
    """Show the whole path on real data: shard, stream, train, throw the machine away, resume.

    Without URL it starts an S3 server of its own on this machine; with URL, an empty prefix such as s3://my-bucket/demo, it uses that.
    Everything is removed at the end unless --keep is given. The exit code is 1 when something that the demo promises did not hold.
    """
    from ..demo.story import show

    try:
        result = show(url, directory, keep=keep, store=None if url is None else store, tell=printer.data, on_event=printer.on_event)
    except (KeyboardInterrupt, Terminated) as error:
        ended, code = ("ended by SIGTERM", Exit.TERMINATED) if isinstance(error, Terminated) else ("interrupted", Exit.INTERRUPTED)
        left = (
            f"{directory} is gone" if url is None else f"what may have been written below {url} stays; remove it before the next demo there"
        )
        printer.on_event(Message(f"{ended}; every process of the demo has ended, and {left}", "error"))
        return code
    summary = [
        f"held-out accuracy   {result.accuracy:.4f}",
        f"resumed at          epoch {result.resumed_epoch}, sample {result.resumed_sample:,}",
        f"weights             {'bit for bit those' if result.bit_equal else 'NOT those'} of the undisturbed training",
        f"streamed            {result.samples_per_s:,.0f} samples/s while training",
        f"took                {format_duration(result.seconds)}",
    ]
    printer.data(
        "\n".join(["", *summary, *(f"FAILED: {problem}" for problem in result.problems)]),
        {
            "event": "result",
            "url": result.url,
            "accuracy": result.accuracy,
            "resumed_epoch": result.resumed_epoch,
            "resumed_sample": result.resumed_sample,
            "bit_equal": result.bit_equal,
            "verdict_exit_code": result.verdict_exit_code,
            "samples_per_s": result.samples_per_s,
            "seconds": round(result.seconds, 1),
            "problems": list(result.problems),
        },
    )
    return Exit.FAILED if result.problems else Exit.DONE
