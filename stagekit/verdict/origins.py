"""The rows about what the newest checkpoint was made with: a base model or a data set that another machine would not find."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from ..config import StoreConfig, hub_endpoint
from ..errors import Denied, ManifestError, NotFound, StagekitError
from ..location import Location
from ..saves.pulled import PulledModel, pulled_model
from ..shards.manifest import MANIFEST, Manifest
from ..store.base import Store
from .bucket import RunState
from .durable import Durable
from .findings import Finding

HubAnswer = Literal["there", "missing", "unasked"]

_HUB_S = 4.0
_CONTENT = re.compile(r"(.+)@content-([0-9a-f]{16})")
_COMMIT = re.compile(r"[0-9a-f]{40}")  # the folder of a snapshot in the Hub's cache is named after its commit


def ask_hub(name: str, revision: str) -> HubAnswer:
    """Whether the Hugging Face Hub has this revision of a model, by the user's own token. ``unasked`` where it does not say in seconds."""
    answers: list[HubAnswer] = []
    # Looking up a name can take longer than any time-out of an HTTP client.
    asking = threading.Thread(target=lambda: answers.append(_ask_hub(name, revision)), name="stagekit-hub", daemon=True)
    asking.start()
    asking.join(_HUB_S + 1.0)
    return answers[0] if answers else "unasked"


def _ask_hub(name: str, revision: str) -> HubAnswer:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        return "unasked"
    try:
        HfApi(endpoint=hub_endpoint()).model_info(name, revision=revision, timeout=_HUB_S)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return "missing"
    except Exception:  # whatever its HTTP client raises: no answer, offline mode, a gated model
        return "unasked"
    return "there"


def judge_base_model(
    state: RunState,
    ignores: Callable[[str], bool],
    open_place: Callable[[str, StoreConfig | None], Store],
    store: StoreConfig | None,
    ask: Callable[[str, str], HubAnswer] = ask_hub,
    home: Path | None = None,
) -> list[Finding]:
    """A base model that an adapter continues: of the Hub, where it must still be, or a directory, which may be nowhere else.

    A directory that was pulled is looked for where it came from.
    """
    newest = state.newest
    base = newest.manifest.identity.get("base_model") if newest is not None else None
    if newest is None or not isinstance(base, str):
        return []
    subject = f"{state.url}@{newest.step}"
    if (local := _CONTENT.fullmatch(base)) is not None:
        if _COMMIT.fullmatch(local[1]) or ignores(local[1]):
            return []
        pulled = pulled_model(local[2], home=home)
        if pulled is not None:
            return _judge_pulled(subject, local[1], pulled, open_place, store)
        what = f"it continues the base model {local[1]}, a directory of this machine, and whether that is anywhere else is not known"
        fix = f"copy {local[1]} away; if it is elsewhere: stagekit teardown --ignore {local[1]}"
        return [Finding("CANNOT TELL", "base model", what, subject, fix=fix)]
    name, _, revision = base.rpartition("@")
    if ignores(name):
        return []
    answer = ask(name, revision)
    if answer == "missing":
        what = f"it continues the base model {base}, which the Hub does not have, or not for this user"
        fix = f"log in (hf auth login), or copy it away; if it is elsewhere: stagekit teardown --ignore {name}"
        return [Finding("CANNOT TELL", "base model", what, subject, fix=fix)]
    if answer == "unasked":
        what = f"it continues the base model {base}; the Hub could not be asked whether it is still there"
        return [Finding("note", "base model", what, subject)]
    return []


def _judge_pulled(
    subject: str, name: str, pulled: PulledModel, open_place: Callable[[str, StoreConfig | None], Store], store: StoreConfig | None
) -> list[Finding]:
    fix = f"stagekit push {name} {pulled.url}; if it is elsewhere: stagekit teardown --ignore {name}"
    try:
        missing = pulled.missing(open_place(pulled.url, store))
    except (StagekitError, OSError) as error:
        what = f"it continues the base model {name}, and {pulled.url}, from where that was pulled, cannot be looked at: {error}"
        return [Finding("CANNOT TELL", "base model", what, subject, fix=fix)]
    if not missing:
        return []
    what = f"it continues the base model {name}, of which {missing[0]} is not at {pulled.url} any more as it was pulled from there"
    return [Finding("CANNOT TELL", "base model", what, subject, fix=fix)]


def judge_dataset(
    state: RunState,
    places: Mapping[str, str],
    ignores: Callable[[str], bool],
    open_place: Callable[[str, StoreConfig | None], Store],
    store: StoreConfig | None,
    durable: Durable,
) -> list[Finding]:
    """The data set that the newest checkpoint was trained on, where this machine noted its place."""
    digest = state.newest.manifest.identity.get("dataset") if state.newest is not None else None
    if not isinstance(digest, str) or digest not in places:
        return []
    url = places[digest]
    if ignores(url):
        return []
    fix = f"look for it: stagekit info {url}; if it is elsewhere: stagekit teardown --ignore {url}"
    try:
        found = Manifest.from_bytes(bytes(open_place(url, store).get(MANIFEST)), source=url)
    except NotFound:
        what = f"the data set of {state.url} is not there any more, and a resume needs it"
        return [Finding("CANNOT TELL", "data set", what, url, fix=fix)]
    except Denied:
        return [Finding("note", "data set", f"the keys of {state.url} may not read its data set, so it was not looked at", url)]
    except (StagekitError, ManifestError) as error:
        return [Finding("CANNOT TELL", "data set", f"the data set of {state.url} cannot be looked at: {error}", url, fix=fix)]
    if found.digest != digest:
        what = f"another data set is there than {state.url} was trained on, and a resume needs that one"
        return [Finding("CANNOT TELL", "data set", what, url, fix=fix)]
    location = Location.parse(url)
    if location.is_directory and not durable.holds(location.local_path):
        what = f"the data set of {state.url} is on this machine; a resume elsewhere needs it, or a copy"
        return [Finding("note", "data set", what, url)]
    return []
