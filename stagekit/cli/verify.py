"""``stagekit verify``."""

from __future__ import annotations

import click

from ..config import StoreConfig
from .exits import Exit
from .options import store_options
from .output import Printer


@click.command()
@click.argument("url")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with its digest.")
@click.option("--afresh", is_flag=True, help="With --deep, read everything, also what an interrupted --deep has read within a day.")
@store_options()
def command(url: str, deep: bool, afresh: bool, store: StoreConfig, printer: Printer) -> Exit:
    """Check that a data set or run in the bucket is whole.

    By default manifests, side files and the size of every object are checked. --deep reads everything, in parallel, and goes on where it
    was interrupted. Exit code 1 when something is damaged; what no reader needs (leftovers, unfinished uploads) is told and does not count.
    """
    from ..verification import verify

    report = verify(url, deep=deep, afresh=afresh, store=store, on_event=printer.on_event)
    for finding in report.findings:
        printer.data(f"{finding.weight}: {finding.line}", {"event": "finding", **finding.record})
    result = {"url": report.url, "kind": report.kind, "deep": report.deep, "objects": report.objects, "bytes": report.bytes}
    printer.data(report.line, {"event": "verified", **result, "ok": report.ok, "faults": len(report.faults)})
    return Exit.DONE if report.ok else Exit.FAILED
