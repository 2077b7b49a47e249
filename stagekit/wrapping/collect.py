"""Finished saves below the watched directories into the run, everything else there into its logs."""

from __future__ import annotations

import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, Fenced, ManifestError, SourceError, StagekitError, UploadFailed, UsageError
from ..progress import Message, Subscriber
from ..runs.home import known_run
from ..runs.layout import SAVED_IN, Checkpoint
from ..runs.run import Run
from ..runs.spool import Entry, default_dir, pending
from ..saves.adapter import base_of_files
from ..saves.find import Found, Look, Watch, look, set_aside, stat_of
from ..transfer.put import file_sha256
from ..units import counted, format_duration
from .logs import Logs, is_due

SAVED_AS = "saved_as"
"""In a checkpoint's identity: where it lay below its watched directory, so that it is put there again."""

_WEIGHTS = (".pt", ".pth", ".ckpt", ".safetensors")


def named(directories: Sequence[Path]) -> dict[str, Path]:
    """The directories by names of their own: the last part of each, and a number where two are the same."""
    result: dict[str, Path] = {}
    for directory in directories:
        name, number = directory.name or "root", 1
        while name in result:
            number += 1
            name = f"{directory.name or 'root'}-{number}"
        result[name] = directory
    return result


def sessions_here(run: Run) -> list[str]:
    """The processes of this machine that wrote to ``run``, this one included when it has sent what others left; none when it is alone."""
    own = run._spool.session if run._spool is not None else None
    with suppress(ManifestError, OSError):  # nothing is known then
        if (known := known_run(run.url)) is not None and any(session != own for session in known.sessions):
            return [*known.sessions, *([own] if own is not None else [])]
    return []


def waiting_for(run: Run) -> list[Entry]:
    """The saves of ``run`` that are pinned in its spool and not in the bucket yet, whoever pinned them."""
    return [entry for entry in pending(run._spool_dir or default_dir()) if entry.run == run.url]


def _shape(name: str) -> str:
    """``name`` with its numbers left open, as names that belong to different steps have in common."""
    return re.sub("[0-9]+", "#", name)


class Collector:
    """Looks below ``roots`` again and again. What is found finished is handed over to ``run``, once; ``logs`` are told what else is there.

    ``printed`` are the files with what the command prints, for the logs. Nothing raises here for a save that could not be sent: it stays
    pinned, and ``run.drain`` tells.

    ``left_s`` are the seconds that are left for all of it, without end as long as nobody has said when it must be over. Looking takes at
    most half of them, so that what was found can be pinned. What there was no time for, and what could not be read, is in ``blind``.
    """

    def __init__(
        self,
        run: Run,
        roots: Mapping[str, Path],
        *,
        patterns: Sequence[str],
        quiet_s: float,
        world_size: int | None,
        logs: Logs | None,
        printed: Sequence[Path],
        on_event: Subscriber,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.roots = dict(roots)
        self._run = run
        self._patterns = tuple(patterns)
        self._quiet_s = quiet_s
        self._world_size = world_size
        self._logs = logs
        self._printed = tuple(printed)
        self._on_event = on_event
        self._clock = clock
        self._left_s = left_s
        self._watch = Watch(quiet_s, monotonic, world_size)
        self._step = 0
        self._told: set[Path] = set()
        self._told_of: set[Path] = set()
        self._old: set[Path] = set()
        self._looks: list[Look] = []
        self._missed = self._missed_told = 0
        self._missed_last: Path | None = None
        self._before: dict[tuple[Path, str], Mapping[str, int]] = {}  # the files of the last save of each kind of name, and their sizes
        self._filled: set[Path] = set()
        self.submitted = 0
        self.abandoned: list[Found] = []
        self.aside: list[Path] = []
        """What the command may have been in the middle of when it was cut off, by its new name."""
        self._held: list[Checkpoint] = []
        self.unsaved: dict[Path, str] = {}
        """Finished saves that could not be pinned, and why; each is tried again by the next ``scan``."""

    def look(self) -> list[Look]:
        """What lies below the roots now. What cannot be read is told, once."""
        half = _Half(self._left_s)
        self._looks = [look(root, self._patterns, over=half.is_over) for root in self.roots.values()]
        for one in self._looks:
            if one.found or one.others or one.unreadable or one.links or one.cut is not None:
                self._filled.add(one.root)
            for path, why in one.unreadable.items():
                if path not in self._told_of:
                    self._told_of.add(path)
                    text = f"{_unreadable(path, why)}; look at its mode and owner: ls -ld {shlex.quote(str(path))}"
                    self._on_event(Message(text, "warning"))
            for path in one.links:
                if path not in self._told_of:
                    self._told_of.add(path)
                    place = path.resolve()
                    text = f"{path} is a link to {place}, where nothing is looked for"
                    hint = f"if the command saves there: --watch {shlex.quote(str(place))}"
                    self._on_event(Message(f"{text}; {hint}", "warning"))
        return self._looks

    @property
    def empty(self) -> list[Path]:
        """The roots below which no look has seen a file."""
        return [root for root in self.roots.values() if root not in self._filled]

    @property
    def found(self) -> list[Found]:
        """The saves below the roots, finished or not, as of the last look."""
        return [found for one in self._looks for found in one.found]

    @property
    def weights(self) -> list[Path]:
        """What went to the logs and has the name of saved weights, as of the last look."""
        return [one.root / path for one in self._looks for path in one.others if path.endswith(_WEIGHTS)]

    @property
    def blind(self) -> list[str]:
        """What was not looked at by the last ``scan``, in words; nothing when everything was."""
        unreadable = {path: why for one in self._looks for path, why in one.unreadable.items()}
        found = []
        if unreadable:
            path, why = next(iter(unreadable.items()))
            more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
            found.append(f"{_unreadable(path, why)}{more}; make it readable for this user, then: stagekit teardown")
        ends = [one.cut for one in self._looks if one.cut is not None] + self._watch.left
        if ends:
            roots = ", ".join(map(str, self.roots.values()))
            what = f"the time after SIGTERM was over before all below {roots} was looked at, from {ends[0]} on"
            found.append(f"{what}; the next start, or `stagekit teardown`, looks again")
        return found

    def before(
        self, held: Collection[Checkpoint], waiting: Collection[Entry] = (), sessions: Collection[str] = ()
    ) -> tuple[list[Found], list[Found]]:
        """The finished saves that lie here before the command starts: those that must be handed over, and those that are ahead of the run.
        Both oldest first.

        What the run holds already, what waits in the spool, and what the run has gone beyond is not handed over: a late copy of an old
        step must not become the newest. Neither is what the run has gone on without, which is in ``abandoned`` then: steps after its
        newest one, of an older generation, and what was saved after them; and all steps after its newest one, where earlier processes of
        this machine wrote to the run (``sessions``) and that one is of none of them.
        """
        self._held = list(held)
        newest = max(held, key=lambda one: one.name, default=None)
        gone_to = max([*(one.step for one in waiting), newest.step if newest is not None else -1], default=-1)
        self._step = max([0, gone_to, *(one.step for one in held)])
        elsewhere = newest is not None and bool(sessions) and newest.name.owner not in sessions
        fresh: list[Found] = []
        ahead: list[Found] = []
        self.abandoned = []
        for found in self._watch.finished(self.look(), still=True):
            step = found.step()
            known = _is_known(found, step, held, waiting)
            beyond = newest is not None and step is not None and step > newest.step
            if newest is not None and beyond and (elsewhere or self.abandoned or self._is_of_older(found, newest)):
                self.abandoned.append(found)
                self._watch.take(found)
                continue
            if newest is None or (not known if step is None else step > newest.step):
                ahead.append(found)
            if known or (step is not None and step <= gone_to):
                self._watch.take(found)
            else:
                fresh.append(found)
        self._old = {found.path for found in fresh}
        return fresh, ahead

    def _is_of_older(self, found: Found, newest: Checkpoint) -> bool:
        """Whether the run holds ``found`` of a generation before the one of ``newest``, and not of that one."""
        held = self._like(found.sizes, found.step())
        return bool(held) and all(one.name.generation < newest.name.generation for one in held)

    def _like(self, sizes: Mapping[str, int], step: int | None) -> list[Checkpoint]:
        return [one for one in self._held if one.step == step and {record.path: record.bytes for record in one.files} == sizes]

    def is_here(self, checkpoint: Checkpoint) -> Found | None:
        """The save below the roots that has the step and the sizes of ``checkpoint``; its content, too, where the run holds another."""
        sizes = {record.path: record.bytes for record in checkpoint.files}
        exactly = len(self._like(sizes, checkpoint.step)) > 1
        for found in (found for found in self.found if found.sizes == sizes):
            if found.step() in (checkpoint.step, None) and (not exactly or _digests(found) == _digests_of(checkpoint)):
                return found
        return None

    def settle(self, waiting: Collection[Found]) -> None:
        """Nothing that lies here finished now is to be handed over, apart from ``waiting``."""
        paths = {found.path for found in waiting}
        for found in self._watch.finished(self.look(), still=True):
            if found.path not in paths:
                self._watch.take(found)

    def scan(self, *, still: bool = False, cut_ns: float | None = None) -> None:
        """Look, and hand over what is finished. ``still``: the command has ended. ``cut_ns``: not by itself, but at that time (nanoseconds
        since 1970), so that what it wrote last before may be cut, and a save that does not tell its end is not believed.
        """
        looks = self.look()
        for path, why in [(path, why) for path, why in self.unsaved.items() if not path.exists()]:
            self._on_event(Message(f"{path} was removed before it could be pinned, and is in no bucket: {why}", "warning"))
            del self.unsaved[path]
        for found in self._watch.finished(looks, still=still, over=self._is_over):
            if self._is_over():
                self.unsaved[found.path] = "the time after SIGTERM was over"
            elif (doubt := self._doubt(found, cut_ns) if still else None) is not None:
                self._watch.take(found)
                target = set_aside(found)
                text = f"{found.path} {doubt}; it is no checkpoint, stays local, and is called {target.name} now"
                self._on_event(Message(f"{text}. If it is whole, rename it back: the next stagekit run here sends it", "warning"))
                self.aside.append(target)
            elif not still and (missing := self._missing_of(found)):
                if found.path not in self._told:  # a trainer that stands still in the middle of a save is quiet as well
                    self._told.add(found.path)
                    text = f"{found.path} lacks {', '.join(missing[:3])}, which the save before it has, so it is waited for"
                    self._on_event(Message(f"{text}; it is sent once a later one is begun", "warning"))
            else:
                self._hand_over(found, still=still)
        self._tell_missed(still=still)
        self._offer(looks, still=still)

    def _tell_missed(self, *, still: bool) -> None:
        """What never gets quiet, once; and how many were gone before they were: the first, again when their number has doubled, and all at
        the end."""
        for found in self._watch.restless:
            if found.path not in self._told:
                self._told.add(found.path)
                what = f"{found.path} keeps changing and has not been quiet for {format_duration(self._quiet_s)} yet, so it is not sent"
                hint = "save into a new file and rename it, give each step a name of its own, or a shorter --quiet"
                self._on_event(Message(f"{what}; {hint}", "warning"))
        self._missed += len(self._watch.missed)
        if self._watch.missed:
            self._missed_last = self._watch.missed[-1].path
        if self._missed.bit_length() > self._missed_told.bit_length() or (still and self._missed > self._missed_told):
            self._missed_told = self._missed
            what = f"{self._missed_last} was removed or replaced before it had been seen quiet for {format_duration(self._quiet_s)}"
            what += ", and was not sent"
            so_far = f" ({counted(self._missed, 'such save')} {'in all' if still else 'so far'})" if self._missed > 1 else ""
            hint = "a shorter --quiet, or a trainer that keeps more, brings them into the bucket"
            self._on_event(Message(f"{what}{so_far}; {hint}", "warning"))

    def activity(self) -> object:
        """A value that changes when a file below the roots does, as of the last look."""
        return [(one.root, {found.path: found.stats for found in one.found}, one.others) for one in self._looks]

    def unfinished(self) -> list[Found]:
        """What looks like a save and was not finished."""
        return self._watch.unfinished(self._looks)

    def _hand_over(self, found: Found, *, still: bool) -> None:
        if still and (last := self._shorter_than_before(found)) is not None:
            self._run._begin()[1].prune_no_more()
            text = f"the last file of {found.path}, {last}, is shorter than in the save before; if the command was killed in its middle"
            text += " (a pipe hides that), it is cut. It is sent, and nothing older is removed now"
            self._on_event(Message(text, "warning"))
        step = found.step()
        self._step = max(self._step, step) if step is not None else self._step + 1
        epoch, metrics = found.told()
        self.unsaved.pop(found.path, None)
        made_with: dict[str, str | int | None] = {
            SAVED_AS: found.name,
            "world_size": self._ranks_of(found),
            "base_model": base_of_files(found.path),
        }
        if len(self.roots) > 1:
            made_with[SAVED_IN] = next(name for name, root in self.roots.items() if root == found.root)
        try:
            self._run.submit(
                found.path,
                step=step if step is not None else self._step,
                epoch=epoch,
                metrics=metrics,
                final=still or found.path in self._old,  # no training is ahead of the network: there is no reason to drop any
                holding=found.sizes,
                made_with=made_with,
            )
        except SourceError as error:
            # While the command runs it changed, or is being rotated away: what is there is looked at again.
            if still and found.path.exists():
                self.unsaved[found.path] = str(error)
            return
        except UsageError as error:
            if not found.path.exists():  # rotated away just now
                self._watch.missed.append(found)
                return
            self._on_event(Message(f"{found.path} is not saved: {error}", "error"))
        except CheckpointError as error:  # of earlier saves; this one is pinned
            if not isinstance(error, UploadFailed | Fenced):  # those were told when they happened
                self._on_event(Message(str(error), "error"))
        except StagekitError as error:
            self.unsaved[found.path] = str(error)
            if found.path not in self._told:
                self._told.add(found.path)
                self._on_event(Message(f"{found.path} is not saved yet, and is tried again: {error}", "error"))
            return
        self._watch.take(found)
        self._before[found.root, _shape(found.name)] = found.sizes
        self.submitted += 1

    def _is_over(self) -> bool:
        return self._left_s() <= 0

    def _ranks_of(self, found: Found) -> int | None:
        if self._world_size is not None or found.kind != "trainer":
            return self._world_size
        states = [name for name in found.stats if name.startswith("rng_state")]
        return len(states) or None

    def _doubt(self, found: Found, cut_ns: float | None) -> str | None:
        """Why what was found when the command had ended is not believed to be whole; ``None`` when it is.

        A shell around a trainer may hide that it was killed (``python train.py | tee log``). So a directory whose format does not tell is
        compared with the save before it, too, when that has a name of the same kind.
        """
        if cut_ns is not None and not self._is_certain(found, cut_ns):
            return "was written just before the command was killed or failed, and nothing tells whether it is whole"
        missing = self._missing_of(found)
        return f"lacks {', '.join(missing[:3])}, which the save before it has" if missing else None

    def _missing_of(self, found: Found) -> list[str]:
        """What the save before ``found`` has and it lacks, as long as that may still come."""
        if found.tells_its_end() or self._is_begun_later(found):
            return []
        before = self._before.get((found.root, _shape(found.name)), {})
        fewer = Counter(map(_shape, before)) - Counter(map(_shape, found.stats))
        absent = sorted(name for name in before if name not in found.stats)
        return sorted(name for shape, count in fewer.items() for name in [one for one in absent if _shape(one) == shape][-count:])

    def _shorter_than_before(self, found: Found) -> str | None:
        """Its last file when that is shorter than in the save before and nothing else tells whether it is whole."""
        last = max(found.stats, key=lambda name: found.stats[name][2], default="")
        before = self._before.get((found.root, _shape(found.name)), {}).get(last, 0)
        return last if not found.tells_its_end() and found.sizes.get(last, 0) < before else None

    def _is_begun_later(self, found: Found) -> bool:
        """Whether another save was begun after the last write to ``found``."""
        last_ns = max(found.times_ns, default=0)
        others = [one for look in self._looks if look.root == found.root for one in look.found if one.path != found.path]
        return any(min(one.times_ns, default=0) > last_ns for one in others)

    def _is_certain(self, found: Found, cut_ns: float) -> bool:
        """Whether nobody was in the middle of ``found`` at ``cut_ns``: its format tells, or it was written later, or a later save was begun
        after it, or it had been quiet before the last sign of life here."""
        last_ns = max(found.times_ns, default=0)
        if found.tells_its_end() or last_ns > cut_ns:
            return True
        return self._is_begun_later(found) or self._last_write_ns() - last_ns >= self._quiet_s * 1e9

    def _last_write_ns(self) -> int:
        stats = [stat for one in self._looks for found in one.found for stat in found.stats.values()]
        stats += [stat for one in self._looks for stat in one.others.values()]
        stats += [stat for path in self._printed if (stat := stat_of(path)) is not None]
        return max((time_ns for _, _, time_ns in stats), default=0)

    def _offer(self, looks: Sequence[Look], *, still: bool) -> None:
        if self._logs is None:
            return
        files = {path.name: path for path in self._printed}
        names = {root: name for name, root in self.roots.items()}
        now_s = self._clock()
        for one in looks:
            for path, (_, size, time_ns) in one.others.items():
                if is_due([size], quiet=still or now_s - time_ns / 1e9 >= self._quiet_s):
                    files[f"{names[one.root]}/{path}"] = one.root / path
        self._logs.offer(files)


@dataclass(slots=True)
class _Half:
    """The first half of the time that is left, from the moment on at which somebody has said how much that is."""

    left_s: Callable[[], float]
    first_s: float = math.inf

    def is_over(self) -> bool:
        left_s = self.left_s()
        if self.first_s == math.inf:
            self.first_s = left_s
        return left_s <= self.first_s / 2 < math.inf


def _unreadable(path: Path, why: str) -> str:
    return f"{path} cannot be read ({why}), so whether what lies there is in the bucket cannot be told"


def _is_known(found: Found, step: int | None, held: Collection[Checkpoint], waiting: Collection[Entry]) -> bool:
    """Whether the run holds ``found``, or will. Sizes tell for a save that has a step; one that has none may be another with the same."""
    sizes = found.sizes
    if step is not None and any(one.step == step and {file.path: file.size for file in one.files} == sizes for one in waiting):
        return True
    known = [one for one in held if step in (None, one.step) and {record.path: record.bytes for record in one.files} == sizes]
    if step is not None or not known:
        return bool(known)
    digests = _digests(found)
    return any(_digests_of(one) == digests for one in known)


def _digests(found: Found) -> dict[str, str]:
    base = found.path if found.path.is_dir() else found.path.parent
    return {path: file_sha256(base / path) for path in found.stats}


def _digests_of(checkpoint: Checkpoint) -> dict[str, str]:
    return {record.path: record.sha256 for record in checkpoint.files}
