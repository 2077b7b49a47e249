"""The pages are true: their commands and code run, every command and public name is explained, links lead somewhere.

The rule for blocks, which docs/index.md tells the reader: blocks marked ``bash`` and ``python`` run, in the order in which they stand, in
one scratch directory a page. A page finds there what a reader would have: raw files in ``digits/`` (which the quickstart makes), the
example ``train_digits.py``, and a bucket ``my-bucket`` that the environment's variables lead to. A block that cannot run says why in a
comment on the line above it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

import stagekit
from stagekit.cli import COMMANDS
from stagekit.cli.exits import MEANINGS, Exit
from stagekit.demo.digits import export_digits
from stagekit.testing.rclone import RcloneServer

from .pages import blocks, environment, run_block

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RcloneServer]:
    """A new one for each page: rclone remembers for a while what was removed behind its back."""
    (tmp_path / "bucket-root" / "my-bucket").mkdir(parents=True)
    with RcloneServer(tmp_path / "bucket-root") as server:
        yield server


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tmp_path_factory.mktemp("docs-digits")
    export_digits(raw)
    return raw / "train"


MAKES_THE_DIGITS = "python -m stagekit.demo.digits"


def with_blocks_that_run() -> list[Path]:
    return [page for page in PAGES if any(block.language in ("bash", "python") and not block.not_run for block in blocks(page.read_text()))]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", with_blocks_that_run(), ids=named)
def test_every_block_runs(page: Path, server: RcloneServer, digits: Path, tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    if MAKES_THE_DIGITS not in page.read_text():
        (work / "digits").symlink_to(digits)
    shutil.copy(ROOT / "examples" / "train_digits.py", work)
    env = environment(server, home)
    for block in blocks(page.read_text()):
        if block.language in ("bash", "python") and not block.not_run:
            run_block(block, page, work, env)


def test_the_front_page_names_both_commands_on_its_first_screen() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:24]
    for command in ("tools/demo", "tools/test"):
        assert any(line.startswith(command) for line in first_screen)
        assert os.access(ROOT / command, os.X_OK), f"{command} cannot be run"


def test_a_block_without_a_reason_is_run() -> None:
    page = "# x\n<!-- not run: it needs an account -->\n```bash\na\n```\n\n```python\nb\n```\n<!-- not run: -->\n```bash\nc\n```\n"
    assert [(block.line, block.not_run) for block in blocks(page)] == [(3, "it needs an account"), (7, None), (11, None)]


def test_every_verdict_over_watched_files_shows_that_they_were_compared() -> None:
    """As the command prints it: a page that leaves a line out makes readers look for what is different on their machine."""
    told = [
        (f"{named(page)}:{block.line}", "\ncomparing files: " in block.text)
        for page in PAGES
        for block in blocks(page.read_text())
        if (
            block.language == "text"
            and block.text.startswith("watching ")
            and re.search("^(YES|NO|CANNOT TELL): ", block.text, re.MULTILINE)
        )
        or ("\nwatching " in block.text and "\nYES: " in block.text)
    ]
    assert len(told) >= 5
    assert [where for where, compared in told if not compared] == []


def test_every_command_has_its_section() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    headings = set(re.findall(r"^#+ `?stagekit ([a-z-]+)`?", page, re.MULTILINE))
    assert headings == set(COMMANDS)


def test_every_public_name_is_explained() -> None:
    table = [line for line in (ROOT / "docs" / "python.md").read_text().splitlines() if line.startswith("| `")]
    explained = {name for line in table for name in re.findall(r"`stagekit\.(\w+)", line.split("|")[1])}
    assert explained == {name for name in stagekit.__all__ if not name.startswith("__")}


def parsed(page: Path) -> SyntaxTreeNode:
    """The page as GitHub reads it. The parser comes with rich."""
    return SyntaxTreeNode(MarkdownIt("commonmark").enable("table").parse(page.read_text()))


def headings(page: Path) -> list[tuple[int, str]]:
    """Level and anchor of each heading, the anchor as GitHub makes it of one that comes once."""
    found: list[tuple[int, str]] = []
    for heading in parsed(page).walk():
        if heading.type == "heading":
            plain = "".join(one.content for one in heading.walk() if one.type in ("text", "code_inline")).strip().lower()
            found.append((int(heading.tag[1:]), re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")))
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for node in parsed(page).walk():
        target = str(node.attrs.get("href", node.attrs.get("src", ""))) if node.type in ("link", "image") else ""
        if node.type == "text":  # what the parser did not take for a link, since it leads nowhere
            assert not re.search(r"\]\[|\]\(", node.content), f"{named(page)}: {node.content}"
        if not target or re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{named(page)} links to {target}"
        assert linked.is_relative_to(ROOT), f"{named(page)} links outside the project: {target}"
        if anchor:
            assert anchor in {anchor for _, anchor in headings(linked)}, f"{named(page)} links to {target}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_is_well_formed(page: Path) -> None:
    """One title, no level left out, no heading twice; every row of a table has its cells, where a browser would drop one without a word."""
    levels = [level for level, _ in headings(page)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    assert not [anchor for anchor, times in Counter(anchor for _, anchor in headings(page)).items() if times > 1]
    lines = page.read_text().splitlines()
    for table in parsed(page).walk():
        if table.type == "table" and table.map is not None:
            rows = lines[table.map[0] : table.map[1]]
            widths = {len(re.split(r"(?<!\\)\|", row.strip().strip("|"))) for row in rows}
            assert len(widths) == 1, f"{named(page)}:{table.map[0] + 1} has rows of {sorted(widths)} cells"


def test_the_site_builds_strictly_and_shows_what_the_pages_say(tmp_path: Path) -> None:
    """No broken link, anchor or forgotten page; and mkdocs, whose Markdown is another dialect, finds every list, table and block."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for page in PAGES[1:]:
        built = tmp_path / "site" / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        _, _, body = built.read_text().partition('itemprop="articleBody">')
        body, _, _ = body.partition("<footer>")
        read = MarkdownIt("commonmark").enable("table").render(page.read_text())
        for tag in ("h2", "p", "li", "table", "td", "pre", "code", "strong"):
            assert len(re.findall(rf"<{tag}\b", body)) == len(re.findall(rf"<{tag}\b", read)), f"{named(page)}: <{tag}>"


def test_exit_codes_are_those_of_the_table() -> None:
    assert set(MEANINGS) == set(Exit)
    for page in PAGES:
        for table in re.findall(r"^\| code \|.*\n(?:\|.*\n)+", page.read_text(), re.MULTILINE):
            codes = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
            assert set(map(int, codes)) <= set(Exit), named(page)


def test_every_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    unreached = [named(page) for page in PAGES[1:] if page.name != "index.md" and f"({page.relative_to(ROOT / 'docs')}" not in index]
    assert unreached == []


def test_the_front_page_installs_a_clone_from_inside_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = re.findall(r'pip install "(\.[^"\[]*)\[([\w,]+)\]"', (ROOT / "README.md").read_text())
    assert [folder for folder, _ in lines if not (ROOT / folder / "pyproject.toml").is_file()] == []
    named = [one for _, listed in lines for one in listed.split(",")]
    assert "demo" in named, "it makes the data of the page's own loop"
    assert [one for one in named if one not in extras] == []


def test_nobody_is_told_to_install_the_other_stagekit() -> None:
    """The name on PyPI belongs to an unrelated project with the same top-level package."""
    wrong = re.compile(r"(?<!un)install\s+(?:-\S+\s+)*[\"']?stagekit(?!-ml)\b")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    telling = [
        name
        for name in listed
        if name != "tests/test_docs.py" and (ROOT / name).is_file() and wrong.search((ROOT / name).read_text(errors="replace"))
    ]
    assert telling == []
    assert wrong.search("pip install -U stagekit")
    assert not wrong.search("pip install 'stagekit-ml[torch]'")
