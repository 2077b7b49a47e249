"""Publications that were begun on this machine and whose end nobody noted, one small file each in the machine's home.

What a killed or failed run has sent is no data set yet, and a machine that is destroyed then takes the rest with it. ``stagekit teardown``
looks here. A note that cannot be written stops no publication.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config import StoreConfig, home_directory
from ..errors import ManifestError, PublishError, StoreError
from ..folders import paths_in
from ..location import Location
from ..store.base import Store
from .destination import SHARDS, Found, enter, look

_FORMAT = "stagekit-begun-publication"


@dataclass(frozen=True, slots=True)
class Begun:
    """A publication to ``url`` that began here, and how its store is reached."""

    url: str
    store: StoreConfig | None


def note_begun(location: Location, store: StoreConfig | None, *, home: Path | None = None) -> bool:
    """Remember that shards for ``location`` are on their way. Returns whether that is news."""
    path = _path(location, home)
    is_news = not path.exists()
    if location.scheme != "memory":
        reached = StoreConfig.in_force(store, str(location))
        values = {"format": _FORMAT, "version": 1, "url": str(location), "store": asdict(reached) if reached is not None else None}
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(values, indent=1) + "\n")
            temporary.replace(path)
    return is_news


def note_ended(location: Location, *, home: Path | None = None) -> None:
    """Forget it: the manifest is there, or nothing was left behind."""
    with suppress(OSError):
        _path(location, home).unlink(missing_ok=True)


def enter_and_note(
    store: Store,
    config: StoreConfig | None,
    plan: str,
    found: Found,
    *,
    takeover: bool,
    again: Callable[[Store], Found] = look,
    uploads: str = SHARDS,
) -> bool:
    """``enter`` the destination, noting first that it was begun. Where it is somebody else's, or may not be written, no new note stays."""
    is_news = note_begun(store.location, config)
    try:
        return enter(store, plan, found, takeover=takeover, again=again, uploads=uploads)
    except (PublishError, StoreError) as error:
        if is_news and not (isinstance(error, StoreError) and error.transient):
            note_ended(store.location)
        raise


def begun(home: Path | None = None) -> list[Begun]:
    """Everything that was begun here and not seen to end, sorted by URL. Raises ``ManifestError`` or
    ``OSError`` naming a note that cannot be read."""
    return sorted((_read(path) for path in paths_in((home or home_directory()) / "publications", "*.json")), key=lambda one: one.url)


def _path(location: Location, home: Path | None) -> Path:
    return (home or home_directory()) / "publications" / f"{hashlib.sha256(str(location).encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> Begun:
    try:
        values = json.loads(path.read_bytes())
        if values["format"] != _FORMAT or values["version"] != 1:
            raise ManifestError(f"{path} is no note of a publication that this Stagekit reads; install a newer one")
        return Begun(str(values["url"]), StoreConfig.from_record(values["store"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{path} is damaged: it does not say which publication was begun ({error})") from None
