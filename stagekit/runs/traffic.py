"""What a training asked of object storage, as it is recorded with its run when it has finished.

The record is the content of ``owners/….closed``, which is written once, at the end. A training that was killed leaves none, so what a
run shows is what its finished trainings counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from ..errors import ManifestError
from ..location import Location
from ..store.base import Store
from ..store.usage import Usage, usages
from .layout import OWNERS, seal, unseal

_FORMAT = "stagekit-traffic"


class Traffic:
    """What this process has asked of each place since this was made."""

    def __init__(self) -> None:
        self._before = usages()

    def so_far(self) -> dict[str, Usage]:
        """By URL, those that were asked something."""
        now = usages()
        return {str(place): more for place, usage in now.items() if (more := usage - self._before.get(place, Usage()))}


def to_bytes(traffic: Mapping[str, Usage]) -> bytes:
    """The record; empty when nothing was counted, as for a run in a directory."""
    if not traffic:
        return b""
    return seal({"format": _FORMAT, "version": 1, "places": {place: asdict(usage) for place, usage in sorted(traffic.items())}})


def from_bytes(data: bytes, *, source: str) -> dict[str, Usage]:
    """Parse strictly. Raises ``ManifestError`` naming ``source``."""
    if not data:
        return {}
    values = unseal(data, _FORMAT, 1, source=source)
    try:
        return {
            str(Location.parse(place)): Usage(**{name: int(count) for name, count in one.items()})
            for place, one in values["places"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError(f"{source}: it does not say what a training asked of storage ({error})") from None


def recorded(store: Store) -> tuple[dict[str, Usage], int]:
    """What the finished trainings of the run at ``store`` counted, by URL, and how many of them counted anything.

    A record that cannot be read is passed over: it tells of money, and decides nothing.
    """
    total: dict[str, Usage] = {}
    trainings = 0
    for info in list(store.list(OWNERS)):
        if not info.key.endswith(".closed") or not info.size:
            continue
        try:
            found = from_bytes(bytes(store.get(info.key)), source=f"{store.location}/{info.key}")
        except ManifestError:
            continue
        trainings += 1
        for place, usage in found.items():
            total[place] = total.get(place, Usage()) + usage
    return dict(sorted(total.items())), trainings
