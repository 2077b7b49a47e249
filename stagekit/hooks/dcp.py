"""torch.distributed.checkpoint into a run and back: sharded state, loaded again on any number of ranks.

Each rank writes its shards to local disk. Only when every tensor lies in a file, and every file is there at the length that ``.metadata``
names, is the step handed over: with more than one writing thread, torch's own writer can lose an error and still write ``.metadata``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, MissingExtra

try:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
except ImportError as missing:
    raise MissingExtra.of("torch", "torch", "stagekit.hooks.dcp") from missing

from ..runs.layout import Checkpoint, Selector
from ..runs.run import Run
from ..saves.dcp import METADATA, DcpContents, dcp_contents
from ..saves.whole import sizes
from .exchange import restored, saved
from .ranks import Ranks


def save(
    state_dict: dict[str, Any],
    run: Run,
    *,
    step: int,
    epoch: int | None = None,
    metrics: Mapping[str, float] | None = None,
    final: bool = False,
    thread_count: int = 1,
    **save_options: Any,
) -> None:
    """``dcp.save`` of ``state_dict`` into ``run``.

    Every rank calls it, with the same ``step``. Each writes into a directory of its own, so the nodes need not share a disk. Returns when
    the files are written, compared with ``.metadata`` and pinned; they are sent in the background, and ``run.close()`` waits for that.
    Raises ``CheckpointError`` on every rank when a file is missing or too short, and commits nothing of this step. What went wrong with
    earlier saves and will not heal by itself is raised here, after this save was pinned. ``thread_count`` threads write on
    each rank. ``save_options`` go to ``dcp.save``.

    What is not in ``state_dict`` is not saved: put random states and loader positions in.

    Example::

        run = stagekit.Run("s3://my-bucket/runs/first")
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        save(state, run, step=100)
        run.close()
    """
    ranks = Ranks.find()
    with saved(run, ranks, step, epoch, metrics, final=final) as directory:
        failure: Exception | None = None
        try:
            writer = FileSystemWriter(directory, thread_count=thread_count)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one rank is meant
                dcp_save(state_dict, storage_writer=writer, no_dist=not ranks.several, **save_options)
        except CheckpointException as error:  # no Exception, by its own account
            failure = CheckpointError(f"step {step} is not saved: {_first(error)}")
        except Exception as error:
            failure = error
        ranks.agree(failure, f"could not save step {step}")
        written = ranks.gather(sizes(directory))
        if ranks.rank == 0:
            _check(step, dcp_contents(directory), written)


def load(
    state_dict: dict[str, Any], run: Run, *, step: Selector | None = None, allow_fresh: bool = False, **load_options: Any
) -> Checkpoint | None:
    """``dcp.load`` into ``state_dict``, in place, from the newest whole checkpoint of ``run``, or from ``step``; ``None`` on a new run.

    Every rank calls it, and all load the same one; there may be more or fewer of them than saved it. Each node fetches it once; every hash
    is checked. Saves that a killed process left pinned on this disk are sent first. Raises when it cannot be told what the run has, unless
    ``allow_fresh``. ``.metadata`` is a pickle, as torch defines it: load only from runs that you trust. ``load_options`` go to
    ``dcp.load``.
    """
    ranks = Ranks.find()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    with restored(run, ranks, local_rank, step, allow_fresh=allow_fresh) as found:
        if found is None:
            return None
        directory, checkpoint = found
        if not any(record.path == METADATA for record in checkpoint.files):
            names = ", ".join(record.path for record in checkpoint.files[:5])
            raise CheckpointError(f"step {checkpoint.step} of {run.url} was not saved by torch.distributed.checkpoint (it holds {names})")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one rank is meant
            dcp_load(state_dict, storage_reader=FileSystemReader(directory), no_dist=not ranks.several, **load_options)
        return checkpoint


def _check(step: int, contents: DcpContents, written: list[dict[str, int]]) -> None:
    """Compare what ``.metadata`` names with what the ranks wrote."""
    there: dict[str, int] = {}
    for found in written:
        there.update(found)
    if problems := contents.problems(there):
        raise CheckpointError(f"step {step} is not saved: torch reported no error, but {'; '.join(problems)}")


def _first(error: CheckpointException) -> str:
    """What went wrong on the first rank on which something did."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"
