"""``stagekit.Run``: a run, and the training loop that saves into it and goes on where it was interrupted.

torch is loaded when a loop begins, not before: everything else of a run works without it.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..errors import CheckpointError, MissingExtra, StagekitError, UsageError
from ..location import Location
from ..progress import Message
from ..runs import catalog, ending
from ..runs import run as runs
from ..runs.layout import Checkpoint, CheckpointName, seal, unseal
from ..runs.restore import restore_checkpoint
from ..units import check_whole, format_duration, parse_duration

if TYPE_CHECKING:
    from types import ModuleType

_PROGRESS = "progress.json"
_LOADER = "loader.json"
_AGREE_EVERY = 10  # batches between two looks at the other ranks' clocks
_DAY_S = 86_400.0


def best_interval_s(save_s: float, sent_s: float, between_failures_s: float = _DAY_S) -> float:
    """How far apart saves lose the least time (Young and Daly): the root of twice a save's cost times the time between two failures.

    ``save_s`` is what a save takes from the training. It is never less than ``sent_s``, what sending one takes beside the training.
    """
    return max(math.sqrt(2 * save_s * between_failures_s), sent_s)


@runtime_checkable
class Stateful(Protocol):
    """What can be saved: a model, an optimizer, a scheduler, a gradient scaler, a loader."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Go on from there."""


class Epoch(int):
    """The number of an epoch, from 0. What is put into ``metrics`` before it ends is saved with its checkpoint."""

    metrics: dict[str, float]

    def __new__(cls, number: int) -> Epoch:
        epoch = super().__new__(cls, number)
        epoch.metrics = {}
        return epoch


class Run(runs.Run):
    __doc__ = "\n\n".join(
        inspect.cleandoc(part or "")  # Python 3.13 takes the indentation out of the first one by itself
        for part in (
            runs.Run.__doc__,
            """
            Around a loop of one's own, ``epochs`` does all of it::

                run = stagekit.Run("s3://my-bucket/runs/first")
                for epoch in run.epochs(10, state={"model": model, "optimizer": optimizer, "loader": loader}):
                    for batch in loader:
                        ...
                    epoch.metrics["loss"] = loss.item()
            """,
        )
    )

    _loop: _Loop | None = None

    def epochs(
        self,
        n: int,
        *,
        state: Mapping[str, object],  # not Stateful: a dict of a model and an optimizer made beforehand is inferred as one of objects
        every: str | float | None = None,
        allow_fresh: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Iterator[Epoch]:
        """Yield the epochs that are still due of ``n``, restoring before the first and saving after each.

        Before the first one, the newest whole checkpoint is loaded into ``state`` and the random generators of Python, numpy and torch,
        so that training goes on as if it had never stopped: at the very next batch, when it was saved in the middle of an epoch. A run
        without a checkpoint starts at 0; when that cannot be told, it raises, unless ``allow_fresh``. After each epoch, and every so often
        (``every="10min"``) between two batches, ``state`` is saved and sent in the background. The loop's end waits until all of it is in
        the bucket, and raises ``UploadFailed`` when that cannot be.

        ``state`` maps names to objects with ``state_dict`` and ``load_state_dict``; each becomes ``NAME.pt``, read back with
        ``weights_only=True``, and ``"loader"`` becomes ``loader.json``. Saving in the middle of an epoch needs a loader that can go on
        there, and a boundary between batches: ``StreamLoader`` tells it by itself, with any other loader call ``step()`` after each batch.

        SIGTERM stops the loop at the next such boundary, with ``every`` or without. The loop then saves,
        sends the newest state first, and exits with 143 within ``grace_s``.

        With several ranks every rank runs this loop, after the process group was made, and calls ``step()`` if any does. Rank 0 saves
        ``state``, every rank its generators. SIGTERM to one of them stops all behind the next step.
        """
        check_whole(n, name="epochs", minimum=0)
        if not isinstance(state, Mapping):
            raise UsageError(f"state: {state!r} is no mapping from names to what is to be saved, such as {{'model': model}}")
        items: dict[str, Stateful] = {}
        for name, item in state.items():
            if not _is_name(name):
                raise UsageError(f"state: {name!r} is no name for a file; use letters, digits, '-' and '_'")
            if not isinstance(item, Stateful):
                raise UsageError(
                    f"state: {name!r} has no state_dict() and load_state_dict(), so it cannot be saved; leave it out or wrap it"
                )
            items[name] = item
        every_s = parse_duration(every, name="every") if every is not None else None
        if every_s is not None and "loader" not in state:
            raise UsageError(
                'every= saves in the middle of an epoch, which needs a loader that can go on there: pass it as state={"loader": …}, '
                "or leave every= away to save after each epoch"
            )
        return self._epochs(n, items, every_s, allow_fresh, monotonic)

    def step(self, **metrics: float) -> None:
        """Say that a training step has ended. Here the loop may save (``every=``) or stop (SIGTERM). ``metrics`` go with the next save.

        It is needed with loaders that do not tell; with ``StreamLoader`` it only makes steps count what the caller wants to count.
        """
        if self._loop is None:
            raise UsageError("step() was called outside of a loop over run.epochs(…)")
        self._loop.step_ended(metrics)

    def _epochs(
        self, n: int, state: dict[str, Stateful], every_s: float | None, allow_fresh: bool, monotonic: Callable[[], float]
    ) -> Iterator[Epoch]:
        if self._loop is not None:
            raise UsageError("one loop over run.epochs(…) is running; end it before the next one")
        ranks = _Ranks(_torch(), self.rank, self.world_size)
        # What a killed process left here may be the newest checkpoint there is.
        if ranks.several:
            self._share_session(ranks)
        else:
            self._finish_backlog()
        dataset = getattr(state.get("loader"), "dataset", None)
        digest, place = getattr(dataset, "digest", None), getattr(dataset, "location", None)
        self._dataset = digest if isinstance(digest, str) else None
        self.made_with(dataset=self._dataset, dataset_url=str(place) if isinstance(place, Location) else None)
        _, uploader = self._begin()
        termination = ending.Termination(self.grace_s, uploader.hurry)
        loop = _Loop(self, ranks, state, every_s, termination, monotonic)
        try:
            loop.restore(allow_fresh)
            self._loop = loop
            loop.follow_loader()
            if loop.epoch >= n:
                text = f"{self.url} has all of its {n} epochs already, so nothing is trained; ask for more, or give another run"
                self._on_event(Message(text, "warning"))
            while loop.epoch < n:
                epoch = loop.begin_epoch()
                yield epoch
                loop.end_epoch(final=loop.epoch + 1 == n)
            self._drain(self._drain_s, lambda: termination.left_s)
            if termination.requested:
                loop.stop()
        finally:
            loop.unfollow_loader()
            self._loop = None
            termination.close()
        self._raise_unsynced()

    def _share_session(self, ranks: _Ranks) -> None:
        """Rank 0 takes the run over; all of them learn under which name, or why not."""
        from .exchange import take_over  # needs torch

        self._check_group(ranks)
        ranks.session = take_over(self, ranks.group)
        self.join(ranks.session)

    def _check_group(self, ranks: _Ranks) -> None:
        if not ranks.grouped:
            raise UsageError(
                f"run.epochs with {ranks.world_size} ranks needs torch.distributed.init_process_group() before it, so that all ranks save "
                "and restore the same steps"
            )


class _Loop:
    """One pass through ``Run.epochs``: where the training is, and saving and restoring that."""

    def __init__(
        self,
        run: Run,
        ranks: _Ranks,
        state: dict[str, Stateful],
        every_s: float | None,
        termination: ending.Termination,
        monotonic: Callable[[], float],
    ) -> None:
        self.run = run
        self.ranks = ranks
        self.state = state
        self.termination = termination
        self.epoch = 0
        self._every_s = every_s
        self._monotonic = monotonic
        self._saved_at = monotonic()
        self._step = 0
        self._counted = False
        self._explicit = False
        self._open_batch = False
        self._tells = False
        self._advised = False
        self._boundaries = 0
        self._current: Epoch | None = None
        self._random_at_first_batch: dict[str, Any] | None = None

    # -------------------------------------------------------------------------------------------------------- boundaries

    def follow_loader(self) -> None:
        """Have the loader tell when it is about to hand out a batch: all that was trained before is complete then."""
        loader = self.state.get("loader")
        if loader is not None and hasattr(loader, "before_batch"):
            self._tells = True
            loader.before_batch = self._before_batch

    def unfollow_loader(self) -> None:
        """Let go of the loader."""
        loader = self.state.get("loader")
        if loader is not None and hasattr(loader, "before_batch"):
            loader.before_batch = None

    def begin_epoch(self) -> Epoch:
        """The epoch that comes next."""
        self._current = Epoch(self.epoch)
        self._open_batch = False
        return self._current

    def end_epoch(self, *, final: bool) -> None:
        """Save what the epoch led to; stop here when this process was asked to."""
        self._close_batch()
        if not self._counted:
            self._step += 1  # nobody tells of steps, so an epoch counts as one
        self.epoch += 1
        self.save(final=final)
        if self.ranks.any(self.termination.requested):
            self.stop()

    def step_ended(self, metrics: Mapping[str, float]) -> None:
        """``Run.step``."""
        self._explicit = self._counted = True  # from now on the caller counts, and batches do not
        self._step += 1
        if self._current is not None:
            self._current.metrics.update(metrics)
        self._boundary()

    def _before_batch(self) -> None:
        if self._random_at_first_batch is not None:
            # What the caller did between the restore and here was done before the interruption, too.
            self._set_random(self._random_at_first_batch)
            self._random_at_first_batch = None
        had_batch = self._open_batch
        self._close_batch()
        if had_batch and not self._explicit:
            self._boundary()
        self._open_batch = True

    def _close_batch(self) -> None:
        if self._open_batch and not self._explicit:
            self._counted = True
            self._step += 1
        self._open_batch = False

    def _boundary(self) -> None:
        self._boundaries += 1
        if self.ranks.several:
            stop_at = self.ranks.stop_at(self._boundaries, self.termination.requested)
            if stop_at is not None and self._boundaries >= stop_at:
                # A rank that is ahead already, since these do not step together, has no save to join in.
                self._save_and_stop(save=self._boundaries == stop_at)
            if self._every_s is None or self._boundaries % _AGREE_EVERY:
                return
        elif self.termination.requested:
            self._save_and_stop(save=True)
        due = self._every_s is not None and self._monotonic() - self._saved_at >= self._every_s
        if self.ranks.any(due):
            self.save(middle=True)

    def _save_and_stop(self, *, save: bool) -> None:
        if save and "loader" in self.state:
            self.save(middle=True)
        self.stop()

    def stop(self) -> None:
        """End the process as SIGTERM asks for: what is pending newest first, then 143."""
        ending.note_exit_code(ending.TERMINATED)
        self.run.finish_for_termination(self.termination.left_s)
        raise SystemExit(ending.TERMINATED)

    # -------------------------------------------------------------------------------------------------------- saving

    def save(self, *, final: bool = False, middle: bool = False) -> None:
        """Save everything under the current step, in the ``middle`` of an epoch or behind one.

        What goes wrong with sending it is told, and raised when the loop ends.
        """
        torch = self.ranks.torch
        began_s = self._monotonic()
        metrics = self._current.metrics if self._current is not None else {}
        with self.run._checkpoint(self._step, self.epoch, dict(metrics), final, passing=middle) as directory:
            if self.ranks.rank == 0:
                for name, item in self.state.items():
                    self._save_item(directory, name, item)
                progress = {"format": "stagekit-progress", "version": 1, "epoch": self.epoch, "middle": middle}
                progress |= {"step": self._step, "counted": self._counted}
                (directory / _PROGRESS).write_bytes(seal(progress))
            torch.save(self._get_random(), directory / f"rng-{self.ranks.rank}.pt")
        self._saved_at = self._monotonic()
        self._advise(self._saved_at - began_s)

    def _advise(self, save_s: float) -> None:
        """Say once, when both times are known, how often saving is worth it."""
        _, uploader = self.run._begin()
        if self._advised or uploader.sent_s is None or self.ranks.rank != 0:
            return
        self._advised = True
        minutes = max(1, round(best_interval_s(save_s, uploader.sent_s) / 60))
        self.run._on_event(
            Message(
                f"saving takes {format_duration(save_s)} of the training and sending {format_duration(uploader.sent_s)} beside it; if the "
                f'machine fails once a day, every="{minutes}min" loses least'
            )
        )

    def _save_item(self, directory: Path, name: str, item: Stateful) -> None:
        values = _inner(item).state_dict()
        if name == "loader":
            text = json.dumps(values, allow_nan=False) if _is_plain(values) else None
            if text is not None:
                (directory / _LOADER).write_text(text + "\n")
                return
        self.ranks.torch.save(values, directory / f"{name}.pt")

    def _get_random(self) -> dict[str, Any]:
        torch = self.ranks.torch
        values: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            import numpy as np

            state: Any = np.random.get_state()  # a tuple or a dict, by an argument that its type does not follow
            kind, keys, position, has_gauss, cached = state
            values["numpy"] = (str(kind), torch.tensor(keys.astype("int64")), int(position), int(has_gauss), float(cached))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            values["cuda"] = torch.cuda.get_rng_state_all()
        return values

    def _set_random(self, values: dict[str, Any]) -> None:
        torch = self.ranks.torch
        random.setstate(values["python"])
        torch.set_rng_state(values["torch"])
        if "numpy" in values:
            import numpy as np

            kind, keys, position, has_gauss, cached = values["numpy"]
            np.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
        if "cuda" in values and torch.cuda.is_available() and torch.cuda.device_count() == len(values["cuda"]):
            torch.cuda.set_rng_state_all(values["cuda"])

    # -------------------------------------------------------------------------------------------------------- restoring

    def restore(self, allow_fresh: bool) -> None:
        """Load the newest whole checkpoint into the state, on every rank the same one; nothing on a new run."""
        spool, _ = self.run._begin()
        reserved = self.run._reserve()
        directory = reserved / "restored"
        try:
            with self.ranks.group.busy():
                found, failure = self._fetch(directory, allow_fresh)
                try:
                    if found is not None and failure is None:
                        self._load(found, directory)
                except Exception as error:
                    failure = error
            self.ranks.group.agree(failure)
        finally:
            spool.release(reserved)

    def _fetch(self, directory: Path, allow_fresh: bool) -> tuple[Checkpoint | None, Exception | None]:
        run, found, failure = self.run, None, None
        if self.ranks.rank == 0:
            try:
                found = run.restore(directory, allow_fresh=allow_fresh)
            except StagekitError as error:
                failure = error
        if not self.ranks.several:
            return found, failure
        name, failure = self.ranks.group.broadcast((str(found.name) if found is not None else None, failure))
        chosen = CheckpointName.parse(name) if name is not None else None
        if self.ranks.rank != 0 and chosen is not None and failure is None:
            try:
                found = catalog.read(run._store, chosen)
                restore_checkpoint(run._store, found, directory, on_event=run._on_event)
            except StagekitError as error:
                failure = error
        return found, failure

    def _load(self, found: Checkpoint, directory: Path) -> None:
        where = f"step {found.step} of {self.run.url}"
        if not (directory / _PROGRESS).exists():
            raise CheckpointError(
                f"{where} was not saved by run.epochs() (it holds {', '.join(record.path for record in found.files[:5])}); "
                "restore it with run.restore(), or use another run"
            )
        progress = unseal((directory / _PROGRESS).read_bytes(), "stagekit-progress", 1, source=f"{_PROGRESS} of {where}")
        for name, item in self.state.items():
            self._load_item(directory, name, item, where)
        self.epoch, self._step = int(progress["epoch"]), int(progress["step"])
        self._counted = bool(progress["counted"])
        own = directory / f"rng-{self.ranks.rank}.pt"
        if own.exists():
            values = self._read(own, where)
            self._set_random(values)
            self._random_at_first_batch = values if progress["middle"] else None
        else:
            text = f"{where} was saved by fewer ranks and has no random state for rank {self.ranks.rank}, which keeps its own"
            self.run._on_event(Message(text, "warning"))
        if self.ranks.rank == 0:
            # At a level that is seen where logging was not set up: nothing else tells a resumed training from a new one.
            self.run._on_event(Message(f"going on at {where} (epoch {self.epoch})", "warning"))

    def _load_item(self, directory: Path, name: str, item: Stateful, where: str) -> None:
        plain, pickled = directory / _LOADER, directory / f"{name}.pt"
        if name == "loader" and plain.exists():
            values = json.loads(plain.read_text())
        elif pickled.exists():
            values = self._read(pickled, where)
        else:
            has = ", ".join(sorted(path.stem for path in directory.glob("*.pt") if not path.stem.startswith("rng-")))
            raise CheckpointError(f"{where} has no {name!r} to load (it has {has}); pass the names under which it was saved as state=")
        try:
            _inner(item).load_state_dict(values)
        except Exception as error:
            error.add_note(f"while loading {name!r} from {where}")
            raise

    def _read(self, path: Path, where: str) -> Any:
        import pickle

        try:
            return self.ranks.torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path.name} of {where} holds more than tensors and plain values. It is not unpickled: that could run any code ({error})"
            ) from error


class _Ranks:
    """The process group as far as the loop needs it: agreeing at its start, and on when to save. Nothing here touches uploads."""

    def __init__(self, torch: ModuleType, rank: int, world_size: int) -> None:
        from .ranks import Ranks  # needs torch

        self.torch: Any = torch  # typed loosely: parts of torch.distributed exist only in builds that have it
        self.rank = rank
        self.world_size = world_size
        self.several = world_size > 1
        self.session = ""
        self.grouped = bool(self.torch.distributed.is_available() and self.torch.distributed.is_initialized())
        self.group = Ranks(rank, world_size)

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank."""
        return any(self.group.gather(flag))

    def stop_at(self, boundary: int, requested: bool) -> int | None:
        """At which boundary between two steps all ranks stop, once one of them was asked to; ``None`` while none was.

        No collective: ranks need not come by equally often. The one that was asked writes the boundary after its own into the group's
        key-value store, and the others look there. They find it in time when no rank finishes a step that another has not begun, as with
        gradients that are averaged in each. One look takes some 50 µs.
        """
        store = self.torch.distributed.distributed_c10d._get_default_store()
        key = f"stagekit/stop/{self.session}"
        try:
            if requested:
                return int(store.compare_set(key, "", str(boundary + 1)))
            return int(store.get(key)) if store.check([key]) else None
        except RuntimeError:  # the rank that holds the store is gone, and with it this training
            return boundary if requested else None


def _torch() -> ModuleType:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtra.of("torch", "torch", "run.epochs()") from error
    return torch


def _inner(item: Any) -> Any:
    """The module inside DistributedDataParallel and torch.compile: its names are the same with and without them."""
    while type(item).__name__ in ("DistributedDataParallel", "OptimizedModule", "DataParallel"):
        item = item._orig_mod if type(item).__name__ == "OptimizedModule" else item.module
    return item


def _is_name(name: str) -> bool:
    return bool(name) and name.isascii() and all(letter.isalnum() or letter in "-_" for letter in name) and not name.startswith("rng-")


def _is_plain(value: Any) -> bool:
    """Whether JSON gives ``value`` back as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))
