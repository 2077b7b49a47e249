"""What is where: data sets, runs and checkpoints below a URL, and what one of them holds. Reads only; never unpickles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import Any, Literal

from .config import StoreConfig
from .contents import checkpoint_at, exists, kind_of, nothing
from .errors import ManifestError, NotFound, UsageError
from .histogram import Bucket, buckets, drawn
from .parallel import each
from .progress import Subscriber, ignore
from .publishing.destination import is_probe
from .runs import catalog, known_runs, spool
from .runs.catalog import Catalog
from .runs.layout import CHECKPOINTS, RUN_JSON, Checkpoint, CheckpointName, RunRecord, metrics_to_json, parse_reference
from .runs.traffic import recorded
from .shards.index import index_from_bytes
from .shards.manifest import MANIFEST, Manifest, ShardRecord, index_name
from .store import Where, open_store
from .store.base import Store
from .store.below import Below
from .store.usage import Usage, price_text
from .units import format_count, format_duration, format_rate, format_size

# Files that Python would execute when it loads them, by the endings that trainers use.
_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".distcp")

_SIZED_SHARDS = 64

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

    A data set or run at the URL itself is the first entry. A damaged manifest makes an entry whose note says so. An empty place gives an
    empty list; one that may not be read, or a missing bucket, raises.

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
    entries = {checkpoint.name: _checkpoint_entry(url, checkpoint) for checkpoint in found.checkpoints}
    entries.update({name: Entry("checkpoint", f"{url}@{name.step}", note=f"damaged: {error}") for name, error in found.damaged})
    entries.update({name: Entry("checkpoint", f"{url}@{name.step}", note="not committed") for name in found.uncommitted})
    for name in sorted(entries):
        yield entries[name]


def _folder(store: Store, folder: str) -> Entry:
    url = str(store.location / folder)
    if exists(store, folder + MANIFEST):
        return _dataset_entry(store, folder)
    if exists(store, folder + RUN_JSON):
        return _run_entry(url, catalog.read_all(Below(store, folder)))
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
        f"{format_count(manifest.samples)} samples, {_plural(len(manifest.shards), 'shard')}",
    )


def _run_entry(url: str, found: Catalog) -> Entry:
    note = _plural(len(found.checkpoints), "checkpoint")
    if found.checkpoints:
        note += f", newest step {format_count(found.checkpoints[0].step)}"
    if found.damaged:
        note += f", {len(found.damaged)} damaged"
    return Entry("run", url, stored_bytes(found.checkpoints), len(found.checkpoints), note)


def _checkpoint_entry(run_url: str, checkpoint: Checkpoint) -> Entry:
    parts = [_plural(len(checkpoint.files), "file")]
    if checkpoint.epoch is not None:
        parts.append(f"epoch {checkpoint.epoch}")
    parts.extend(f"{name} {value:.6g}" for name, value in sorted(checkpoint.metrics.items()))
    return Entry("checkpoint", f"{run_url}@{checkpoint.step}", checkpoint.size_bytes, len(checkpoint.files), ", ".join(parts))


def stored_bytes(checkpoints: Iterable[Checkpoint]) -> int:
    """The bytes that these checkpoints occupy: a file that several of them share counts once."""
    return sum({record.key(one.name): record.bytes for one in checkpoints for record in one.files}.values())


# --------------------------------------------------------------------------------------------------------------------------- info


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a data set: how many samples have it, and its bytes in all."""

    name: str
    samples: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What a data set holds. ``peek`` has the first samples: key and, per field, size and the beginning of what is text. ``elsewhere`` has
    the URLs of shards that were indexed where they lie. ``sizes`` counts samples by what they take in a tar, headers included, over
    ``sized_shards`` shards that are spread over the data set. ``price_per_gb`` is what a gigabyte costs that leaves the store. ``urls`` are
    those of all shards, in source order, when they were asked for.
    """

    url: str
    digest: str
    samples: int
    bytes: int
    shards: int
    largest_block: int
    fields: tuple[FieldInfo, ...]
    peek: tuple[Mapping[str, str], ...] = ()
    elsewhere: tuple[str, ...] = ()
    sizes: tuple[Bucket, ...] = ()
    sized_shards: int = 0
    price_per_gb: float | None = None
    urls: tuple[str, ...] = ()
    kind: Literal["dataset"] = field(default="dataset", init=False)

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        average = self.bytes / self.shards if self.shards else 0
        lines = [
            f"data set   {self.url}",
            f"samples    {format_count(self.samples)}",
            f"size       {format_size(self.bytes)} in {_plural(self.shards, 'shard')} of about {format_size(average)}",
            f"digest     {self.digest}",
        ]
        if self.price_per_gb is not None:
            cost = Usage(received_bytes=self.bytes).cost(self.price_per_gb)
            lines.append(f"price      {cost:,.2f} for each time it is read ({format_size(self.bytes)} at {self.price_per_gb:g} a GB)")
        if self.elsewhere:
            shown = f"{format_count(len(self.elsewhere))} of {_plural(self.shards, 'shard')}, the first at {self.elsewhere[0]}"
            lines.append(f"elsewhere  {shown}")
        lines.extend(self._field_lines())
        lines.extend(self._size_lines())
        for sample in self.peek:
            values = [f"{name} {value}" for name, value in sample.items() if name != "__key__"]
            lines.append(f"sample     {sample['__key__']}: {', '.join(values)}")
        return lines

    def _field_lines(self) -> Iterator[str]:
        rows = [("field", "samples", "size", "a sample", "missing in")]
        for one in self.fields:
            mean = format_size(one.bytes / one.samples) if one.samples else "0 B"
            missing = "" if one.samples == self.samples else format_count(self.samples - one.samples)
            rows.append((one.name, format_count(one.samples), format_size(one.bytes), mean, missing))
        if not any(row[4] for row in rows[1:]):
            rows = [(*row[:4], "") for row in rows]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for row in rows:
            numbers = "  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            yield f"{row[0].ljust(max(10, widths[0]))} {numbers}".rstrip()

    def _size_lines(self) -> Iterator[str]:
        if self.sizes:
            of = "" if self.sized_shards == self.shards else f", in {format_count(self.sized_shards)} of {_plural(self.shards, 'shard')}"
            yield f"sizes      of samples in the tar, headers included{of}"
            for line in drawn(self.sizes):
                yield f"           {line}"

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a checkpoint. ``shared`` when an earlier checkpoint sent its bytes; ``pickle`` when loading it runs code."""

    path: str
    bytes: int
    sha256: str
    shared: bool
    pickle: bool


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What one checkpoint holds."""

    url: str
    name: str
    step: int
    epoch: int | None
    metrics: Mapping[str, float]
    identity: Mapping[str, str | int]
    saved_s: float | None
    bytes: int
    files: tuple[FileInfo, ...]
    kind: Literal["checkpoint"] = field(default="checkpoint", init=False)

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        lines = [
            f"checkpoint {self.url}",
            f"step       {format_count(self.step)}" + ("" if self.epoch is None else f", epoch {self.epoch}"),
            f"size       {format_size(self.bytes)} in {_plural(len(self.files), 'file')}",
        ]
        lines.extend(f"metric     {name} {value:.6g}" for name, value in sorted(self.metrics.items()))
        lines.extend(f"made with  {name}: {value}" for name, value in sorted(self.identity.items()))
        for one in self.files:
            marks = [
                mark
                for mark, holds in (("sent by an earlier checkpoint", one.shared), ("a pickle: loading it runs code", one.pickle))
                if holds
            ]
            lines.append(f"file       {one.path}: {format_size(one.bytes)}" + (f" ({'; '.join(marks)})" if marks else ""))
        return lines

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values; numbers that JSON lacks are text."""
        values = asdict(self)
        values["metrics"] = metrics_to_json(self.metrics)
        return values


@dataclass(frozen=True, slots=True)
class PendingInfo:
    """A save that this machine holds and that is not in the bucket yet; ``error`` tells why, when that is known."""

    step: int
    rank: int
    world_size: int
    bytes: int
    sender_lives: bool
    error: str | None

    @property
    def line(self) -> str:
        """The same for people."""
        of = f" of rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        state = "its process lives" if self.sender_lives else "its process ended; the next start here, or stagekit teardown, sends it"
        return f"step {self.step}{of}, {format_size(self.bytes)}, {state}" + (f": {self.error}" if self.error else "")


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """An attempt without a commit: on its way, or given up. ``ranks`` are those other than 0 that have delivered."""

    step: int
    generation: int
    ranks: tuple[int, ...]

    @property
    def line(self) -> str:
        """The same for people."""
        delivered = f", delivered by rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"step {self.step} (generation {self.generation}{delivered}): no commit, so it is on its way or its writer died"


@dataclass(frozen=True, slots=True)
class ArrivalInfo:
    """How a checkpoint reached the bucket: committed ``age_s`` ago, ``lag_s`` after it was saved; ``bytes`` were sent for it.

    Both durations compare two machines' clocks. ``None`` where the store does not tell when an object was written.
    """

    age_s: float | None
    lag_s: float | None
    bytes: int

    @property
    def line(self) -> str:
        """The same for people; nothing when nothing is known."""
        if self.age_s is None:
            return ""
        text = f"verified {format_duration(self.age_s)} ago"
        if self.lag_s is not None:
            rate = f", {format_rate(self.bytes / self.lag_s)}" if self.lag_s >= 1 else ""
            text += f", {format_duration(self.lag_s)} after it was saved{rate}"
        return text


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run holds.

    ``unfinished`` are attempts that were never committed, ``damaged`` those whose manifest is unusable. ``pending`` is what this machine,
    and no other, has not sent yet. ``arrival`` is that of the newest checkpoint. ``traffic`` is what ``trainings`` that have finished
    asked of each store, by URL; ``price_per_gb`` turns what they received into money.
    """

    url: str
    created_s: float | None
    checkpoints: tuple[CheckpointInfo, ...]
    bytes: int
    unfinished: tuple[AttemptInfo, ...]
    damaged: tuple[str, ...]
    pending: tuple[PendingInfo, ...] = ()
    traffic: Mapping[str, Usage] = field(default_factory=dict)
    trainings: int = 0
    price_per_gb: float | None = None
    arrival: ArrivalInfo | None = None
    kind: Literal["run"] = field(default="run", init=False)

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        lines = [f"run        {self.url}", f"size       {format_size(self.bytes)} in {_plural(len(self.checkpoints), 'checkpoint')}"]
        if self.checkpoints:
            newest = self.checkpoints[-1]
            lines.append(f"newest     step {format_count(newest.step)}" + ("" if newest.epoch is None else f", epoch {newest.epoch}"))
        if self.arrival is not None and self.arrival.line:
            lines.append(f"arrived    {self.arrival.line}")
        for one in self.checkpoints:
            metrics = "".join(f", {name} {value:.6g}" for name, value in sorted(one.metrics.items()))
            lines.append(f"checkpoint @{one.step}: {format_size(one.bytes)}, {_plural(len(one.files), 'file')}{metrics}")
        lines.extend(f"pending    {one.line}" for one in self.pending)
        lines.extend(f"unfinished {one.line}" for one in self.unfinished)
        lines.extend(f"damaged    {problem}" for problem in self.damaged)
        lines.extend(f"traffic    {line}" for line in self._traffic_lines())
        pickles = sorted({file.path for one in self.checkpoints for file in one.files if file.pickle})
        if pickles:
            lines.append(f"pickles    {', '.join(pickles[:8])}{' …' if len(pickles) > 8 else ''} (loading them runs code)")
        return lines

    def _traffic_lines(self) -> Iterator[str]:
        for place, usage in self.traffic.items():
            yield f"{place}: {usage}{price_text(usage, self.price_per_gb)}"
        if len(self.traffic) > 1:
            total = sum(self.traffic.values(), Usage())
            yield f"together, of {_plural(self.trainings, 'training')} that finished: {total}{price_text(total, self.price_per_gb)}"

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values; checkpoints without their files."""
        checkpoints = [{key: value for key, value in one.record.items() if key != "files"} for one in self.checkpoints]
        values = {name: getattr(self, name) for name in ("url", "kind", "created_s", "bytes")}
        values |= {"trainings": self.trainings, "traffic": {place: asdict(usage) for place, usage in self.traffic.items()}}
        if self.price_per_gb is not None:
            values["cost"] = sum(self.traffic.values(), Usage()).cost(self.price_per_gb)
        values |= {"unfinished": [asdict(one) for one in self.unfinished], "pending": [asdict(one) for one in self.pending]}
        values |= {"arrival": asdict(self.arrival) if self.arrival is not None else None}
        return {**values, "damaged": list(self.damaged), "checkpoints": checkpoints}


def info(
    where: Where,
    *,
    peek: int = 0,
    price_per_gb: float | None = None,
    urls: bool = False,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
    clock: Callable[[], float] = time.time,
) -> DatasetInfo | RunInfo | CheckpointInfo:
    """What a data set, a run, or one checkpoint of a run (``RUN@1200``, ``RUN@latest``, ``RUN@best``) holds.

    ``peek`` samples of a data set are read as well. ``price_per_gb`` is what a gigabyte costs that leaves the store: with it, reading the
    data set and what the run's trainings received have a price. ``urls`` asks for those of a data set's shards (``UsageError`` for anything
    else). Raises ``ManifestError`` when neither lies there.

    Example: ``stagekit.info("s3://bucket/digits").samples``.
    """
    if isinstance(where, str):
        run_url, selector = parse_reference(where)
        if run_url != where:
            if urls:
                raise _no_shards(where)
            opened = open_store(run_url, store, on_event=on_event)
            return _checkpoint_info(run_url, checkpoint_at(opened, selector))
    opened = open_store(where, store, on_event=on_event)
    kind = kind_of(opened)
    if kind == "dataset":
        return replace(_dataset_info(opened, where, peek, urls, store), price_per_gb=price_per_gb)
    if kind == "run":
        if urls:
            raise _no_shards(str(opened.location))
        return _run_info(opened, price_per_gb, clock())
    raise nothing(opened, "looking at")


def _no_shards(url: str) -> UsageError:
    return UsageError(f"urls: {url} is no data set, and only those have shards; look at it with `stagekit ls`")


def _dataset_info(opened: Store, where: Where, peek: int, urls: bool, config: StoreConfig | None) -> DatasetInfo:
    url = str(opened.location)
    manifest = Manifest.from_bytes(bytes(opened.get(MANIFEST)), source=f"{url}/{MANIFEST}")
    fields = tuple(FieldInfo(name, *totals) for name, totals in sorted(manifest.fields.items()))
    samples: list[Mapping[str, str]] = []
    if peek:
        from .dataset import Dataset

        samples = [_preview(sample) for sample in islice(Dataset(where, store=config), peek)]
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
    checkpoints = tuple(reversed(found.checkpoints))
    return RunInfo(
        url,
        created_s,
        tuple(_checkpoint_info(url, checkpoint) for checkpoint in checkpoints),
        stored_bytes(checkpoints),
        tuple(AttemptInfo(name.step, name.generation, _delivered(opened, name)) for name in reversed(found.uncommitted)),
        tuple(str(error) for _, error in reversed(found.damaged)),
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
    texts = (info.key.rpartition("/rank-")[2].removesuffix(".json") for info in store.list(f"{name.folder}parts/"))
    return tuple(sorted(int(text) for text in texts if text.isascii() and text.isdecimal()))


def _pending(url: str) -> Iterator[PendingInfo]:
    """What this machine has pinned for the run and not sent."""
    spools = {spool.default_dir(), *(path for known in known_runs() if known.url == url for path in known.spools)}
    for directory in sorted(spools):
        for entry in spool.pending(directory):
            if entry.run == url and entry.dropped is None:
                yield PendingInfo(entry.step, entry.rank, entry.world_size, entry.size_bytes, spool.is_alive(entry), entry.error)


def _checkpoint_info(run_url: str, checkpoint: Checkpoint) -> CheckpointInfo:
    files = tuple(
        FileInfo(record.path, record.bytes, record.sha256, record.object is not None, record.path.lower().endswith(_PICKLES))
        for record in sorted(checkpoint.files, key=lambda record: record.path)
    )
    return CheckpointInfo(
        f"{run_url}@{checkpoint.step}",
        str(checkpoint.name),
        checkpoint.step,
        checkpoint.epoch,
        dict(checkpoint.metrics),
        dict(checkpoint.manifest.identity),
        checkpoint.manifest.saved_s,
        checkpoint.size_bytes,
        files,
    )


def _plural(number: int, noun: str) -> str:
    return f"{format_count(number)} {noun}{'' if number == 1 else 's'}"
