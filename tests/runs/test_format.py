"""Runs are as docs/format.md says: a second reader, written from that page alone, reads them."""

from __future__ import annotations

import random
from pathlib import Path

from stagekit.runs import Run

from . import handread
from .conftest import Events


def test_a_second_reader_reads_what_a_run_wrote(tmp_path: Path, events: Events) -> None:
    where = tmp_path / "run"
    base = random.Random(0).randbytes(64 * 2**20)
    run = Run(where, spool_dir=tmp_path / "spool", keep_last=1, keep_best=("loss", "min", 1), base_model="Größe/7b", on_event=events.append)
    for step in (1, 2, 3):
        with run.checkpoint(step=step, epoch=step, metrics={"loss": float("nan") if step == 1 else 0.1 + step, "lr": 1e-7}) as directory:
            (directory / "base.bin").write_bytes(base)
            (directory / "größe.bin").write_bytes(b"%d" % step)
        run.drain()
    run.close()
    ranks = [Run(where, rank=rank, world_size=2, spool_dir=tmp_path / f"spool-{rank}", on_event=events.append) for rank in range(2)]
    ranks[1].join(ranks[0].session())
    for rank in (1, 0):
        with ranks[rank].checkpoint(step=4) as directory:
            (directory / f"rng-{rank}.pt").write_bytes(b"%d" % rank)
            if rank == 0:
                (directory / "base.bin").write_bytes(base)
        ranks[rank].close()
    assert handread.read(where) == (4, {"base.bin": base, "rng-0.pt": b"0", "rng-1.pt": b"1"})
    seen = handread.everything_is_described(where)
    assert seen == {"run\\.json", "owners", "checkpoints", "checkpoints/files", "checkpoints/parts", "commits", "superseded"}
    assert [record.object is not None for record in ranks[0].checkpoints()[0].files] == [True, False, False]
