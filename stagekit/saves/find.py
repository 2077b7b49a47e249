"""Finished checkpoints below a directory into which somebody else's trainer writes, found by rule.

=========== ================================================================== ====================================================
kind        a candidate is                                                     finished when
=========== ================================================================== ====================================================
trainer     ``checkpoint-<step>/`` of transformers' ``Trainer``                everything that such a save holds is there and whole;
                                                                               where only other ranks' states lack, when it is quiet
dcp         a directory with ``.metadata`` or ``*.distcp``                     ``.metadata`` is there, and every file it names
accelerate  a directory with ``random_states_<rank>.pkl``                      every file is whole and it is quiet
lightning   ``*.ckpt``, a file or a directory                                  it is quiet and whole
pattern     what the user's pattern names, a file or a directory;              it is quiet, and whole as far as its formats tell
            ``checkpoint-<step>/`` of a program that is no ``Trainer``
=========== ================================================================== ====================================================

*Quiet* means that no file below it was added, changed or removed for some time; the one who looks knows the time. What has no end of its
own (an unknown format) can be told finished by quiet alone.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from . import lightning, trainer
from .dcp import METADATA, missing_dcp
from .whole import is_whole, tells_its_end

Kind = Literal["trainer", "dcp", "accelerate", "lightning", "pattern"]
Stat = tuple[int, int, int]

INCOMPLETE = ".incomplete"
"""What is appended to the name of a save that its trainer did not finish, so that no trainer takes it for a checkpoint."""

ABANDONED = ".abandoned"
"""The same for a save that its run has gone on without."""

_STEP = re.compile(r"(?:step|iter|global_step|checkpoint)[=_-]?0*([0-9]{1,12})(?![0-9])", re.IGNORECASE)
_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")  # also with a number that no step can be, such as a time in nanoseconds
_NUMBER = re.compile(r"(?<![0-9.])0*([0-9]{1,12})(?![0-9.])")
# What nobody else writes. Optimizer, scheduler and random states have these names in other programs, too, and come after such a file.
_TRAINERS = re.compile(r"(trainer_state\.json|training_args\.bin|global_step[0-9]|pytorch_model_fsdp)")
_HAVE_AN_END = (".safetensors", ".json", ".pt", ".pth", ".bin", ".ckpt")
_STRUCTURED = ("trainer", "dcp")
_EFFECTIVE = os.access in os.supports_effective_ids
_RESTLESS = 10
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate below ``root`` as it is now. ``stats`` is inode, size and time of change of each file, by its path below ``path``."""

    root: Path
    path: Path
    kind: Kind
    stats: Mapping[str, Stat]
    unreadable: tuple[str, ...] = ()
    """What below it could not be looked at, each with the reason."""

    @property
    def name(self) -> str:
        """Where it lies below its root, with slashes."""
        return self.path.relative_to(self.root).as_posix()

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file."""
        return {path: size for path, (_, size, _) in self.stats.items()}

    def needs_quiet(self, world_size: int | None = None) -> bool:
        """Whether what is there does not tell by itself that it is finished."""
        if self.kind == "trainer":
            return (world_size is None and "rng_state_0.pth" in self.stats) or not self._is_closed()
        return self.kind not in _STRUCTURED

    def _is_closed(self) -> bool:
        """Whether ``trainer_state.json`` is as new as the rest of what rank 0 writes: a save over an older one begins with the weights."""
        times = {path: time for path, (_, _, time) in self.stats.items()}
        return times.get(trainer.STATE, 0) >= max((time for path, time in times.items() if not path.startswith("rng_state_")), default=0)

    def is_file(self) -> bool:
        """Whether it is a single file."""
        return list(self.stats) == [self.path.name]

    def tells_its_end(self) -> bool:
        """Whether a save that was cut would be noticed. A directory of unknown layout may lack files, however whole the others are."""
        return self.kind in _STRUCTURED or (self.path.is_file() and tells_its_end(self.path))

    @property
    def times_ns(self) -> list[int]:
        """When each file was written last."""
        return [time_ns for _, _, time_ns in self.stats.values()]

    def lacking(self, world_size: int | None = None) -> list[str]:
        """What it lacks to be finished, apart from quiet; nothing when nothing is."""
        if self.unreadable:
            return list(self.unreadable)
        if not self.stats:
            return ["any file"]
        try:
            return self._lacking(world_size)
        except OSError as error:  # it is being rotated away under this look
            return [f"{error.filename or self.name} ({error.strerror})"]

    def _lacking(self, world_size: int | None) -> list[str]:
        if self.kind == "trainer":
            step = trainer.step_of(self.path) or 0
            return trainer.Expected.seen_in(self.path, world_size).missing(self.path, step)
        if self.kind == "dcp":
            return missing_dcp(self.path)
        if self.path.is_file():
            return [] if not self.path.name.endswith(_HAVE_AN_END) or is_whole(self.path) else ["its end"]
        return [path for path in self.stats if path.endswith(_HAVE_AN_END) and not is_whole(self.path / path)]

    def why_not(self) -> str:
        """The sentence about one that is not sent."""
        if self.unreadable:
            return f"{self.path} is not sent and stays local: it holds what cannot be read, {self.unreadable[0]}"
        return f"{self.path} is not finished and stays local: it lacks {', '.join(self.lacking()[:3])}"

    def step(self) -> int | None:
        """The step it was saved at, as its content or its name tells."""
        if self.kind == "trainer":
            return trainer.saved_step(self.path)
        if self.path.is_file() and (step := lightning.told_by(self.path).step) is not None:
            return step
        return step_in(self.name)

    def told(self) -> tuple[int | None, dict[str, float]]:
        """Epochs finished, and metrics."""
        if self.kind == "trainer":
            state = trainer.read_state(self.path)
            return trainer.epochs_of(state), trainer.metrics_of(state)
        if self.path.is_file():
            found = lightning.told_by(self.path)
            return found.epoch, found.metrics
        return None, {}


@dataclass(frozen=True, slots=True)
class Look:
    """What lies below one root: candidates, and the files that belong to none, by their path below the root.

    ``unreadable``: folders and files that could not be looked at, with the reason. ``cut``: where looking ended because the time was
    over; ``None`` when everything was looked at. ``links`` lead to directories elsewhere that are no saves, and were not followed.
    """

    root: Path
    found: tuple[Found, ...]
    others: Mapping[str, Stat]
    unreadable: Mapping[Path, str] = field(default_factory=dict)
    cut: Path | None = None
    links: tuple[Path, ...] = ()


def look(root: Path, patterns: Sequence[str] = (), *, over: Callable[[], bool] = lambda: False) -> Look:
    """Everything below ``root``. ``patterns`` are shell patterns for paths below it, or for names. What vanishes meanwhile is left out.

    A link to a directory elsewhere counts when that is a save, and is not followed otherwise: a data set may lie there. What has a name
    that begins with ``.`` or ends in ``.incomplete`` or ``.abandoned`` is nobody's.
    ``over`` is asked again and again: once it is true, what was seen so far is returned.
    """
    seeing = _Seeing(root, patterns, over)
    try:
        seeing.enter(root, "")
    except _TimeIsOver as reached:
        return Look(root, tuple(seeing.found), seeing.others, seeing.unreadable, reached.path)
    return Look(root, tuple(seeing.found), seeing.others, seeing.unreadable, links=tuple(seeing.links))


class _TimeIsOver(Exception):
    """Looking ends before ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path


@dataclass(slots=True)
class _Seeing:
    """One look below ``root``, as far as it has come."""

    root: Path
    patterns: Sequence[str]
    over: Callable[[], bool]
    found: list[Found] = field(default_factory=list)
    others: dict[str, Stat] = field(default_factory=dict)
    unreadable: dict[Path, str] = field(default_factory=dict)
    links: list[Path] = field(default_factory=list)

    def enter(self, folder: Path, prefix: str) -> None:
        for entry in self._entries(folder):
            path, place = f"{prefix}{entry.name}", Path(entry.path)
            if entry.name.startswith(".") or entry.name.endswith((INCOMPLETE, ABANDONED)):
                continue
            try:
                is_folder = entry.is_dir(follow_symlinks=False)
            except OSError as error:
                self._note(place, error)
                continue
            leads_away = entry.is_symlink() and self._leads_away(place)
            kind = self._kind(place, path, is_folder or leads_away)
            if leads_away:
                if kind is not None:
                    self.found.append(self._candidate(place, kind, True))
                else:
                    self.links.append(place)
            elif kind is not None:
                if not entry.is_symlink():  # what it leads to is a candidate itself
                    self.found.append(self._candidate(place, kind, is_folder))
            elif is_folder:
                self.enter(place, f"{path}/")
            elif (now := self._stat(place)) is not None:
                self.others[path] = now

    def _leads_away(self, link: Path) -> bool:
        """Whether ``link`` leads to a directory that is not below the root, and is not around it."""
        real, root = Path(os.path.realpath(link)), Path(os.path.realpath(self.root))
        return not real.is_relative_to(root) and not root.is_relative_to(real) and real.is_dir()

    def _kind(self, path: Path, relative: str, is_folder: bool) -> Kind | None:
        if is_folder:
            names = {entry.name for entry in self._entries(path)}
            if path in self.unreadable:
                return None
            if METADATA in names or any(name.endswith(".distcp") for name in names):
                return "dcp"
            if any(re.fullmatch(r"random_states_[0-9]+\.pkl", name) for name in names):
                return "accelerate"
            if _CHECKPOINT.fullmatch(path.name):
                return "trainer" if trainer.step_of(path) is not None and any(map(_TRAINERS.match, names)) else "pattern"
        if path.suffix == ".ckpt":
            return "lightning"
        return "pattern" if _matches(relative, self.patterns) else None

    def _candidate(self, path: Path, kind: Kind, is_folder: bool) -> Found:
        before = set(self.unreadable)
        stats = self._stats(path, is_folder)
        below = tuple(f"{place} ({why})" for place, why in self.unreadable.items() if place not in before)
        return Found(self.root, path, kind, stats, below)

    def _stats(self, path: Path, is_folder: bool) -> dict[str, Stat]:
        if not is_folder:
            now = self._stat(path)
            return {} if now is None else {path.name: now}
        result: dict[str, Stat] = {}
        seen: set[str] = set()
        for folder, folders, names in os.walk(path, followlinks=True, onerror=self._note_walking):
            real = os.path.realpath(folder)
            if real in seen:
                folders.clear()  # a link that leads in a circle
                continue
            seen.add(real)
            for name in names:
                file = Path(folder, name)
                if (now := self._stat(file)) is not None:
                    result[file.relative_to(path).as_posix()] = now
        return result

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        if self.over():
            raise _TimeIsOver(folder)
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self._note(folder, error)
            return []

    def _stat(self, path: Path) -> Stat | None:
        if self.over():
            raise _TimeIsOver(path)
        try:
            now = _regular(path.stat())
            if now is not None and not os.access(path, os.R_OK, effective_ids=_EFFECTIVE):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            self._note(path, error)
            return None
        return now

    def _note_walking(self, error: OSError) -> None:
        self._note(Path(error.filename), error)

    def _note(self, path: Path, error: OSError) -> None:
        """Something could not be looked at, unless it is gone by now, or is a link that leads nowhere."""
        if error.errno not in _GONE and not _is_gone(path):
            self.unreadable[path] = error.strerror or str(error)


def set_aside(found: Found, ending: str = INCOMPLETE) -> Path:
    """Rename a save that nobody is to go on from, so that no trainer takes it for a checkpoint. Returns its new place; nothing is lost.

    A directory gets another beginning as well: transformers' rotation deletes whatever begins like one of its checkpoints.
    """
    name = f"aside-{found.path.name}" if found.path.is_dir() else found.path.name
    target, number = found.path.with_name(name + ending), 1
    while target.exists():
        number += 1
        target = found.path.with_name(f"{name}-{number}{ending}")
    return found.path.rename(target)


def names_a_step(name: str) -> bool:
    """Whether ``name`` is one that trainers give to checkpoints, such as ``checkpoint-900`` or ``step=12``."""
    return bool(_STEP.search(name))


def step_in(name: str) -> int | None:
    """The step in a path: a number after a word such as ``step`` or ``iter``, else its last whole number. Endings such as ``.h5`` do not
    count."""
    for part in reversed(name.split("/")):
        stem = PurePosixPath(part).stem
        numbers = _STEP.findall(stem) or _NUMBER.findall(stem)
        if numbers:
            return int(numbers[-1])
    return None


@dataclass(slots=True)
class Watch:
    """Which candidates are finished, for one who looks again and again. ``world_size``: the number of ranks, when it is known.

    ``left`` are those that the last call of ``finished`` had no time for. ``missed`` are those that were waited for to be quiet at the call
    before, and are gone, or a single file that has become another one: under its name, or in place, where it was whole before or was cut
    short. ``restless`` are those that have changed again and again for ten times as long.
    """

    quiet_s: float
    monotonic: Callable[[], float]
    world_size: int | None = None
    left: list[Path] = field(default_factory=list)
    missed: list[Found] = field(default_factory=list)
    restless: list[Found] = field(default_factory=list)
    _waiting: dict[Path, Found] = field(default_factory=dict)
    _whole: dict[Path, Mapping[str, Stat]] = field(default_factory=dict)  # single files that were, as they were then
    _since: dict[Path, float] = field(default_factory=dict)
    _seen: dict[Path, tuple[Mapping[str, Stat], float]] = field(default_factory=dict)
    _done: dict[Path, Mapping[str, Stat]] = field(default_factory=dict)

    def finished(self, looks: Sequence[Look], *, still: bool = False, over: Callable[[], bool] = lambda: False) -> list[Found]:
        """What is finished now and was not ``taken`` as it is now, by step. ``still``: nobody writes any more, so that all is quiet.

        ``over`` is asked before each: once it is true, the rest is not judged.
        """
        now_s = self.monotonic()
        result: list[Found] = []
        self.left = []
        current = {found.path: found for one in looks for found in one.found}
        self._seen = {path: seen for path, seen in self._seen.items() if path in current}
        self.missed = [found for path, found in self._waiting.items() if path not in current or self._is_replaced(found, current[path])]
        self._whole = {path: stats for path, stats in self._whole.items() if path in self._waiting}
        self._since = {path: since_s for path, since_s in self._since.items() if path in self._waiting}
        self._waiting = {}
        self.restless = []
        for path, found in current.items():
            before, since_s = self._seen.get(path, (None, now_s))
            if before != found.stats:
                since_s = now_s
                self._seen[path] = (found.stats, now_s)
            if self._done.get(path) == found.stats:
                continue
            if over():
                self.left.append(path)
                continue
            quiet = still or now_s - since_s >= self.quiet_s
            if found.needs_quiet(self.world_size) and not quiet:
                self._waiting[path] = found
                if before != found.stats and self._is_whole_file(found):
                    self._whole[path] = found.stats
                if now_s - self._since.setdefault(path, now_s) >= _RESTLESS * self.quiet_s > 0:
                    self.restless.append(found)
                continue
            lacking = found.lacking(self.world_size)
            if not lacking or (quiet and all(_is_other_ranks(name) for name in lacking)):
                result.append(found)
        steps = {id(one): one.step() for one in result}
        # One that tells no step counts as the next one.
        return sorted(result, key=lambda one: (steps[id(one)] is None, steps[id(one)] or 0, max(one.times_ns, default=0)))

    def _is_whole_file(self, found: Found) -> bool:
        if not found.is_file() or not found.tells_its_end() or found.lacking(self.world_size):
            return False
        return stat_of(found.path) == found.stats[found.path.name]  # else it may have become whole after that look

    def _is_replaced(self, before: Found, now: Found) -> bool:
        if not before.is_file() or not now.is_file() or before.stats == now.stats:
            return False
        ((inode, size, _),), ((inode_now, size_now, _),) = before.stats.values(), now.stats.values()
        return inode != inode_now or size_now < size or self._whole.get(before.path) == before.stats

    def take(self, found: Found) -> None:
        """``found`` was dealt with, and counts again only when it changes."""
        self._done[found.path] = found.stats

    def unfinished(self, looks: Sequence[Look]) -> list[Found]:
        """Candidates that lack something and were not taken."""
        return [
            found
            for one in looks
            for found in one.found
            if self._done.get(found.path) != found.stats and any(not _is_other_ranks(name) for name in found.lacking(self.world_size))
        ]


def _is_other_ranks(name: str) -> bool:
    """Whether what lacks is another rank's random state: it may lie on another node."""
    return re.fullmatch(r"rng_state_[1-9][0-9]*\.pth", name) is not None


def _matches(relative: str, patterns: Sequence[str]) -> bool:
    name = relative.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(relative, pattern) or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def stat_of(path: Path) -> Stat | None:
    """Inode, size and time of change of a regular file; ``None`` when there is none."""
    try:
        return _regular(path.stat())
    except OSError:
        return None


def _regular(now: os.stat_result) -> Stat | None:
    return (now.st_ino, now.st_size, now.st_mtime_ns) if stat.S_ISREG(now.st_mode) else None


def _is_gone(path: Path) -> bool:
    """Whether nothing is there: a network file system tells so of a folder that was removed under a look in words of its own."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno in _GONE
    return False
