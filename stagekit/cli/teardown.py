"""``stagekit teardown``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from .exits import Exit
from .options import store_options
from .output import Printer

_EXITS = {"YES": Exit.DONE, "NO": Exit.VERDICT_NO, "CANNOT TELL": Exit.CANNOT_TELL}


@click.command()
@click.option("--watch", multiple=True, type=click.Path(), metavar="DIR", help="A directory whose files must be safe. Repeatable.")
@click.option("--run", "runs", multiple=True, metavar="RUN", help="A run that holds them. Repeatable.")
@click.option("--ignore", "ignored", multiple=True, metavar="GLOB", help="Files that are no loss: a path below DIR, or a name. Repeatable.")
@click.option("--durable", multiple=True, type=click.Path(), metavar="PATH", help="A volume that outlives this server. Repeatable.")
@click.option("--deep", is_flag=True, help="Read every object of the runs again and compare it.")
@click.option("--check", is_flag=True, help="Only look, here and in the bucket: send nothing.")
@store_options()
def command(
    watch: tuple[str, ...],
    runs: tuple[str, ...],
    ignored: tuple[str, ...],
    durable: tuple[str, ...],
    deep: bool,
    check: bool,
    store: StoreConfig,
    printer: Printer,
) -> Exit:
    """Finish uploads, then tell whether this server may be destroyed.

    Exit code 0 is YES, 3 is NO, 4 is CANNOT TELL, so that `stagekit teardown && destroy-server` is safe. Without options the runs and
    directories that this machine has recorded are judged.
    """
    from ..verdict import find_scope, judge

    # Options that name a store hold for every run; without them each recorded run is reached as its training reached it.
    judged = find_scope(watch, runs, ignored, durable=durable, store=None if store == StoreConfig() else store)
    printer.data("\n".join(judged.scope.lines), {"event": "scope", **judged.scope.record})
    verdict = judge(judged, check=check, deep=deep, on_event=printer.on_event)
    for finding in verdict.findings:
        printer.data(finding.line, {"event": "finding", **finding.record})
    printer.data(verdict.line, {"event": "verdict", "answer": verdict.answer, "findings": len(verdict.findings)})
    return _EXITS[verdict.answer]
