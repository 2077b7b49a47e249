"""The row about shards that were built and not published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..config import StoreConfig
from ..errors import ManifestError, StagekitError
from ..location import Location
from ..mds.index import INDEX
from ..publishing.begun import Begun, begun
from ..publishing.claim import read_claim
from ..shards.manifest import MANIFEST
from ..store.base import Store, exists
from .durable import Durable
from .findings import Finding

ROW = "publication"


def recorded(home: Path | None = None) -> tuple[list[Begun], list[Finding]]:
    """Publications that were begun here and not seen to end, and what cannot be read of them."""
    try:
        return begun(home), []
    except (ManifestError, OSError) as error:
        fix = "remove that file when the data set is published: stagekit ls URL"
        return [], [Finding("CANNOT TELL", ROW, f"this machine's notes of publications cannot be read: {error}", "this machine", fix=fix)]


def judge(
    one: Begun, ignores: Callable[[str], bool], open_store: Callable[[str, StoreConfig | None], Store], durable: Durable
) -> list[Finding]:
    """What is left to do for one of them: nothing when it was published after all."""
    location = Location.parse(one.url)
    if ignores(one.url) or (location.is_directory and durable.holds(location.local_path)):
        return []
    store = open_store(one.url, one.store)
    try:
        claim, published = read_claim(store), exists(store, MANIFEST) or exists(store, INDEX)
        if claim is None and published:
            return []
        kind = "new shards of an update" if published else "shards"
    except StagekitError as error:
        what = f"shards were sent here and not published when this machine last knew; now it cannot be looked at: {error}"
        return [Finding("CANNOT TELL", ROW, what, one.url, fix=f"stagekit ls {one.url}")]
    again = (
        f"repeat the command that publishes it, with the options it had, as in: stagekit shard DATA {one.url}; "
        f"or give it up: stagekit teardown --ignore {one.url}"
    )
    if claim is None:
        return [Finding("CANNOT TELL", ROW, "a data set was begun here, and nothing of it is there any more", one.url, fix=again)]
    state = claim.state()
    if state == "running":
        fix = f"wait until process {claim.process.pid} ends, then: stagekit teardown"
        return [Finding("NO", ROW, f"{claim.process} is publishing {kind}", one.url, fix=fix)]
    if state == "dead":
        return [Finding("NO", ROW, f"{kind} were built and not published; {claim.process} has ended", one.url, fix=again)]
    return [Finding("CANNOT TELL", ROW, f"{kind} are claimed by {claim}, which cannot be asked from here", one.url, fix=again)]
