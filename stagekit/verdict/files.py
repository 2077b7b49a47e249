"""The rows about the watched directories: is every file in a verified checkpoint, by its content, or explicitly no loss?"""

from __future__ import annotations

import errno
import fnmatch
import os
import shlex
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..mounts import Judgement, MountTable
from ..mounts import judge as judge_mount
from ..parallel import each
from ..progress import Progress, Subscriber
from ..saves.find import Watch
from ..saves.find import look as look_for_saves
from ..transfer.put import file_sha256
from ..units import format_count
from . import nearby, trackers
from .bucket import Content, RunState
from .caches import is_cache
from .durable import Durable
from .findings import Finding, owner, quoted
from .git import Checkout, Unclear, enclosing
from .git import look as look_at_checkout
from .trackers import is_wandb

NO_LOSS = ("__pycache__", "*.pyc", "*.egg-info", ".ipynb_checkpoints", ".cache", "lost+found", ".nfs*")
"""What Python, Jupyter and file systems make again by themselves, and the folder that is for nothing but caches."""

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file below a directory that is looked at; ``path`` is relative to it, with slashes. ``row`` is where its loss is told."""

    root: Path
    path: str
    size: int
    modified_s: float
    row: str = "file"

    @property
    def full(self) -> Path:
        """Where it lies."""
        return self.root / self.path


@dataclass(slots=True)
class Found:
    """What lies on this machine: files to compare with the buckets, wandb's folders, checkouts, and what could not be looked at."""

    files: list[LocalFile] = field(default_factory=list)
    wandb: set[Path] = field(default_factory=set)
    checkouts: dict[str, Checkout | Unclear] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def is_ignored(path: str, patterns: Iterable[str]) -> bool:
    """Whether a relative path is covered: a pattern fits the whole path, or the name of the file or of one of its folders."""
    parts = path.split("/")
    candidates = {*("/".join(parts[: number + 1]) for number in range(len(parts))), *parts}
    return any(fnmatch.fnmatchcase(candidate, pattern.rstrip("/")) for pattern in patterns for candidate in candidates)


class Looking:
    """Walks over what is watched and over where trainings were started. Nothing on a refused mount is touched.

    ``ignored`` are the patterns that are no loss, ``own`` the directories with Stagekit's own records, ``home`` this machine's where it is
    not the usual one. ``ask_git`` looks at a checkout.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        ignored: Sequence[str],
        *,
        explicit: Collection[str] = (),
        own: Iterable[Path] = (),
        home: Path | None = None,
        ask_git: Callable[[Path], Checkout | Unclear] = look_at_checkout,
    ) -> None:
        self.found = Found()
        self._roots = roots
        self._ignored = [*ignored, *NO_LOSS]
        self._explicit = explicit
        self._own = {os.path.realpath(path) for path in own}
        self._home = home
        self._ask_git = ask_git
        self._table = MountTable.read()
        self._seen: set[tuple[int, int]] = set()
        self._tracked: set[str] = set()
        self._asked: dict[Path, Checkout | Unclear] = {}

    def watched(self) -> None:
        """Everything below the roots. One that was named and is missing cannot be judged; a recorded one that is gone holds nothing."""
        for root in self._roots:
            try:
                self._watched(root)
            except OSError as error:
                self.found.findings.append(unreadable(root, error))

    def _watched(self, root: Path) -> None:
        mount = judge_mount(root)
        if mount.kind == "refused":
            what = f"it is not looked at, since {mount.warning or mount.reason}"
            fix = f"umount -l {root}, or watch a local directory"
            self.found.findings.append(Finding("CANNOT TELL", "mount", what, str(root), fix=fix))
        elif not root.exists():
            if str(root) in self._explicit:
                fix = f"check the path: ls {root.parent}"
                self.found.findings.append(Finding("CANNOT TELL", "watched", "there is no such directory", str(root), fix=fix))
        elif root.is_file():
            info = root.stat()
            self.found.files.append(LocalFile(root.parent, root.name, info.st_size, info.st_mtime))
        else:
            top = enclosing(root.resolve().parent)
            if top is not None:
                self._tracks_below(top, os.path.realpath(root))
            self._walk(root, "file")

    def working(self, directories: Mapping[Path, float | None]) -> None:
        """The checkouts in which trainings were started, what trackers left there, and what looks like a save and was written since then,
        whose time is told. Other files that git ignores are nobody's loss."""
        for directory, since_s in directories.items():
            try:
                self._working(directory, since_s)
            except OSError as error:
                self.found.findings.append(unreadable(directory, error))
        if since := [since_s for since_s in directories.values() if since_s is not None]:
            self._trackio(trackers.trackio_folder(), min(since))

    def _trackio(self, folder: Path, since_s: float) -> None:
        """What Trackio wrote for this user since then, wherever the training was started."""
        if judge_mount(folder).kind == "refused":
            what = "what Trackio may have written is on a mount that is not looked at"
            self.found.findings.append(Finding("note", "mount", what, str(folder)))
            return
        for inner, _, names in os.walk(folder):
            written = (Path(inner, name) for name in names if not name.endswith(".lock"))
            recent = [path for path in written if path.lstat().st_mtime >= since_s]
            self._nearby(folder.parent, recent, "tracker")

    def _working(self, directory: Path, since_s: float | None) -> None:
        if judge_mount(directory).kind == "refused":
            what = "a training was started here, on a mount that is not looked at"
            fix = "copy away what is only there, or name what counts: stagekit teardown --watch DIR"
            self.found.findings.append(Finding("note", "mount", what, str(directory), fix=fix))
            return
        top = enclosing(directory.resolve())
        checkout = self._checkout(top) if top is not None else None
        found = nearby.look(directory, since_s, skips=self._is_passed_over, home=self._home)
        self.found.wandb.update(found.wandb)
        self._nearby(directory, found.tracked, "tracker")
        if found.cut is not None:
            much = "so much lies here" if found.cut == "below" else "links lead to so much"
            what = f"{much} that not all of it was searched for what trackers wrote, and for saves, in {nearby.PATIENCE_S:.0f} s"
            fix = "name a folder that need not be searched, such as one with data: stagekit teardown --ignore FOLDER"
            self.found.findings.append(Finding("CANNOT TELL" if found.cut == "below" else "note", "tracker", what, str(directory), fix=fix))
        for one in (checkout, *self._inner(checkout)) if checkout is not None else ():
            for path in one.untracked if isinstance(one, Checkout) else ():
                self._untracked(one.top, path)
        self._nearby(directory, found.saves, "beside")

    def _nearby(self, directory: Path, paths: Iterable[Path], row: str) -> None:
        for path in paths:
            relative = str(path.relative_to(directory))
            if not is_ignored(relative, self._ignored) and os.path.realpath(path) not in self._tracked:
                with suppress(FileNotFoundError):
                    info = path.stat()
                    if self._is_new(info):
                        self.found.files.append(LocalFile(directory, relative, info.st_size, info.st_mtime, row))

    def _untracked(self, top: Path, path: Path) -> None:
        relative = str(path.relative_to(top))
        if is_ignored(relative, self._ignored) or self._is_own(path):
            return
        try:
            info = path.stat()
        except OSError:
            return
        if stat.S_ISDIR(info.st_mode):
            self._walk(top, "git", below=relative)
        elif stat.S_ISREG(info.st_mode) and self._is_new(info):
            row = "tracker" if trackers.whose(relative) else "git"
            self.found.files.append(LocalFile(top, relative, info.st_size, info.st_mtime, row))

    def _checkout(self, top: Path) -> Checkout | Unclear:
        """The checkout at ``top`` and those that belong to it, which are judged from now on, and whose files are as safe as they are."""
        checkout = self._ask(top)
        for one in (checkout, *self._inner(checkout)):
            self._asked.setdefault(Path(os.path.realpath(one.top)), one)
            if self.found.checkouts.setdefault(str(one.top), one) is one and isinstance(one, Checkout):
                self._tracked |= one.tracked
        return checkout

    def _inner(self, checkout: Checkout | Unclear) -> Iterator[Checkout | Unclear]:
        """Its submodules and other work trees, but for those that are ignored."""
        for one in checkout.all_inner if isinstance(checkout, Checkout) else ():
            if not is_ignored(os.path.relpath(one.top, checkout.top), self._ignored):
                yield one

    def _ask(self, top: Path) -> Checkout | Unclear:
        real = Path(os.path.realpath(top))
        if real not in self._asked:
            self._asked[real] = self._ask_git(real)
        return self._asked[real]

    def _tracks_below(self, top: Path, real: str) -> None:
        """Judge the checkout around a watched directory when files of that directory are tracked by it."""
        checkout = self._ask(top)
        if isinstance(checkout, Checkout) and any(path.startswith(f"{real}/") for path in checkout.tracked):
            self._checkout(top)

    def _is_passed_over(self, path: Path, relative: str) -> bool:
        return is_ignored(relative, self._ignored) or self._is_own(path)

    def _is_own(self, path: Path) -> bool:
        return os.path.realpath(path) in self._own

    def _is_new(self, info: os.stat_result) -> bool:
        """Whether this is met for the first time: what is below a watched directory is not told again for the checkout around it."""
        place = (info.st_dev, info.st_ino)
        if place in self._seen:
            return False
        self._seen.add(place)
        return True

    def _walk(self, root: Path, row: str, *, below: str = "") -> None:
        """Collect what counts below ``root``. Links are followed, since what they lead to may be lost as well; each folder counts once.

        Mounts in the way are looked up before they are touched: one that hangs would hang this process as well.
        """
        folders = [(below, os.path.realpath(root / below))]
        while folders:
            folder, real = folders.pop()
            try:
                here = os.stat(real)
                if real in self._own or not self._is_new(here):
                    continue
                with os.scandir(real) as found:
                    entries = sorted(found, key=lambda entry: entry.name)
            except OSError as error:
                self.found.findings.append(unreadable(root / folder, error))
                continue
            names = [entry.name for entry in entries]
            if (folder or row != "file") and is_cache(Path(real), names):
                continue  # a root that somebody watches counts, whatever it is
            if is_wandb(Path(real), names):
                self.found.wandb.add(root / folder)
                continue
            if ".git" in names and isinstance(self._checkout(Path(real)), Unclear):
                continue  # nothing is known of its files
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name != ".git" and not is_ignored(path, self._ignored):
                    self._entry(root, path, f"{real}/{entry.name}", entry, folders, row)

    def _entry(self, root: Path, path: str, real: str, entry: os.DirEntry[str], folders: list[tuple[str, str]], row: str) -> None:
        link = entry.is_symlink()
        if self._table is not None and (link or self._table.is_point(entry.path)):
            judged = judge_mount(entry.path, table=self._table)
            if judged.kind == "refused":
                self.found.findings.append(_mounted(root / path, judged, path))
                return
        try:
            info = entry.stat()
        except FileNotFoundError:
            return  # a link that leads nowhere holds nothing, and neither does a file that is gone
        except OSError as error:
            if error.errno != errno.ELOOP:
                self.found.findings.append(unreadable(root / path, error))
            return
        if stat.S_ISDIR(info.st_mode):
            folders.append((path, os.path.realpath(entry.path) if link else entry.path))
        elif stat.S_ISREG(info.st_mode) and real not in self._tracked:
            if row == "file":
                self._seen.add((info.st_dev, info.st_ino))
            elif not self._is_new(info):
                return
            self.found.files.append(LocalFile(root, path, info.st_size, info.st_mtime, "tracker" if trackers.whose(path) else row))


def compare(
    found: Found,
    states: Collection[RunState],
    durable: Durable,
    *,
    clock: Callable[[], float],
    on_event: Subscriber,
) -> list[Finding]:
    """Compare every file that was found with what the runs' buckets hold, by content.

    Files of a size that nothing has are told at once; the others are hashed. Findings are one per folder below a root.
    """
    findings: list[Finding] = []
    held = {content for state in states for content in state.held}
    dropped = {content for state in states for content in state.dropped}
    blind = any(not state.seen for state in states)
    lost, given_up, changed, gone = _compare(found.files, held, dropped, on_event)
    now_s = clock()
    unfinished = _unfinished(lost)
    for (row, folder), members in _folders(lost).items():
        finding = _lost(row, folder, members, now_s, blind=blind, runs=bool(states), why=unfinished.get(folder, ""))
        findings.append(durable.excuse(finding, folder))
    for root in sorted({file.root for file in given_up}):  # there may be a folder for each of hundreds of steps
        members = [file for file in given_up if file.root == root]
        what = f"{_count(members)} of steps that policy dropped, such as {members[0].path}"
        findings.append(Finding("note", "superseded", what, str(root), sum(file.size for file in members), _age(members, now_s)))
    for (_, folder), members in _folders(gone).items():
        what = f"{_count(members)} went away during the look, so something still writes here"
        findings.append(durable.excuse(Finding("CANNOT TELL", "file", what, str(folder), fix="look again: stagekit teardown"), folder))
    for file, reason in changed:
        fix = f"see {owner(file.full)}"
        findings.append(durable.excuse(Finding("CANNOT TELL", "file", reason, str(file.full), file.size, fix=fix), file.full))
    return findings


def _mounted(path: Path, judged: Judgement, pattern: str) -> Finding:
    what = f"it is not looked at, since {judged.warning or judged.reason}"
    fix = f"unmount it once its writes are through, or leave it out: stagekit teardown --ignore {shlex.quote(pattern)}"
    return Finding("CANNOT TELL", "mount", what, str(path), fix=fix)


def unreadable(path: Path, error: OSError) -> Finding:
    """The row about a file or folder that may not be looked at."""
    return Finding("CANNOT TELL", "file", f"it cannot be read: {error.strerror}", str(path), fix=f"see {owner(path)}")


def _compare(
    files: list[LocalFile], held: set[Content], dropped: set[Content], on_event: Subscriber
) -> tuple[list[LocalFile], list[LocalFile], list[tuple[LocalFile, str]], set[LocalFile]]:
    """Files that are nowhere else, files that policy gave up, files that could not be read to the end, and files that are gone."""
    sizes = {size for size, _ in held} | {size for size, _ in dropped}
    lost = [file for file in files if file.size not in sizes]
    candidates = [file for file in files if file.size in sizes]
    given_up: list[LocalFile] = []
    gone = {file for file in lost if not os.path.lexists(file.full)}
    # Nobody can copy these away, as the row would say.
    closed = {file for file in lost if file not in gone and not os.access(file.full, os.R_OK)}
    changed = [
        (file, f"it cannot be read ({os.strerror(errno.EACCES)}), and nothing of its size is in a bucket")
        for file in sorted(closed, key=lambda one: one.full)
    ]
    lost = [file for file in lost if file not in closed and file not in gone]
    total, done = sum(file.size for file in candidates), 0
    for file, sha256 in zip(candidates, each(_hash, candidates, threads=4), strict=True):
        done += file.size
        on_event(Progress("comparing files", done, total, finished=file is candidates[-1]))
        if isinstance(sha256, FileNotFoundError):
            gone.add(file)
        elif isinstance(sha256, OSError):
            changed.append((file, f"it cannot be read: {sha256.strerror}"))
        elif (file.size, sha256) in held:
            continue
        elif (file.size, sha256) in dropped:
            given_up.append(file)
        else:
            lost.append(file)
    return lost, given_up, changed, gone


def _hash(file: LocalFile) -> str | OSError:
    try:
        return file_sha256(file.full)
    except OSError as error:
        return error


def _folders(files: Iterable[LocalFile]) -> dict[tuple[str, Path], list[LocalFile]]:
    """By row and folder directly below the root, and by file for those that lie in the root itself."""
    grouped: dict[tuple[str, Path], list[LocalFile]] = {}
    for file in files:
        grouped.setdefault((file.row, file.root / file.path.split("/")[0]), []).append(file)
    return dict(sorted(grouped.items()))


def _unfinished(lost: Iterable[LocalFile]) -> dict[Path, str]:
    """What the checkpoints below the watched directories lack that are not finished, in words, by the folder that their row is about."""
    places = {file.full for file in lost if file.row == "file"}
    roots = {file.root for file in lost if file.row == "file" and "/" in file.path}  # a file that is watched itself lies beside anything
    looks = [look_for_saves(root) for root in sorted(roots)]
    told: dict[Path, str] = {}
    for found in Watch(0.0, time.monotonic).unfinished(looks):
        if any(path.is_relative_to(found.path) for path in places):
            lacking = found.lacking()
            more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
            folder = found.root / found.name.split("/")[0]
            name = "it" if folder == found.path else found.name
            told.setdefault(folder, f"; {name} is not a finished checkpoint, since it lacks {', '.join(lacking[:_SHOWN])}{more}")
    return told


def _lost(row: str, folder: Path, members: list[LocalFile], now_s: float, *, blind: bool, runs: bool, why: str = "") -> Finding:
    size, age_s = sum(file.size for file in members), _age(members, now_s)
    first = members[0]
    example = "" if first.full == folder else f", such as {first.path.partition('/')[2]}"
    pattern = folder.name if first.full == folder else f"{folder.name}/*"
    fix = f"copy it away, or accept the loss: stagekit teardown --ignore {_quoted(pattern)}"
    if blind:
        what = f"{_count(members)} may be in a run that could not be looked at{example}"
        return Finding("CANNOT TELL", row, what, str(folder), size, age_s, fix)
    verb = "is" if len(members) == 1 else "are"
    if row == "git":
        at = f"git -C {quoted(str(first.root))}"
        fix = f"{at} add {quoted(folder.name)} && {at} commit -m 'before teardown' && {at} push; or {fix}"
        what = f"{_count(members)} {verb} not in git and in no verified checkpoint{example}"
        return Finding("NO", row, what, str(folder), size, age_s, fix)
    if row == "tracker":
        tracker = trackers.whose(first.path)
        what = f"{_count(members)} of {tracker or 'Trackio'} {verb} in no bucket that is known here{example}"
        if tracker is None:  # from the folder that is Trackio's: wherever a file of the others lies, its name tells
            what += "; whether a Space has what they hold is not known"
            fix = f"if none has: trackio sync --project NAME; then, or else: stagekit teardown --ignore {_quoted(pattern)}"
        return Finding("NO" if tracker is not None else "CANNOT TELL", row, what, str(folder), size, age_s, fix)
    if row == "beside":
        what = f"{_count(members)} that looks like a save lies" if len(members) == 1 else f"{_count(members)} that look like saves lie"
        push = "copy it away" if first.full == folder else f"stagekit push {quoted(str(folder))} URL"
        fix = f"if it counts: {push}; then, or if it is no loss: stagekit teardown --ignore {_quoted(pattern)}"
        what += f" where nothing is watched, written since a training was started here, and in no verified checkpoint{example}"
        return Finding("CANNOT TELL", row, what, str(folder), size, age_s, fix)
    network = judge_mount(folder)
    if network.kind == "warned" and network.mount is not None:
        fix += f"; or, if that volume outlives this server: stagekit teardown --durable {shlex.quote(network.mount.point)}"
    nowhere = "in no verified checkpoint" if runs else "not in any bucket that is known here (name its run with --run)"
    return Finding("NO", row, f"{_count(members)} {verb} {nowhere}{example}{why}", str(folder), size, age_s, fix)


def _quoted(pattern: str) -> str:
    """In quotes also where a shell needs none today: what somebody makes of it may hold a star."""
    word = quoted(pattern)
    return word if word.startswith(("'", "$'")) else f"'{word}'"


def _age(members: Sequence[LocalFile], now_s: float) -> float:
    return now_s - max(file.modified_s for file in members)


def _count(members: Sequence[LocalFile]) -> str:
    return "1 file" if len(members) == 1 else f"{format_count(len(members))} files"


def holds_a_file(root: Path) -> bool:
    """Whether anything but folders lies below ``root``, or may, where that cannot be read."""
    unread: list[OSError] = []
    return root.is_file() or any(names for _, _, names in os.walk(root, onerror=unread.append)) or bool(unread)


def existing(roots: Iterable[Path]) -> Iterator[Path]:
    """Those that are there and may be looked at."""
    for root in roots:
        with suppress(OSError):
            if judge_mount(root).kind != "refused" and root.exists():
                yield root
