"""Training runs: checkpoints pinned, sent, verified, restored and kept. Needs no torch."""

from __future__ import annotations

from .home import KnownRun, known_runs
from .layout import Checkpoint, parse_reference
from .run import Run
from .sync import RunStatus, Upload

__all__ = ["Checkpoint", "KnownRun", "Run", "RunStatus", "Upload", "known_runs", "parse_reference"]
