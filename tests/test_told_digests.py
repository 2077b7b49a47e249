"""The digests that the pages print are those that come out today."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import stagekit
from stagekit.demo.digits import export_digits

DOCS = Path(__file__).parent.parent / "docs"


def test_the_digests_on_the_pages_are_those_that_come_out(tmp_path: Path) -> None:
    export_digits(tmp_path)
    digits = tmp_path / "train"
    grown = shutil.copytree(digits, tmp_path / "more")
    stagekit.shard(grown, tmp_path / "out")
    shutil.copy(grown / "00000.png", grown / "new.png")
    (grown / "new.cls").write_text("0\n")
    known = {
        stagekit.shard(digits, tmp_path / "plain").digest[:16],
        stagekit.shard(digits, tmp_path / "cut", shard_size="512KiB").digest[:16],
        stagekit.shard(grown, tmp_path / "out", update=True).digest[:16],
    }
    for name in ("quickstart", "shard", "scale-out", "info"):
        text = (DOCS / f"{name}.md").read_text()
        told = {digest[:16] for digest in re.findall(r"\b[0-9a-f]{16}(?:[0-9a-f]{48})?\b", text)}
        assert told
        assert told <= known, name
