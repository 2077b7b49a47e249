"""Logs in the bucket while they grow: what the command prints, and the files under the watched directories that are in no checkpoint.

::

    logs/000002-1a2b3c4d/stdout.log                  the file as it was first sent
    logs/000002-1a2b3c4d/stdout.log.0002             what was added to it since, and so on: put together they are the file
    logs/000002-1a2b3c4d/out/runs/events.out.…       a file below the watched directory ``out``
    logs/000002-1a2b3c4d/manifest-000007.json        which objects make up which file, with sizes and sha-256; the highest number counts

No object is ever overwritten: somebody may be reading it. A file that was rewritten instead of added to is sent again under new names.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import ManifestError, NotFound, StagekitError, StoreError, UsageError
from ..parallel import each
from ..progress import Message, Progress, Subscriber
from ..runs.layout import seal, unseal
from ..saves.find import Stat, stat_of
from ..store.base import Store
from ..transfer.put import put_file, put_object

LOGS = "logs/"
EVERY_S = 60.0
AT_ONCE = 64 * 2**20
"""A file up to this size is sent while it may still be written; a larger one once it is quiet."""

_PIECE = 16 * 2**20
_SMALL, _TOGETHER = 2**20, 16
_MANY = 100
_MANIFEST = re.compile(r"manifest-([0-9]{6})\.json")


@dataclass(frozen=True, slots=True)
class LogFile:
    """One file as the bucket has it: ``objects`` with their sizes, in order."""

    path: str
    bytes: int
    sha256: str
    objects: tuple[tuple[str, int], ...]


def manifests(store: Store) -> Iterator[tuple[str, list[LogFile]]]:
    """Each attempt's logs, by its newest manifest that can be read. Raises the store's errors."""
    newest: dict[str, int] = {}
    for info in store.list(LOGS):
        attempt, _, name = info.key.removeprefix(LOGS).partition("/")
        if match := _MANIFEST.fullmatch(name):
            newest[attempt] = max(newest.get(attempt, 0), int(match[1]))
    for attempt, number in sorted(newest.items()):
        try:
            yield attempt, _read(store, attempt, number)
        except (NotFound, ManifestError):
            continue  # a manifest that says nothing excuses nothing


def _read(store: Store, attempt: str, number: int) -> list[LogFile]:
    key = _manifest_key(attempt, number)
    values = unseal(bytes(store.get(key)), "stagekit-logs", 1, source=str(store.location / key))
    try:
        return [
            LogFile(one["path"], one["bytes"], one["sha256"], tuple((key, size) for key, size in one["objects"])) for one in values["files"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{store.location / key}: it is no manifest of logs ({error})") from None


def _manifest_key(attempt: str, number: int) -> str:
    return f"{LOGS}{attempt}/manifest-{number:06d}.json"


@dataclass(slots=True)
class _State:
    seen: Stat
    sent: LogFile
    next_s: float
    part: int


@dataclass(slots=True)
class Logs:
    """The logs of one attempt. ``bring`` is for one thread; ``offer`` tells it from any thread which files there are now.

    Sending is repeated every ``EVERY_S`` seconds for a file that grew, less often for a large one, so that a log never takes the network
    away from the checkpoints.
    """

    open_store: Callable[[], Store]
    attempt: str
    on_event: Subscriber
    monotonic: Callable[[], float]
    _files: dict[str, Path] = field(default_factory=dict)
    _states: dict[str, _State] = field(default_factory=dict)
    _number: int = 0
    _begun: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _told: bool = False
    _changed: bool = False
    refused: dict[str, str] = field(default_factory=dict)
    """Files that no store can hold under their names, by their path in the logs, each with a sentence."""

    def offer(self, files: Mapping[str, Path]) -> None:
        """These belong to the logs now: path in the logs to local file. What was offered before and is gone stays in the bucket."""
        with self._lock:
            self._files = dict(files)

    def bring(self, *, last: bool = False) -> bool:
        """Send what has changed and is due; ``last``: everything that is not there yet. False when something could not be sent.

        What may pass is tried again at the next call. It is told once. What is ``refused`` is passed over, and told once as well.
        """
        with self._lock:
            files = dict(self._files)
        whole = True
        failed: StagekitError | OSError | None = None
        try:
            store = self.open_store()
            self._begin(store)
            for path, local, result in self._each(store, files, last=last):
                if isinstance(result, bool):
                    self._changed |= result
                elif isinstance(result, UsageError):
                    self._refuse(path, local, result)
                elif _is_about_a_file(result):
                    whole = False  # it vanished, or cannot be read: teardown looks at what is left
                else:
                    failed = failed or result
            if failed is not None:
                raise failed
            if self._changed:
                self._commit(store)
            if whole:
                self._told = False
        except (StagekitError, OSError) as error:
            if not self._told:
                self._told = True
                self.on_event(Message(f"logs are not in the bucket yet, and are tried again: {error}", "warning"))
            return False
        return whole

    def _each(self, store: Store, files: Mapping[str, Path], *, last: bool) -> Iterator[tuple[str, Path, bool | StagekitError | OSError]]:
        """Whether each file was sent, or what kept it from that. Small ones go together: each costs an answer of the store and little else.

        After an error of the store no other file is begun.
        """
        over = threading.Event()

        def bring(one: tuple[str, Path]) -> bool | StagekitError | OSError:
            try:
                return not over.is_set() and self._bring(store, *one, last=last)
            except (StagekitError, OSError) as error:
                if not (isinstance(error, UsageError) or _is_about_a_file(error)):
                    over.set()
                return error

        sizes = {path: now[1] if (now := stat_of(local)) is not None else 0 for path, local in files.items()}
        ordered = sorted(files.items(), key=lambda one: one[0])
        small = [one for one in ordered if sizes[one[0]] <= _SMALL]
        large = [one for one in ordered if sizes[one[0]] > _SMALL]
        results = chain(each(bring, small, threads=_TOGETHER), map(bring, large))
        total, done = sum(sizes.values()), 0
        for number, ((path, local), result) in enumerate(zip([*small, *large], results, strict=True), 1):
            yield path, local, result
            done += sizes[path]
            if last and len(files) >= _MANY:  # somebody waits
                self.on_event(Progress("sending logs", done, total, finished=number == len(files)))

    def _refuse(self, path: str, local: Path, error: UsageError) -> None:
        if path not in self.refused:
            shown = os.fsencode(local).decode(errors="backslashreplace")
            self.refused[path] = f"{shown} is in no bucket, as {error}; rename it, then: stagekit teardown"
            self.on_event(Message(self.refused[path], "warning"))

    def _begin(self, store: Store) -> None:
        """Go on from what an earlier process sent of the same attempt."""
        if self._begun:
            return
        for info in store.list(f"{LOGS}{self.attempt}/"):
            if match := _MANIFEST.fullmatch(info.key.rpartition("/")[2]):
                self._number = max(self._number, int(match[1]))
        if self._number:
            for sent in _read(store, self.attempt, self._number):
                self._states[sent.path] = _State((0, 0, 0), sent, 0.0, len(sent.objects) + 1)
        self._begun = True

    def _bring(self, store: Store, path: str, local: Path, *, last: bool) -> bool:
        now = stat_of(local)
        state = self._states.get(path)
        if now is None or (state is not None and state.seen == now):
            return False
        size = now[1]
        now_s = self.monotonic()
        if state is not None and now_s < state.next_s and not last:
            return False
        kept = state.sent if state is not None else LogFile(path, 0, hashlib.sha256().hexdigest(), ())
        part = state.part if state is not None else 1
        before, after = _digests(local, kept.bytes, size)
        if after == kept.sha256 and size == kept.bytes:
            sent = kept
        else:
            if before != kept.sha256 or size < kept.bytes:
                kept = LogFile(path, 0, "", ())  # it was rewritten
            sent, part = self._send(store, path, local, kept, size, after, part)
        self._states[path] = _State(now, sent, now_s + max(EVERY_S, size / 1e6), part)
        return state is None or sent != state.sent

    def _send(self, store: Store, path: str, local: Path, kept: LogFile, size: int, sha256: str, part: int) -> tuple[LogFile, int]:
        objects = list(kept.objects)
        if not kept.bytes and size > _PIECE:
            key = self._key(path, part)
            stored = put_file(store, key, local)  # in one object, however large; SourceError when it grows meanwhile
            return LogFile(path, stored.size, stored.sha256, ((key, stored.size),)), part + 1
        with local.open("rb") as file:
            file.seek(kept.bytes)
            left = size - kept.bytes
            while left:
                data = file.read(min(_PIECE, left))
                if len(data) < min(_PIECE, left):
                    raise OSError(f"{local} was cut while it was sent")
                key = self._key(path, part)
                put_object(store, key, data)
                objects.append((key, len(data)))
                part += 1
                left -= len(data)
        return LogFile(path, size, sha256, tuple(objects)), part

    def _key(self, path: str, part: int) -> str:
        return f"{LOGS}{self.attempt}/{path}" + (f".{part:04d}" if part > 1 else "")

    def _commit(self, store: Store) -> None:
        self._number += 1
        files: list[dict[str, Any]] = [
            {"path": sent.path, "bytes": sent.bytes, "sha256": sent.sha256, "objects": [list(one) for one in sent.objects]}
            for sent in sorted((state.sent for state in self._states.values()), key=lambda sent: sent.path)
        ]
        values = {"format": "stagekit-logs", "version": 1, "attempt": self.attempt, "files": files}
        put_object(store, _manifest_key(self.attempt, self._number), seal(values))
        self._changed = False
        if self._number > 1:
            store.delete(_manifest_key(self.attempt, self._number - 1))


def _is_about_a_file(error: Exception) -> bool:
    """Whether one local file cannot be sent, and not that the store fails."""
    return isinstance(error, OSError) and not isinstance(error, StoreError)


def _digests(path: Path, first: int, size: int) -> tuple[str, str]:
    """The sha-256 of the file's first ``first`` bytes, and of its first ``size``."""
    digest, read = hashlib.sha256(), 0
    before = digest.hexdigest()
    with path.open("rb") as file:
        for end in (min(first, size), size):
            while read < end:
                data = file.read(min(2**20, end - read))
                if not data:
                    raise OSError(f"{path} was cut while it was read")
                digest.update(data)
                read += len(data)
            if end == min(first, size):
                before = digest.hexdigest()
    return before, digest.hexdigest()


def is_due(sizes: Iterable[int], *, quiet: bool) -> bool:
    """Whether files of these sizes may be sent now."""
    return quiet or all(size <= AT_ONCE for size in sizes)
