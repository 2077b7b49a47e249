"""Many small samples at once: the same bytes, the same refusals."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit.errors import DuplicateKey, KeyNotAllowed
from stagekit.shards.archive import LARGEST_MEMBER, member_header, member_headers
from stagekit.shards.index import Batch, BuiltShard, ShardBuilder
from stagekit.shards.sample import member_name, member_names


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n"), min_size=1, max_size=70),
            st.one_of(st.integers(0, 2000), st.integers(0, LARGEST_MEMBER)),
        ),
        max_size=20,
    )
)
def test_headers_are_those_made_one_by_one(members: list[tuple[str, int]]) -> None:
    members = [(name, size) for name, size in members if len(name.encode()) <= 100]
    names, sizes = [name for name, _ in members], [size for _, size in members]
    assert member_headers(names, sizes) == b"".join(member_header(name, size) for name, size in members)


def test_headers_with_a_prefix_and_sizes_beyond_the_limit() -> None:
    names = ["d" * 90 + "/" + "f" * 90 + ".json", "a.json"]
    assert member_headers(names, [3, 5]) == member_header(names[0], 3) + member_header(names[1], 5)
    with pytest.raises(KeyNotAllowed, match="a USTAR member ends at 8 GiB"):
        member_headers(["a.json", "b.json"], [1, LARGEST_MEMBER + 1])


def build(feed: Callable[[ShardBuilder], None], builder: ShardBuilder, out: list[bytes]) -> tuple[bytes, BuiltShard]:
    feed(builder)
    out += [bytes(piece) for piece in builder.finish()]
    return b"".join(out), builder.result


@settings(max_examples=60, deadline=None)
@given(
    payloads=st.lists(st.one_of(st.binary(max_size=30), st.integers(0, 5000).map(bytes)), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    block_size=st.sampled_from([1024, 3000, 10_000, 8 * 2**20]),
)
def test_a_batch_makes_the_bytes_and_side_files_of_its_samples(payloads: list[bytes], cuts: list[int], block_size: int) -> None:
    keys = [f"{number:03d}" for number in range(len(payloads))]
    one, many = ShardBuilder(block_size=block_size), ShardBuilder(block_size=block_size)
    singles: list[bytes] = []
    batched: list[bytes] = []

    def feed_one(builder: ShardBuilder) -> None:
        for key, payload in zip(keys, payloads, strict=True):
            singles.extend(map(bytes, builder.sample(key, [("json", len(payload), (payload,))])))

    def feed_many(builder: ShardBuilder) -> None:
        borders = sorted({0, len(keys), *(cut for cut in cuts if cut < len(keys))})
        for begin, end in pairwise(borders):
            batched.extend(map(bytes, builder.batch(Batch(keys[begin:end], "json", payloads[begin:end]))))

    expected, expected_result = build(feed_one, one, singles)
    found, result = build(feed_many, many, batched)
    assert found == expected
    assert result == expected_result
    assert many.bytes == one.bytes


def test_a_batch_of_megabytes_comes_in_pieces_of_one_size() -> None:
    builder = ShardBuilder()
    pieces = list(builder.batch(Batch([f"{n}" for n in range(1000)], "bin", [bytes(10_000)] * 1000)))
    assert {len(piece) for piece in pieces} == {ShardBuilder.PIECE}
    assert len(pieces) == 1000 * (512 + 10_240) // ShardBuilder.PIECE > 1


def test_what_a_batch_refuses_is_refused_before_a_byte() -> None:
    builder = ShardBuilder()
    assert list(builder.batch(Batch([], "json", []))) == []
    assert list(builder.batch(Batch(["a"], "json", [b"1"]))) == []
    with pytest.raises(DuplicateKey, match="the key 'a' comes twice in a row"):
        list(builder.batch(Batch(["a", "b"], "json", [b"1", b"2"])))
    with pytest.raises(DuplicateKey, match="the key 'c' comes twice in a row"):
        list(builder.batch(Batch(["b", "c", "c"], "json", [b"1", b"2", b"3"])))
    with pytest.raises(KeyNotAllowed, match=r"'x\.y\.json': the key 'x\.y' has a dot"):
        list(builder.batch(Batch(["b", "x.y"], "json", [b"1", b"2"])))
    assert builder.samples == 1
    assert list(builder.batch(Batch(["b"], "json", [b"2"]))) == []
    assert builder.samples == 2


@given(
    st.lists(
        st.one_of(st.from_regex(r"[0-9]{1,9}", fullmatch=True), st.text(max_size=8), st.sampled_from(["a\nb", "", "a/", "x" * 99, "é"])),
        max_size=8,
    ),
    st.sampled_from(["json", "é", "seg.png", "x" * 95]),
)
def test_names_of_many_keys_are_those_of_each(keys: list[str], field: str) -> None:
    def names() -> list[str] | str:
        try:
            return [member_name(key, field) for key in keys]
        except KeyNotAllowed as error:
            return str(error)

    expected = names()
    if isinstance(expected, str):
        with pytest.raises(KeyNotAllowed) as caught:
            member_names(keys, field)
        assert str(caught.value) == expected
    else:
        assert member_names(keys, field) == expected


def test_names_are_refused_for_their_field_even_without_a_key() -> None:
    with pytest.raises(KeyNotAllowed, match="'JSON' is no field name"):
        member_names([], "JSON")
