"""A folder of a model's files, made known to Hugging Face's cache: ``from_pretrained("org/name")`` finds it without a network.

::

    HUB/models--org--name/blobs/<sha-256>             the bytes: a hard link to the file, a symbolic link where it lies on another disk
    HUB/models--org--name/snapshots/<revision>/PATH   a link to the blob
    HUB/models--org--name/refs/main                   the revision, written last

The revision is a digest of names and contents, so the same files are the same revision wherever they come from.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config import hub_cache_directory
from ..errors import UsageError
from ..progress import Message, Subscriber, ignore
from ..transfer.put import file_sha256
from .landing import local_files

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True, slots=True)
class HubLink:
    """The model ``name`` (``org/name``) in the cache ``hub``."""

    name: str
    hub: Path

    @classmethod
    def parse(cls, name: str) -> HubLink:
        """``org/name`` in the cache that ``HF_HUB_CACHE``, ``HF_HOME`` or the default names. Raises ``UsageError`` for another shape."""
        if not _NAME.fullmatch(name) or "--" in name or ".." in name:
            raise UsageError(f"link_hf: {name!r} is no model's name; write it as from_pretrained gets it, org/name")
        return cls(name, hub_cache_directory())

    @property
    def folder(self) -> Path:
        return self.hub / f"models--{self.name.replace('/', '--')}"

    def lay_out(self, directory: Path, *, on_event: Subscriber = ignore) -> str:
        """Link the files of ``directory`` into the cache and return the revision. No byte is copied; an earlier revision stays.

        Killed halfway, ``refs/main`` still names what it named before. The links need ``directory`` where it is: on the same disk its
        files may be removed later, on another they may not, which is told.
        """
        digests = {path: file_sha256(directory / path) for path in sorted(local_files(directory)) if (directory / path).is_file()}
        revision = hashlib.sha256("".join(f"{digest} {path}\0" for path, digest in digests.items()).encode()).hexdigest()[:40]
        linked = True
        for path, digest in digests.items():
            linked = _place(directory / path, self.folder / "blobs" / digest) and linked
            shown = self.folder / "snapshots" / revision / path
            shown.parent.mkdir(parents=True, exist_ok=True)
            _replace_link(shown, Path(os.path.relpath(self.folder / "blobs" / digest, shown.parent)))
        ref = self.folder / "refs" / "main"
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = ref.with_name(f".main.{uuid.uuid4().hex}")
        fresh.write_text(revision)
        fresh.replace(ref)
        if not linked:
            on_event(Message(f"{self.folder} is on another disk than {directory}: the model is found as long as {directory} stays"))
        return revision


def _place(file: Path, blob: Path) -> bool:
    """Make ``blob`` the same bytes as ``file``. Whether it lasts without ``file``."""
    blob.parent.mkdir(parents=True, exist_ok=True)
    if blob.is_file() and not blob.is_symlink():
        return True  # its name is its digest
    fresh = blob.with_name(f".{blob.name}.{uuid.uuid4().hex}")
    try:
        os.link(file.resolve(), fresh)
        hard = True
    except OSError:
        fresh.symlink_to(file.resolve())
        hard = False
    fresh.replace(blob)
    return hard


def _replace_link(link: Path, to: Path) -> None:
    with suppress(OSError):
        if link.readlink() == to:
            return
    fresh = link.with_name(f".{link.name}.{uuid.uuid4().hex}"[:200])
    fresh.symlink_to(to)
    fresh.replace(link)
