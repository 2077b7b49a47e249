"""A checkpoint of several ranks: saved by all of them, brought back once on each node, the same one everywhere, or an error everywhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import StagekitError
from ..runs import catalog
from ..runs.layout import Checkpoint, CheckpointName, Selector
from ..runs.restore import restore_checkpoint
from ..runs.run import Run
from ..saves.whole import files
from ..transfer.put import file_sha256
from .ranks import Ranks


def share_session(run: Run, ranks: Ranks) -> None:
    """All ranks learn under which name rank 0 has taken the run over, so that what each saves goes into the same checkpoints."""
    if ranks.several and (run._uploader is None or not run._uploader.joined):
        run.join(take_over(run, ranks))


def take_over(run: Run, ranks: Ranks) -> str:
    """Rank 0 sends what a killed process left and takes the run over. Returns the session to ``join``, on every rank."""

    def work() -> str:
        run._finish_backlog()
        return run.session()

    return ranks.decide(work)


@contextmanager
def saved(run: Run, ranks: Ranks, step: int, epoch: int | None, metrics: Mapping[str, float] | None, *, final: bool) -> Iterator[Path]:
    """A directory for this rank's files of ``step``, handed over when the block ends. Every rank runs the block, with the same ``step``.

    An exception in it on one rank is raised on all, and nothing is committed. What went wrong with earlier saves is raised after this one
    was pinned, on all ranks as well: one that stops alone leaves the others waiting for it.
    """
    share_session(run, ranks)
    failure: Exception | None = None
    with run._checkpoint(step, epoch, metrics, final) as directory:
        try:
            with ranks.busy():
                yield directory
        except Exception as error:
            failure = error
        ranks.agree(failure, f"could not save step {step}")
    try:
        run._begin()[1].raise_sticky()
    except Exception as error:
        failure = error
    ranks.agree(failure, "could not send what it saved before")


@contextmanager
def restored(
    run: Run, ranks: Ranks, local_rank: int, step: Selector | None, *, allow_fresh: bool = False
) -> Iterator[tuple[Path, Checkpoint] | None]:
    """The newest whole checkpoint (or ``step``) in a directory that lasts as long as the block; ``None`` on a new run.

    Every rank runs the block. An exception in it on one rank is raised on all. ``local_rank`` 0 fetches for its node.
    """
    if not ranks.several:
        run._finish_backlog()
    share_session(run, ranks)
    spool, _ = run._begin()
    reserved = run._reserve()
    directory = reserved / "restored"

    def choose() -> str | None:
        found = run.restore(directory, step, allow_fresh=allow_fresh)
        return None if found is None else str(found.name)

    try:
        chosen = ranks.decide(choose)
        name = CheckpointName.parse(chosen) if chosen is not None else None
        if name is None:
            yield None
            return
        failure: Exception | None = None
        if ranks.rank != 0 and local_rank == 0:
            try:
                with ranks.busy():
                    restore_checkpoint(run._store, catalog.read(run._store, name), directory, on_event=run._on_event)
            except StagekitError as error:
                failure = error
        ranks.agree(failure)
        directory = Path(ranks.gather(str(directory))[ranks.rank - local_rank])
        failure = None
        try:
            with ranks.busy():
                yield directory, catalog.read(run._store, name)
        except Exception as error:
            failure = error
        ranks.agree(failure)
    finally:
        spool.release(reserved)


def bring(run: Run, ranks: Ranks, local_rank: int, folder: Path, step: Selector | None) -> Path | None:
    """The newest whole checkpoint (or ``step``) in a directory below ``folder`` that stays; ``None`` on a new run.

    What was brought before, byte for byte, is not fetched again; what an earlier call brought and is not needed any more is removed.
    """

    def choose() -> str | None:
        run._finish_backlog()
        newest = run.latest() if step is None else None
        if newest is not None and is_same(newest, folder / str(newest.name)):
            run.go_on_with(newest)
            return str(newest.name)
        arriving = folder / f".restoring-{os.getpid()}"
        shutil.rmtree(arriving, ignore_errors=True)
        try:
            found = run.restore(arriving, step)
            if found is None:
                return None
            shutil.rmtree(folder / str(found.name), ignore_errors=True)
            arriving.rename(folder / str(found.name))
            return str(found.name)
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    chosen = ranks.decide(choose)
    name = CheckpointName.parse(chosen) if chosen is not None else None
    if name is None:
        return None
    failure: Exception | None = None
    target = folder / str(name)
    if ranks.rank != 0 and local_rank == 0 and not target.is_dir():
        # Another node, which does not share rank 0's directory.
        try:
            with ranks.busy():
                restore_checkpoint(run._store, catalog.read(run._store, name), target, on_event=run._on_event)
        except StagekitError as error:
            failure = error
    ranks.agree(failure)
    if local_rank == 0:
        for other in folder.iterdir():
            if other != target and CheckpointName.parse(other.name) is not None:
                shutil.rmtree(other, ignore_errors=True)
    return target


def is_same(found: Checkpoint, directory: Path, *, beside: str | None = None) -> bool:
    """Whether ``directory`` holds exactly the files of ``found``, byte for byte, apart from those in its folder ``beside``."""
    if not directory.is_dir():
        return False
    here = {path.relative_to(directory).as_posix(): path for path in files(directory)}
    records = [record for record in found.files if beside is None or not record.path.startswith(f"{beside}/")]
    if set(here) != {record.path for record in records}:
        return False
    sizes_fit = all(here[record.path].stat().st_size == record.bytes for record in records)
    return sizes_fit and all(file_sha256(here[record.path]) == record.sha256 for record in records)
