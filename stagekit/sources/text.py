"""Text files as documents for language models: one file, one sample, one field ``txt``."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..errors import SourceError
from ..location import Location
from ..shards.plan import PlannedSample
from ..store.base import Data
from .base import Bad, Listing, OnBad, Payload
from .files import FileRules
from .folder import FolderSource

SUFFIX = ".txt"
_LOOK = 64 * 1024


@dataclass(frozen=True)
class TextSource:
    """The ``.txt`` file at ``path``, or all of them in the folder ``path``. Other files are counted.

    Blank documents (white space alone, or nothing) are left out and counted. A document that is not UTF-8 raises ``SourceError`` with
    path and position; ``on_bad="skip"`` counts and lists it instead. Dots in a file's name become underscores in its key.
    """

    path: str
    on_bad: OnBad = "raise"

    @property
    def name(self) -> str:
        return self.path

    @property
    def location(self) -> Location:
        return Location.parse(self.path)

    @property
    def readers(self) -> int:
        return 1

    @property
    def _folder(self) -> FolderSource:
        if os.path.isdir(self.path):
            return FolderSource(self.path, FileRules(dots="rewrite", include=("*.[tT][xX][tT]",), on_bad=self.on_bad))
        folder, name = os.path.split(self.path)
        literal = "".join(f"[{character}]" if character in "*?[" else character for character in name)
        return FolderSource(folder, FileRules(dots="rewrite", include=(literal,), on_bad=self.on_bad))

    def listing(self) -> Listing:
        folder = self._folder
        listing = folder.listing()
        if folder.path != self.path:
            listing.skipped.clear()  # what else lies beside the one file that was named is nobody's question
        samples: list[PlannedSample] = []
        for sample in listing.samples:
            path = os.path.join(folder.path, sample.fields[0].ref)
            try:
                blank = _is_blank(path)
            except OSError as error:
                if self.on_bad == "raise":
                    raise SourceError(f"reading {path}: {error.strerror} (--on-bad skip counts such files and goes on)") from error
                listing.bad.append(Bad(path, error.strerror or str(error)))
                continue
            if blank:
                listing.skipped["blank documents"] += 1
            else:
                samples.append(sample)
        if not samples:
            raise SourceError(f"reading {self.path}: every document in it is blank; name the folder that holds the text")
        listing.samples = samples
        return listing

    def read(self, sample: PlannedSample) -> Payload:
        folder = self._folder
        ((name, size, pieces),) = folder.read(sample)
        path = os.path.join(folder.path, sample.fields[0].ref)
        if isinstance(pieces, tuple):
            return [(name, size, tuple(_utf8(path, pieces)))]
        return [(name, size, _utf8(path, pieces))]


def _is_blank(path: str) -> bool:
    with open(path, "rb") as file:  # noqa: PTH123
        while data := file.read(_LOOK):
            if data.strip():
                return False
    return True


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
