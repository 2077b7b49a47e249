"""Text files as documents for language models: one file, one sample, one field ``txt``."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..errors import SourceError, StoreError
from ..location import Location
from ..parallel import each
from ..shards.plan import PlannedSample
from ..store.base import Data
from .base import Bad, Listing, OnBad, Payload
from .files import FileRules, Files
from .shelf import Disk, Shelf
from .table import cannot_read, check_encoding

SUFFIX = ".txt"
_LOOK = 64 * 1024


@dataclass(frozen=True)
class TextSource:
    """All ``.txt`` files in the folder ``path``, or the one file ``path`` if ``single``. Other files are counted.

    Blank documents (white space alone, or nothing) are left out and counted. A document that is not UTF-8 raises ``SourceError`` with
    path and position; ``on_bad="skip"`` counts and lists it instead. Dots in a file's name become underscores in its key.
    """

    path: str
    on_bad: OnBad = "raise"
    shelf: Shelf = field(default_factory=Disk)
    single: bool = False

    @property
    def name(self) -> str:
        return self.path

    @property
    def location(self) -> Location:
        return Location.parse(self.path)

    @property
    def readers(self) -> int:
        return self.shelf.readers

    @property
    def _folder(self) -> str:
        return os.path.dirname(self.path) if self.single else self.path

    @property
    def _rules(self) -> FileRules:
        return FileRules(dots="rewrite", include=("*.[tT][xX][tT]",), on_bad=self.on_bad)

    def _path(self, sample: PlannedSample) -> str:
        return os.path.join(self._folder, sample.fields[0].ref)

    def listing(self) -> Listing:
        """The start of every document is read, until something is found that is not blank."""
        listing = self._alone() if self.single else self.shelf.files(self.path, self._rules).listing()
        samples: list[PlannedSample] = []
        looks = each(self._look, listing.samples, threads=self.readers) if self.readers > 1 else map(self._look, listing.samples)
        for sample, blank in zip(listing.samples, looks, strict=True):
            if isinstance(blank, Bad):
                listing.bad.append(blank)
            elif blank:
                listing.skipped["blank documents"] += 1
            else:
                samples.append(sample)
        if not samples:
            raise SourceError(f"reading {self.path}: every document in it is blank; name the folder that holds the text")
        listing.samples = samples
        return listing

    def _alone(self) -> Listing:
        try:
            stamp = self.shelf.stamp(self.path)
        except FileNotFoundError as error:
            raise cannot_read(self.path, error) from error
        files = Files(self.path, self._rules)
        files.add(os.path.basename(self.path), stamp.size, stamp.mark)
        return files.listing()

    def _look(self, sample: PlannedSample) -> bool | Bad:
        """Whether the document is blank, or why that cannot be told."""
        path, planned = self._path(sample), sample.fields[0]
        try:
            return self._is_blank(path, planned.size, planned.mark)
        except SourceError as error:
            problem: SourceError | StoreError = error
        except OSError as error:
            problem = cannot_read(path, error)
        if isinstance(problem, StoreError):
            raise problem
        if self.on_bad == "raise":
            raise SourceError(f"{problem} (--on-bad skip counts such files and goes on)")
        return Bad(path, str(problem).removeprefix(f"reading {path}: "))

    def _is_blank(self, path: str, size: int, mark: int | str | None) -> bool:
        with self.shelf.open(path, straight=False, mark=mark, size=size) as file:
            begins = True
            while data := file.read(_LOOK):
                if begins:
                    check_encoding(path, data)
                    begins = False
                if data.strip():
                    return False
        return True

    def read(self, sample: PlannedSample) -> Payload:
        ((name, size, pieces),) = self.shelf.files(self._folder, self._rules).read(sample)
        path = self._path(sample)
        if isinstance(pieces, tuple):
            return [(name, size, tuple(_utf8(path, pieces)))]
        return [(name, size, _utf8(path, pieces))]


def _utf8(path: str, pieces: Iterable[Data]) -> Iterator[Data]:
    """The pieces as they are; ``SourceError`` at the first byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = 0
    for piece in pieces:
        waiting = len(decoder.getstate()[0])
        _decode(decoder, path, piece, before - waiting)
        before += len(piece)
        yield piece
    _decode(decoder, path, b"", before - len(decoder.getstate()[0]), final=True)


def _decode(decoder: codecs.IncrementalDecoder, path: str, data: Data, begin: int, *, final: bool = False) -> None:
    try:
        decoder.decode(bytes(data), final)
    except UnicodeDecodeError as error:
        raise SourceError(
            f"reading {path}: byte {begin + error.start + 1} of it is not UTF-8, and a document is; convert it, or count such files and "
            "go on with --on-bad skip"
        ) from None
