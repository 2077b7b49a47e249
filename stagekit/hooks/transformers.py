"""``StagekitCallback``: every checkpoint that transformers' ``Trainer`` saves, in the bucket. TRL, Unsloth and Axolotl are Trainers, too.

Three things about the Trainer shape it. ``on_epoch_end`` comes before that epoch's save, so nothing happens there. ``on_save`` comes after
the Trainer has rotated old checkpoints away, on every rank, and without waiting for the others, so that rank 0 must look whether all is
there and come back when it is not. Saves on SIGTERM and calls of ``save_model`` come without ``on_save``, so the directory is looked
through again when the training ends.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, MissingExtra, StagekitError, UploadFailed, UsageError
from ..progress import Message
from ..runs import catalog
from ..runs.layout import Checkpoint, CheckpointName, Selector
from ..runs.restore import restore_checkpoint
from ..runs.run import Run
from ..saves.trainer import STATE, Expected, epochs_of, is_weights, metrics_of, read_state, step_of
from ..saves.whole import files
from ..store import Where
from ..transfer.put import file_sha256
from .base_model import base_model_of
from .exchange import is_same
from .ranks import Ranks
from .trainer_files import expected_by

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise MissingExtra.of("transformers", "transformers", "stagekit.hooks.transformers") from missing

from .trainer_data import go_on_in

EXPORTED = "exported"  # where models that were saved outside of a checkpoint go

RESTORED = "restored"  # where a checkpoint goes whose own name is taken by something else

_Stat = tuple[int, int, int]


class StagekitCallback(TrainerCallback):
    """Sends each checkpoint of a ``Trainer`` to a run, and brings the newest one back on the next machine.

    ``run`` is a ``Run``, or where it lies; ``options`` are those of ``Run`` (``keep_last=…``, ``store=…``). A checkpoint is handed over
    once it is complete by what the live ``TrainingArguments`` say: weights, optimizer, scheduler, ``trainer_state.json`` of that step and
    every rank's random state. Handing over pins the files, so ``save_total_limit=1`` may rotate them away. Training goes on meanwhile.

    What goes wrong in the background and will not heal by itself is raised at the next save, after that one was pinned. At the end of the
    training everything is in the bucket, or ``train()`` raises ``UploadFailed`` and the local copies stay pinned.

    For a PEFT adapter, base model and revision are noted with each checkpoint, and a resume on another base is refused.

    Example::

        callback = StagekitCallback("s3://my-bucket/runs/first")
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume_dir())
    """

    def __init__(
        self,
        run: Run | Where,
        *,
        wait_s: float = 60.0,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(run, Run) and options:
            raise UsageError(f"{', '.join(sorted(options))}: give these to the Run itself, or give its URL here instead")
        self._run = run if isinstance(run, Run) else None
        self._where: Any = run
        self._options = options
        self._wait_s = wait_s
        self._monotonic = monotonic
        self._sleep = sleep
        self._output: Path | None = None
        self._local_main = True
        self._expected = Expected()
        self._before: dict[Path, _Stat] = {}
        self._waiting: dict[int, Path] = {}
        self._handed_over: dict[Path, dict[Path, _Stat]] = {}

    @property
    def run(self) -> Run:
        """The run that is saved to."""
        if self._run is None:
            self._run = Run(self._where, **self._options)
        return self._run

    # -------------------------------------------------------------------------------------------------------- resuming

    def resume_dir(self, directory: str | os.PathLike[str] | None = None, step: Selector | None = None) -> str | None:
        """Where the newest whole checkpoint (or ``step``) is now, for ``train(resume_from_checkpoint=…)``; ``None`` on a new run.

        It lies in ``directory`` (the Trainer's ``output_dir``) under the name the Trainer gave it. Every hash was checked. One that is
        there already, byte for byte, is taken as it is; one that differs is left alone, and the checkpoint goes to ``restored/`` beside it.
        Saves that a killed process left pinned on this disk are sent first. With several ranks every rank calls this, and all get the same
        answer. Raises when it cannot be told what the run has: training from scratch would be the wrong answer.
        """
        ranks = Ranks.find()
        folder = Path(directory).expanduser().absolute() if directory is not None else self._output
        if folder is None:
            raise UsageError("resume_dir(): make the Trainer with this callback first, or say where: resume_dir(output_dir)")

        def restore_here() -> tuple[str, str] | None:
            self.run._finish_backlog()
            found = self._restore(folder, step)
            return None if found is None else (str(found[0]), str(found[1].name))

        chosen = ranks.decide(restore_here)
        if chosen is None or not ranks.several:
            return chosen[0] if chosen is not None else None
        failure: Exception | None = None
        target, name = Path(chosen[0]), CheckpointName.parse(chosen[1])
        if ranks.rank != 0 and self._local_main and name is not None and not target.is_dir():
            # Another node, which does not share rank 0's directory.
            try:
                with ranks.busy():
                    restore_checkpoint(self.run._store, catalog.read(self.run._store, name), target, on_event=self.run._on_event)
            except Exception as error:
                failure = error
        ranks.agree(failure)
        return str(target)

    def _restore(self, folder: Path, step: Selector | None) -> tuple[Path, Checkpoint] | None:
        newest = self.run.latest() if step is None else None
        if newest is not None and is_same(newest, folder / f"checkpoint-{newest.step}", beside=EXPORTED):
            self.run.go_on_with(newest)
            return self._checked(folder / f"checkpoint-{newest.step}", newest)
        arriving = folder / f".restoring-{os.getpid()}"
        shutil.rmtree(arriving, ignore_errors=True)
        try:
            found = self.run.restore(arriving, step)
            if found is None:
                return None
            self._checked(arriving, found)
            target = folder / f"checkpoint-{found.step}"
            if is_same(found, target, beside=EXPORTED):
                return target, found
            if target.exists() and any(target.iterdir()):
                aside = folder / RESTORED / str(found.name) / target.name
                text = f"{target} is not what {self.run.url} holds as step {found.step}; it is left alone, going on with {aside}"
                self.run._on_event(Message(text, "warning"))
                shutil.rmtree(aside, ignore_errors=True)
                aside.parent.mkdir(parents=True, exist_ok=True)
                target = aside
            arriving.rename(target)
            return target, found
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    def _checked(self, directory: Path, found: Checkpoint) -> tuple[Path, Checkpoint]:
        if not (directory / STATE).exists():
            raise CheckpointError(
                f"step {found.step} of {self.run.url} holds no {STATE}, so the Trainer cannot go on with it. It holds "
                f"{', '.join(record.path for record in found.files[:5])}; restore it with run.restore(), or use another run"
            )
        return directory, found

    # -------------------------------------------------------------------------------------------------------- the Trainer's hooks

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Learn where the Trainer saves, which rank this is, and which base model an adapter continues."""
        self._attach(args, kwargs.get("model"))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note what lies in the output directory from before, so that it is not taken for what this training saves."""
        if state.is_hyper_param_search:
            raise UsageError("StagekitCallback: one run holds one training; a hyperparameter search makes many. Give each trial a run")
        self._attach(args, kwargs.get("model"))
        go_on_in(kwargs.get("train_dataloader"), global_step=state.global_step, accumulation=args.gradient_accumulation_steps)
        if not state.is_world_process_zero or self._output is None:
            return
        self._expected = expected_by(args)
        self._waiting.clear()
        self._before = {path: _stat(path) for path in files(self._output)} if self._output.is_dir() else {}
        self.run.watch(self._output)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hand over what the other ranks have finished meanwhile."""
        self._offer_waiting()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The same. This is the last chance before the next save rotates: no rank gets past a step that another has not reached."""
        if state.is_world_process_zero:
            self.run.heartbeat(state.global_step)
        self._offer_waiting()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hand over the checkpoint that was just saved, or as soon as the other ranks have written their part of it."""
        if not state.is_world_process_zero:
            return
        step = state.global_step
        self._waiting[step] = self._folder(args) / f"checkpoint-{step}"
        try:
            self._offer_waiting()
        finally:
            late = {number: directory for number, directory in self._waiting.items() if number != step}
            for number in late:
                del self._waiting[number]
        for number, directory in late.items():
            raise self._incomplete(directory, number)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hand over what came without ``on_save``, then wait until all is in the bucket. Raises ``UploadFailed`` when it cannot be."""
        if not state.is_world_process_zero:
            return
        deadline = self._monotonic() + self._wait_s
        output = self._folder(args)
        failures: list[Exception] = []
        self._collect(failures, self._offer_waiting)
        while self._waiting and self._monotonic() < deadline:
            self._sleep(0.05)  # another rank is still writing
            self._collect(failures, self._offer_waiting)
        late, self._waiting = dict(self._waiting), {}
        for number, directory in self._untold(output, late):
            self._collect(failures, partial(self._hand_over, directory, number))
        self._export(output, state.global_step)
        self.run._drain_at_end()
        for failure in failures:
            if not isinstance(failure, UploadFailed):  # that one has healed
                raise failure
        for number, directory in late.items():
            raise self._incomplete(directory, number)

    # -------------------------------------------------------------------------------------------------------- handing over

    def _attach(self, args: TrainingArguments, model: Any) -> None:
        self._output = self._folder(args)
        self._local_main = args.local_process_index == 0
        if self._run is None:
            self._run = Run(self._where, **{"rank": args.process_index, "world_size": args.world_size, **self._options})
        if model is not None and self._run._base_model is None and (base := base_model_of(model)) is not None:
            self._run.made_with(base_model=base)

    def _folder(self, args: TrainingArguments) -> Path:
        return Path(str(args.output_dir)).expanduser().absolute()

    def _offer_waiting(self) -> None:
        """Hand over what is complete. What went wrong with earlier saves is raised after all of them are pinned."""
        failures: list[Exception] = []
        for step, directory in list(self._waiting.items()):
            if not self._expected.missing(directory, step, self._is_new):
                del self._waiting[step]
                self._collect(failures, partial(self._hand_over, directory, step))
        for failure in failures:
            raise failure

    def _collect(self, failures: list[Exception], work: Callable[[], None]) -> None:
        try:
            work()
        except StagekitError as error:
            failures.append(error)

    def _hand_over(self, directory: Path, step: int) -> None:
        now = {path: _stat(path) for path in files(directory)}
        if self._handed_over.get(directory) == now:
            return
        self._handed_over[directory] = now
        state = read_state(directory)
        self.run.submit(directory, step=step, epoch=epochs_of(state), metrics=metrics_of(state))

    def _is_new(self, path: Path) -> bool:
        return self._before.get(path) != _stat(path)

    def _incomplete(self, directory: Path, step: int) -> CheckpointError:
        if not directory.is_dir():
            return CheckpointError(
                f"step {step}: {directory} was removed before every rank had saved its part, so that step is not in the bucket"
            )
        lacking = self._expected.missing(directory, step, self._is_new)
        hint = ""
        if any(name.startswith("rng_state_") for name in lacking):
            hint = ". When the nodes do not share output_dir, set save_on_each_node=True"
        return CheckpointError(
            f"step {step}: {directory} is not complete, so it is not in {self.run.url}: it lacks "
            f"{', '.join(lacking) or 'nothing any more'}{hint}"
        )

    def _untold(self, output: Path, late: dict[int, Path]) -> list[tuple[int, Path]]:
        """Complete checkpoints that nobody told about, by step: a save on SIGTERM, or one that was written again."""
        if not output.is_dir():
            return []
        untold = []
        for step, directory in sorted((step, path) for path in output.iterdir() if (step := step_of(path)) is not None and path.is_dir()):
            if step in late or not any(map(self._is_new, files(directory))):
                continue
            lacking = self._expected.missing(directory, step, self._is_new)
            if not lacking:
                untold.append((step, directory))
            elif directory not in self._handed_over:
                text = f"{directory} is no complete checkpoint and stays local: it lacks {', '.join(lacking)}"
                self.run._on_event(Message(text, "warning"))
        return untold

    def _export(self, output: Path, step: int) -> None:
        """Send models saved outside of a checkpoint (``save_model``), together with the newest one, so that the latest stays whole."""
        exports = self._exports(output)
        if not exports:
            return
        newest = max((path for path in self._handed_over if path.is_dir()), key=lambda path: step_of(path) or 0, default=None)
        state = read_state(newest) if newest is not None else {}
        number = step_of(newest) if newest is not None else step
        with self.run._checkpoint(number or 0, epochs_of(state), metrics_of(state), True) as directory:
            if newest is not None:
                for path in files(newest):
                    _place(path, directory / path.relative_to(newest))
            for path in exports:
                _place(path, directory / EXPORTED / path.relative_to(output))

    def _exports(self, output: Path) -> list[Path]:
        """Files beside new weights outside of checkpoints, unless the checkpoints have the same content already."""
        if not output.is_dir():
            return []
        inside = tuple(path for path in output.iterdir() if step_of(path) is not None or path.name == RESTORED)
        new = [path for path in files(output) if not any(path.is_relative_to(folder) for folder in inside) and self._is_new(path)]
        folders = {path.parent for path in new if is_weights(path)}
        candidates = [path for path in new if path.parent in folders]
        held = [path for directory in self._handed_over if directory.is_dir() for path in files(directory)]
        by_size: dict[int, list[Path]] = {}
        for path in held:
            by_size.setdefault(path.stat().st_size, []).append(path)

        def is_held(path: Path) -> bool:
            same_size = by_size.get(path.stat().st_size, [])
            return bool(same_size) and file_sha256(path) in map(file_sha256, same_size)

        return candidates if any(is_weights(path) and not is_held(path) for path in candidates) else []


def _stat(path: Path) -> _Stat:
    try:
        now = path.stat()
    except OSError:
        return (0, 0, 0)
    return now.st_ino, now.st_size, now.st_mtime_ns


def _place(source: Path, target: Path) -> None:
    """A hard link where the disk allows, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)
