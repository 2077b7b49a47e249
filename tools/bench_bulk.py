"""The copying figures of ``tools/bench bulk``: every engine, verified, against ``s5cmd cp`` alone, from one nginx, in one run.

nginx serves the objects on loopback, so that neither side waits for a slow store. The files land on memory. What is timed is what ``pull``
does behind its listing: the engine, the comparison of every byte (of a shard with its block table, of a small file with its sha-256),
and the renames. ``s5cmd`` alone is the same list of copies given to the same binary, with nothing compared.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from stagekit.config import StoreConfig
from stagekit.copies.landing import Landing
from stagekit.progress import ignore
from stagekit.shards.index import Block, BlockTable, block_digest
from stagekit.store import open_store
from stagekit.transfer.bulk.base import Engine, Item
from stagekit.transfer.bulk.fetching import fetch_items
from stagekit.transfer.bulk.rclone import Rclone
from stagekit.transfer.bulk.s5cmd import S5cmd, s5cmd_binary
from tests.rigs.nginx import nginx

_BUCKET = "bench"
_BLOCK = 8 * 2**20


def run(options: argparse.Namespace) -> None:
    shm = Path("/dev/shm")
    os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true")
    with tempfile.TemporaryDirectory(prefix="stagekit-bench-", dir=shm if shm.is_dir() else None) as name, nginx(Path(name)) as server:
        for what, count, size in (
            ("large", options.large, options.large_size),
            ("small", options.small, options.small_size),
        ):
            items = _objects(server.root / _BUCKET / what, what, count, size)
            _compare(f"{count:,} × {size:,} B", server.fast_url, items, Path(name) / "out", options.runs)
            shutil.rmtree(server.root / _BUCKET / what)


def _objects(folder: Path, what: str, count: int, size: int) -> list[Item]:
    folder.mkdir(parents=True)
    block = os.urandom(min(size, 2**20))
    items = []
    for number in range(count):
        data = (number.to_bytes(8) + block * (size // len(block) + 1))[:size]
        (folder / f"{number:06d}").write_bytes(data)
        # As in a data set: a shard has a block table besides its sha-256, a small file has not.
        cuts = range(0, size, _BLOCK) if size > _BLOCK else ()
        blocks = [Block(at // _BLOCK, at, min(_BLOCK, size - at), 1, block_digest(data[at : at + _BLOCK])) for at in cuts]
        table = BlockTable(tuple(blocks)) if blocks else None
        name = f"{what}/{number:06d}"
        items.append(Item(name, name, size, sha256=hashlib.sha256(data).hexdigest(), blocks=table))
    return items


def _compare(title: str, url: str, items: list[Item], out: Path, runs: int) -> None:
    sizes = sum(item.size for item in items)
    works: dict[str, Callable[[], object]] = {"s5cmd cp alone": lambda: _alone(url, items, out)}
    for name, engine, make in (
        ("built in, obstore", "auto", lambda: None),
        ("built in, botocore", "botocore", lambda: None),
        ("s5cmd, verified", "auto", S5cmd),
        ("rclone, verified", "auto", Rclone),
    ):
        works[name] = lambda engine=engine, make=make: _ours(url, engine, make(), items, out)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(runs + 1):
        for name, work in works.items():
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    shutil.rmtree(out)
    alone = times["s5cmd cp alone"][1:]
    print(f"{title}: s5cmd cp alone{sizes / statistics.median(alone) / 1e6:>32.4g} MB/s", flush=True)
    for name, took in list(times.items())[1:]:
        ratios = [theirs / ours for ours, theirs in zip(took[1:], alone, strict=True)]
        spread = f"(min {min(ratios):.3g}, max {max(ratios):.3g}, {runs} runs)"
        print(f"{title}: {name} ÷ s5cmd cp alone".ljust(62) + f"{statistics.median(ratios):>10.3g}   {spread}", flush=True)


def _alone(url: str, items: list[Item], out: Path) -> None:
    batch = out / "list"
    batch.write_text(
        "".join(f"cp --raw {shlex.quote(f's3://{_BUCKET}/{item.key}')} {shlex.quote(str(out / item.path))}\n" for item in items)
    )
    command = [str(s5cmd_binary()), "--log", "error", "--endpoint-url", url, "run", str(batch)]
    subprocess.run(command, check=True)


def _ours(url: str, engine: str, program: Engine | None, items: list[Item], out: Path) -> None:
    store = open_store(f"s3://{_BUCKET}", StoreConfig(endpoint_url=url, engine=engine))  # type: ignore[arg-type]  # both are engines
    with Landing(out / "target", "bench") as landing:
        missing = landing.missing(items)
        fetch_items(store, missing, landing.incoming, landing.accept, engine=program, on_event=ignore)
        landing.reveal()
