"""``info``: looking at one place. Reads only; never unpickles."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

from .. import pickles
from ..config import StoreConfig
from ..contents import checkpoint_at, kind_of, nothing
from ..errors import NotFound, StoreError, UsageError
from ..histogram import buckets
from ..page.file import check_target
from ..parallel import each
from ..progress import Subscriber, ignore
from ..runs import catalog, commits, known_runs, spool
from ..runs.layout import RUN_JSON, Checkpoint, CheckpointName, FileRecord, RunRecord, address_of, parse_reference
from ..runs.traffic import recorded
from ..shards.index import index_from_bytes
from ..shards.manifest import MANIFEST, Manifest, ShardRecord, index_name
from ..store import Where, open_store
from ..store.base import Store
from ..units import format_size
from .entries import stored_bytes
from .values import ArrivalInfo, AttemptInfo, CheckpointInfo, DatasetInfo, FieldInfo, FileInfo, PendingInfo, RunInfo

# Files that Python would execute when it loads them, by the endings that trainers use.
_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".distcp")
# Anything may be called .bin: these of Transformers, Accelerate, PEFT and Diffusers are pickles, of others the beginning is looked at.
_PICKLED_BIN = re.compile(r"(.*pytorch_model.*|adapter_model|training_args|(optimizer|scheduler|sampler)(_\d+)?)\.bin")
_HEAD = 4

_SIZED_SHARDS = 64


def info(
    where: Where,
    *,
    peek: int | None = None,
    price_per_gb: float | None = None,
    urls: bool = False,
    html: str | os.PathLike[str] | None = None,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
    clock: Callable[[], float] = time.time,
) -> DatasetInfo | RunInfo | CheckpointInfo:
    """What a data set, a run, or one checkpoint of a run (``RUN@1200``, ``RUN@latest``, ``RUN@best``) holds.

    ``peek`` samples of a data set are read as well. ``price_per_gb`` is what a gigabyte costs that leaves the store: with it, reading the
    data set and what the run's trainings received have a price. ``urls`` asks for those of a data set's shards (``UsageError`` for anything
    else). Raises ``ManifestError`` when neither lies there.

    ``html`` is a file to which a page of a run or a data set is written as well. It needs no network, and takes the place of an older page,
    never of anything else. That of a data set shows its first ``peek`` samples, 12 where none is given; with 0, nothing of what is in
    them gets into the page, and none is read.

    Example: ``stagekit.info("s3://bucket/digits").samples``.
    """
    if isinstance(where, str):
        run_url, selector = parse_reference(where)
        if run_url != where:
            if urls:
                raise _no_shards(where)
            if html is not None:
                raise UsageError(f"html: {where} is one checkpoint, and there are pages of runs and data sets; give {run_url}")
            opened = open_store(run_url, store, on_event=on_event)
            checkpoint = checkpoint_at(opened, selector, on_event=on_event)
            return _checkpoint_info(run_url, address_of(checkpoint.name, selector), checkpoint, _Pickles(opened))
    target = check_target(html) if html is not None else None
    opened = open_store(where, store, on_event=on_event)
    kind = kind_of(opened)
    if kind == "dataset":
        dataset = replace(_dataset_info(opened, where, peek or 0, urls, store), price_per_gb=price_per_gb)
        if target is not None:
            from ..page.write import write_dataset_page

            write_dataset_page(target, dataset, where, peek, store, clock())
        return dataset
    if kind == "run":
        if urls:
            raise _no_shards(str(opened.location))
        run = _run_info(opened, price_per_gb, clock())
        if target is not None:
            from ..page.write import write_run_page

            write_run_page(target, run, opened, clock())
        return run
    raise nothing(opened, "looking at")


def _no_shards(url: str) -> UsageError:
    return UsageError(f"urls: {url} is no data set, and only those have shards; look at it with `stagekit ls`")


def _dataset_info(opened: Store, where: Where, peek: int, urls: bool, config: StoreConfig | None) -> DatasetInfo:
    url = str(opened.location)
    manifest = Manifest.from_bytes(bytes(opened.get(MANIFEST)), source=f"{url}/{MANIFEST}")
    fields = tuple(FieldInfo(name, *totals) for name, totals in sorted(manifest.fields.items()))
    samples: list[Mapping[str, str]] = []
    if peek:
        from ..dataset import Dataset

        samples = [_preview(sample) for sample in Dataset(where, store=config).head(peek)]
    elsewhere = tuple(record.url for record in manifest.shards if record.url is not None)
    # As many as are looked at in a moment, from everywhere in the data set.
    step = -(-len(manifest.shards) // _SIZED_SHARDS)
    sized = manifest.shards[::step]
    sizes = chain.from_iterable(each(lambda record: _sample_sizes(opened, record), sized))
    return DatasetInfo(
        url,
        manifest.digest,
        manifest.samples,
        manifest.bytes,
        len(manifest.shards),
        manifest.largest_block,
        fields,
        tuple(samples),
        elsewhere,
        buckets(sizes),
        len(sized),
        urls=tuple(record.url or str(opened.location / record.name) for record in manifest.shards) if urls else (),
    )


def _sample_sizes(store: Store, record: ShardRecord) -> list[int]:
    """What each sample of a shard takes in the tar. A missing index has no size to tell; ``verify`` is there to say so."""
    try:
        offsets = index_from_bytes(store.get(index_name(record.name)), source=str(store.location / index_name(record.name)))
    except NotFound:
        return []
    return [end - start for start, end in pairwise(offsets)]


def _preview(sample: Mapping[str, Any]) -> dict[str, str]:
    """Key, and per field its size and, where it is short text, the text."""
    shown: dict[str, str] = {"__key__": str(sample["__key__"])}
    for name, value in sorted(sample.items()):
        if name.startswith("__"):
            continue
        data = bytes(value)
        text = f"({format_size(len(data))})"
        head = data[:60]
        try:
            decoded = head.decode().strip()
        except UnicodeDecodeError:
            decoded = ""
        if decoded and decoded.isprintable():
            text = f"{decoded!r}{'…' if len(data) > 60 else ''} {text}"
        shown[name] = text
    return shown


def _run_info(opened: Store, price_per_gb: float | None, now_s: float) -> RunInfo:
    url = str(opened.location)
    try:
        created_s: float | None = RunRecord.from_bytes(bytes(opened.get(RUN_JSON)), source=f"{url}/{RUN_JSON}").created_s
    except NotFound:
        created_s = None
    found = catalog.read_all(opened)
    checkpoints, behind = tuple(reversed(found.checkpoints)), catalog.addresses(found)
    broken: list[str] = []
    catalog.first_whole(
        opened, lambda: catalog.attempts(opened), lambda one: catalog.confirm(opened, one), lambda error: broken.append(str(error))
    )
    damaged = dict.fromkeys([*(str(error) for _, error in reversed(found.damaged)), *broken])
    vanished = commits.newest(opened, found.uncommitted)
    lending, pickled = catalog.lending(found.uncommitted, checkpoints), _Pickles(opened)
    dropped = catalog.dropped(opened, found.uncommitted) - lending
    unfinished = [name for name in reversed(found.uncommitted) if name != vanished and name not in dropped]
    return RunInfo(
        url,
        created_s,
        tuple(_checkpoint_info(url, behind[checkpoint.name], checkpoint, pickled) for checkpoint in checkpoints),
        stored_bytes(checkpoints),
        tuple(AttemptInfo(name.step, name.generation, _delivered(opened, name), name in lending) for name in unfinished),
        tuple(damaged),
        tuple(_pending(url)),
        *recorded(opened),
        price_per_gb,
        _arrival(opened, checkpoints[-1], now_s) if checkpoints else None,
    )


def _arrival(store: Store, checkpoint: Checkpoint, now_s: float) -> ArrivalInfo | None:
    try:
        arrived_s = store.head(checkpoint.name.manifest_key).modified_s
    except NotFound:
        return None  # it was removed since it was listed
    saved_s = checkpoint.manifest.saved_s
    age_s = max(0.0, now_s - arrived_s) if arrived_s is not None else None
    lag_s = max(0.0, arrived_s - saved_s) if arrived_s is not None and saved_s is not None else None
    return ArrivalInfo(age_s, lag_s, sum(record.bytes for record in checkpoint.files if record.object is None))


def _delivered(store: Store, name: CheckpointName) -> tuple[int, ...]:
    """The ranks whose part of the attempt ``name`` is in the bucket."""
    texts = (info.key.rpartition("/rank-")[2].removesuffix(".json") for info in store.list(name.parts))
    return tuple(sorted(int(text) for text in texts if text.isascii() and text.isdecimal()))


def _pending(url: str) -> Iterator[PendingInfo]:
    """What this machine has pinned for the run and not sent."""
    spools = {spool.default_dir(), *(path for known in known_runs() if known.url == url for path in known.spools)}
    for directory in sorted(spools):
        for entry in spool.pending(directory):
            if entry.run == url and entry.dropped is None:
                yield PendingInfo(entry.step, entry.rank, entry.world_size, entry.size_bytes, spool.is_alive(entry), entry.error)


class _Pickles:
    """Which files of a run run code when they are loaded: by name, and by the beginning where names do not tell, read once for all
    checkpoints that have the bytes. What cannot be read may be one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_digest: dict[str, bool] = {}

    def __call__(self, record: FileRecord, name: CheckpointName) -> bool:
        path = record.path.lower()
        if not path.endswith(".bin"):
            return path.endswith(_PICKLES)
        if _PICKLED_BIN.fullmatch(path.rpartition("/")[2]):
            return True
        if record.sha256 not in self._by_digest:
            self._by_digest[record.sha256] = self._looks(record, name)
        return self._by_digest[record.sha256]

    def _looks(self, record: FileRecord, name: CheckpointName) -> bool:
        if not record.bytes:
            return False
        try:
            return pickles.may_be(bytes(self._store.get(record.key(name), 0, min(_HEAD, record.bytes))))
        except StoreError:
            return True


def _checkpoint_info(run_url: str, address: CheckpointName | int, checkpoint: Checkpoint, pickled: _Pickles) -> CheckpointInfo:
    files = tuple(
        FileInfo(record.path, record.bytes, record.sha256, record.object is not None, pickled(record, checkpoint.name))
        for record in sorted(checkpoint.files, key=lambda record: record.path)
    )
    return CheckpointInfo(
        f"{run_url}@{address}",
        str(checkpoint.name),
        checkpoint.step,
        checkpoint.epoch,
        dict(checkpoint.metrics),
        dict(checkpoint.manifest.identity),
        checkpoint.manifest.saved_s,
        checkpoint.size_bytes,
        files,
    )
