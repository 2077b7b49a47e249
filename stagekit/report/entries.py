"""What lies below a URL, a line for each data set, run, checkpoint, folder and object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..config import StoreConfig
from ..contents import kind_of
from ..errors import Denied, ManifestError
from ..parallel import each
from ..progress import Subscriber, ignore
from ..publishing.destination import is_probe
from ..runs import catalog
from ..runs.catalog import Catalog
from ..runs.layout import CHECKPOINTS, RUN_JSON, Checkpoint
from ..shards.manifest import MANIFEST, Manifest
from ..store import Where, open_store
from ..store.base import Store, exists
from ..store.below import Below
from ..units import counted, format_count, format_size

EntryKind = Literal["dataset", "run", "checkpoint", "folder", "object"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of ``ls``. ``size_bytes`` and ``count`` (samples, checkpoints) are ``None`` where they were not looked up."""

    kind: EntryKind
    url: str
    size_bytes: int | None = None
    count: int | None = None
    note: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Kind, size, contents, URL: the columns for people."""
        size = "" if self.size_bytes is None else format_size(self.size_bytes)
        return ("data set" if self.kind == "dataset" else self.kind), size, self.note, self.url

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def ls(where: Where, *, store: StoreConfig | None = None, threads: int = 8, on_event: Subscriber = ignore) -> list[Entry]:
    """Data sets, runs, folders and objects directly below a URL, sorted by name; at a run, its checkpoints from oldest to newest.

    A data set or run at the URL itself is the first entry. A damaged manifest, and one below the URL that these keys may not read, makes
    an entry whose note says so. An empty place gives an empty list; one that may not be listed, or a missing bucket, raises.

    Example: ``for entry in stagekit.ls("s3://bucket"): print(entry.kind, entry.url)``.
    """
    opened = open_store(where, store, on_event=on_event)
    below = opened.children()
    names = {info.key for info in below.objects}
    if MANIFEST in names or RUN_JSON in names or CHECKPOINTS in below.folders:
        kind = kind_of(opened)
        if kind is not None:
            return list(_inside(opened, kind))
    entries = list(each(lambda folder: _folder(opened, folder), below.folders, threads=threads))
    entries.extend(Entry("object", str(opened.location / info.key), info.size) for info in below.objects if not is_probe(info.key))
    return entries


def _inside(store: Store, kind: Literal["dataset", "run"]) -> Iterator[Entry]:
    if kind == "dataset":
        yield _dataset_entry(store, "")
        return
    url, found = str(store.location), catalog.read_all(store)
    yield _run_entry(url, found)
    behind = catalog.addresses(found)
    at = {name: f"{url}@{address}" for name, address in behind.items()}
    entries = {checkpoint.name: _checkpoint_entry(at[checkpoint.name], checkpoint) for checkpoint in found.checkpoints}
    entries.update({name: Entry("checkpoint", at[name], note=f"damaged: {error}") for name, error in found.damaged})
    lending = catalog.lending(found.uncommitted, found.checkpoints)
    dropped = catalog.dropped(store, found.uncommitted)
    for name in found.uncommitted:
        note = "not committed"
        if name in lending:
            note = "removed, but for files that others refer to"
        elif name in dropped:
            note = "dropped by policy, with files that are not removed yet"
        entries[name] = Entry("checkpoint", at[name], note=note)
    steps = Counter(name.step for name in entries)
    for name in sorted(entries):
        entry = entries[name]
        if steps[name.step] > 1:
            which = f", which @{name.step} stands for" if behind[name] == name.step else ""
            entry = replace(entry, note=f"{entry.note}; generation {name.generation}{which}")
        yield entry


def _folder(store: Store, folder: str) -> Entry:
    url = str(store.location / folder)
    try:
        if exists(store, folder + MANIFEST):
            return _dataset_entry(store, folder)
        if exists(store, folder + RUN_JSON):
            return _run_entry(url, catalog.read_all(Below(store, folder)))
    except Denied as error:
        return Entry("folder", url, note=f"may not be read: {error}")
    return Entry("folder", url)


def _dataset_entry(store: Store, folder: str) -> Entry:
    url = str(store.location / folder)
    try:
        manifest = Manifest.from_bytes(bytes(store.get(folder + MANIFEST)), source=f"{url}/{MANIFEST}")
    except ManifestError as error:
        return Entry("dataset", url, note=f"damaged: {error}")
    return Entry(
        "dataset",
        url,
        manifest.bytes,
        manifest.samples,
        f"{format_count(manifest.samples)} samples, {counted(len(manifest.shards), 'shard')}",
    )


def _run_entry(url: str, found: Catalog) -> Entry:
    note = counted(len(found.checkpoints), "checkpoint")
    if found.checkpoints:
        note += f", newest step {format_count(found.checkpoints[0].step)}"
    if found.damaged:
        note += f", {len(found.damaged)} damaged"
    return Entry("run", url, stored_bytes(found.checkpoints), len(found.checkpoints), note)


def _checkpoint_entry(url: str, checkpoint: Checkpoint) -> Entry:
    parts = [counted(len(checkpoint.files), "file")]
    if checkpoint.epoch is not None:
        parts.append(f"epoch {checkpoint.epoch}")
    parts.extend(f"{name} {value:.6g}" for name, value in sorted(checkpoint.metrics.items()))
    return Entry("checkpoint", url, checkpoint.size_bytes, len(checkpoint.files), ", ".join(parts))


def stored_bytes(checkpoints: Iterable[Checkpoint]) -> int:
    """The bytes that these checkpoints occupy: a file that several of them share counts once."""
    return sum({record.key(one.name): record.bytes for one in checkpoints for record in one.files}.values())
