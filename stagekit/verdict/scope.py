"""What is judged: what was named, else what this machine remembers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config import StoreConfig, home_directory
from ..errors import StagekitError, UsageError
from ..mounts import judge
from ..publishing.begun import Begun
from ..runs import KnownRun, known_runs, parse_reference
from ..runs.home import unfinished_records
from ..runs.spool import default_dir, is_there
from ..store import Where, open_store
from ..store.base import Store
from ..units import counted
from . import publications as publication_rows
from .durable import Durable
from .files import existing, holds_a_file, is_ignored
from .findings import Finding, Scope, owner, quoted

# Together these keep one call to a store that does not answer below ten seconds.
_CONNECT_S, _READ_S, _RETRY_S = 3.0, 5.0, 3.0


@dataclass(frozen=True, slots=True)
class Target:
    """One run of the scope, and how its store is reached. ``watched`` is where its trainings were to save, as this machine recorded it."""

    url: str
    where: Where
    store: StoreConfig | None
    datasets: Mapping[str, str] = field(default_factory=dict)
    watched: tuple[Path, ...] = ()

    def open(self) -> Store:
        """The run's store, with little patience."""
        return open_briefly(self.where, self.store)


def open_briefly(where: Where, store: StoreConfig | None) -> Store:
    """A store with little patience: a verdict that cannot be reached is told within ten seconds."""
    config = store or StoreConfig()
    patience = replace(
        config,
        connect_timeout_s=min(config.connect_timeout_s, _CONNECT_S),
        read_timeout_s=min(config.read_timeout_s, _READ_S),
        retry_s=min(config.retry_s, _RETRY_S),
    )
    return open_store(where, patience)


@dataclass(frozen=True, slots=True)
class Judged:
    """A scope with what is needed to judge it. ``explicit`` are the watched directories that somebody named just now. ``working`` are the
    directories in which trainings were started, with the time of the first."""

    scope: Scope
    targets: tuple[Target, ...]
    roots: tuple[Path, ...]
    explicit: frozenset[str]
    findings: tuple[Finding, ...]
    working: Mapping[Path, float | None] = field(default_factory=dict)
    publications: tuple[Begun, ...] = ()
    durable: Durable = field(default_factory=Durable)
    home: Path | None = None

    def ignores(self, name: str) -> bool:
        """Whether somebody said that ``name``, a path below what is looked at or what else a finding is about, is no loss."""
        return is_ignored(name, self.scope.ignored)


def find_scope(
    watch: Iterable[str | os.PathLike[str]] = (),
    runs: Iterable[Where] = (),
    ignore: Iterable[str] = (),
    *,
    durable: Iterable[str | os.PathLike[str]] = (),
    store: StoreConfig | None = None,
    home: Path | None = None,
) -> Judged:
    """What to judge. Named directories and runs are taken as they are; what is not named comes from this machine's records.

    With ``watch`` alone, every recorded run may hold those files; with ``runs`` alone, their recorded directories are watched. Where the
    trainings of these runs were started belongs to the scope unless directories are named. The spools of all recorded runs and the
    publications that were begun here belong to every scope, whatever is named: what waits there exists nowhere else. Reads local records
    only. ``durable`` are volumes that outlive the server.
    ``store`` is for every run when it is given; else each recorded run is reached as its training reached it.
    """
    findings: list[Finding] = []
    recorded: list[KnownRun] = []
    try:
        # What was in another process's memory is gone, whatever becomes of this server.
        recorded = [known for known in known_runs(home) if not known.url.startswith("memory://")]
        findings.extend(_half_written(path) for path in unfinished_records(home))
    except (StagekitError, OSError) as error:
        fix = "name the runs and directories: stagekit teardown --run RUN --watch DIR"
        if isinstance(error, OSError) and error.filename:
            fix = f"see {owner(error.filename)}; or {fix}"
        what = f"this machine's records cannot be read: {error}"
        findings.append(Finding("CANNOT TELL", "records", what, str(home or home_directory()), fix=fix))
    ignored = tuple(ignore)
    by_url = {known.url: known for known in recorded}
    named = list({target.url: target for target in (_named(where, by_url, store) for where in runs)}.values())
    targets = named or [Target(known.url, known.url, store or known.store, known.datasets, known.watched) for known in recorded]
    explicit = _paths(watch, "watch")
    here = [by_url[target.url] for target in targets if target.url in by_url]
    roots = explicit or [path for known in here for path in known.watched if _is_there(path)]
    outer = _outermost(_each_once(roots))
    working, left = _started(here, set(outer), ignored)
    findings.extend(left)
    used = {path for known in recorded for path in known.spools}
    spools = sorted({default_dir(), *used})
    findings.extend(_lost_spool(path) for path in sorted(used) if not _spool_is_there(path))
    if not explicit:
        findings.extend(finding for known in here if (finding := _vanished(known, outer, ignored)) is not None)
    publications, broken = publication_rows.recorded(home)
    lasting = Durable(_paths(durable, "durable"))
    scope = Scope(
        watched=tuple(map(str, outer)),
        runs=tuple(target.url for target in targets),
        spools=tuple(str(path) for path in spools if _is_there(path)),
        ignored=ignored,
        working=tuple(map(str, working)),
        publications=tuple(one.url for one in publications),
        durable=tuple(map(str, lasting.paths)),
    )
    return Judged(
        scope,
        tuple(targets),
        tuple(outer),
        frozenset(map(str, explicit)),
        (*findings, *broken, *lasting.judge()),
        working,
        tuple(publications),
        lasting,
        home,
    )


def _half_written(path: Path) -> Finding:
    what = "a run could not be noted here, as when the disk is full, so that the scope may lack it and its directories"
    fix = f"name them: stagekit teardown --run RUN --watch DIR; then let go of the trace: rm {quoted(str(path))}"
    return Finding("CANNOT TELL", "records", what, str(path), fix=fix)


def _started(
    here: Iterable[KnownRun], watched: Collection[Path], ignored: Collection[str]
) -> tuple[dict[Path, float | None], list[Finding]]:
    """Where trainings were started, and when the first was (``None`` where that was not noted); and findings about places that are gone."""
    found: dict[Path, float | None] = {}
    gone: dict[Path, str] = {}
    for known in here:
        for path in known.working:
            if not _is_there(path):
                gone.setdefault(path, known.url)
            elif path not in watched:
                times = (found.get(path, known.since_s), known.since_s)
                found[path] = min((time_s for time_s in times if time_s is not None), default=None)
    findings = []
    for path, url in sorted(gone.items()):
        if not is_ignored(str(path), ignored):
            what = f"a training was started in {path}, which is not there any more: its code, and what trackers wrote there, is not judged"
            fix = f"move it back; or, if it was removed on purpose: stagekit teardown --ignore {quoted(str(path))}"
            findings.append(Finding("CANNOT TELL", "started", what, url, fix=fix))
    return dict(sorted(found.items())), findings


def _each_once(paths: Iterable[Path]) -> list[Path]:
    """Without those that are another way to the same directory."""
    found: dict[Path, Path] = {}
    for path in sorted(set(paths)):
        real = path if judge(path).kind == "refused" else path.resolve()  # a mount that hangs is not touched
        if real not in found or found[real] == real:
            found[real] = path
    return list(found.values())


def _paths(given: Iterable[str | os.PathLike[str]], name: str) -> list[Path]:
    texts = [os.fspath(path) for path in given]
    if not all(texts):  # "$OUT" that was never set; it must not mean the directory we happen to be in
        raise UsageError(f"{name}: an empty text names no directory; give the one whose files must be safe, or . for this one")
    return [Path(os.path.abspath(os.path.expanduser(text))) for text in texts]


def _is_there(path: Path) -> bool:
    """Whether a recorded directory is still there. One that must not be touched, or may not be, counts as there, so that it is told."""
    try:
        return judge(path).kind == "refused" or path.exists()
    except OSError:
        return True


def _spool_is_there(path: Path) -> bool:
    try:
        return judge(path).kind == "refused" or is_there(path)
    except OSError:
        return True  # what is in it cannot be read, and that is told


def _lost_spool(path: Path) -> Finding:
    what = "a spool that was used here is not there any more, and saves that are in no bucket may wait in it"
    fix = f"mount its disk again, or move it back; if it was removed on purpose: mkdir -p {shlex.quote(str(path / 'entries'))}"
    return Finding("CANNOT TELL", "spool", what, str(path), fix=fix)


def _vanished(known: KnownRun, roots: Sequence[Path], ignored: Collection[str]) -> Finding | None:
    """About directories that were watched for a run and are gone. What was rotated away below one that is there is not meant, and neither
    is what was handed over as a save.

    One that was removed holds nothing, and one that was moved, or whose disk is not there any more, may hold anything.
    """
    counting = [path for path in known.watched if not is_ignored(str(path), ignored)]
    gone = _outermost([path for path in counting if not _is_there(path) and not any(path.is_relative_to(root) for root in roots)])
    gone = [path for path in gone if path not in known.handed]
    empty = [path for path in existing(counting) if not holds_a_file(path)]  # as a mount point is without its disk
    lost = [path for path in (*gone, *empty) if _is_elsewhere(path, known.disks.get(path))]
    fix = "if it was moved, or its disk is not mounted, name where it is: stagekit teardown --watch DIR"
    if lost:
        what = f"{lost[0]} was watched{_more(lost)}, and the disk that it was on is not there any more"
        return Finding("CANNOT TELL", "watched", what, known.url, fix=fix)
    if not gone:
        return None
    what = f"{gone[0]} was watched and is not there any more{_more(gone)}: nothing in it is judged"
    removed = f"stagekit teardown --ignore {quoted(str(gone[0]))}"
    return Finding("CANNOT TELL", "watched", what, known.url, fix=f"{fix}; or, if it was removed on purpose: {removed}")


def _more(paths: Sequence[Path]) -> str:
    return f", like {counted(len(paths) - 1, 'other')}" if len(paths) > 1 else ""


def _is_elsewhere(path: Path, device: int | None) -> bool:
    """Whether what is at ``path`` now, or would be, lies on another device than it did."""
    try:
        nearest = next(one for one in (path, *path.parents) if one.exists())
        return device is not None and nearest.stat().st_dev != device
    except (OSError, StopIteration):
        return False


def _named(where: Where, by_url: dict[str, KnownRun], store: StoreConfig | None) -> Target:
    # Opening does no I/O; it gives one spelling to "s3://bucket/run/" and "s3://bucket/run".
    url = str(open_store(parse_reference(where)[0] if isinstance(where, str) else where).location)
    known = by_url.get(url)
    config, datasets, watched = (known.store, known.datasets, known.watched) if known else (None, {}, ())
    return Target(url, where if not isinstance(where, str) else url, store or config, datasets, watched)


def _outermost(roots: Sequence[Path]) -> list[Path]:
    """Without those that lie below another one."""
    found: list[Path] = []
    for root in sorted(set(roots)):
        if not any(root.is_relative_to(other) for other in found):
            found.append(root)
    return found
