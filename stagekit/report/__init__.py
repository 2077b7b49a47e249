"""What is where: data sets, runs and checkpoints below a URL, and what one of them holds. Reads only; never unpickles."""

from __future__ import annotations

from .entries import Entry as Entry
from .entries import ls as ls
from .look import info as info
from .values import ArrivalInfo as ArrivalInfo
from .values import CheckpointInfo as CheckpointInfo
from .values import DatasetInfo as DatasetInfo
from .values import RunInfo as RunInfo
