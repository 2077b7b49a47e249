"""Named files, wherever they lie, become samples: which are packed, which are fields of one sample, what class they have.

Files that share directory and base name up to its first dot are the fields of one sample: ``cats/a.jpg`` + ``cats/a.json`` is the sample
``cats/a`` with the fields ``jpg`` and ``json``, by WebDataset's rule. With ``labels="dir"`` the top-level directory is the class, as in
torchvision's ``ImageFolder``, and every sample gets a field ``cls`` that holds the class index as text.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..errors import KeyNotAllowed, SourceError, UsageError
from ..shards.plan import Dots, PlannedField, PlannedSample, group
from ..shards.sample import check_member, is_plain, member_name, split_name
from .base import Bad, Listing, OnBad
from .glob import matcher

TEXT = "\0"  # starts the ref of a field whose bytes are the ref itself; any other ref is a path, which cannot hold a NUL


def text_of(ref: str) -> bytes | None:
    """The bytes of a field that lies in no file (a class index); ``None`` when ``ref`` is a path."""
    return ref[1:].encode() if ref.startswith(TEXT) else None


@dataclass(frozen=True)
class FileRules:
    """Which files are packed, and how.

    - ``labels="dir"`` adds the field ``cls``: the index of the top-level directory among all of them, sorted by name.
    - ``dots`` says what ``cat.v1.jpg`` beside ``cat.v2.jpg`` means (see ``shards.plan.group``).
    - ``include`` and ``exclude`` are globs (see ``sources.glob``) on the path relative to the source; exclude wins.
    - Never packed, and counted: dot-files and what lies in dot-directories, AppleDouble files (``._x``).
    - A file that can be no field (no extension, a name that is not UTF-8 or too long for a tar) raises ``SourceError`` or
      ``KeyNotAllowed`` with the path; ``on_bad="skip"`` counts and lists it instead.
    """

    labels: Literal["dir"] | None = None
    dots: Dots = "refuse"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    on_bad: OnBad = "raise"

    def __post_init__(self) -> None:
        if self.labels not in (None, "dir"):
            raise UsageError(f"labels: {self.labels!r} is neither 'dir' nor None")
        if self.on_bad not in ("raise", "skip"):
            raise UsageError(f"on_bad: {self.on_bad!r} is neither 'raise' nor 'skip'")
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), str):
                raise UsageError(f"{name}: give a list of patterns, not one text")
            matcher(getattr(self, name))


_path = operator.itemgetter(0)


class Files:
    """Collects the files of one source and makes its listing. ``source`` is what messages call it."""

    def __init__(self, source: str, rules: FileRules) -> None:
        self._source = source
        self._rules = rules
        self._included = matcher(rules.include) if rules.include else None
        self._excluded = matcher(rules.exclude) if rules.exclude else None
        self._listing = Listing([])
        self._packed: list[tuple[str, int, str, int | str | None]] = []
        self._without_extension: list[str] = []
        self._top_level: set[str] = set()

    def skip(self, reason: str) -> None:
        """Count something that is left out by rule."""
        self._listing.skipped[reason] += 1

    def bad(self, path: str, reason: str) -> None:
        """Something that should have been packed and cannot be."""
        if self._rules.on_bad == "raise":
            raise SourceError(f"reading {self._source}: {path}: {reason} (--on-bad skip counts such files and goes on)")
        self._listing.bad.append(Bad(path, reason))

    def may_enter(self, path: str) -> bool:
        """Whether the file or directory at ``path``, in a directory that was entered, may be packed; counted when not."""
        if path.startswith(".", path.rfind("/") + 1):
            self.skip("AppleDouble files" if path.startswith("._", path.rfind("/") + 1) else "dot-files")
            return False
        if self._excluded is not None and self._excluded(path):
            self.skip("excluded by a pattern")
            return False
        return True

    def add_directory(self, path: str) -> None:
        """A directory that was entered. Those at the top are classes, also empty ones."""
        if "/" not in path:
            self._top_level.add(path)

    def add(self, path: str, size: int, mark: int | str | None) -> None:
        """A file of ``size`` bytes that ``may_enter``. By ``mark`` its source knows whether it is still the same."""
        if self._included is not None and not self._included(path):
            self.skip("not matched by an include pattern")
            return
        name = split_name(path)
        try:
            if name is not None and is_plain(*name):
                self._packed.append((path, size, path, mark))
                return
            check_member(path)  # first, so that no name that is not UTF-8 gets into another message
            if name is None:
                self._without_extension.append(path)
                return
            member_name(*name)
        except KeyNotAllowed as error:
            if self._rules.on_bad == "raise":
                raise KeyNotAllowed(f"reading {self._source}: {path!r}: {error} (--on-bad skip counts such files and goes on)") from None
            self._listing.bad.append(Bad(ascii(path), str(error)))
            return
        self._packed.append((path, size, path, mark))

    def listing(self) -> Listing:
        """The samples, sorted by key. Raises ``SourceError`` when there is none."""
        if self._without_extension:
            self._refuse_without_extension()
        samples = group(sorted(self._packed, key=_path), dots=self._rules.dots).samples
        if self._rules.labels == "dir":
            samples = self._labelled(samples)
        if not samples:
            raise SourceError(f"reading {self._source}: {_nothing(self._listing)}")
        self._listing.samples = sorted(samples, key=lambda sample: sample.key)
        return self._listing

    def _refuse_without_extension(self) -> None:
        paths = sorted(self._without_extension)
        if self._rules.on_bad == "skip":
            self._listing.bad += [Bad(path, "no extension, so it has no field name") for path in paths]
            return
        one = len(paths) == 1
        raise SourceError(
            f"reading {self._source}: {_some(paths)} {'has' if one else 'have'} no extension, so there is no field name for "
            f"{'it' if one else 'them'}; leave {'it' if one else 'such files'} out with --exclude {paths[0]!r}, or all of them "
            "with --on-bad skip"
        )

    def _labelled(self, samples: Iterable[PlannedSample]) -> tuple[PlannedSample, ...]:
        """The samples with the index of their class; the classes are torchvision's: all top-level directories, sorted by name."""
        classes = self._listing.classes = tuple(sorted(self._top_level))
        index = {name: str(number) for number, name in enumerate(classes)}
        used: set[str] = set()
        labelled = []
        for sample in samples:
            top, slash, _ = sample.fields[0].ref.partition("/")
            if not slash:
                self.bad(
                    sample.fields[0].ref, "it lies in no class directory, and labels='dir' takes the class from the top-level directory"
                )
                continue
            own = next((field.ref for field in sample.fields if field.field == "cls"), None)
            if own is not None:
                raise SourceError(
                    f"reading {self._source}: {own} is the field cls already, and labels='dir' would add a second one to its sample; "
                    "shard without labels, or leave such files out with --exclude '*.cls'"
                )
            used.add(top)
            labelled.append(PlannedSample(sample.key, (*sample.fields, PlannedField("cls", len(index[top]), TEXT + index[top]))))
        empty = [name for name in classes if name not in used]
        if empty:
            self._listing.notes.append(f"{_some(empty)}: no sample in {'this class' if len(empty) == 1 else 'these classes'}")
        return tuple(labelled)


def _some(paths: list[str]) -> str:
    shown = ", ".join(paths[:5])
    return shown if len(paths) <= 5 else f"{shown} and {len(paths) - 5} more"


def _nothing(listing: Listing) -> str:
    reasons = [f"{count} {reason}" for reason, count in sorted(listing.skipped.items())]
    reasons += [f"{len(listing.bad)} that could not be packed"] if listing.bad else []
    left = f" (left out: {', '.join(reasons)})" if reasons else ""
    return f"there is no file to pack in it{left}; name the folder that holds the raw files"
