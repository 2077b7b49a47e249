"""``StagekitCheckpointIO``: every checkpoint that Lightning's ``Trainer`` saves, in the bucket, and none removed before its successor is.
``StagekitHeartbeat``: how far it has trained, for ``stagekit teardown``.

Lightning's FSDP, DeepSpeed and model-parallel strategies write their shards themselves and never ask a ``CheckpointIO``; for these, save
with ``stagekit.hooks.dcp`` or use ``stagekit run``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ..config import process_rank
from ..errors import CheckpointError, MissingExtra, UsageError
from ..runs.layout import Selector
from ..runs.run import Run
from ..runs.sync import Upload
from ..saves.lightning import epochs_of, metrics_of
from ..store import Where
from .exchange import bring
from .ranks import Ranks

try:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch.callbacks import Callback
except ImportError as missing:
    raise MissingExtra.of("lightning", "lightning", "stagekit.hooks.lightning") from missing

_HANDED_DOWN = "STAGEKIT_LIGHTNING_RESUME"
"""What rank 0 found, for the processes that Lightning starts by running the same script again: they have no other way to ask."""


class StagekitCheckpointIO(CheckpointIO):
    """Lightning's way to save, with each checkpoint handed over to a run.

    ``run`` is a ``Run``, or where it lies; ``options`` are those of ``Run``. ``inner`` writes and reads the local files (Lightning's own by
    default). A save returns once its file is pinned; it is sent in the background. ``remove_checkpoint`` waits until a later checkpoint is
    verified in the bucket. When the training ends, everything is in the bucket, or ``fit()`` raises ``UploadFailed``.

    What goes wrong in the background and will not heal by itself is raised at the next save, after that one was pinned.

    Example::

        io = StagekitCheckpointIO("s3://my-bucket/runs/first")
        trainer = Trainer(plugins=[io], callbacks=[ModelCheckpoint(every_n_epochs=1)])
        trainer.fit(model, ckpt_path=io.resume_path())
    """

    def __init__(self, run: Run | Where, *, inner: CheckpointIO | None = None, **options: Any) -> None:
        if isinstance(run, Run) and options:
            raise UsageError(f"{', '.join(sorted(options))}: give these to the Run itself, or give its URL here instead")
        self.run = run if isinstance(run, Run) else Run(run, **options)
        self.inner = inner or TorchCheckpointIO()
        self._uploads: list[Upload] = []
        self._removals: list[tuple[str, int]] = []
        # The same package under its other name: its Trainer asks whether this is a CheckpointIO of its own.
        if (other := sys.modules.get("lightning_fabric.plugins")) is not None:
            other.CheckpointIO.register(type(self))

    # -------------------------------------------------------------------------------------------------------- resuming

    def resume_path(self, directory: str | os.PathLike[str] = "restored", step: Selector | None = None) -> str | None:
        """The newest whole checkpoint (or ``step``) as a local file below ``directory``, for ``fit(ckpt_path=…)``; ``None`` on a new run.

        Every hash was checked. Saves that a killed process left pinned on this disk are sent first. With several ranks every rank calls
        this, and all get the same answer. Raises when it cannot be told what the run has: training from scratch would be the wrong answer.
        """
        parent, _, handed_down = os.environ.get(_HANDED_DOWN, "").partition(":")
        if "LOCAL_RANK" in os.environ and "RANK" not in os.environ and parent not in ("", str(os.getpid())):
            return handed_down or None
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        found = bring(self.run, Ranks.find(), local_rank, Path(directory).expanduser().absolute(), step)
        path = str(self._only_file(found)) if found is not None else None
        if process_rank()[1] == 1:
            os.environ[_HANDED_DOWN] = f"{os.getpid()}:{path or ''}"
        return path

    def _only_file(self, directory: Path) -> Path:
        found = sorted(path for path in directory.iterdir() if path.is_file())
        if len(found) != 1 or len(list(directory.iterdir())) != 1:
            names = ", ".join(path.name for path in sorted(directory.iterdir())[:5])
            raise CheckpointError(
                f"{self.run.url} was not saved by StagekitCheckpointIO: its checkpoint holds {names}. Restore it with run.restore(), or "
                "use another run"
            )
        return found[0]

    # -------------------------------------------------------------------------------------------------------- what Lightning calls

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None) -> None:
        """Write the file, then hand it over. Lightning calls this on rank 0 alone."""
        if "://" in str(path):
            raise UsageError(f"{path} is no local path. Let ModelCheckpoint save to a local dirpath; the run sends it to {self.run.url}")
        self.inner.save_checkpoint(checkpoint, os.fspath(path), storage_options)
        folder = Path(path).absolute().parent
        if folder not in (Path.cwd(), Path.home()):
            self.run.watch(folder)
        self._removals = [(waiting, number) for waiting, number in self._removals if Path(waiting) != Path(path)]
        number = len(self._uploads)
        self._uploads.append(Upload(int(checkpoint["global_step"])))
        self._uploads[number] = self.run.submit(
            path, step=int(checkpoint["global_step"]), epoch=epochs_of(checkpoint), metrics=metrics_of(checkpoint)
        )
        self._remove_what_may_go()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a local file."""
        return self.inner.load_checkpoint(os.fspath(path), map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the local file once a checkpoint that was saved after it is verified in the bucket: now, or later."""
        self._removals.append((os.fspath(path), len(self._uploads) - 1))
        self._remove_what_may_go()

    def teardown(self) -> None:
        """Wait until everything is in the bucket, then remove what may go. Raises ``UploadFailed``, unless the training failed already."""
        failed = sys.exc_info()[1] is not None
        try:
            if not failed and self.run._uploader is not None:
                self.run._drain_at_end()
        finally:
            self._remove_what_may_go()
            self.inner.teardown()

    def _remove_what_may_go(self) -> None:
        verified = max((number for number, upload in enumerate(self._uploads) if upload.state == "verified"), default=-1)
        for path, number in [one for one in self._removals if one[1] <= verified]:
            self._removals.remove((path, number))
            self.inner.remove_checkpoint(path)


class StagekitHeartbeat(Callback):
    """Tells after each step how far the training is, so that ``stagekit teardown`` can say what would be lost with this machine.

    A checkpoint's own step is told by ``io`` alone; what was trained since is known to the ``Trainer``, which tells it to its callbacks.

    Example::

        trainer = Trainer(plugins=[io], callbacks=[ModelCheckpoint(), StagekitHeartbeat(io)])
    """

    def __init__(self, io: StagekitCheckpointIO) -> None:
        self._run = io.run

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Note the step, every few seconds, on this machine."""
        if trainer.is_global_zero:
            self._run.heartbeat(int(trainer.global_step))
