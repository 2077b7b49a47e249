"""MosaicML's format written by an executor that somebody has, with a worker that is killed in the middle: the files of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest
from streaming import MDSWriter

import stagekit
from stagekit.errors import StagekitError
from stagekit.shards.plan import PlannedSample
from stagekit.sources.base import Read
from stagekit.sources.folder import FolderSource

from .test_mds import make_raw, tree

assert MDSWriter  # imported here, so that the workers, which are forked, have it
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:streaming"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@dataclass(frozen=True)
class Deadly(FolderSource):
    """A folder whose last sample costs the first worker that reads it its life."""

    def read_in_order(self, samples: Sequence[PlannedSample]) -> Iterator[Read]:
        yield from super().read_in_order(samples)
        died = Path(f"{self.path}-died")
        if samples[-1].key == "0119" and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    """The standard library's pool ends with it, and the same call on another one goes on. (Dask's would have run its job elsewhere.)"""
    raw = make_raw(tmp_path / "raw")
    whole = stagekit.shard_mds(raw, tmp_path / "whole", shard_size=20_000, workers=1)
    out, source = tmp_path / "out", Deadly(str(raw))
    broke = r"the executor that ran the shards broke \(.*\); nothing was published\. Run the same command again: finished shards are kept"
    with ProcessPoolExecutor(2, get_context("fork")) as pool, pytest.raises(StagekitError, match=broke):
        stagekit.shard_mds(source, out, shard_size=20_000, executor=pool)
    assert Path(f"{raw}-died").exists()
    assert not (out / "index.json").exists()
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        done = stagekit.shard_mds(source, out, shard_size=20_000, executor=pool)
        assert tree(out) == tree(tmp_path / "whole")
        assert done.kept + done.sent == len(whole.entries) > 16
        assert 0 < done.sent <= 6, "the files of the shard whose worker died, and at most those of the one that the other had begun"
        assert stagekit.shard_mds(source, out, shard_size=20_000, executor=pool).unchanged
