"""The rows about git: what of a checkout, its submodules and the other work trees of its repository is on no remote.

git itself is asked, without locks, prompts and hooks, and for a bounded time: one that hangs, is missing or refuses makes it CANNOT TELL.
What a checkout's ignore rules leave out is left out here, too, unless it lies below a watched directory.
"""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config import git_ceilings
from ..mounts import judge as judge_mount
from ..parallel import each
from ..units import format_count
from .findings import Finding, quoted

PATIENCE_S = 6.0  # for all questions about one checkout and those that belong to it
_AT_ONCE = 8
_SUBMODULE = "160000"
_ARGUMENTS, _TIPS = 500, 10_000
_MADE = ("commit", "rebase", "cherry-pick", "merge", "revert", "am")

_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


@dataclass(frozen=True, slots=True)
class Checkout:
    """What git tells of a checkout. ``tracked`` and ``untracked`` are absolute; an untracked folder stands for all that is in it.

    ``modified`` are paths below ``top``, ``hidden`` changed ones that git was told to pass over; ``tagged`` are the times of commits that
    were made here and that only a tag holds; ``silent`` are remotes in directories of this machine that did not answer, with what git
    said. ``unpushed`` and ``stashed`` are the times of commits that no remote has, ``beside`` of those that only remotes in directories of
    this machine have, and ``local`` those remotes by name and directory. ``inner`` are its
    submodules that are checked out, with theirs, and the other work trees of the repository. Those are ``linked``: branches, stashes and
    remotes are told once, for the one that was asked about.
    """

    top: Path
    tracked: frozenset[str]
    modified: tuple[str, ...]
    untracked: tuple[Path, ...]
    unpushed: tuple[float, ...]
    stashed: tuple[float, ...]
    remotes: tuple[tuple[str, str], ...]
    has_commits: bool
    on_branch: bool = True
    linked: bool = False
    inner: tuple[Checkout | Unclear, ...] = ()
    hidden: tuple[str, ...] = ()
    tagged: tuple[float, ...] = ()
    silent: tuple[tuple[str, str], ...] = ()
    beside: tuple[float, ...] = ()
    local: tuple[tuple[str, Path], ...] = ()

    @property
    def all_inner(self) -> Iterator[Checkout | Unclear]:
        """The ``inner`` ones, theirs, and so on."""
        for one in self.inner:
            yield one
            if isinstance(one, Checkout):
                yield from one.all_inner


@dataclass(frozen=True, slots=True)
class Unclear:
    """A checkout about which git could not be asked, why, and what helps."""

    top: Path
    why: str
    fix: str


def enclosing(directory: Path) -> Path | None:
    """The checkout that ``directory`` lies in, or is; ``None`` when it lies in none, or in one beyond what git is told to look at."""
    ceilings = git_ceilings()
    for folder in (directory, *directory.parents):
        if folder != directory and str(folder) in ceilings:
            return None
        if (folder / ".git").exists():
            return folder
    return None


def look(top: Path, *, program: str = "git", patience_s: float = PATIENCE_S) -> Checkout | Unclear:
    """Ask git about the checkout at ``top``. Only reads; never raises for what git says or does not say."""
    return _look(top, program, patience_s, time.monotonic() + patience_s)


def _look(top: Path, program: str, patience_s: float, deadline: float, *, linked: bool = False) -> Checkout | Unclear:
    asked = _Git(top, program, deadline)
    again = f"see what it says: git -C {shlex.quote(str(top))} status"
    try:
        status = asked("status", "--porcelain=v2", "--branch", "--untracked-files=normal", "--ignore-submodules=dirty", "-z")
        staged = asked("ls-files", "--stage", "-z")
        tracked, submodules = _parse_files(staged)
        modified, untracked, has_commits, on_branch = _parse_status(status)
        hidden = _hidden(asked, staged)
        remotes = _remotes(asked("config", "--get-regexp", r"^remote\..*\.url$", fine=(0, 1)))
        away = [f"--remotes={name}" for name, url in remotes if not _is_local(url)]
        local = tuple((name, _directory(top, url)) for name, url in remotes if _is_local(url))
        beside, silent = _held_by(asked, local)
        published = [*away, *beside] if local else ["--remotes"]  # also of remotes that are gone from the settings
        missing = _missing(asked, published, linked=linked) if has_commits else {}
        nowhere_else = _missing(asked, away, linked=linked) if has_commits and local else {}
        tagged = _tagged(asked, published) if has_commits and not linked else ()
        stashed = _times(asked("stash", "list", "--format=%ct")) if has_commits and not linked else ()
        trees = _other_trees(asked) if not linked else []
    except FileNotFoundError:
        return Unclear(top, "git is not installed here, so its state cannot be told", "install it: apt-get install -y git")
    except subprocess.TimeoutExpired:
        return Unclear(top, f"git did not answer within {patience_s:.0f} s", again)
    except OSError as error:
        return Unclear(top, f"git cannot be asked: {error.strerror or error}", again)
    except _Refused as error:
        own = "dubious ownership" in str(error)
        fix = "run stagekit teardown as the user who owns the checkout" if own else again
        return Unclear(top, f"git refuses to tell: {error}", fix)
    belonging = [(top / path, False) for path in submodules if (top / path / ".git").exists()] + [(path, True) for path in trees]
    return Checkout(
        top,
        frozenset(f"{top}/{path}" for path in tracked),
        modified,
        tuple(top / path for path in untracked),
        tuple(missing.values()),
        stashed,
        remotes,
        has_commits,
        on_branch,
        linked,
        tuple(each(lambda one: _look(one[0], program, patience_s, deadline, linked=one[1]), belonging, threads=_AT_ONCE)),
        hidden,
        tagged,
        silent,
        tuple(time_s for commit, time_s in nowhere_else.items() if commit not in missing),
        local,
    )


def judge(
    checkout: Checkout | Unclear, ignores: Callable[[str], bool], now_s: float, outlives: Callable[[Path], bool] = lambda _: False
) -> list[Finding]:
    """The findings about one checkout, but for its untracked files, which are compared with the buckets first. ``outlives`` tells which
    directories do not go with this machine."""
    top, at = str(checkout.top), f"git -C {shlex.quote(str(checkout.top))}"
    if isinstance(checkout, Unclear):
        return [Finding("CANNOT TELL", "git", checkout.why, top, fix=checkout.fix)]
    findings = []
    modified = [path for path in checkout.modified if not ignores(path)]
    if modified:
        sizes, times = _stat(checkout.top, modified)
        what = f"{_count(modified, 'file')} changed and not committed, such as {modified[0]}"
        fix = f"{_committing(checkout, at)} commit -am 'before teardown'{_pushing(checkout, at)}"
        findings.append(Finding("NO", "git", what, top, sum(sizes), now_s - max(times) if times else None, fix))
    hidden = [path for path in checkout.hidden if not ignores(path)]
    if hidden:
        sizes, times = _stat(checkout.top, hidden)
        what = f"{_count(hidden, 'file')} changed that git was told to pass over (git update-index), such as {hidden[0]}"
        shown = " && ".join(f"{at} update-index --no-{flag} {shlex.quote(hidden[0])}" for flag in ("skip-worktree", "assume-unchanged"))
        fix = f"let git see it: {shown}; then commit and push it, or copy it away"
        findings.append(Finding("NO", "git", what, top, sum(sizes), now_s - max(times) if times else None, fix))
    first = "" if checkout.on_branch else f"{at} branch rescued && "  # no push takes along what is on no branch
    if checkout.has_commits and not checkout.remotes and not checkout.linked:
        what = "it has no remote, so its commits are nowhere else"
        fix = f"{first}{at} remote add origin URL && {at} push --all origin"
        findings.append(Finding("NO", "git", what, top, age_s=now_s - max(checkout.unpushed) if checkout.unpushed else None, fix=fix))
    elif checkout.unpushed and checkout.remotes:
        what = f"{_count(checkout.unpushed, 'commit')} on no remote"
        fix = f"{first}{at} push --all {shlex.quote(checkout.remotes[0][0])}"
        findings.append(Finding("NO", "git", what, top, age_s=now_s - max(checkout.unpushed), fix=fix))
    if checkout.tagged:
        what = f"{_count(checkout.tagged, 'commit')} that only a tag of this repository holds"
        fix = f"{at} push {shlex.quote(checkout.remotes[0][0]) if checkout.remotes else 'URL'} --tags"
        findings.append(Finding("NO", "git", what, top, age_s=now_s - max(checkout.tagged), fix=fix))
    for name, said in checkout.silent if not checkout.linked else ():
        what = f"its remote {name} is a directory of this machine and does not answer, so what was pushed there cannot be told: {said}"
        fix = f"see what it says: {at} ls-remote {shlex.quote(name)}; or push to another one: {at} remote set-url {shlex.quote(name)} URL"
        findings.append(Finding("CANNOT TELL", "git", what, top, fix=fix))
    if checkout.beside:
        findings.append(_judge_beside(checkout, at, now_s, outlives))
    if checkout.stashed:
        what = f"{_count(checkout.stashed, 'stash', 'stashes')}, which no push takes along"
        fix = f"{at} stash branch stashed && {at} commit -am stashed && {at} push --all; or {at} stash drop"
        findings.append(Finding("NO", "git", what, top, age_s=now_s - max(checkout.stashed), fix=fix))
    return findings


def _judge_beside(checkout: Checkout, at: str, now_s: float, outlives: Callable[[Path], bool]) -> Finding:
    """Of commits that only remotes in directories of this machine have."""
    going = [(name, path) for name, path in checkout.local if not outlives(path)]
    name, path = (going or checkout.local)[0]
    what = f"{_count(checkout.beside, 'commit')} on no remote but {name}, a directory of this machine, {path}"
    if not going:
        return Finding("note", "git", f"{what}; it outlives this server", str(checkout.top))
    durable = f"stagekit teardown --durable {quoted(str(path))}"
    fix = f"push to another machine: {at} push --all URL; or, if its volume outlives this server: {durable}"
    return Finding("CANNOT TELL", "git", what, str(checkout.top), age_s=now_s - max(checkout.beside), fix=fix)


def _committing(checkout: Checkout, at: str) -> str:
    return at if checkout.on_branch else f"{at} switch -c rescued && {at}"


def _pushing(checkout: Checkout, at: str) -> str:
    """Also of a branch that has no upstream; nothing where there is no remote, which is told by itself."""
    return f" && {at} push -u {shlex.quote(checkout.remotes[0][0])} HEAD" if checkout.remotes else ""


def _is_local(url: str) -> bool:
    return url.startswith(("/", "file://", ".", "~"))


def _directory(top: Path, url: str) -> Path:
    """Where a remote lies that is local."""
    return Path(os.path.abspath(top / Path(url.removeprefix("file://")).expanduser()))


class _Refused(Exception):
    """git ended with an error."""


@dataclass(frozen=True, slots=True)
class _Git:
    top: Path
    program: str
    deadline: float

    def __call__(self, *arguments: str, fine: Collection[int] = (0,)) -> str:
        command = [self.program, "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", "-C", str(self.top), *arguments]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # as in a hook: of another checkout
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**inherited, **_QUIET},
            start_new_session=True,
        )
        try:
            said, complained = process.communicate(timeout=max(0.1, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # Its helpers hold the pipes as well. One that hangs in the kernel is left behind.
            os.killpg(process.pid, signal.SIGKILL)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            raise
        if process.returncode not in fine:
            lines = complained.decode(errors="replace").strip().splitlines() or [f"it ended with {process.returncode}"]
            raise _Refused(lines[0].removeprefix("fatal: ")[:200])
        return os.fsdecode(said)


def _hidden(asked: _Git, staged: str) -> tuple[str, ...]:
    """Changed files that ``update-index --skip-worktree`` or ``--assume-unchanged`` keeps ``status`` from looking at."""
    marked = [entry.partition(" ") for entry in asked("ls-files", "-v", "-z").split("\0") if entry]
    paths = [path for mark, _, path in marked if (mark.islower() or mark == "S") and (asked.top / path).is_file()]
    if not paths:
        return ()
    known = {path: facts.split()[1] for facts, _, path in (entry.partition("\t") for entry in staged.split("\0") if entry)}
    changed: list[str] = []
    for first in range(0, len(paths), _ARGUMENTS):
        some = paths[first : first + _ARGUMENTS]
        hashed = asked("hash-object", "--", *some).split()
        changed += [path for path, digest in zip(some, hashed, strict=True) if known.get(path) != digest]
    return tuple(changed)


def _held_by(asked: _Git, local: Sequence[tuple[str, Path]]) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """What ``git log`` is told of what remotes on this machine have: what they answer now, for they may have been removed, or made anew.
    Also those that do not answer, with what git said."""
    told = ["--ignore-missing"]
    silent: list[tuple[str, str]] = []
    for name, _ in local:
        try:
            told += [line.partition("\t")[0] for line in asked("ls-remote", "--heads", "--tags", name).splitlines()][:_TIPS]
        except _Refused as error:
            silent.append((name, str(error)))
            told.append(f"--remotes={name}")  # as far as is known; that it is not certain is told
    return told, tuple(silent)


def _tagged(asked: _Git, published: Sequence[str]) -> tuple[float, ...]:
    """The times of commits that were made here and that only a tag holds. What came with a fetched tag is on its remote."""
    found = [line.split() for line in asked("log", "--tags", "--not", "--branches", "HEAD", *published, "--format=%H %ct").splitlines()]
    if not found:
        return ()
    moves = (line.partition(" ") for line in asked("log", "-g", "--all", "--format=%H %gs").splitlines())
    made = {commit for commit, _, how in moves if how.startswith(_MADE)}
    return tuple(float(time_s) for commit, time_s in found if commit in made)


def _missing(asked: _Git, published: Sequence[str], *, linked: bool) -> dict[str, float]:
    """The commits that are not ``published``, with their times. What a shallow clone begins with came from a remote, also when none of its
    branches shows it."""
    query = ("log", "HEAD", "--not", *published, "--branches") if linked else ("log", "--branches", "HEAD", "--not", *published)
    found = _commits(asked(*query, "--format=%H %ct"))
    if found:
        shallow = asked.top / asked("rev-parse", "--git-path", "shallow").rstrip("\n")
        if shallow.is_file():
            found = _commits(asked(*query, *shallow.read_text().split(), "--format=%H %ct"))
    return found


def _other_trees(asked: _Git) -> list[Path]:
    """The other work trees of the repository that are there, the one it was cloned into among them."""
    if not (asked.top / ".git").is_file() and not (asked.top / ".git" / "worktrees").is_dir():
        return []
    lines = asked("worktree", "list", "--porcelain").splitlines()
    paths = [Path(line.partition(" ")[2]) for line in lines if line.startswith("worktree ")]
    return [path for path in paths if path != asked.top and judge_mount(path).kind != "refused" and (path / ".git").exists()]


def _parse_files(text: str) -> tuple[list[str], list[str]]:
    """All paths of ``ls-files --stage -z``, and those of submodules."""
    entries = [entry.partition("\t") for entry in text.split("\0") if entry]
    return [path for _, _, path in entries], [path for facts, _, path in entries if facts.startswith(_SUBMODULE)]


def _parse_status(text: str) -> tuple[tuple[str, ...], tuple[str, ...], bool, bool]:
    """Changed paths, untracked ones, whether there is a commit, and whether a branch is checked out, from ``status --porcelain=v2 --branch
    -z``."""
    modified: list[str] = []
    untracked: list[str] = []
    has_commits = on_branch = True
    entries = iter(text.split("\0"))
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if kind == "1":
            modified.append(rest.split(" ", 7)[7])
        elif kind == "2":
            modified.append(rest.split(" ", 8)[8])
            next(entries, None)  # the name it had before
        elif kind == "u":
            modified.append(rest.split(" ", 9)[9])
        elif kind == "?":
            untracked.append(rest.rstrip("/"))
        elif entry == "# branch.oid (initial)":
            has_commits = False
        elif entry == "# branch.head (detached)":
            on_branch = False
    return tuple(modified), tuple(untracked), has_commits, on_branch


def _commits(text: str) -> dict[str, float]:
    return {commit: float(time_s) for commit, _, time_s in (line.partition(" ") for line in text.splitlines())}


def _times(text: str) -> tuple[float, ...]:
    return tuple(float(line) for line in text.split())


def _remotes(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (line.partition(" ") for line in text.splitlines())
    return tuple((name.removeprefix("remote.").removesuffix(".url"), url) for name, _, url in pairs)


def _stat(top: Path, paths: Sequence[str]) -> tuple[list[int], list[float]]:
    sizes, times = [], []
    for path in paths:
        try:
            info = (top / path).stat()
        except OSError:
            continue  # it was deleted, and the deletion is what is not committed
        sizes.append(0 if stat.S_ISDIR(info.st_mode) else info.st_size)  # a submodule is no file
        times.append(info.st_mtime)
    return sizes, times


def _count(things: Sequence[object], one: str, many: str = "") -> str:
    return f"1 {one}" if len(things) == 1 else f"{format_count(len(things))} {many or f'{one}s'}"
