"""What a run's bucket really holds: the rows about the run itself, and the contents that are safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..errors import (
    BucketNotFound,
    ClockSkew,
    DamagedCheckpoint,
    Denied,
    ManifestError,
    NotFound,
    StagekitError,
    StoreError,
    Throttled,
    Unreachable,
    WrongCredentials,
)
from ..parallel import each
from ..processes import Process
from ..progress import Progress, Subscriber, ignore
from ..publishing.destination import stored_sha256
from ..runs import catalog, lease
from ..runs.layout import CHECKPOINTS, RUN_JSON, Checkpoint, CheckpointName, FileRecord, PartRecord, SupersededRecord
from ..store.base import ObjectInfo, Store, uploads_if_told
from ..store.extras import clock_skew_s, expiry_rules
from ..units import format_count, format_duration
from ..wrapping.logs import LOGS, manifests
from .expiry import SOON_S, first_expiry
from .findings import Finding

Content = tuple[int, str]
"""Size and sha-256: what makes two files the same, whatever they are called."""

_THREADS = 16
_HEADS = 500
_RECENT_S = 300.0
_SKEW_S = 60.0


@dataclass(slots=True)
class RunState:
    """What one run's bucket holds now. ``held`` is safe there; ``dropped`` was given up by policy, so its local copies are no loss.

    ``is_empty``: it holds no checkpoint. ``has_logs``: it holds files that were sent from watched directories.
    """

    url: str
    seen: bool = False
    is_empty: bool = False
    has_logs: bool = False
    newest: Checkpoint | None = None
    held: dict[Content, int] = field(default_factory=dict)
    dropped: set[Content] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)


def look_at_run(store: Store, clock: Callable[[], float], *, deep: bool = False, on_event: Subscriber = ignore) -> RunState:
    """Everything about one run that the bucket tells. Only reads; with ``deep`` every object of every checkpoint, to its end.

    What cannot be looked at is a finding, never an exception: the first call that fails ends the look, so that a store that is down
    costs one call's patience.
    """
    state = RunState(str(store.location))
    try:
        _look(store, state, clock, deep, on_event)
    except StagekitError as error:
        state.findings.extend(unseen(state.url, error).findings)
    else:
        state.seen = True
    return state


def unseen(url: str, error: StagekitError) -> RunState:
    """A run that could not be looked at, because of ``error``."""
    return RunState(url, findings=[Finding("CANNOT TELL", "bucket", f"the run cannot be looked at: {error}", url, fix=_remedy(error, url))])


def mute(url: str, error: StagekitError) -> Finding:
    """A run that can be looked at and takes no writes, because of ``error``."""
    what = f"the store takes no writes for this run, so what waits here for it is not sent: {error}"
    return Finding("CANNOT TELL", "bucket", what, url, fix="see what the store's server says, then: stagekit teardown")


def _look(store: Store, state: RunState, clock: Callable[[], float], deep: bool, on_event: Subscriber) -> None:
    names = sorted(catalog.attempts(store), reverse=True)
    if not names and not _exists(store, RUN_JSON):
        what = "there is no run at this URL, so nothing of it is in the bucket"
        state.findings.append(Finding("CANNOT TELL", "run", what, state.url, fix=_check_url(state.url)))
        return
    listed = {info.key: info for info in store.list(CHECKPOINTS)}
    found = list(zip(names, each(lambda name: _read(store, name), names, threads=_THREADS), strict=True))
    committed = [checkpoint for _, checkpoint in found if isinstance(checkpoint, Checkpoint)]
    newest = committed[0] if committed else None
    for name, problem in found:
        if isinstance(problem, ManifestError | DamagedCheckpoint):
            is_newest = newest is None or name > newest.name
            state.findings.append(
                Finding(
                    "NO" if is_newest else "note",
                    "damaged",
                    f"the manifest of step {name.step} is damaged: {problem}",
                    f"{state.url}@{name.step}",
                    fix=f"stagekit verify {state.url}",
                )
            )
    budget = _HEADS
    for checkpoint in committed:
        # The listing speaks for what was confirmed when it was committed. Wherever it disagrees, and for the largest files of what was not
        # verified within the last minutes, a HEAD of the object decides: of all files it would take 40 s for 10,000 at 250 requests/s.
        manifest = listed.get(checkpoint.name.manifest_key)
        written_s = manifest.modified_s if manifest is not None else None
        is_recent = written_s is not None and 0 <= clock() - written_s <= _RECENT_S
        largest = sorted(checkpoint.files, key=lambda record: record.bytes, reverse=True)
        # One of the newest in any case: it shows that these keys may read what they wrote.
        asked = {record.path for record in largest[: min(budget, 1) if is_recent and checkpoint is newest else 0 if is_recent else budget]}
        budget -= len(asked)
        doubtful = [one for one in checkpoint.files if one.path in asked or not _agrees(listed.get(one.key(checkpoint.name)), one.bytes)]
        keys = [record.key(checkpoint.name) for record in doubtful]
        sizes = each(lambda key: _size(store, key), keys, threads=_THREADS)
        missing = {record.path for record, size in zip(doubtful, sizes, strict=True) if size != record.bytes}
        whole = [record for record in checkpoint.files if record.path not in missing]
        damaged = _damaged(store, checkpoint, whole, on_event) if deep else set()
        for record in whole:
            if record.path not in damaged:
                state.held.setdefault((record.bytes, record.sha256), checkpoint.step)
        if missing or damaged:
            state.findings.append(_incomplete(state.url, checkpoint, missing, damaged, is_newest=checkpoint is newest))
        elif state.newest is None:
            state.newest = checkpoint
    if not committed:
        state.findings.append(Finding("note", "run", "the run has no checkpoint yet", state.url))
    _superseded(store, state, listed)
    state.has_logs = _logs(store, state)
    state.is_empty = not committed
    _open_uploads(store, state, clock())
    _lease(store, state, clock())
    if newest is not None:
        keys_of_newest = {newest.name.manifest_key, *(record.key(newest.name) for record in newest.files)}
        _expiry(store, state, [info for key, info in listed.items() if key in keys_of_newest], clock())
    _clock(store, state, clock)


def _agrees(info: ObjectInfo | None, size: int) -> bool:
    return info is not None and info.size == size


def _damaged(store: Store, checkpoint: Checkpoint, records: Sequence[FileRecord], on_event: Subscriber) -> set[str]:
    """Paths whose objects are not, byte for byte, what was saved."""
    found: set[str] = set()
    total, done = sum(record.bytes for record in records), 0
    digests = each(lambda record: stored_sha256(store, record.key(checkpoint.name)), records, threads=4)
    for record, sha256 in zip(records, digests, strict=True):
        done += record.bytes
        on_event(Progress(f"reading step {checkpoint.step}", done, total, finished=record is records[-1]))
        if sha256 != record.sha256:
            found.add(record.path)
    return found


def _read(store: Store, name: CheckpointName) -> Checkpoint | ManifestError | DamagedCheckpoint | None:
    try:
        return catalog.read_committed(store, name)
    except NotFound:
        return None  # never committed: on its way (the spool tells), or its writer died
    except (ManifestError, DamagedCheckpoint) as error:
        return error


def _size(store: Store, key: str) -> int | None:
    try:
        return store.head(key).size
    except NotFound:
        return None


def _exists(store: Store, key: str) -> bool:
    return _size(store, key) is not None


def _incomplete(url: str, checkpoint: Checkpoint, missing: set[str], damaged: set[str], *, is_newest: bool) -> Finding:
    words = []
    for paths, what in ((missing, "missing or of another size"), (damaged, "other bytes than were saved")):
        if paths:
            more = f" and {format_count(len(paths) - 1)} more" if len(paths) > 1 else ""
            words.append(f"{min(paths)}{more} {what}")
    return Finding(
        "NO" if is_newest else "note",
        "damaged",
        f"step {checkpoint.step} is not whole in the bucket: {'; '.join(words)}",
        f"{url}@{checkpoint.step}",
        sum(record.bytes for record in checkpoint.files if record.path in missing | damaged),
        fix=f"stagekit verify {url}@{checkpoint.step}" + (" --deep" if damaged else ""),
    )


def _superseded(store: Store, state: RunState, listed: Iterable[str]) -> None:
    """What policy dropped: the files that rank 0 names, and those that the other ranks had delivered for the same step."""
    names = catalog.superseded(store)
    # By the folder's name: a long run has thousands of these, and tens of thousands of keys.
    of_keys = ((key, CheckpointName.parse(key.removeprefix(CHECKPOINTS).partition("/")[0])) for key in listed)
    parts = [key for key, name in of_keys if name in names and name is not None and key.startswith(name.parts)]

    def of_rank_0(name: CheckpointName) -> list[Content]:
        record = SupersededRecord.from_bytes(bytes(store.get(name.superseded_key)), source=str(store.location / name.superseded_key))
        return [(size, sha256) for _, size, sha256 in record.files]

    def of_another(key: str) -> list[Content]:
        record = PartRecord.from_bytes(bytes(store.get(key)), source=str(store.location / key))
        return [(file.bytes, file.sha256) for file in record.files]

    def read(ask: Callable[[], list[Content]]) -> list[Content]:
        try:
            return ask()
        except (NotFound, ManifestError):
            return []  # a record that says nothing excuses nothing

    asked = [*(partial(of_rank_0, name) for name in sorted(names)), *(partial(of_another, key) for key in parts)]
    for found in each(read, asked, threads=_THREADS):
        state.dropped.update(found)


def _logs(store: Store, state: RunState) -> bool:
    """What ``stagekit run`` sent besides checkpoints is safe, too, where every piece of it is there with its size. Whether some of it
    is from a watched directory, and not only what a command printed."""
    from_watched = False
    listed = {info.key: info.size for info in store.list(LOGS)}
    for _, found in manifests(store):
        for file in found:
            from_watched |= "/" in file.path
            if all(listed.get(key) == size for key, size in file.objects):
                state.held.setdefault((file.bytes, file.sha256), 0)
    return from_watched


def _open_uploads(store: Store, state: RunState, now_s: float) -> None:
    """Uploads that nobody finished cost money and hold nothing that a reader could use: notes."""
    uploads = uploads_if_told(store, CHECKPOINTS)
    if uploads is None:
        state.findings.append(Finding("note", "multipart", "these credentials may not list unfinished uploads", state.url))
    elif uploads:
        started = [upload.started_s for upload in uploads if upload.started_s is not None]
        what = f"{format_count(len(uploads))} unfinished multipart {'upload is' if len(uploads) == 1 else 'uploads are'} billed"
        age_s = now_s - min(started) if started else None
        state.findings.append(Finding("note", "multipart", what, state.url, age_s=age_s, fix=f"stagekit prune {state.url}"))


def _lease(store: Store, state: RunState, now_s: float) -> None:
    owners = lease.look(store)
    if owners.newest is None or owners.closed:
        return
    held = lease.read_lease(store, *owners.newest)
    here = Process.current()
    if held.process == here or held.process.is_dead():
        return
    age_s = now_s - held.time_s
    if held.process.can_be_asked(seen_from=here):
        what, fix = f"{held.process} is training and writes to this run", f"wait until it ends, or stop it: kill {held.process.pid}"
        state.findings.append(Finding("NO", "writer", what, state.url, age_s=age_s, fix=fix))
    elif here.boot_id and held.process.boot_id == here.boot_id:
        what = f"{held.process} wrote to this run last, in another container of this machine, and whether it still does cannot be seen"
        fix = "look in that container, or end it; a training that ends by itself says so in the bucket"
        state.findings.append(Finding("CANNOT TELL", "writer", what, state.url, age_s=age_s, fix=fix))
    else:
        state.findings.append(Finding("note", "writer", f"the run belongs to {held.process} now, which is another machine", state.url))


def _expiry(store: Store, state: RunState, objects: Sequence[ObjectInfo], now_s: float) -> None:
    """A bucket that removes the newest checkpoint by itself. Not being allowed to ask is a note; a store without such rules has none."""
    try:
        rules = expiry_rules(store)
    except Denied:
        state.findings.append(Finding("note", "expiry", "these credentials may not read the bucket's lifecycle rules", state.url))
        return
    except StoreError as error:
        if error.transient:
            raise
        return
    first = first_expiry(objects, f"{store.location.path}/" if store.location.path else "", rules)
    if first is None:
        return
    left_s = first.at_s - now_s
    when = f"in {format_duration(left_s)}" if left_s > 0 else "now"
    what = f"the bucket's lifecycle rule {first.rule.name or first.rule.prefix!r} removes step {_step_of(state)} {when}"
    fix = f"look at it: aws s3api get-bucket-lifecycle-configuration --bucket {store.location.bucket}; lift it, or copy the checkpoint away"
    state.findings.append(Finding("NO" if left_s <= SOON_S else "note", "expiry", what, state.url, fix=fix))


def _step_of(state: RunState) -> str:
    return str(state.newest.step) if state.newest is not None else "the newest"


def _clock(store: Store, state: RunState, clock: Callable[[], float]) -> None:
    skew_s = clock_skew_s(store, clock=clock)
    if skew_s is not None and abs(skew_s) >= _SKEW_S:
        direction = "behind" if skew_s > 0 else "ahead of"
        what = f"this machine's clock is {format_duration(abs(skew_s))} {direction} the store's, and ages are off by that"
        state.findings.append(Finding("note", "clock", what, state.url, fix="timedatectl set-ntp true"))


def _remedy(error: StagekitError, url: str) -> str:
    if isinstance(error, ClockSkew):
        return f"set this machine's clock: timedatectl set-ntp true, then: stagekit ls {url}"
    if isinstance(error, WrongCredentials):
        return f"give this shell the keys of the run's store, then: stagekit ls {url}"
    if isinstance(error, Denied):
        return f"use credentials that may list and read the run, then: stagekit ls {url}"
    if isinstance(error, Unreachable | Throttled):
        return f"try again when the store answers: stagekit ls {url}"
    if isinstance(error, BucketNotFound):
        return _check_url(url)
    return f"stagekit ls {url}"


def _check_url(url: str) -> str:
    parent = url.rpartition("/")[0] if url.count("/") > 3 else url
    return f"check the URL: stagekit ls {parent}; if the run was removed on purpose, name those that count: stagekit teardown --run RUN"
