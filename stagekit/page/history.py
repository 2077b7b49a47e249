"""How each checkpoint of a run came to the bucket: when it was saved, when its files were there, when it was committed; what was sent for
it and what was there already. The times of objects are the store's, that of a save is the writer's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..report.values import CheckpointInfo
from ..runs.layout import CHECKPOINTS, CheckpointName
from ..store.base import Store


@dataclass(frozen=True, slots=True)
class Passage:
    """One checkpoint's. ``sent_s`` is when its last own file was there; moments that nobody told are ``None``."""

    checkpoint: CheckpointInfo
    saved_s: float | None
    sent_s: float | None
    verified_s: float | None
    sent_bytes: int
    reused_bytes: int

    @property
    def lag_s(self) -> float | None:
        """Seconds from the save to the commit; 0 where the two clocks contradict each other."""
        if self.saved_s is None or self.verified_s is None:
            return None
        return max(0.0, self.verified_s - self.saved_s)

    @property
    def upload_s(self) -> float | None:
        """That part of ``lag_s`` which passed before the last file was there."""
        lag_s = self.lag_s
        if lag_s is None or self.saved_s is None:
            return None
        return lag_s if self.sent_s is None else min(lag_s, max(0.0, self.sent_s - self.saved_s))

    @property
    def bytes_per_s(self) -> float | None:
        """What was sent, divided by ``lag_s``."""
        return self.sent_bytes / self.lag_s if self.lag_s and self.sent_bytes else None

    @property
    def reused(self) -> float:
        """The share of its bytes that an earlier checkpoint had sent."""
        whole = self.sent_bytes + self.reused_bytes
        return self.reused_bytes / whole if whole else 0.0


def passages(store: Store, checkpoints: Iterable[CheckpointInfo]) -> list[Passage]:
    """Those of ``checkpoints``, in their order. One listing; nothing is read."""
    written = {info.key: info.modified_s for info in store.list(CHECKPOINTS)}
    return [_passage(one, written) for one in checkpoints]


def _passage(one: CheckpointInfo, written: Mapping[str, float | None]) -> Passage:
    name = CheckpointName.parse(one.name)
    assert name is not None  # its manifest was read under this name
    own = [file for file in one.files if not file.shared]
    arrived = [moment for file in own if (moment := written.get(name.file_key(file.path))) is not None]
    sent = sum(file.bytes for file in own)
    return Passage(one, one.saved_s, max(arrived, default=None), written.get(name.manifest_key), sent, one.bytes - sent)
