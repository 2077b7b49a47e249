"""``stagekit run``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ..config import StoreConfig
from ..progress import Message
from .exits import Exit
from .options import DURATION, SIZE, Number, Printer, best_of, given, store_options
from .output import JsonPrinter

if TYPE_CHECKING:
    from ..wrapping.wrapper import Ended

_EXITS = {"stalled": Exit.STALLED, "overtime": Exit.OVERTIME}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--to", "to", required=True, metavar="RUN", help="Where the run lies: s3://bucket/runs/first.")
@click.option(
    "--watch",
    multiple=True,
    required=True,
    metavar="DIR",
    help="A directory that the command saves into; made when it is missing. Repeatable.",
)
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    metavar="GLOB",
    help="Further checkpoints: a path below DIR, or a name, of a file or a directory.",
)
@click.option(
    "--quiet",
    "quiet_s",
    type=DURATION,
    default="30s",
    show_default=True,
    metavar="TIME",
    help="Without change for so long is finished, where the format does not tell.",
)
@click.option(
    "--resume",
    type=click.Choice(["auto", "never", "must"]),
    default="auto",
    show_default=True,
    help="Fetch the newest checkpoint first: when there is one, never, or fail when there is none.",
)
@click.option("--allow-fresh", is_flag=True, help="Start although it cannot be told what the run holds.")
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks that the command starts. [default: as its launcher or WORLD_SIZE says]",
)
@click.option("--stall", "stall_s", type=DURATION, metavar="TIME", help="End the command when nothing is printed or written for so long.")
@click.option("--max-hours", type=Number(min=0, min_open=True), metavar="H", help="End the command after H hours.")
@click.option(
    "--grace",
    "grace_s",
    type=DURATION,
    default="25s",
    show_default=True,
    metavar="TIME",
    help="From SIGTERM to the end: of the command, and with SIGTERM from outside of the sending as well.",
)
@click.option(
    "--drain", "drain_s", type=DURATION, default="10min", show_default=True, metavar="TIME", help="For sending what is left at the end."
)
@click.option("--no-record", is_flag=True, help="Do not note command line, installed packages and git diff in the run.")
@click.option("--no-logs", is_flag=True, help="Send no logs, and leave the terminal to the command.")
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N checkpoints.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep checkpoints whose step is a multiple of N.")
@click.option("--keep-best", metavar="METRIC:min|max:N", help="Keep the best N by a metric, such as val_loss:min:2.")
@click.option("--spool", "spool_dir", type=click.Path(path_type=Path), metavar="DIR", help="Where saves are pinned until they are sent.")
@click.option("--disk", type=SIZE, metavar="SIZE", help="What pinned saves may take before intermediate ones are dropped.")
@click.option("--allow-mount", is_flag=True, help="Accept a watched directory on a mounted bucket.")
@store_options(beside=True)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    to: str,
    watch: tuple[str, ...],
    patterns: tuple[str, ...],
    quiet_s: float,
    resume: Literal["auto", "never", "must"],
    allow_fresh: bool,
    world_size: int | None,
    stall_s: float | None,
    max_hours: float | None,
    grace_s: float,
    drain_s: float,
    no_record: bool,
    no_logs: bool,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    spool_dir: Path | None,
    disk: int | None,
    allow_mount: bool,
    store: StoreConfig,
    printer: Printer,
    command: tuple[str, ...],
) -> int:
    """Run any training command with its checkpoints and logs kept in a bucket.

    The newest checkpoint is fetched into the watched directory first; what the command saves is sent while it runs and until all is there.
    STAGEKIT_RESUME_DIR tells the command where the checkpoint is, and is empty for a new training. The exit code is the command's own when
    that is not 0 (128+N for signal N), 5 after --stall, 6 after --max-hours, else 1 when something is not in the bucket.
    """
    from ..wrapping.wrapper import Settings, run_command

    settings = Settings(
        watch=watch,
        patterns=patterns,
        quiet_s=quiet_s,
        resume=resume,
        allow_fresh=allow_fresh,
        stall_s=stall_s,
        limit_s=max_hours * 3600 if max_hours is not None else None,
        grace_s=grace_s,
        drain_s=drain_s,
        world_size=world_size,
        record=not no_record,
        logs=not no_logs,
        allow_mount=allow_mount,
        stdout=2 if isinstance(printer, JsonPrinter) else 1,
        options=tuple(given(context)),
    )
    ended = run_command(
        command,
        to,
        settings,
        store=store,
        on_event=printer.on_event,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=best_of(keep_best),
        spool_dir=spool_dir,
        disk=disk,
    )
    return finish(ended, printer)


def finish(ended: Ended, printer: Printer) -> int:
    """Tell how it ended, and give the exit code."""
    if isinstance(printer, JsonPrinter):
        printer.data("", {"event": "ended", **ended.record})
    else:
        saved = f"step {ended.verified} is in {ended.url}" if ended.verified is not None else f"nothing new is in {ended.url}"
        printer.on_event(Message(f"the command ended with {ended.code}; {saved}"))
    if ended.problem is not None:
        printer.on_event(Message(ended.problem, "error"))
    if ended.reason in _EXITS:
        return _EXITS[ended.reason]
    return ended.code or (Exit.FAILED if ended.problem is not None else Exit.DONE)
