"""The rows about the watched directories: is every file in a verified checkpoint, by its content, or explicitly no loss?"""

from __future__ import annotations

import errno
import fnmatch
import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..mounts import Judgement, MountTable
from ..mounts import judge as judge_mount
from ..parallel import each
from ..progress import Progress, Subscriber
from ..transfer.put import file_sha256
from ..units import format_count
from .bucket import Content, RunState
from .findings import Finding

NO_LOSS = ("__pycache__", "*.pyc", ".ipynb_checkpoints", "lost+found", ".nfs*")
"""What Python, Jupyter and file systems make again by themselves."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file below a watched directory; ``path`` is relative to it, with slashes."""

    root: Path
    path: str
    size: int
    modified_s: float

    @property
    def full(self) -> Path:
        """Where it lies."""
        return self.root / self.path


def is_ignored(path: str, patterns: Iterable[str]) -> bool:
    """Whether a relative path is covered: a pattern fits the whole path, or the name of the file or of one of its folders."""
    parts = path.split("/")
    candidates = {*("/".join(parts[: number + 1]) for number in range(len(parts))), *parts}
    return any(fnmatch.fnmatchcase(candidate, pattern.rstrip("/")) for pattern in patterns for candidate in candidates)


def judge(
    roots: Sequence[Path],
    ignored: Sequence[str],
    states: Collection[RunState],
    *,
    explicit: Collection[str],
    clock: Callable[[], float],
    on_event: Subscriber,
) -> list[Finding]:
    """Compare every file below ``roots`` with what the runs' buckets hold.

    Files of a size that nothing has are told at once; the others are hashed. Findings are one per folder below a root. ``explicit`` are
    the roots that somebody named: one of them that is missing cannot be judged, while a recorded one that is gone holds nothing.
    """
    findings: list[Finding] = []
    files: list[LocalFile] = []
    for root in roots:
        mount = judge_mount(root)
        if mount.kind == "refused":
            what = f"it is not looked at, since {mount.warning or mount.reason}"
            findings.append(Finding("CANNOT TELL", "mount", what, str(root), fix=f"umount -l {root}, or watch a local directory"))
        elif not root.exists():
            if str(root) in explicit:
                findings.append(
                    Finding("CANNOT TELL", "watched", "there is no such directory", str(root), fix=f"check the path: ls {root.parent}")
                )
        elif root.is_file():
            info = root.stat()
            files.append(LocalFile(root.parent, root.name, info.st_size, info.st_mtime))
        else:
            _walk(root, [*ignored, *NO_LOSS], files, findings)
    held = {content for state in states for content in state.held}
    dropped = {content for state in states for content in state.dropped}
    blind = any(not state.seen for state in states)
    lost, given_up, changed = _compare(files, held, dropped, on_event)
    now_s = clock()
    for folder, members in _folders(lost).items():
        findings.append(_lost(folder, members, now_s, blind=blind, runs=bool(states)))
    for folder, members in _folders(given_up).items():
        what = f"{_count(members)} of steps that policy dropped"
        findings.append(Finding("note", "superseded", what, str(folder), sum(file.size for file in members), _age(members, now_s)))
    for file, reason in changed:
        fix = "run stagekit teardown again when nothing writes there"
        findings.append(Finding("CANNOT TELL", "file", reason, str(file.full), file.size, fix=fix))
    return findings


def _walk(root: Path, ignored: Sequence[str], files: list[LocalFile], findings: list[Finding]) -> None:
    """Collect what counts below ``root``. Links are followed, since what they lead to may be lost as well; each folder counts once.

    Mounts in the way are looked up before they are touched: one that hangs would hang this process as well.
    """
    table = MountTable.read()
    seen: set[tuple[int, int]] = set()
    folders = [("", os.path.realpath(root))]
    while folders:
        folder, real = folders.pop()
        try:
            here = os.stat(real)
            if (here.st_dev, here.st_ino) in seen:
                continue
            seen.add((here.st_dev, here.st_ino))
            with os.scandir(real) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            findings.append(_unreadable(root / folder, error))
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if is_ignored(path, ignored):
                continue
            link = entry.is_symlink()
            if table is not None and (link or table.is_point(entry.path)):
                judged = judge_mount(entry.path, table=table)
                if judged.kind == "refused":
                    findings.append(_mounted(root / path, judged, path))
                    continue
            try:
                info = entry.stat()
            except FileNotFoundError:
                continue  # a link that leads nowhere holds nothing, and neither does a file that is gone
            except OSError as error:
                if error.errno != errno.ELOOP:
                    findings.append(_unreadable(root / path, error))
                continue
            if stat.S_ISDIR(info.st_mode):
                folders.append((path, os.path.realpath(entry.path) if link else entry.path))
            elif stat.S_ISREG(info.st_mode):
                files.append(LocalFile(root, path, info.st_size, info.st_mtime))


def _mounted(path: Path, judged: Judgement, pattern: str) -> Finding:
    what = f"it is not looked at, since {judged.warning or judged.reason}"
    fix = f"unmount it once its writes are through, or leave it out: stagekit teardown --ignore {shlex.quote(pattern)}"
    return Finding("CANNOT TELL", "mount", what, str(path), fix=fix)


def _unreadable(path: Path, error: OSError) -> Finding:
    return Finding(
        "CANNOT TELL", "file", f"it cannot be read: {error.strerror}", str(path), fix="run stagekit teardown as the user who owns it"
    )


def _compare(
    files: list[LocalFile], held: set[Content], dropped: set[Content], on_event: Subscriber
) -> tuple[list[LocalFile], list[LocalFile], list[tuple[LocalFile, str]]]:
    """Files that are nowhere else, files that policy gave up, and files that could not be read to the end."""
    sizes = {size for size, _ in held} | {size for size, _ in dropped}
    lost = [file for file in files if file.size not in sizes]
    candidates = [file for file in files if file.size in sizes]
    given_up: list[LocalFile] = []
    changed: list[tuple[LocalFile, str]] = []
    total, done = sum(file.size for file in candidates), 0
    for file, sha256 in zip(candidates, each(_hash, candidates, threads=4), strict=True):
        done += file.size
        on_event(Progress("comparing files", done, total, finished=file is candidates[-1]))
        if isinstance(sha256, OSError):
            changed.append((file, f"it cannot be read: {sha256.strerror}"))
        elif (file.size, sha256) in held:
            continue
        elif (file.size, sha256) in dropped:
            given_up.append(file)
        else:
            lost.append(file)
    return lost, given_up, changed


def _hash(file: LocalFile) -> str | OSError:
    try:
        return file_sha256(file.full)
    except OSError as error:
        return error


def _folders(files: Iterable[LocalFile]) -> dict[Path, list[LocalFile]]:
    """By folder directly below the root, and by file for those that lie in the root itself."""
    grouped: dict[Path, list[LocalFile]] = {}
    for file in files:
        grouped.setdefault(file.root / file.path.split("/")[0], []).append(file)
    return dict(sorted(grouped.items()))


def _lost(folder: Path, members: list[LocalFile], now_s: float, *, blind: bool, runs: bool) -> Finding:
    size, age_s = sum(file.size for file in members), _age(members, now_s)
    first = members[0]
    example = "" if first.full == folder else f", such as {first.path.partition('/')[2]}"
    pattern = folder.name if first.full == folder else f"{folder.name}/*"
    fix = f"copy it away, or accept the loss: stagekit teardown --ignore '{pattern}'"
    if blind:
        what = f"{_count(members)} may be in a run that could not be looked at{example}"
        return Finding("CANNOT TELL", "file", what, str(folder), size, age_s, fix)
    nowhere = "in no verified checkpoint" if runs else "not in any bucket that is known here (name its run with --run)"
    verb = "is" if len(members) == 1 else "are"
    return Finding("NO", "file", f"{_count(members)} {verb} {nowhere}{example}", str(folder), size, age_s, fix)


def _age(members: Sequence[LocalFile], now_s: float) -> float:
    return now_s - max(file.modified_s for file in members)


def _count(members: Sequence[LocalFile]) -> str:
    return "1 file" if len(members) == 1 else f"{format_count(len(members))} files"


def existing(roots: Iterable[Path]) -> Iterator[Path]:
    """Those that are there and may be looked at."""
    for root in roots:
        if judge_mount(root).kind != "refused" and root.exists():
            yield root
