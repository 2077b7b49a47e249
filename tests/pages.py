"""Pages of the documentation as a test reads them: their blocks, why one is not run, and what it finds when it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stagekit.testing.rclone import RcloneServer

ROOT = Path(__file__).parent.parent
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
FENCE = re.compile(r"```(\S*)")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins (1 is the file's first line), its language, its text, and why it is not run."""

    line: int
    language: str
    text: str
    not_run: str | None


def blocks(page: str) -> Iterator[Block]:
    """All fenced blocks of a page."""
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.fullmatch(lines[number])
        if opening is None:
            number += 1
            continue
        begin = number
        number = lines.index("```", begin + 1)
        reason = NOT_RUN.fullmatch(lines[begin - 1]) if begin else None
        yield Block(begin + 1, opening[1], "\n".join(lines[begin + 1 : number]) + "\n", reason[1] if reason else None)
        number += 1


def environment(server: RcloneServer, home: Path) -> dict[str, str]:
    """What a reader's shell has: this interpreter's programs, a home of its own, and the variables that lead to the bucket."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "LD_LIBRARY_PATH") if name in os.environ}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",  # two for pictures of 64 pixels wait for each other, and on a busy machine for long
        "AWS_ENDPOINT_URL": server.endpoint_url,
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
    }


def run_block(block: Block, page: Path, work: Path, env: dict[str, str]) -> None:
    """Run a ``bash`` or ``python`` block in ``work``; an assertion fails when it does not end with 0."""
    argv = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    done = subprocess.run([*argv, block.text], cwd=work, env=env, capture_output=True, text=True, check=False, timeout=280)
    where = f"{page.relative_to(ROOT)}:{block.line}"
    assert done.returncode == 0, f"{where} ended with {done.returncode}\n{block.text}\n{done.stdout}{done.stderr}"
