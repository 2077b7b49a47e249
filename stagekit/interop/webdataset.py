"""WebDataset's pipelines over Stagekit's reader, and ``s3://`` for WebDataset itself."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import MissingExtra, UsageError
from ..location import Location
from ..store import open_store
from ..store.base import Data
from ..transfer.fetch import PIECE, fetch_pieces

if TYPE_CHECKING:
    from ..torch.plan import Source

_CONNECTIONS = 4


def webdataset(source: Source, **options: Any) -> Any:
    """A pipeline of the package ``webdataset`` over the samples of the data set at ``source``, each once an epoch.

    It has all methods that ``wds.WebDataset`` has behind the reading (``.shuffle()``, ``.decode()``, ``.to_tuple()``, ``.batched()`` and so
    on), and goes into ``wds.WebLoader`` or a ``DataLoader``. A sample is ``{"__key__": key, field: bytes, …}``, as that package reads it,
    without ``__url__``. Every byte was compared with its digest: damage raises ``CorruptShard``, and an epoch never just ends early.

    Ranks and ``DataLoader`` workers each read their own samples, so it wants no ``split_by_node`` and no ``split_by_worker``. Every
    iteration is the next epoch and has another order of blocks, before any ``.shuffle()`` of the pipeline. Its first stage, ``.stage(0)``,
    is the ``stagekit.torch.StreamDataset`` that reads: it has ``set_epoch()``, ``receipt``, and ``len()`` in samples of this rank.

    :param source: as for ``StreamDataset``: URL, directory, open store, ``Dataset``, ``Mix``, or the names of plain tars
    :param options: those of ``StreamDataset`` without ``decode`` and ``transform``, which the pipeline has methods for. Give
        ``batch_size`` the number that ``.batched()`` gets, so that workers get whole batches; ``drop_last=False`` also gives the last
        samples, of which ranks may have one more or less

    Example::

        pipeline = stagekit.interop.webdataset("s3://bucket/digits", batch_size=32).decode("pil").to_tuple("png", "cls").batched(32)
    """
    for name, method in (("decode", ".decode()"), ("transform", ".map()")):
        if name in options:
            raise UsageError(f"{name}: a WebDataset pipeline does that itself; leave it out, and append {method}")
    try:
        from webdataset import FluidWrapper
    except ImportError as error:
        raise MissingExtra.of("webdataset", "webdataset", "stagekit.interop.webdataset") from error
    from ..torch import StreamDataset

    register()
    return FluidWrapper(StreamDataset(source, decode=None, **options))


def register() -> None:
    """Let WebDataset open ``s3://`` URLs. A handler that is there already, such as AIStore's, stays."""
    from webdataset.gopen import gopen_schemes

    gopen_schemes.setdefault("s3", gopen)


def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **_: Any) -> BinaryIO:
    """The object at ``url``, to be read from its beginning: in ranges of 8 MiB, four at the same time, as endpoint and keys in the
    environment lead there.

    An object that is cut or replaced while it is read is an error. Its bytes are not compared with digests, since a tar alone has none:
    ``webdataset()`` does that. Raises ``UsageError`` for any mode but reading.
    """
    if mode != "rb":
        raise UsageError(
            f"writing {url} through WebDataset is refused: whatever stops the writer would leave a cut tar that looks finished. Use "
            "stagekit.ShardWriter or `stagekit shard`"
        )
    location = Location.parse(url)
    store = open_store(location.parent)
    info = store.head(location.name)
    pieces = fetch_pieces(store, location.name, size=info.size, etag=info.etag, threads=_CONNECTIONS)
    return io.BufferedReader(_Pieces(pieces, url), buffer_size=max(bufsize, PIECE // 8))


class _Pieces(io.RawIOBase):
    """A file that is read once, in order. Closing it, or dropping it, ends the fetching."""

    def __init__(self, pieces: Iterator[Data], name: str) -> None:
        self.name = name
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # whatever has a writable buffer; the name for that came with Python 3.12
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def close(self) -> None:
        self._left = memoryview(b"")
        self._pieces.close()  # type: ignore[attr-defined]  # a generator, whose end closes its connections
        super().close()
