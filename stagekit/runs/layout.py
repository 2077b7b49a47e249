"""What a run looks like in the bucket: its keys, its checkpoint manifest, and references such as ``s3://bucket/run@1200``.

::

    run.json                                                    created once
    owners/000004-1a2b3c4d.json                                 who writes, append-only (``runs.lease``)
    checkpoints/000000001200-000004-000007-1a2b3c4d/files/…     the trainer's files under their own names
    checkpoints/000000001200-000004-000007-1a2b3c4d/parts/…     what another rank than 0 has delivered
    checkpoints/000000001200-000004-000007-1a2b3c4d/manifest.json   the commit, written last
    commits/000004-1a2b3c4d/000001                              what that owner committed, for readers whose listing lags (``runs.commits``)
    superseded/000000001100-000004-000006-1a2b3c4d.json         a step that policy dropped, so that its local copies are no loss

A checkpoint's folder is step, generation, save counter and owner. Two writers never share one, whatever the store's listing says.
Newest means highest (generation, step, counter); no clock is asked.

Everything here is a value: nothing touches a store.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from ..errors import ManifestError, UsageError

RUN_JSON = "run.json"
OWNERS = "owners/"
CHECKPOINTS = "checkpoints/"
COMMITS = "commits/"
SUPERSEDED = "superseded/"
BESIDE = "beside"
"""In an identity: the save was left by a machine whose run had gone on without it, and was sent later; it is none of the run's line."""
SAVED_IN = "saved_in"
"""In a checkpoint's identity, where several directories save into one run: the name of the one that this was in."""
MANIFEST = "manifest.json"

Metrics = Mapping[str, float]
_NAME = re.compile(r"([0-9]{12})-([0-9]{6})-([0-9]{6})-([0-9a-f]{8})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PATH_BYTES = 900  # the folder's own key takes up to 60 of S3's 1,024 bytes


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """One attempt at saving one step. Values sort from oldest to newest: by generation, then step, then save counter."""

    generation: int
    step: int
    counter: int
    owner: str

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """The name a folder stands for, or ``None`` when it is no checkpoint's folder."""
        match = _NAME.fullmatch(text.rstrip("/"))
        return cls(int(match[2]), int(match[1]), int(match[3]), match[4]) if match else None

    def __str__(self) -> str:
        return f"{self.step:012d}-{self.generation:06d}-{self.counter:06d}-{self.owner}"

    @property
    def folder(self) -> str:
        """The prefix of everything of this attempt, ending in a slash."""
        return f"{CHECKPOINTS}{self}/"

    @property
    def manifest_key(self) -> str:
        """The key of the commit."""
        return self.folder + MANIFEST

    @property
    def superseded_key(self) -> str:
        """The key of the record that policy dropped this step."""
        return f"{SUPERSEDED}{self}.json"

    def file_key(self, path: str) -> str:
        """The key of one of the trainer's files."""
        return f"{self.folder}files/{path}"

    @property
    def parts(self) -> str:
        """Where the ranks other than 0 say what they have delivered."""
        return f"{self.folder}parts/"

    def part_key(self, rank: int) -> str:
        """The key of what ``rank`` (not 0) has delivered."""
        return f"{self.parts}rank-{rank:05d}.json"


Selector = int | CheckpointName | Literal["latest", "best"]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint. ``object`` is set when the bytes lie in an earlier checkpoint of the same run.

    ``sample`` is a digest of a few pieces of a large file: when it differs, the whole file differs, and hashing it to find out is spared.
    """

    path: str
    bytes: int
    sha256: str
    object: str | None = None
    sample: str | None = None

    def key(self, name: CheckpointName) -> str:
        """Where the bytes are, for a checkpoint called ``name``."""
        return self.object or name.file_key(self.path)

    def to_json(self) -> dict[str, Any]:
        """Plain values; absent ones are left out."""
        values = {"path": self.path, "bytes": self.bytes, "sha256": self.sha256, "object": self.object, "sample": self.sample}
        return {key: value for key, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, value: Any, source: str) -> FileRecord:
        """Strict: raises ``ManifestError`` naming ``source`` for anything that is not a file record."""
        record = _object(value, source, "a file")
        known = {"path", "bytes", "sha256", "object", "sample"}
        if set(record) - known:
            raise ManifestError(f"{source}: a file record has unknown entries {sorted(set(record) - known)}; a newer Stagekit wrote it")
        path, size, sha256 = record.get("path"), record.get("bytes"), record.get("sha256")
        if not isinstance(path, str):
            raise ManifestError(f"{source}: a file record has no path")
        if not _is_count(size):
            raise ManifestError(f"{source}: {path!r} has no size")
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise ManifestError(f"{source}: {path!r} has no sha256")
        place, sample = record.get("object"), record.get("sample")
        if place is not None and not _is_checkpoint_file(place):
            raise ManifestError(f"{source}: {path!r} refers to {place!r}, which is no file of a checkpoint of this run")
        if sample is not None and not isinstance(sample, str):
            raise ManifestError(f"{source}: {path!r} has a sample that is no text")
        return cls(path, size, sha256, place, sample)


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The commit of one checkpoint: what belongs to it, and what it was made with.

    ``identity`` holds what must fit at a resume (dataset digest, base model, world size, versions, code commit). ``best`` says which
    metric decides what ``@best`` means, as ``(name, "min" | "max")``. ``saved_s`` is this writer's clock, for people only.
    """

    name: CheckpointName
    files: tuple[FileRecord, ...]
    epoch: int | None = None
    metrics: Metrics = field(default_factory=dict)
    identity: Mapping[str, str | int] = field(default_factory=dict)
    best: tuple[str, str] | None = None
    saved_s: float | None = None

    def __post_init__(self) -> None:
        check_paths(record.path for record in self.files)

    @property
    def size_bytes(self) -> int:
        """The sum of all files."""
        return sum(record.bytes for record in self.files)

    def to_bytes(self) -> bytes:
        """JSON that one can read, with a checksum over itself."""
        values: dict[str, Any] = {
            "format": "stagekit-checkpoint",
            "version": 1,
            "name": str(self.name),
            "step": self.name.step,
            "epoch": self.epoch,
            "metrics": metrics_to_json(self.metrics),
            "identity": dict(self.identity),
            "files": [record.to_json() for record in self.files],
        }
        if self.best is not None:
            values["best"] = list(self.best)
        if self.saved_s is not None:
            values["saved_s"] = round(self.saved_s, 3)
        return seal(values)

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> CheckpointManifest:
        """Parse strictly: version, checksum, types, and paths that could leave the target directory.

        Raises ``ManifestError`` naming ``source`` and what is wrong.
        """
        values = unseal(data, "stagekit-checkpoint", 1, source=source)
        name = CheckpointName.parse(str(values.get("name")))
        if name is None or values.get("step") != name.step:
            raise ManifestError(f"{source}: {values.get('name')!r} is no checkpoint name for step {values.get('step')!r}")
        epoch, saved_s, best = values.get("epoch"), values.get("saved_s"), values.get("best")
        if epoch is not None and not _is_count(epoch):
            raise ManifestError(f"{source}: epoch {epoch!r} is no number")
        if best is not None and not (isinstance(best, list) and len(best) == 2 and isinstance(best[0], str) and best[1] in ("min", "max")):
            raise ManifestError(f"{source}: best {best!r} is no metric with min or max")
        files = values.get("files")
        if not isinstance(files, list):
            raise ManifestError(f"{source}: it lists no files")
        identity = _object(values.get("identity"), source, "identity")
        return cls(
            name=name,
            files=tuple(FileRecord.from_json(record, source) for record in files),
            epoch=epoch,
            metrics=metrics_from_json(values.get("metrics"), source),
            identity={str(key): value for key, value in identity.items() if isinstance(value, str | int)},
            best=(best[0], best[1]) if best is not None else None,
            saved_s=float(saved_s) if isinstance(saved_s, int | float) else None,
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint of a run, as its manifest tells it."""

    manifest: CheckpointManifest
    url: str

    @property
    def name(self) -> CheckpointName:
        """Step, generation, save counter and owner."""
        return self.manifest.name

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.manifest.name.step

    @property
    def epoch(self) -> int | None:
        """Epochs finished when it was saved, when the trainer told."""
        return self.manifest.epoch

    @property
    def metrics(self) -> Metrics:
        """What the trainer measured at this step."""
        return self.manifest.metrics

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Its files, sorted by path."""
        return self.manifest.files

    @property
    def size_bytes(self) -> int:
        """The sum of all files."""
        return self.manifest.size_bytes


@dataclass(frozen=True, slots=True)
class SupersededRecord:
    """A step that policy dropped, before or after it was sent. ``files`` are ``(path, bytes, sha256)``."""

    step: int
    reason: str
    files: tuple[tuple[str, int, str], ...]

    def to_bytes(self) -> bytes:
        """JSON with a checksum over itself."""
        files = [{"path": path, "bytes": size, "sha256": sha256} for path, size, sha256 in self.files]
        return seal({"format": "stagekit-superseded", "version": 1, "step": self.step, "reason": self.reason, "files": files})

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> SupersededRecord:
        """Parse strictly. Raises ``ManifestError`` naming ``source``."""
        values = unseal(data, "stagekit-superseded", 1, source=source)
        step, reason, files = values.get("step"), values.get("reason"), values.get("files")
        if not _is_count(step) or not isinstance(reason, str) or not isinstance(files, list):
            raise ManifestError(f"{source}: it does not say which step was dropped, and why")
        records = [FileRecord.from_json(value, source) for value in files]
        return cls(step, reason, tuple((record.path, record.bytes, record.sha256) for record in records))


@dataclass(frozen=True, slots=True)
class PartRecord:
    """What one rank other than 0 has delivered for one attempt: sent and verified, waiting for rank 0's commit."""

    rank: int
    files: tuple[FileRecord, ...]

    def to_bytes(self) -> bytes:
        """JSON with a checksum over itself."""
        return seal({"format": "stagekit-part", "version": 1, "rank": self.rank, "files": [record.to_json() for record in self.files]})

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> PartRecord:
        """Parse strictly. Raises ``ManifestError`` naming ``source``."""
        values = unseal(data, "stagekit-part", 1, source=source)
        rank, files = values.get("rank"), values.get("files")
        if not _is_count(rank) or not isinstance(files, list):
            raise ManifestError(f"{source}: it does not say which rank delivered what")
        return cls(rank, tuple(FileRecord.from_json(value, source) for value in files))


@dataclass(frozen=True, slots=True)
class RunRecord:
    """``run.json``: that this prefix is a run, since when, and by which program."""

    created_s: float
    stagekit: str

    def to_bytes(self) -> bytes:
        """JSON with a checksum over itself."""
        return seal({"format": "stagekit-run", "version": 1, "created_s": round(self.created_s, 3), "stagekit": self.stagekit})

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> RunRecord:
        """Parse strictly. Raises ``ManifestError`` naming ``source``."""
        values = unseal(data, "stagekit-run", 1, source=source)
        created_s, program = values.get("created_s"), values.get("stagekit")
        if not isinstance(created_s, int | float) or not isinstance(program, str):
            raise ManifestError(f"{source}: it does not say when and by what the run was created")
        return cls(float(created_s), program)


def parse_reference(text: str) -> tuple[str, Selector]:
    """The run and the checkpoint meant by ``RUN``, ``RUN@1200``, ``RUN@latest`` or ``RUN@best``. Without ``@`` the latest is meant.

    After a takeover, several checkpoints may be of one step: the newest is meant then, and ``RUN@NAME``, with the name of its folder below
    ``checkpoints/``, is any of them.

    An ``@`` that is followed by anything else belongs to the name, and so does the one of ``s3://PROFILE@bucket``.
    """
    scheme, separator, rest = text.partition("://")
    head, slash, last = (rest if separator else text).rpartition("/")
    name, at, selector = last.rpartition("@")
    if not at or not name or (separator and not slash):
        return text, "latest"
    run = f"{scheme}{separator}{head}{slash}{name}" if separator else f"{head}{slash}{name}"
    if selector == "latest":
        return run, "latest"
    if selector == "best":
        return run, "best"
    if selector.isascii() and selector.isdecimal():
        return run, check_step(int(selector))
    named = CheckpointName.parse(selector)
    return (run, named) if named is not None else (text, "latest")


def address_of(name: CheckpointName, asked: Selector) -> CheckpointName | int:
    """What stands behind ``RUN@`` for the checkpoint ``name`` that was found as ``asked``: its step, unless it was called by its name."""
    return name if isinstance(asked, CheckpointName) else name.step


def check_step(step: int) -> int:
    """``step`` itself when it is a number from 0 to 12 digits. Raises ``UsageError``."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12:
        raise UsageError(f"step {step!r} is no step; give a whole number of at most 12 digits, such as the optimizer steps taken")
    return step


def check_paths(paths: Iterable[str]) -> None:
    """Nothing when files of these names can be stored, and written below a directory without leaving it or hitting each other.

    Raises ``ManifestError`` naming the path: absolute, ``..``, NUL, no valid Unicode, too long, twice, equal to another but for upper and
    lower case, or at once a file and a folder.
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for path in paths:
        _check_path(path)
        folded = path.casefold()
        if folded in seen:
            same = "is listed twice" if seen[folded] == path else f"and {seen[folded]!r} differ in upper and lower case only"
            raise ManifestError(f"the file {path!r} {same}")
        seen[folded] = path
        parts = folded.split("/")
        folders.update({"/".join(parts[:end]): path for end in range(1, len(parts))})
    for folded, path in seen.items():
        if folded in folders:
            raise ManifestError(f"{path!r} is a file and also the folder of {folders[folded]!r}")


def _check_path(path: str) -> None:
    try:
        length = len(path.encode())
    except UnicodeEncodeError:
        raise ManifestError(f"the file name {path!r} is not valid Unicode") from None
    parts = path.split("/")
    if path.startswith("/"):
        raise ManifestError(f"the file name {path!r} is absolute")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ManifestError(f"the file name {path!r} has a NUL or an empty, '.' or '..' component")
    if length > _PATH_BYTES or any(len(part.encode()) > 255 for part in parts):
        raise ManifestError(f"the file name {path[:60]!r}… is too long ({length} bytes)")


def metrics_to_json(metrics: Metrics) -> dict[str, float | str]:
    """Numbers as they are; NaN and infinities, which JSON lacks, as text."""
    return {name: value if math.isfinite(value) else str(value) for name, value in sorted(metrics.items())}


def metrics_from_json(value: Any, source: str) -> dict[str, float]:
    """The inverse of ``metrics_to_json``. Raises ``ManifestError``."""
    result = {}
    for name, number in _object(value, source, "metrics").items():
        if isinstance(number, bool) or not (isinstance(number, int | float) or number in ("nan", "inf", "-inf")):
            raise ManifestError(f"{source}: metric {name!r} is {number!r}, which is no number")
        result[name] = float(number)
    return result


def seal(values: Mapping[str, Any]) -> bytes:
    """JSON for people and programs: sorted as given, with a ``checksum`` over everything else. Names that are no text are escaped in it."""
    return (
        json.dumps({**values, "checksum": _checksum(values)}, ensure_ascii=False, indent=1, allow_nan=False).encode(
            errors="backslashreplace"
        )
        + b"\n"
    )


def unseal(data: bytes, format: str, version: int, *, source: str) -> dict[str, Any]:
    """What ``seal`` was given. Raises ``ManifestError`` when it is damaged, of another format, or of a newer version."""
    try:
        values = json.loads(bytes(data).decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{source} is damaged: it is no JSON ({error})") from None
    record = _object(values, source, "it")
    if record.get("format") != format:
        raise ManifestError(f"{source} is no {format} but {record.get('format')!r}")
    if record.get("version") != version:
        raise ManifestError(f"{source} has version {record.get('version')!r}; this Stagekit reads version {version}. Install a newer one")
    checksum = record.pop("checksum", None)
    if checksum != _checksum(record):
        raise ManifestError(f"{source} is damaged: its checksum does not fit its content")
    return record


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _checksum(values: Mapping[str, Any]) -> str:
    canonical = json.dumps(values, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _object(value: Any, source: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ManifestError(f"{source}: {what} is no JSON object")
    return value


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_checkpoint_file(key: Any) -> bool:
    if not isinstance(key, str) or not key.startswith(CHECKPOINTS):
        return False
    folder, _, rest = key.removeprefix(CHECKPOINTS).partition("/")
    if CheckpointName.parse(folder) is None or not rest.startswith("files/"):
        return False
    try:
        _check_path(rest.removeprefix("files/"))
    except ManifestError:
        return False
    return True
