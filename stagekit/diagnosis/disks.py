"""What a directory lies on: its mount and class, the kind of disk, the space that is left here. A mount that hangs is never touched."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..mounts import Judgement, MountTable, bucket_url, judge

_BLOCK = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True)
class Disk:
    """``existing`` was looked at: ``path``, or the nearest one above that is there; ``is_file`` when that is no directory.

    ``free_bytes`` and ``total_bytes`` are what the file system tells this user, so a quota it knows of counts; ``None`` where it was not
    asked.
    ``kind`` is ``"nvme"``, ``"ssd"``, ``"disk"``, ``"memory"``, ``"network"``, or ``None`` where that cannot be told."""

    path: Path
    existing: Path
    judged: Judgement
    kind: str | None
    free_bytes: int | None = None
    total_bytes: int | None = None
    writable: bool | None = None
    url: str | None = None
    is_file: bool = False


def look_at_disk(path: Path) -> Disk:
    """What ``path`` lies on. Answers within about a second, also when its mount hangs."""
    wanted = path.expanduser().absolute()
    judged = judge(wanted, probe=True)
    mount = judged.mount
    url = bucket_url(mount, str(wanted)) if mount is not None and judged.kind == "refused" else None
    if judged.kind == "refused":
        return Disk(wanted, wanted, judged, "network", url=url)
    existing = wanted
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        usage = shutil.disk_usage(existing)
    except OSError:
        return Disk(wanted, existing, judged, None)
    return Disk(
        wanted,
        existing,
        judged,
        _kind(judged),
        usage.free,
        usage.total,
        os.access(existing, os.W_OK | os.X_OK),
        is_file=not existing.is_dir(),
    )


def remarkable_mounts() -> list[Judgement] | None:
    """All mounts that are not simply local, in the order of the mount table; ``None`` where the system has none. Touches no mount."""
    table = MountTable.read()
    if table is None:
        return None
    judged = [table.classify(mount) for mount in table.mounts]
    return [one for one in judged if one.kind != "fine" and one.mount is not None and one.mount.type != "autofs"]


def _kind(judged: Judgement) -> str | None:
    mount = judged.mount
    if mount is None:
        return None
    if mount.type in ("tmpfs", "ramfs"):
        return "memory"
    if judged.kind == "warned":
        return "network"
    device = _BLOCK / mount.device
    if not device.exists():
        return None  # overlay, btrfs, zfs: what lies beneath has no number here
    name = device.resolve().name
    if name.startswith("nvme"):
        return "nvme"
    for queue in (device / "queue/rotational", device.resolve().parent / "queue/rotational"):
        try:
            return "disk" if queue.read_text().strip() == "1" else "ssd"
        except OSError:
            continue
    return None
