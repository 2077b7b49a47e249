"""What the command goes on from: the newest whole checkpoint, in the watched directory, where its trainer looks for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from ..errors import CheckpointError, DamagedCheckpoint, ManifestError
from ..progress import Message, Subscriber
from ..runs.layout import SAVED_IN, Checkpoint, check_paths
from ..runs.restore import restore_checkpoint
from ..runs.run import Run
from ..saves.find import ABANDONED, Found, set_aside
from .collect import SAVED_AS, Collector
from .world import refuse_other_world

Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True, slots=True)
class Start:
    """Where the command begins: at ``path`` (a directory, or one file) of ``step``; from nothing when both are ``None``."""

    path: Path | None = None
    step: int | None = None

    @property
    def variables(self) -> dict[str, str]:
        """``STAGEKIT_RESUME_DIR``, empty for a new training, and ``STAGEKIT_RESUME_FILE`` when the checkpoint is a single file."""
        if self.path is None:
            return {"STAGEKIT_RESUME_DIR": "", "STAGEKIT_RESUME_FILE": ""}
        if self.path.is_dir():
            return {"STAGEKIT_RESUME_DIR": str(self.path), "STAGEKIT_RESUME_FILE": ""}
        return {"STAGEKIT_RESUME_DIR": str(self.path.parent), "STAGEKIT_RESUME_FILE": str(self.path)}


def clear_way(collector: Collector, on_event: Subscriber) -> None:
    """Rename what a killed trainer left unfinished, so that the next one does not take it for its newest checkpoint."""
    collector.look()
    for found in collector.unfinished():
        if (found.kind in ("trainer", "dcp") or found.path.is_file()) and not found.unreadable:
            lacking = ", ".join(found.lacking()[:3])
            target = set_aside(found)
            on_event(Message(f"{found.path} was never finished (it lacks {lacking}); it is called {target.name} now", "warning"))


def start_from(
    run: Run,
    collector: Collector,
    newest: Checkpoint | None,
    ahead: Sequence[Found],
    held: Sequence[Checkpoint],
    resume: Resume,
    *,
    world_size: int | None,
    allow_fresh: bool,
    on_event: Subscriber,
) -> Start:
    """Make the newest checkpoint be in its watched directory, and say where; and the newest of each other watched directory in that one.

    ``newest`` is the run's, and ``held`` all it has, newest first; ``ahead`` are finished saves below the watched directories that are
    newer, oldest first. What is here already is not fetched. Raises ``CheckpointError``, before anything is fetched, for ``must`` without
    a checkpoint, for a layout that the command's number of ranks cannot load, and where of several directories none is the checkpoint's.
    """
    if resume == "never":
        return Start()
    start = _start(run, collector, newest, held, ahead, resume, world_size, allow_fresh, on_event)
    if start.path is not None:
        _fill_others(run, collector, held, start.path, on_event)
    return start


def _start(
    run: Run,
    collector: Collector,
    newest: Checkpoint | None,
    held: Sequence[Checkpoint],
    ahead: Sequence[Found],
    resume: Resume,
    world_size: int | None,
    allow_fresh: bool,
    on_event: Subscriber,
) -> Start:
    if newest is not None:
        _leave_abandoned(run, collector.abandoned, newest, on_event)
    if ahead:
        local = ahead[-1]
        if newest is not None:
            on_event(Message(f"going on from {local.path}, which {run.url} does not hold; its newest is step {newest.step}"))
        else:
            text = f"going on from {local.path}, which lay here before, and which {run.url}, a new run, is given as its first checkpoint"
            on_event(Message(f"{text}; if that is another training's, end this one and give a --watch of its own", "warning"))
        _check_world(str(local.path), list(local.stats), None, world_size, on_event)
        return Start(local.path, local.step())
    if newest is None:
        if resume == "must":
            raise CheckpointError(
                f"{run.url} has no checkpoint, and --resume must says that there is one; check the URL: stagekit ls {run.url}"
            )
        return Start()
    name = f"step {newest.step} of {run.url}"
    _check_world(name, [record.path for record in newest.files], _world_of(newest), world_size, on_event)
    there = collector.is_here(newest)
    if there is not None:
        run.go_on_with(newest)
        return Start(there.path, newest.step)
    saved_in = newest.manifest.identity.get(SAVED_IN)
    several = len(collector.roots) > 1 or len({one.manifest.identity.get(SAVED_IN) for one in held} - {None}) > 1
    if saved_in is not None and several and saved_in not in collector.roots:
        raise CheckpointError(
            f"{name} was saved in a directory called {saved_in}, and of those that are watched none is ({', '.join(collector.roots)}), so "
            f"that it would come back in another one's place; add --watch {saved_in}, or give this training another --to"
        )
    return _fetch(run, collector.roots, world_size, allow_fresh, on_event)


def _leave_abandoned(run: Run, abandoned: Sequence[Found], newest: Checkpoint, on_event: Subscriber) -> None:
    """Rename what the run has gone on without: a trainer that looks for the highest step would go on from it."""
    if not abandoned:
        return
    targets = [set_aside(found, ABANDONED) for found in abandoned]
    more = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
    text = f"{run.url} has gone on elsewhere without {abandoned[-1].path}{more}, and its newest is step {newest.step}"
    text += (
        f": going on from that; what was here is called {targets[-1].name} now. To go on from it instead, rename it and give another --to"
    )
    on_event(Message(text, "warning"))


def place_of(checkpoint: Checkpoint, roots: Mapping[str, Path]) -> Path:
    """Where a checkpoint lay below its watched directory, or where its trainer would look for it."""
    name = checkpoint.manifest.identity.get(SAVED_AS)
    root = roots.get(str(checkpoint.manifest.identity.get(SAVED_IN)), next(iter(roots.values())))
    if isinstance(name, str):
        try:
            check_paths([name])
            return root / name
        except ManifestError:
            pass  # made by hand: it must not lead out of the watched directory
    only = checkpoint.files[0].path if len(checkpoint.files) == 1 else None
    return root / only if only is not None and "/" not in only else root / f"checkpoint-{checkpoint.step}"


def _fetch(run: Run, roots: Mapping[str, Path], world_size: int | None, allow_fresh: bool, on_event: Subscriber) -> Start:
    arriving = next(iter(roots.values())) / f".restoring-{os.getpid()}"
    shutil.rmtree(arriving, ignore_errors=True)
    try:
        found = run.restore(arriving, allow_fresh=allow_fresh)
        if found is None:
            return Start()
        # The newest may have turned out damaged, and an older one may be of other ranks.
        _check_world(f"step {found.step} of {run.url}", [record.path for record in found.files], _world_of(found), world_size, on_event)
        target = place_of(found, roots)
        if target.exists():
            aside = target.parent / "restored" / str(found.name) / target.name
            on_event(
                Message(f"{target} is not what {run.url} holds as step {found.step}; it is left alone, going on with {aside}", "warning")
            )
            shutil.rmtree(aside.parent, ignore_errors=True)
            target = aside
        _put(found, arriving, target)
        on_event(Message(f"going on from step {found.step} of {run.url}, now in {target}"))
        return Start(target, found.step)
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _fill_others(run: Run, collector: Collector, held: Sequence[Checkpoint], start: Path, on_event: Subscriber) -> None:
    """Put the newest whole checkpoint of each watched directory that has no save into it, but for the one that ``start`` lies in."""
    for name, root in collector.roots.items():
        if start.is_relative_to(root) or any(found.root == root for found in collector.found):
            continue
        arriving = root / f".restoring-{os.getpid()}"
        for checkpoint in (one for one in held if one.manifest.identity.get(SAVED_IN) == name):
            target = place_of(checkpoint, collector.roots)
            if target.exists():  # somebody's, under a name that no rule takes for a save
                on_event(Message(f"{target} is in the way of step {checkpoint.step} of {run.url}, so that is not fetched", "warning"))
                break
            try:
                restore_checkpoint(run._store, checkpoint, arriving, on_event=on_event)
                _put(checkpoint, arriving, target)
            except DamagedCheckpoint as error:
                on_event(Message(f"{error}; the next older one of {root} is taken", "warning"))
                continue
            finally:
                shutil.rmtree(arriving, ignore_errors=True)
            on_event(Message(f"step {checkpoint.step} of {run.url}, which was saved in {root}, is now in {target}"))
            break


def _put(checkpoint: Checkpoint, arriving: Path, target: Path) -> None:
    """Move what has arrived to ``target``: a directory, or its only file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    single = len(checkpoint.files) == 1 and checkpoint.files[0].path == PurePosixPath(target.name).name
    shutil.move(arriving / checkpoint.files[0].path if single else arriving, target)


def _world_of(checkpoint: Checkpoint) -> int | None:
    value = checkpoint.manifest.identity.get("world_size")
    return value if isinstance(value, int) else None


def _check_world(name: str, paths: Sequence[str], saved: int | None, now: int | None, on_event: Subscriber) -> None:
    if (warning := refuse_other_world(name, paths, saved, now)) is not None:
        on_event(Message(warning, "warning"))
