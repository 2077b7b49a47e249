"""``stagekit shard``."""

from __future__ import annotations

from typing import Any, Literal

import click

from ..config import StoreConfig
from ..units import parse_size
from .options import SIZE, store_options
from .output import Printer


@click.command()
@click.argument("source")
@click.argument("dest")
@click.option("--shard-size", type=SIZE, metavar="SIZE", help="Bytes of a shard at most, headers included. [default: 256MiB; mds: 64MiB]")
@click.option(
    "--format",
    "shard_format",
    type=click.Choice(["webdataset", "mds"]),
    default="webdataset",
    show_default=True,
    help="webdataset: tars, for Stagekit and everybody who reads those. mds: MosaicML's format, for its StreamingDataset.",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME:ENCODING",
    help="mds: how a field is stored, such as cls:int64 or json:bytes. [default: by its extension] May be repeated.",
)
@click.option("--samples-per-shard", type=click.IntRange(min=1), metavar="N", help="Samples of a shard at most.")
@click.option("--labels", type=click.Choice(["dir"]), help="dir: the top-level folder is the class; adds the field cls with its index.")
@click.option(
    "--dots",
    type=click.Choice(["refuse", "field", "rewrite"]),
    default="refuse",
    show_default=True,
    help="What cat.v1.jpg beside cat.v2.jpg means: a mistake, two fields of one sample, or two samples cat_v1 and cat_v2.",
)
@click.option("--include", multiple=True, metavar="GLOB", help="Pack only what matches, such as '*.jpg' or 'train/**'. May be repeated.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out what matches; wins over --include. May be repeated.")
@click.option(
    "--symlinks",
    type=click.Choice(["follow", "skip"]),
    default="follow",
    show_default=True,
    help="Pack what a link points to, or leave it out.",
)
@click.option(
    "--source-format",
    type=click.Choice(["auto", "files", "jsonl", "csv", "parquet", "hf", "text"]),
    default="auto",
    show_default=True,
    help=(
        "What SOURCE is. auto: a file by its suffix (.jsonl .ndjson .csv .tsv .parquet .arrow .txt, also compressed), a folder as files "
        "unless datasets saved it. Name the format of a folder of tables."
    ),
)
@click.option("--key", metavar="COLUMN", help="The column of a table that has the samples' keys. [default: the row's number]")
@click.option(
    "--file-column",
    "file_columns",
    multiple=True,
    metavar="COLUMN",
    help="A column with paths, relative to the table, of files to pack. May be repeated.",
)
@click.option("--text-field", metavar="COLUMN", help="The column whose text is the sample: documents, as the field txt.")
@click.option(
    "--on-bad",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="What to do with a file or a row that cannot be packed: end, or list it and go on.",
)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes that read and send. [default: one per core]")
@click.option("--executor", metavar="URL", help="Let an engine on other machines read and send: dask://host:port. Instead of --workers.")
@click.option("--limit-rate", metavar="RATE", help="What all workers together send at most, such as 20MB/s or 40Mbit/s.")
@click.option(
    "--update", is_flag=True, help="Add the samples that DEST does not hold yet, in further shards; what it holds stays as it is."
)
@click.option("--takeover", is_flag=True, help="Remove what a run that died left at DEST of other data, and start afresh.")
@click.option("--allow-mount", is_flag=True, help="Accept a SOURCE on a mounted bucket.")
@click.option("--dry-run", is_flag=True, help="Print the plan with sizes and overhead; read and write nothing.")
@store_options()
def command(
    source: str,
    dest: str,
    shard_size: int | None,
    shard_format: Literal["webdataset", "mds"],
    columns: tuple[str, ...],
    samples_per_shard: int | None,
    labels: Literal["dir"] | None,
    on_bad: Literal["raise", "skip"],
    workers: int | None,
    executor: str | None,
    limit_rate: str | None,
    takeover: bool,
    update: bool,
    dry_run: bool,
    store: StoreConfig,
    printer: Printer,
    **folder: Any,
) -> None:
    """Pack raw data into WebDataset shards, straight into the bucket.

    SOURCE is a path or a URL. Of a folder, files with the same path up to the first dot of their name are one sample; of a table (JSON
    lines, CSV, Parquet, a saved Hugging Face data set) each row is, and of text each document. DEST is a URL or a directory; nothing is
    visible there as a data set before everything is. The same command goes on where it was interrupted, and does nothing when it is done.
    """
    from .. import mds, publishing
    from ..errors import UsageError
    from ..location import Location
    from ..mds.outline import SHARD_SIZE

    if shard_format == "mds" and update:
        raise UsageError("--update adds tars to a data set of tars; with --format mds name another destination for what is new")
    if shard_format != "mds" and columns:
        raise UsageError("--column is for --format mds; a tar holds the bytes of a field as they are")
    prepared = publishing.source_of(source, labels=labels, on_bad=on_bad, store=store, on_event=printer.on_event, **folder)
    cut: dict[str, Any] = {
        "shard_size": shard_size if shard_size is not None else SHARD_SIZE if shard_format == "mds" else "256MiB",
        "samples_per_shard": samples_per_shard,
    }
    if dry_run:
        publishing.refuse_overlap(prepared.location, Location.parse(dest))
        plan: publishing.Outline | mds.MdsOutline
        if shard_format == "mds":
            plan = mds.mds_outline(prepared, columns=columns, **cut)
        else:
            plan = publishing.outline(prepared, shard_size=parse_size(cut["shard_size"]), samples_per_shard=samples_per_shard)
        printer.data("\n".join(plan.lines), {"event": "plan", **plan.record})
        return
    how: dict[str, Any] = {
        **cut,
        "on_bad": on_bad,
        "workers": workers,
        "executor": executor,
        "takeover": takeover,
        "limit_rate": limit_rate,
        "store": store,
        "on_event": printer.on_event,
    }
    done: publishing.Publication | mds.MdsPublication
    if shard_format == "mds":
        done = mds.publish_mds(prepared, dest, columns=columns, **how)
    else:
        done = publishing.publish(prepared, dest, update=update, **how)
    printer.data("\n".join(done.lines), {"event": "published", **done.record})
