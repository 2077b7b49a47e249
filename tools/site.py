"""What mkdocs is told about these pages: their anchors are GitHub's, and they link to files of the repository beside them.

A link to ``../examples/x.py`` becomes one to a copy of that file below ``repository/``, so that the site is whole by itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(\.\./([^)#]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs["toc"] = {"slugify": anchor, "permalink": True}
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    linked = {name for page in files.documentation_pages() for name in LINK.findall(page.content_string)}
    folders = {name for name in linked if (ROOT / name).is_dir()}
    for folder in sorted(folders):
        names = sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file())
        listing = "".join(f"- [{name}]({name})\n" for name in names)
        files.append(File.generated(config, _place(folder), content=f"# {folder}\n\n{listing}", inclusion=InclusionLevel.NOT_IN_NAV))
        linked |= {f"{folder}/{name}" for name in names}
    for name in sorted(linked - folders):
        files.append(File.generated(config, _place(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return LINK.sub(lambda link: f"]({_place(link[1])}", markdown)


def _place(name: str) -> str:
    return f"repository/{name}/index.md" if (ROOT / name).is_dir() else f"repository/{name}"


def anchor(title: str, _separator: str) -> str:
    """The part of a link behind ``#`` that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
