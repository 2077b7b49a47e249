"""What a source gives, looked at in every way in which it may be read."""

from __future__ import annotations

import pickle

from stagekit.errors import SourceError
from stagekit.shards.index import Batch
from stagekit.shards.plan import SampleRange, plan
from stagekit.sources.base import InOrder, Listing, Source

Content = dict[str, dict[str, bytes] | str]


def content(source: Source, listing: Listing | None = None, *, per_shard: int = 3) -> Content:
    """Every sample's fields by key, or the error in its place. Cut into shards, read in a row, in pieces and one by one: it is the same."""
    listing = source.listing() if listing is None else listing
    assert isinstance(source, InOrder)
    assert isinstance(listing.samples, SampleRange)
    whole = in_order(source, listing.samples[:])
    cut: Content = {}
    for shard in plan(listing.samples, shard_size=2**40, samples_per_shard=per_shard).shards:
        travelled, samples = pickle.loads(pickle.dumps((source, shard.samples)))
        assert len(samples) == len(shard.samples) <= per_shard
        cut |= in_order(travelled, samples)
    assert cut == whole
    one_by_one: Content = {}
    for sample in list(listing.samples)[::-1]:
        try:
            fields = {name: b"".join(map(bytes, pieces)) for name, _, pieces in source.read(sample)}
            assert [(planned.field, planned.size) for planned in sample.fields] == [(name, len(data)) for name, data in fields.items()]
            one_by_one[sample.key] = fields
        except SourceError as error:
            one_by_one[sample.key] = str(error)
    assert one_by_one == whole
    assert [sample.key for sample in listing.samples] == list(whole)
    assert [sample.bytes for sample in listing.samples] == list(listing.samples.sizes)
    return whole


def in_order(source: InOrder, samples: object) -> Content:
    """What ``read_in_order`` gives."""
    found: Content = {}
    for read in source.read_in_order(samples):  # type: ignore[arg-type]
        if isinstance(read, Batch):
            found |= {key: {read.field: data} for key, data in zip(read.keys, read.payloads, strict=True)}
        else:
            key, payload = read
            if isinstance(payload, SourceError):
                found[key] = str(payload)
            else:
                found[key] = {name: b"".join(map(bytes, pieces)) for name, _, pieces in payload}
    return found
