"""The pages' blocks that need MosaicML's package or LitData run in the environment that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagekit.demo.digits import export_digits
from stagekit.testing.rclone import RcloneServer

from ..pages import ROOT, Block, blocks, environment, run_block

RUNS_HERE = "tests/mosaicml runs it"
PAGES = [ROOT / "docs" / "shard.md", ROOT / "docs" / "interop.md"]


def mine(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text()) if RUNS_HERE in (block.not_run or "")]


@pytest.mark.timeout(400)
def test_the_blocks_that_say_so_run_here(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    (tmp_path / "bucket-root" / "my-bucket").mkdir(parents=True)
    export_digits(work)
    (work / "train").rename(work / "digits")
    with RcloneServer(tmp_path / "bucket-root") as server:
        for page in PAGES:
            assert mine(page), page
            for block in mine(page):
                run_block(block, page, work, environment(server, home))


def test_no_other_page_relies_on_this_one() -> None:
    assert [page for page in sorted((ROOT / "docs").glob("**/*.md")) if mine(page)] == sorted(PAGES)
