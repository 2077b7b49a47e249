"""``ShardWriter``: samples made by a program, published as one data set."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..config import StoreConfig
from ..errors import DuplicateKey, PublishError, ShardError, StoreError, UsageError
from ..progress import Message, Progress, Stage, Subscriber, ignore
from ..shards.archive import END, member_bytes
from ..shards.index import FieldTotals, ShardBuilder
from ..shards.manifest import WIDS, Manifest, ShardRecord, blocks_name, index_name, samples_name, shard_name
from ..shards.plan import near_duplicates
from ..shards.sample import encode_field, member_name
from ..store import Where, open_store
from ..store.base import Store
from ..transfer.put import ObjectWriter, Stored, put_object
from ..units import counted, parse_size
from .begun import note_begun, note_ended
from .claim import confirm_claim, read_claim, release_claim
from .destination import commit, confirm_objects, enter, holds_another, look
from .outline import near_duplicate_notes, overhead_notes, oversized_notes
from .sending import tar_writer

if TYPE_CHECKING:
    from ..dataset import Dataset

_REPORT_EVERY_BYTES = 2**20
_STREAM = "stream-"  # how the plan of a writer starts: nobody knows what will be written, so no two writers have the same plan


class ShardWriter:
    """Write samples one by one into shards at ``dest``; a ``with`` block that ends normally publishes them.

    ::

        with stagekit.ShardWriter("s3://bucket/digits") as writer:
            writer.write({"__key__": "a", "txt": "one", "cls": 1})
        writer.dataset

    The data set is there completely or not at all: an exception inside the block publishes nothing and removes what was sent, and a
    process that is killed leaves shards without a manifest, which the next ``ShardWriter`` there removes once it is sure that the first
    one is dead (else it raises ``PublishError``, and ``takeover=True`` decides). A destination that holds a data set is refused.

    Samples stay in the order in which they are written. A new shard starts where ``shard_size`` (headers and padding included) or
    ``samples_per_shard`` would be exceeded. Values are bytes, or what their field's extension stands for: ``shards.sample.encode_field``
    has the table. Names that start with ``__`` other than ``__key__`` are not stored, as with WebDataset's own writer. That is reported at
    the end, and so are a large overhead, samples larger than a shard, and keys that are easily mixed up.
    """

    def __init__(
        self,
        dest: Where,
        *,
        shard_size: str | int = "256MiB",
        samples_per_shard: int | None = None,
        takeover: bool = False,
        store: StoreConfig | None = None,
        on_event: Subscriber = ignore,
    ) -> None:
        self._shard_size = parse_size(shard_size, name="shard_size")
        if self._shard_size < 1:
            raise UsageError(f"shard_size: {shard_size!r} is no size for a shard")
        if samples_per_shard is not None and samples_per_shard < 1:
            raise UsageError(f"samples_per_shard: {samples_per_shard} is below 1")
        self._samples_per_shard = samples_per_shard
        self._takeover = takeover
        self._dest = dest
        self._config = store
        self._on_event = on_event
        self._plan = _STREAM + uuid.uuid4().hex
        self._store: Store | None = None
        self._open: _OpenShard | None = None
        self._keys: set[str] = set()
        self._oversized: list[str] = []
        self._left_out: set[str] = set()
        self._records: list[ShardRecord] = []
        self._objects: list[Stored] = []
        self._fields: dict[str, FieldTotals] = {}
        self._largest_block = 0
        self._bytes = self._reported_bytes = 0
        self._failed = False
        self._dataset: Dataset | None = None

    @property
    def dataset(self) -> Dataset:
        """What was published. Available once the block has ended without an exception."""
        if self._dataset is None:
            raise UsageError("a ShardWriter's data set is there when its with-block has ended without an exception")
        return self._dataset

    def __enter__(self) -> Self:
        if self._store is not None:
            raise UsageError("a ShardWriter writes one data set; make another one for the next")
        store = open_store(self._dest, self._config, on_event=self._on_event)
        found = look(store)
        if found.manifest is not None:
            raise holds_another(store, found.manifest, "a ShardWriter only writes new ones")
        claim = read_claim(store)
        # Nothing can be continued from a writer that died, so there is nothing to decide.
        abandoned = claim is not None and claim.plan.startswith(_STREAM) and claim.state() == "dead"
        enter(store, self._plan, found, takeover=self._takeover or abandoned)
        note_begun(store.location, self._config)
        self._store = store
        return self

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append one sample: ``__key__`` (a text, unique in the data set) and at least one field.

        Raises ``DuplicateKey``, ``KeyNotAllowed``, or ``ShardError`` for a value that cannot be stored; the sample is then not written,
        and the next one may be. A failure of the store raises at this or a later call, and then for good.
        """
        if self._store is None or self._dataset is not None:
            raise UsageError("write into a ShardWriter inside its with-block: with ShardWriter(dest) as writer: writer.write(…)")
        if self._failed:
            raise PublishError(
                f"publishing to {self._store.location}: an earlier sample failed while it was sent, so nothing will be published"
            )
        if not isinstance(sample, Mapping):
            raise ShardError(
                f"a sample is a mapping such as {{'__key__': 'a', 'txt': 'one'}}, and not of the type {type(sample).__name__}; give it "
                "a '__key__' and a name to each field"
            )
        key = sample.get("__key__")
        if not isinstance(key, str):
            raise ShardError(f"a sample needs a '__key__' that is a text, not {key!r}")
        if key in self._keys:
            raise DuplicateKey(f"the key {key!r} was written before; give each sample its own key")
        fields = {name: encode_field(name, value, key=key) for name, value in sample.items() if self._is_field(name, key)}
        if not fields:
            raise ShardError(f"the sample {key!r} has no field; a shard cannot hold it")
        size = sum(member_bytes(member_name(key, name), len(data)) for name, data in fields.items())
        self._failed = True  # until the sample is through: what was passed on cannot be taken back
        if self._open is not None and self._is_full(self._open.builder, size):
            self._close_shard()
        if self._open is None:
            self._open = _OpenShard(self._store, shard_name(len(self._records)))
        self._open.write(key, fields)
        self._keys.add(key)
        if size + len(END) > self._shard_size:
            self._oversized.append(key)
        self._bytes += size
        self._failed = False
        if self._bytes - self._reported_bytes >= _REPORT_EVERY_BYTES:
            self._reported_bytes = self._bytes
            self._on_event(Progress("shard", self._bytes, note=counted(len(self._keys), "sample")))

    def _is_field(self, name: object, key: str) -> bool:
        """Whether a name of a sample is that of a field; what is about the sample is left out, and told at the end."""
        if not isinstance(name, str):
            raise ShardError(f"the sample {key!r} has a field named {name!r}; a field's name is a text, an extension such as 'txt'")
        if not name.startswith("__"):
            return True
        if name != "__key__":
            self._left_out.add(name)
        return False

    def _is_full(self, builder: ShardBuilder, added: int) -> bool:
        return builder.bytes + added > self._shard_size or builder.samples == self._samples_per_shard

    def _close_shard(self) -> None:
        assert self._open is not None
        record, objects, fields, largest = self._open.finish()
        self._open = None
        self._records.append(record)
        self._objects += objects
        self._largest_block = max(self._largest_block, largest)
        for name, totals in fields.items():
            before = self._fields.get(name, (0, 0))
            self._fields[name] = FieldTotals(before[0] + totals.samples, before[1] + totals.bytes)
        self._on_event(Stage("shard", record.name))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._publish()
            else:
                self._abandon(error)
        finally:
            self._failed = True

    def _publish(self) -> None:
        from ..dataset import Dataset

        assert self._store is not None
        store = self._store
        try:
            if self._failed:
                raise PublishError(f"publishing to {store.location}: a sample failed while it was sent, so nothing was published")
            if self._open is not None:
                self._close_shard()
            if not self._records:
                raise PublishError(f"publishing to {store.location}: no sample was written; a data set has at least one")
            confirm_claim(store, self._plan)
            confirm_objects(store, self._objects)
            commit(store, Manifest(tuple(self._records), self._fields, self._largest_block), ())
            note_ended(store.location)
        except BaseException as error:
            self._abandon(error)
            raise
        for note in self._notes():
            self._on_event(Message(note, "warning"))
        self._on_event(Progress("shard", self._bytes, self._bytes, note=counted(len(self._keys), "sample"), finished=True))
        self._dataset = Dataset(self._dest, store=self._config)

    def _notes(self) -> Iterator[str]:
        payload = sum(totals.bytes for totals in self._fields.values())
        yield from overhead_notes(payload, sum(record.bytes for record in self._records), sum(one.samples for one in self._fields.values()))
        yield from oversized_notes(self._oversized, self._shard_size)
        yield from near_duplicate_notes(near_duplicates(self._keys))
        if self._left_out:
            yield (
                f"left out: {', '.join(sorted(self._left_out))}; names that start with two underscores belong to the sample itself. "
                "Rename what is to be kept"
            )

    def _abandon(self, error: BaseException) -> None:
        """Take back what was sent: without its manifest nobody can use it."""
        assert self._store is not None
        if self._open is not None:
            self._open.abandon(error)
            self._open = None
        with suppress(StoreError):  # what the store does not let us remove is removed by the next writer
            store = open_store(self._dest, self._config, retry_s=5.0)
            claim = read_claim(store)
            if claim is None or claim.plan != self._plan:
                return
            for number in range(len(self._records) + 1):
                name = shard_name(number)
                for key in (blocks_name(name), samples_name(name), index_name(name), name):
                    store.delete(key)
            store.delete(WIDS)
            release_claim(store)
            note_ended(store.location)


class _OpenShard:
    """The shard that samples are being added to."""

    def __init__(self, store: Store, name: str) -> None:
        self.builder = ShardBuilder()
        self._store = store
        self._name = name
        self._upload: AbstractContextManager[ObjectWriter] = tar_writer(store, name, self.builder)
        self._writer = self._upload.__enter__()

    def write(self, key: str, fields: Mapping[str, bytes]) -> None:
        for piece in self.builder.sample(key, ((name, len(data), (data,)) for name, data in fields.items())):
            self._writer.write(piece)

    def finish(self) -> tuple[ShardRecord, list[Stored], Mapping[str, FieldTotals], int]:
        """Send what is left, then the side files."""
        for piece in self.builder.finish():
            self._writer.write(piece)
        self._upload.__exit__(None, None, None)
        built = self.builder.result
        stored = [
            self._writer.stored,
            put_object(self._store, index_name(self._name), built.index),
            put_object(self._store, samples_name(self._name), built.sample_digests),
            put_object(self._store, blocks_name(self._name), built.table.to_bytes()),
        ]
        return ShardRecord.of(self._name, built), stored, built.fields, built.table.largest

    def abandon(self, error: BaseException) -> None:
        """Leave nothing visible under the tar's name."""
        with suppress(StoreError):  # an abort that does not get through; the error that led here is the one to tell
            self._upload.__exit__(type(error), error, error.__traceback__)
