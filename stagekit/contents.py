"""What lies at a URL: a data set, a run, or neither.

Everything here reads. "Cannot tell" (forbidden, unreachable, no such bucket) is raised and never taken for "nothing there".
"""

from __future__ import annotations

from typing import Literal

from .errors import CheckpointError, ManifestError, NotFound
from .location import Location
from .progress import Subscriber, ignore
from .runs import catalog
from .runs.layout import RUN_JSON, Checkpoint, Selector, parse_reference
from .shards.manifest import MANIFEST
from .store.base import Store, exists

Kind = Literal["dataset", "run"]


def kind_of(store: Store) -> Kind | None:
    """``"dataset"`` where a manifest lies, ``"run"`` where a run's record or a checkpoint's folder lies, else ``None``."""
    if exists(store, MANIFEST):
        return "dataset"
    if exists(store, RUN_JSON) or catalog.attempts(store):
        return "run"
    return None


def nothing(store: Store, doing: str) -> ManifestError:
    """The error for a place that is neither; ``doing`` as in "pulling". Raises what listing it raises."""
    location = store.location
    children = store.children()
    if not children.objects and not children.folders:
        return ManifestError(
            f"{doing} {location}: nothing lies there, so it is neither a data set nor a run, which begins with its first save; check how "
            f"it is written, stagekit ls {location.parent} tells what is beside it{misnamed(location)}"
        )
    if any(info.key == "index.json" for info in children.objects) and _is_mosaicml(store):
        return ManifestError(
            f"{doing} {location}: it holds MosaicML's format, and this is for data sets of tars; the stagekit shard --format mds that made "
            "it, given again, compares every file with the source, and stagekit.interop.mosaicml checks each shard that it reads"
        )
    return ManifestError(
        f"{doing} {location}: it is neither a data set nor a run, as it holds neither {MANIFEST} nor {RUN_JSON}; "
        f"stagekit ls {location} tells what is there{misnamed(location)}"
    )


def _is_mosaicml(store: Store) -> bool:
    """Whether ``index.json`` is one of MosaicML's format, which other packages do not have alone."""
    from .mds import index

    try:
        return bool(index.from_bytes(bytes(store.get(index.INDEX)), source=index.INDEX))
    except (ManifestError, NotFound):
        return False


def absent(location: Location, doing: str) -> ManifestError:
    """The error for a place where no object lies and none below it, when any would do."""
    return ManifestError(
        f"{doing} {location}: there is no object of this name, and none below it; stagekit ls {location.parent} tells what is there"
        f"{misnamed(location)}"
    )


def misnamed(location: Location) -> str:
    """What to add where nothing lies at ``location``: how checkpoints are named, when one seems to be meant."""
    run, at, selector = location.name.rpartition("@")
    if not at or not run:
        return ""
    name = str(location).removesuffix(f"@{selector}")
    if parse_reference(str(location))[0] == name:
        return f". For a checkpoint of the run {name}: stagekit info {location}"
    return f". If a checkpoint of {name} is meant, {selector!r} is none of a step's number, latest and best"


def refuse_selector(url: str, asked: str, doing: str) -> None:
    """Nothing when ``asked`` is ``url``. Raises ``CheckpointError`` when it names a checkpoint of ``url``, where a data set lies."""
    if asked != url:
        raise CheckpointError(f"{doing} {asked}: {url} is a data set, and only a run has checkpoints; name {url} alone")


def checkpoint_at(store: Store, selector: Selector, *, on_event: Subscriber = ignore) -> Checkpoint:
    """The committed checkpoint that ``selector`` means, by its manifest alone. Others of its step are told to ``on_event``.

    Raises ``CheckpointError`` when there is none, ``ManifestError`` when the one that is meant cannot be read.
    """
    for name in catalog.candidates(store, selector):
        try:
            checkpoint = catalog.read(store, name)
        except NotFound:
            continue  # it was never committed
        catalog.tell_of_others(store, selector, checkpoint, on_event)
        return checkpoint
    raise CheckpointError(f"{store.location} has no committed checkpoint ({selector}); stagekit ls {store.location} tells what is there")
