"""The page around everything: one file, no script, and a policy under which a browser fetches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import __version__
from .markup import Markup, joined, tag

GENERATOR = '<meta name="generator" content="stagekit '
"""What tells a page of ours, near its beginning."""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #1d2129; --soft: #5c6470; --rule: #e1e3e6; --track: #eceef0;
  --blue: #2f6bd8; --green: #23855c; --amber: #a86d07; --red: #c0392f; --pale: #b9c9e8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --card: #1c1f25; --ink: #e7e9ed; --soft: #9aa3b0; --rule: #2f343c; --track: #282c34;
    --blue: #7ba6ff; --green: #56c596; --amber: #e6b450; --red: #f08077; --pale: #41557f;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 2rem 1.25rem 3rem; }
header { margin-bottom: 1.5rem; }
.kind { margin: 0; color: var(--soft); font-size: .8rem; letter-spacing: .06em; text-transform: uppercase; }
h1 { margin: .15rem 0 .3rem; font-size: 1.45rem; line-height: 1.25; font-weight: 650; overflow-wrap: anywhere; }
h2 { margin: 0 0 .75rem; font-size: 1rem; font-weight: 650; }
p { margin: .4rem 0; }
header p { overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.small { font-size: .85rem; }
section { margin-top: 1rem; padding: 1.1rem 1.25rem 1.25rem; background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tiles { display: grid; grid-template-columns: repeat(var(--across), minmax(0, 1fr)); gap: .75rem; margin: 0; }
.tiles > div { padding: .8rem 1rem; background: var(--card); border: 1px solid var(--rule); border-radius: 10px; min-width: 0; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
dd small { display: block; color: var(--soft); font-size: .8rem; font-weight: 400; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; margin-top: 1rem; }
.figures section { margin: 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); stroke-width: 1; }
.blue { fill: var(--blue); } .green { fill: var(--green); } .amber { fill: var(--amber); }
.red { fill: var(--red); } .pale { fill: var(--pale); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .6rem 0 0; color: var(--soft); font-size: .8rem; }
.key span::before { content: ""; display: inline-block; width: .7em; height: .7em; margin-right: .4em; border-radius: 2px;
  background: var(--swatch); }
.key .blue { --swatch: var(--blue); } .key .green { --swatch: var(--green); } .key .amber { --swatch: var(--amber); }
.key .red { --swatch: var(--red); } .key .pale { --swatch: var(--pale); }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .9rem .4rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
th:last-child, td:last-child { padding-right: 0; }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; }
td.wide { min-width: 11rem; white-space: normal; overflow-wrap: anywhere; }
td .bar { display: block; min-width: 5rem; height: .55rem; margin-top: .4rem; border-radius: 3px; background: var(--track);
  overflow: hidden; }
td .bar span { display: block; height: 100%; background: var(--blue); }
.chip { display: inline-block; margin-right: .4rem; padding: .05rem .6rem; border-radius: 99px;
  color: var(--card); font-size: .85rem; font-weight: 650; }
.chip.green { background: var(--green); } .chip.red { background: var(--red); } .chip.amber { background: var(--amber); }
ul.plain { margin: .5rem 0 0; padding: 0; list-style: none; }
ul.plain li { padding: .45rem 0; border-top: 1px solid var(--rule); white-space: pre-wrap; overflow-wrap: anywhere; font-size: .88rem; }
code { font: .85em ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(46%, 12.5rem), 1fr)); gap: .75rem; }
.sample { min-width: 0; border: 1px solid var(--rule); border-radius: 8px; overflow: hidden; }
.sample h3 { margin: 0; padding: .45rem .7rem; font-size: .82rem; font-weight: 600; overflow-wrap: anywhere; background: var(--track); }
.field { padding: .45rem .7rem; border-top: 1px solid var(--rule); font-size: .82rem; }
.field img { display: block; max-width: 100%; height: auto; margin: .4rem auto; border-radius: 4px; }
.field img.tiny { image-rendering: pixelated; }
.field pre { margin: .25rem 0 0; max-height: 16rem; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  font: .82rem/1.4 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
footer { margin-top: 1.5rem; color: var(--soft); font-size: .82rem; }
@media (max-width: 58rem) { .tiles { grid-template-columns: repeat(3, minmax(0, 1fr)); } }
@media (max-width: 40rem) {
  main { padding: 1.1rem .8rem 2rem; }
  section { padding: .9rem .9rem 1rem; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .5rem; }
  .tiles > div { padding: .6rem .75rem; }
  dd { font-size: 1.05rem; }
}
"""


def document(kind: str, title: str, lead: str, *body: str, made: str) -> str:
    """The whole page. ``lead`` stands below the title and ``made`` at the end."""
    head = joined(
        Markup('<meta charset="utf-8">\n'),
        Markup(f'{GENERATOR}{__version__}">\n'),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · {kind}"),
        Markup(f"<style>{_STYLE}</style>"),
    )
    top = tag("header", tag("p", kind, class_="kind"), tag("h1", title), tag("p", lead, class_="soft"))
    page = tag(
        "html", Markup("\n<head>\n"), head, Markup("\n</head>\n"), tag("body", tag("main", top, *body, tag("footer", made))), lang="en"
    )
    return f"<!doctype html>\n{page}\n"


def tiles(values: Sequence[tuple[str, str, str]]) -> Markup:
    """Name, value and a remark (may be empty) of what matters most."""
    across = len(values) if len(values) <= 6 else (len(values) + 1) // 2
    shown = (
        tag("div", tag("dt", name), tag("dd", value, tag("small", remark) if remark else Markup(""))) for name, value, remark in values
    )
    return tag("dl", *shown, class_="tiles", style=f"--across:{across}")


def section(title: str, *content: str) -> Markup:
    """A part of the page under a heading."""
    return tag("section", tag("h2", title), *content)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), wide: int | None = None) -> Markup:
    """``rows`` under ``heads``; the columns ``numbers`` are aligned right, and the column ``wide`` is broken into lines where it is long.
    Scrolls by itself where the page is narrow."""

    def line(cells: Sequence[str], name: str) -> Markup:
        return tag(
            "tr", *(tag(name, cell, class_="number" if at in numbers else "wide" if at == wide else None) for at, cell in enumerate(cells))
        )

    return tag("div", tag("table", tag("thead", line(heads, "th")), tag("tbody", *(line(row, "td") for row in rows))), class_="scroll")


def key(colours: Iterable[tuple[str, str]]) -> Markup:
    """What the colours of a chart mean."""
    return tag("p", *(tag("span", meaning, class_=colour) for colour, meaning in colours), class_="key")
