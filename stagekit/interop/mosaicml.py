"""MosaicML's ``StreamingDataset``, whose files come through Stagekit's store."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config import StoreConfig, cache_directory
from ..errors import BadDigest, ManifestError, MissingExtra, NotFound, UsageError
from ..location import Location
from ..mounts import refuse_mount
from ..progress import Subscriber, ignore
from ..store import open_store
from ..store.base import Store
from ..transfer.fetch import fetch_file, fetch_object
from .leftovers import directories_in_use, mark, remove_leftovers, remove_unfinished
from .reused import FileFacts, compare_before_reading, difference, remove_unlike

_INDEX = "index.json"


def mosaicml(
    source: str | os.PathLike[str] | Location | Sequence[Any],
    local: str | os.PathLike[str] | None = None,
    *,
    split: str | None = None,
    dataset: Any = None,
    store: StoreConfig | None = None,
    on_event: Subscriber = ignore,
    **options: Any,
) -> Any:
    """MosaicML's own ``StreamingDataset`` over the data set in its format at ``source``, with every file fetched through Stagekit's store.

    Endpoint, credentials and retries are those of everything else here. A file that arrives is compared with the size and the hash in
    ``index.json`` (sha-256, or whichever hash is there), fetched once more when it differs, then ``BadDigest``; it gets its name once it is
    whole. What lies in ``local`` from an earlier run is compared before it is used, and fetched again where it differs: sizes now, bytes
    in each process before it reads the first sample of a shard. In a source that is read where it lies, damage raises ``CorruptShard``.
    All else is MosaicML's: order, shuffling, ``state_dict()``, the cache and its limit, ``StreamingDataLoader``. Other datasets in the
    process, and their downloads, stay as they are.

    What a killed run left in shared memory is removed first, where it is certain that no process has it any more; what belongs to a run
    that lives is never touched. The same ``local`` serves the next run, and what is there already is not fetched again. Raises
    ``UsageError`` when ``local`` holds another data set's index, or is in use by another dataset that lives, and ``ManifestError`` when
    there is no index.

    :param source: URL or directory of a data set in MosaicML's format, made by ``stagekit shard --format mds`` or by MosaicML; or the
        ``streaming.Stream`` objects of several, each made with its own ``remote=`` and ``local=``
    :param local: where files are kept on this machine; by default a directory of this data set's own below ``~/.cache/stagekit/mosaicml``.
        A source that is a directory is read where it lies unless ``local`` is given
    :param dataset: a subclass of ``StreamingDataset``, called with ``streams=`` and ``options``
    :param options: those of ``StreamingDataset``: ``batch_size=``, ``shuffle=``, ``cache_limit=``, …

    Example::

        dataset = stagekit.interop.mosaicml("s3://bucket/digits-mds", batch_size=32, shuffle=True)
        loader = streaming.StreamingDataLoader(dataset, batch_size=32)
    """
    try:
        import streaming
        from streaming.base.constant import SHM_TO_CLEAN
    except ImportError as error:
        raise MissingExtra.of("mosaicml", "mosaicml-streaming", "stagekit.interop.mosaicml") from error
    if isinstance(source, str | os.PathLike | Location):
        streams = [_stream(streaming.Stream, Location.parse(source), local, split or "", store, on_event)]
    elif local is not None:
        raise UsageError("local: each of several streams has a local directory of its own; give it to streaming.Stream(local=…)")
    else:
        streams = list(source)
        if split is not None:
            options = {**options, "split": split}
        for stream in streams:
            if stream.remote is not None:
                _feed(stream, Downloads.of(stream.remote, stream.split or split or "", stream.local, store, on_event))
    with _together() as leads:
        if leads:
            remove_leftovers(SHM_TO_CLEAN)
            for stream in streams:
                if stream.remote is not None:  # what lies here already may be read by any number
                    directory = os.path.abspath(os.path.join(stream.local, stream.split or split or ""))
                    _check_free(directory)
                    remove_unfinished(Path(directory))
                    stream._downloader.remove_unlike()
        _barrier()
        made = (dataset or streaming.StreamingDataset)(streams=streams, **options)
    for stream, begin, count in zip(made.streams, made.shard_offset_per_stream, made.shards_per_stream, strict=True):
        compare_before_reading(made.shards[begin : begin + count], again=stream.remote is not None)
    background = _Background(made)
    made.on_exception, made._each_sample_id, made.prepare_shard = background.note, background.sample_ids, background.prepare_shard
    mark(made._shm_prefix_int)
    return made


class _Background:
    """Stands where a dataset hears of errors in its threads, where it has a shard fetched, and where it goes through its samples.

    By itself, MosaicML's package prints an error of a thread and ends the epoch there, without one; and a worker that waits for a shard
    which another one could not fetch waits for ever. Can be pickled, as workers need it.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._error: BaseException | None = None

    def note(self, future: Future[None]) -> None:
        """One of the threads has ended."""
        error = future.exception()
        if error is not None:
            self._error = error
            self._dataset._event.set()  # which ends the others, and the iteration

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Have the shard here, or let everybody who waits for it find out by themselves why it is not."""
        from streaming.base.dataset import _ShardState

        dataset = self._dataset
        try:
            type(dataset).prepare_shard(dataset, shard_id, blocking)
        except BaseException:
            if dataset._shard_states[shard_id] == _ShardState.PREPARING:
                dataset._shard_states[shard_id] = _ShardState.LOCAL  # where there is no file, whoever needs it fetches it and fails, too
            raise

    def sample_ids(self, iteration: Any) -> Iterator[int]:
        """The samples of an epoch, and behind the last one what kept the others away."""
        dataset = self._dataset
        yield from type(dataset)._each_sample_id(dataset, iteration)
        if self._error is not None:
            raise self._error


def _stream(
    kind: Any, source: Location, local: str | os.PathLike[str] | None, split: str, store: StoreConfig | None, on_event: Subscriber
) -> Any:
    """A stream of MosaicML's class ``kind`` that downloads through the store."""
    if source.is_directory:
        refuse_mount(source.local_path, "reading a data set from")
        if local is None:
            return kind(local=str(source), split=split)
    downloads = Downloads.of(str(source), split, local, store, on_event)
    # Its own constructor would ask for the package of each kind of URL, and refuses those that it does not know. So it learns of it later.
    stream = kind(local=downloads.local, split=split)
    stream.remote = downloads.remote
    _feed(stream, downloads)
    return stream


def _feed(stream: Any, downloads: Downloads) -> None:
    """Put ``downloads`` where this one stream has its own downloader."""
    if not hasattr(stream, "_downloader"):
        raise MissingExtra(
            "stagekit.interop.mosaicml needs a newer mosaicml-streaming. Install it with: pip install 'mosaicml-streaming>=0.10'"
        )
    stream._downloader = downloads


class Downloads:
    """Stands where a ``Stream`` of MosaicML's keeps its downloader, for files below ``remote``. Can be pickled, as workers need it."""

    def __init__(self, remote: str, local: str, index_key: str, index_sha256: str, files: Mapping[str, FileFacts], store: Store) -> None:
        self.remote, self.local = remote, local
        self._index_key, self._index_sha256 = index_key, index_sha256
        self._files = files
        self._store = store

    @classmethod
    def of(
        cls, remote: str, split: str, local: str | os.PathLike[str] | None, store: StoreConfig | None, on_event: Subscriber
    ) -> Downloads:
        """For the data set at ``remote``, whose index is read now. Raises as ``mosaicml`` does."""
        opened = open_store(remote, store, on_event=on_event)
        key = f"{split}/{_INDEX}" if split else _INDEX
        url = str(opened.location / key)
        try:
            data = bytes(fetch_object(opened, key))
        except NotFound as error:
            raise ManifestError(
                f"{opened.location} holds no data set in MosaicML's format: there is no {url}. Check the URL with `stagekit ls "
                f"{opened.location}`, or make it with `stagekit shard SOURCE {opened.location} --format mds`"
            ) from error
        files = files_of(data, split=split, source=url)
        digest = hashlib.sha256(data).hexdigest()
        if local is None:
            named = hashlib.sha256(f"{remote}\0{split}\0{digest}".encode()).hexdigest()[:32]
            local = cache_directory() / "mosaicml" / named
        _check_index(Path(local) / key, data, url)
        return cls(remote, os.fspath(local), key, digest, files, opened)

    def download(self, remote: str | None, local: str, timeout: float | None = None) -> None:  # noqa: ARG002
        """Have the file ``remote`` at ``local``, whole. How long that may take is the store's to say, not ``timeout``'s."""
        assert remote is not None
        key, path = remote.removeprefix(self.remote).lstrip("/"), Path(local)
        if key == self._index_key:
            path.parent.mkdir(parents=True, exist_ok=True)
            fetch_file(self._store, key, path, size=self._store.head(key).size, sha256=self._index_sha256)
        elif not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            facts = self._files.get(key)
            fetch_checked(self._store, key, path, facts or FileFacts(self._store.head(key).size, {}))

    def remove_unlike(self) -> None:
        """Remove what lies in ``local`` and cannot be what the index says, so that it is fetched again."""
        remove_unlike(Path(self.local), self._files)

    def clean_up(self) -> None:
        """Nothing is open between downloads."""


def files_of(data: bytes, *, split: str, source: str) -> dict[str, FileFacts]:
    """The files that the ``index.json`` of ``split`` lists, by their names below the data set.

    Raises ``ManifestError`` when it is no index.
    """
    try:
        files = {}
        for shard in json.loads(data)["shards"]:
            for field, part in shard.items():
                if isinstance(part, dict) and "basename" in part:
                    raw = shard["raw" + field.removeprefix("zip")] if field.startswith("zip") else None
                    unpacked = None if raw is None else os.path.join(split, raw["basename"])
                    files[os.path.join(split, part["basename"])] = FileFacts(int(part["bytes"]), dict(part.get("hashes") or {}), unpacked)
        return files
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(
            f"{source} is no index of MosaicML's format ({error!r}); check the URL, and that the data set is whole"
        ) from error


def fetch_checked(store: Store, key: str, path: Path, facts: FileFacts) -> None:
    """Write an object to ``path``, which is there whole, with the size and the hash that the index promises, or not at all.

    Raises ``BadDigest`` when they differ twice, ``InvalidReply`` for another size.
    """
    known = facts.hashes.get("sha256")
    if known is not None or not facts.hashes:
        fetch_file(store, key, path, size=facts.size, sha256=known)
        return
    found: list[str] = []
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        for _ in range(2):
            fetch_file(store, key, part, size=facts.size)
            problem = difference(part, facts)
            if problem is None:
                part.replace(path)
                return
            found.append(problem)
    finally:
        part.unlink(missing_ok=True)
    raise BadDigest(f"reading {store.location / key}: {found[0]}, and then {found[1]}; the object is damaged or was replaced")


def _check_index(path: Path, data: bytes, url: str) -> None:
    """What lies in the local directory from an earlier run must be of the same data."""
    try:
        here = path.read_bytes()
    except FileNotFoundError:
        return
    if here != data:
        raise UsageError(
            f"local: {path} is not the index at {url}: the directory holds another data set, or an earlier state of this one, which would "
            "be read in its place. Delete the directory, or give another"
        )


def _check_free(directory: str) -> None:
    if directory in directories_in_use():
        gc.collect()  # one of this process that was dropped, but not yet by the interpreter, says so when it goes
        if directory in directories_in_use():
            raise UsageError(
                f"local: {directory} is in use by another StreamingDataset, of this or another process that lives; give this one a "
                "directory of its own"
            )


@contextmanager
def _together() -> Iterator[bool]:
    """A process group for as long as the dataset is made, as MosaicML makes one. Whether this rank leads on its machine."""
    from streaming.base.distributed import dist, get_local_rank, maybe_init_dist

    made = maybe_init_dist()
    try:
        yield get_local_rank() == 0
    finally:
        if made:
            dist.destroy_process_group()


def _barrier() -> None:
    from streaming.base.distributed import barrier

    barrier()
