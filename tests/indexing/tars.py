"""Tars as other programs write them."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterable
from typing import Any

from stagekit.store.base import Store

Named = Iterable[tuple[str, bytes]]


def tar(files: Named, *, format: int = tarfile.USTAR_FORMAT, mtime: float = 1_600_000_000, **attributes: Any) -> bytes:
    """What Python's ``tarfile``, and with it ``webdataset.TarWriter``, makes of these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w|", format=format) as archive:
        for number, (name, data) in enumerate(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode, entry.uname, entry.gname = len(data), mtime + number, 0o444, "bigdata", "bigdata"
            for attribute, value in attributes.items():
                setattr(entry, attribute, value)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def samples(first: int, count: int, *, largest: int = 3000, seed: int = 0) -> list[tuple[str, bytes]]:
    """Two files a sample, an odd one with an upper-case extension."""
    rng = random.Random(seed + first)
    found = []
    for number in range(first, first + count):
        found.append((f"{number:06d}.cls", str(number % 10).encode()))
        found.append((f"{number:06d}.{'JPG' if number % 2 else 'jpg'}", rng.randbytes(rng.randrange(largest))))
    return found


def expected(files: Named) -> list[dict[str, Any]]:
    """The samples that such files make."""
    found: list[dict[str, Any]] = []
    for name, data in files:
        head, _, base = name.rpartition("/")
        stem, _, field = base.partition(".")
        key = f"{head}/{stem}" if head else stem
        if not found or found[-1]["__key__"] != key:
            found.append({"__key__": key})
        found[-1][field.lower()] = data
    return found


FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def put_tars(store: Store, count: int = 3, *, each: int = 8, folder: str = "", seed: int = 0) -> list[list[tuple[str, bytes]]]:
    """``count`` tars ``shard-000000.tar``, … in turn in each format tarfile knows. Returns their files."""
    made = []
    for number in range(count):
        files = samples(number * each, each, seed=seed)
        # A time that is no whole number makes tarfile write a PAX header for every member, as old TarWriters did.
        store.put(f"{folder}shard-{number:06d}.tar", tar(files, format=FORMATS[number % 3], mtime=1_600_000_000.5))
        made.append(files)
    return made
