"""Files in MosaicML's format that lie on this machine from an earlier run: compared with the index before they are read.

A power cut, a bad disk or somebody else on a shared volume leaves bytes that no download will look at again. Sizes are compared when a
dataset is made, bytes before the first sample of a shard is read in a process: a cache of a terabyte is not read before training starts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CorruptShard


@dataclass(frozen=True)
class FileFacts:
    """What an index says of a file. ``unpacked`` is the name of the file that a compressed one becomes."""

    size: int
    hashes: Mapping[str, str]
    unpacked: str | None = None


def difference(path: Path, facts: FileFacts) -> str | None:
    """How a file differs from what its index says: its size, and one hash where there are any. ``None`` when it does not.

    Raises ``FileNotFoundError`` where there is no file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != facts.size:
            return f"expected {facts.size} bytes, found {size}"
        if not facts.hashes:
            return None
        name = "sha256" if "sha256" in facts.hashes else next(iter(facts.hashes))
        if name in hashlib.algorithms_guaranteed:
            found = hashlib.file_digest(file, name).hexdigest()
        else:
            from streaming.base.hashing import get_hash

            found = get_hash(name, file.read())
    return None if found == facts.hashes[name] else f"expected {name} {facts.hashes[name]}, found {found}"


def remove_unlike(root: Path, files: Mapping[str, FileFacts]) -> None:
    """Remove the files below ``root`` that cannot be what ``files`` says of them.

    That is by size; of compressed files that are still to be unpacked also by their bytes, as nobody looks at those later.
    """
    for name, facts in files.items():
        with suppress(FileNotFoundError):
            if (root / name).stat().st_size != facts.size:
                (root / name).unlink()
    for name, facts in files.items():
        if facts.unpacked is not None and not (root / facts.unpacked).exists():
            _remove_damaged(root / name, facts)


def compare_before_reading(shards: Iterable[Any], *, again: bool) -> None:
    """Have each of MosaicML's ``shards`` whose files are here compared before this process reads its first sample.

    What differs is removed and fetched once more, or where there is nowhere to fetch it from (not ``again``) raises ``CorruptShard``.
    """
    for shard in shards:
        folder = Path(shard.dirname, shard.split or "")
        pairs = [
            tuple((folder / file.basename, FileFacts(file.bytes, file.hashes)) for file in pair if file is not None)
            for pair in shard.file_pairs
        ]
        if any(path.exists() for (path, _), *_ in pairs):
            shard.get_sample_data = _Comparing(shard, pairs, again)


class _Comparing:
    """Stands where a shard has its ``get_sample_data``, for its first call in each process. Can be pickled, as workers need it.

    ``pairs`` are its files, each followed by the compressed one that it may have been unpacked from.
    """

    def __init__(self, shard: Any, pairs: Sequence[tuple[tuple[Path, FileFacts], ...]], again: bool) -> None:
        self._shard, self._pairs, self._again = shard, pairs, again

    def __call__(self, number: int) -> bytes:
        for (path, facts), *compressed in self._pairs:
            if not self._again:
                problem = difference(path, facts)
                if problem is not None:
                    raise CorruptShard(f"reading {path}: {problem}; the file is damaged, fetch or make the data set anew")
            elif (problem := _remove_damaged(path, facts)) is not None:
                for packed in compressed:  # it would be unpacked next
                    _remove_damaged(*packed)
                # For this, MosaicML's package has the shard fetched, and asks again.
                raise FileNotFoundError(f"reading {path}: {problem}; the file was damaged, and is fetched again")
        vars(self._shard).pop("get_sample_data", None)
        data: bytes = self._shard.get_sample_data(number)
        return data


def _remove_damaged(path: Path, facts: FileFacts) -> str | None:
    """Remove the file when it differs from ``facts``, and return how. Not one that another process has put there meanwhile."""
    try:
        before = path.stat()
        problem = difference(path, facts)
        now = path.stat()
        if problem is not None and (now.st_ino, now.st_ctime_ns) == (before.st_ino, before.st_ctime_ns):
            path.unlink()
        return problem
    except FileNotFoundError:
        return None
