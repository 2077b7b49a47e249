"""A folder of this machine sent to a store: verified, resumable, and nothing there changed unless told so."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import StoreConfig
from ..errors import SourceError, UsageError
from ..location import Location
from ..mounts import refuse_mount
from ..progress import Message, Subscriber, ignore
from ..store import Where, open_store
from ..store.base import ObjectInfo, check_key
from ..transfer.bulk.base import Item, place_of
from ..transfer.bulk.builtin import Trust, same_bytes
from ..transfer.bulk.choice import EngineName, choose
from ..transfer.bulk.sending import send_items, telling_if_gone
from ..units import counted, format_size
from .landing import local_files
from .outgoing import aside, make_plan, remove
from .pull import Bar, paced, rate_of


@dataclass(frozen=True, slots=True)
class Pushed:
    """What ``push`` has put where. ``sent_bytes`` went over the network; the rest was there already, compared."""

    directory: str
    url: str
    files: int
    bytes: int
    sent_bytes: int
    replaced: int = 0
    removed: int = 0
    engine: str = "builtin"

    @property
    def line(self) -> str:
        """One sentence for people."""
        return (
            f"{self.directory} is in {self.url}: {counted(self.files, 'file')}, {format_size(self.bytes)}, "
            f"every byte verified{aside(self.bytes, self.sent_bytes, self.replaced, self.removed)}"
        )

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


def push(
    directory: str | os.PathLike[str],
    where: Where,
    *,
    engine: EngineName = "auto",
    delete: bool = False,
    limit_rate: str | float | None = None,
    store: StoreConfig | None = None,
    threads: int = 8,
    allow_mount: bool = False,
    on_event: Subscriber = ignore,
) -> Pushed:
    """Send all files of ``directory`` to the prefix ``where``, each under its own name, each verified in the store.

    Nothing that is there is changed or removed: an object with the same bytes is left, one with other bytes is refused before anything is
    sent, and others are none of its business. ``delete`` makes the prefix what the folder is, and tells first what that replaces or
    removes. Stopped at any moment, the same command sends what is missing; manifests go last, so that a copy of a data set or run counts
    only once it is whole.

    Hidden files are files: all of them go. A link to a file goes as the file; a link to a folder, a socket or a device is left out with a
    warning. ``engine`` and ``limit_rate`` are those of ``pull``.

    Raises ``MountRefused`` for a folder on a mounted bucket (copy between stores instead; ``allow_mount`` accepts it), ``SourceError``
    for a file that changes while it is read, ``UsageError`` for an object that differs, and the store's errors.

    Example: ``stagekit.push("outputs", "s3://bucket/outputs")``.
    """
    source = Path(os.path.abspath(os.path.expanduser(os.fspath(directory))))
    judged = refuse_mount(source, "pushing from", allow_mount=allow_mount)
    if judged.warning:
        on_event(Message(judged.warning, "warning"))
    bytes_per_s = rate_of(limit_rate)
    opened = paced(open_store(where, store, on_event=on_event), bytes_per_s)
    if not source.is_dir():
        if "://" in os.fspath(directory):
            raise UsageError(f"pushing {os.fspath(directory)}: it takes a folder of this machine; between stores use stagekit cp")
        raise UsageError(f"pushing {source}: it is no folder; give one that is there")
    if Location.parse(source).contains(opened.location) or opened.location.contains(Location.parse(source)):
        raise UsageError(f"pushing {source} to {opened.location}: one lies in the other; give a place elsewhere")
    items = list(_items(source, on_event))
    if not items:
        raise SourceError(f"pushing {source}: there is no file in it")
    trust = Trust()

    def is_there(item: Item, info: ObjectInfo) -> bool:
        with telling_if_gone(source / item.path):
            return same_bytes(opened, replace(item, etag=info.etag, sha256=info.sha256), (source / item.path).resolve(), trust)

    plan = make_plan(
        {info.key: info for info in opened.list()},
        items,
        is_there,
        doing=f"pushing {source} to {opened.location}",
        where=str(opened.location),
        delete=delete,
        threads=threads,
        on_event=on_event,
    )
    due = sum(item.size for item in plan.due)
    bar = Bar(f"push {source.name}", sum(item.size for item in items), on_event)
    bar.add(bar.total - due)
    chosen = choose(engine, place_of(opened), plan.due, doing=f"pushing {source}", threads=threads, bytes_per_s=bytes_per_s)
    with tempfile.TemporaryDirectory(prefix="stagekit-push-") as scratch:
        for phase in plan.phases:
            send_items(
                opened,
                phase,
                source,
                Path(scratch) / "engine",
                engine=chosen,
                threads=threads,
                on_bytes=bar.add,
                on_event=on_event,
            )
    remove(opened, plan.removed, threads=threads)
    bar.finish()
    name = chosen.name if chosen is not None and plan.due else "builtin"
    return Pushed(str(source), str(opened.location), len(items), bar.total, due, len(plan.replaced), len(plan.removed), name)


def _items(source: Path, on_event: Subscriber) -> Iterator[Item]:
    left_out: list[str] = []
    try:
        paths = sorted(local_files(source))
    except PermissionError as error:
        raise _unreadable(source, os.path.relpath(error.filename, source)) from error
    for path in paths:
        try:
            found = (source / path).stat()
        except FileNotFoundError as error:
            if (source / path).is_symlink():
                raise SourceError(f"pushing {source}: {path} is a link that leads nowhere; mend or remove it") from error
            continue  # it went away meanwhile
        except PermissionError as error:
            raise _unreadable(source, path) from error
        if stat.S_ISREG(found.st_mode):
            if not os.access(source / path, os.R_OK):
                raise _unreadable(source, path)
            try:
                key = check_key(path)
            except UsageError as error:
                raise UsageError(f"pushing {source}: {error}; rename the file, or move it out of the folder") from None
            yield Item(key, path, found.st_size)
        else:
            left_out.append(path)
    if left_out:
        on_event(
            Message(
                f"{counted(len(left_out), 'entry', 'entries')} of {source} left out, no file or a link to a folder: {', '.join(left_out)}",
                "warning",
            )
        )


def _unreadable(source: Path, path: str) -> SourceError:
    return SourceError(f"pushing {source}: {path} may not be read by this user, and nothing was sent; look at the owner and mode there")
