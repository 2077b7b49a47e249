"""A data set as a page."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.values import DatasetInfo
from ..units import counted, format_count, format_size
from .chart import Column, columns
from .document import document, section, table, tiles
from .markup import Markup, joined, tag
from .samples import Shown, ShownSample
from .words import moment


def dataset_page(info: DatasetInfo, samples: Sequence[ShownSample], now_s: float) -> str:
    """The page of the data set ``info`` at ``now_s``, with ``samples``."""
    return document(
        "data set",
        info.url,
        f"Digest {info.digest}",
        _summary(info),
        tag("div", _fields(info), *_sizes(info), class_="figures"),
        *_samples(samples),
        made=f"Made by stagekit info on {moment(now_s)}.",
    )


def _summary(info: DatasetInfo) -> Markup:
    each = info.bytes / info.shards if info.shards else 0
    values = [
        ("Samples", format_count(info.samples), f"{format_size(info.bytes / info.samples)} each" if info.samples else ""),
        ("Size", format_size(info.bytes), ""),
        ("Shards", format_count(info.shards), f"about {format_size(each)} each"),
        ("Largest block", format_size(info.largest_block), "what is read at once"),
    ]
    if info.elsewhere:
        values.append(("Indexed in place", counted(len(info.elsewhere), "shard"), info.elsewhere[0]))
    if info.price_per_gb is not None:
        values.append(("Price of a pass", f"{info.bytes / 1e9 * info.price_per_gb:,.2f}", f"at {info.price_per_gb:g} a GB"))
    return tiles(values)


def _fields(info: DatasetInfo) -> Markup:
    whole = sum(one.bytes for one in info.fields)
    sparse = any(one.samples < info.samples for one in info.fields)
    rows = []
    for one in info.fields:
        share = 100 * one.bytes / whole if whole else 0.0
        bar = tag("span", tag("span", Markup(""), style=f"width:{share:.1f}%"), class_="bar", title=f"{share:.0f} % of all bytes")
        mean = format_size(one.bytes / one.samples) if one.samples else "0 B"
        missing = [format_count(info.samples - one.samples)] if sparse else []
        rows.append((tag("code", one.name), format_count(one.samples), *missing, mean, format_size(one.bytes), bar))
    heads = ("Field", "Samples", *(["Missing in"] if sparse else []), "A sample", "Bytes", "Share")
    return section("Fields", table(heads, rows, numbers=range(1, len(heads) - 1)))


def _sizes(info: DatasetInfo) -> list[Markup]:
    if not info.sizes:
        return []
    found = [
        Column(
            (("blue", float(one.count)),),
            format_size(one.least),
            f"{format_size(one.least)} to {format_size(one.below)}: {counted(one.count, 'sample')}",
        )
        for one in info.sizes
    ]
    of = "" if info.sized_shards == info.shards else f", in {format_count(info.sized_shards)} of {counted(info.shards, 'shard')}"
    note = f"What samples take in the tar, headers included{of}. Each column holds sizes from its label up to twice that."
    chart = columns("How many samples are of which size", found, lambda value: format_count(round(value)))
    return [section("Sizes of samples", chart, tag("p", note, class_="soft small"))]


def _samples(samples: Sequence[ShownSample]) -> list[Markup]:
    if not samples:
        return []
    cards = (tag("div", tag("h3", one.key), *(_field(one.key, field) for field in one.fields), class_="sample") for one in samples)
    title = f"The first {counted(len(samples), 'sample')}" if len(samples) > 1 else "The first sample"
    return [section(title, tag("div", *cards, class_="samples"))]


def _field(key: str, field: Shown) -> Markup:
    size = tag("span", f" {format_size(field.bytes)}", class_="soft")
    content: list[Markup] = []
    if field.picture is not None:
        picture = field.picture
        content.append(
            tag(
                "img",
                src=picture.source,
                alt=f"{field.name} of {key}",
                width=picture.width or None,
                height=picture.height or None,
                class_="tiny" if picture.tiny else None,
            )
        )
    elif field.text is not None:
        content.append(tag("pre", joined(field.text, "…" if field.cut else ""), dir="auto"))
    if field.trouble is not None:
        content.append(tag("p", field.trouble, class_="soft small"))
    return tag("div", tag("code", field.name), size, *content, class_="field")
