"""``stagekit fit``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from ..fitting.plan import ALL_PRECISIONS, KINDS, OPTIMIZERS
from .exits import Exit
from .options import LOOKING_S, SIZE, store_options
from .output import Printer

_EXITS = {"fits": Exit.DONE, "does not fit": Exit.VERDICT_NO, "cannot tell": Exit.CANNOT_TELL}


@click.command()
@click.argument("model")
@click.option("--plan", type=click.Choice(KINDS), default="lora", show_default=True, help="What is to be done with the model.")
@click.option(
    "--precision", type=click.Choice(ALL_PRECISIONS), help="Of its weights. [default: fp16 to infer, int4 for qlora, else bf16, mixed]"
)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True, help="Whose states are kept.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Sequences at once on one GPU.")
@click.option("--seq", type=click.IntRange(min=1), default=2048, show_default=True, metavar="N", help="Tokens of a sequence.")
@click.option("--checkpointing/--no-checkpointing", default=True, help="Compute activations again instead of keeping them. [default: on]")
@click.option("--rank", type=click.IntRange(min=1), default=16, show_default=True, metavar="N", help="Of the adapters, for lora and qlora.")
@click.option("--data", metavar="URL", help="The data set, for RAM and disk.")
@click.option("--rate", metavar="RATE", help="How fast checkpoints leave, such as 100MB/s or 1Gbit/s.")
@click.option("--run", metavar="URL", help="Take the rate from the newest checkpoint of this run.")
@click.option(
    "--gpu", metavar="SIZE", default="auto", show_default=True, help="The server's GPUs: 24GB, 8x80GB, or auto for those of this machine."
)
@click.option("--ram", type=SIZE, metavar="SIZE", help="The server's RAM. [default: this machine's, with --gpu auto]")
@click.option("--disk", type=SIZE, metavar="SIZE", help="Free space on its disk. [default: what is free here, with --gpu auto]")
@store_options(retry_s=LOOKING_S)
def command(
    model: str,
    plan: str,
    precision: str | None,
    optimizer: str,
    batch: int,
    seq: int,
    checkpointing: bool,
    rank: int,
    data: str | None,
    rate: str | None,
    run: str | None,
    gpu: str,
    ram: int | None,
    disk: int | None,
    store: StoreConfig,
    printer: Printer,
) -> Exit:
    """Tell what a model needs of a GPU, RAM, disk and link, and whether a server has it.

    MODEL is a parameter count such as 7B, or a local config.json, safetensors file, or directory of them. Every figure is a low and a high
    with its arithmetic; the server is judged on the high ones. Exit code 3 means that it does not fit, 4 that there was no GPU to compare
    with.
    """
    from ..fitting import fit

    found = fit(
        model,
        plan,  # type: ignore[arg-type]  # click lets no other word through
        precision=precision,
        optimizer=optimizer,
        batch=batch,
        seq=seq,
        checkpointing=checkpointing,
        rank=rank,
        data=data,
        rate=rate,
        run=run,
        gpu=gpu,
        ram=ram,
        disk=disk,
        store=store,
        on_event=printer.on_event,
    )
    printer.data("\n".join(found.lines), {"event": "fit", **found.record})
    return _EXITS[found.verdict]
