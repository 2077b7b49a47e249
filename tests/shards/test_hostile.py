"""Every damage is an error that names the archive, the offset, what was expected and what was found; none is skipped or guessed at."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagekit.errors import CorruptShard, DuplicateKey, ShardError
from stagekit.shards.archive import ArchiveReader, members, samples

from .handmade import END, header, member
from .hostile import CASES, FIRST, GOOD, SECOND, THIRD, Hostile, flipped

SOURCE = "shards/000007.tar"


def stream(data: bytes, chunk: int = 700) -> list[tuple[str, bytes]]:
    chunks = (data[at : at + chunk] for at in range(0, len(data), chunk))
    return [(found.name, b"".join(payload)) for found, payload in ArchiveReader(chunks, source=SOURCE)]


def check(error: BaseException, case: Hostile) -> None:
    text = str(error)
    assert type(error) is case.error
    assert SOURCE in text
    assert f"offset {case.offset}" in text
    assert case.words in text


@pytest.mark.parametrize("case", [case for case in CASES if "reserved" not in case.what and not case.block], ids=lambda case: case.what)
def test_the_stream_reader_names_it(case: Hostile) -> None:
    for chunk in (1, 512, 10**6):
        with pytest.raises(ShardError) as caught:
            stream(case.body if case.whole else case.body + END, chunk)
        check(caught.value, case)


@pytest.mark.parametrize("case", [case for case in CASES if not case.whole], ids=lambda case: case.what)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_block_readers_name_it(case: Hostile, kind: type[bytes]) -> None:
    with pytest.raises(ShardError) as caught:
        list(samples(kind(case.body), source=SOURCE))
    if case.what in ("size beyond the end", "largest octal size"):
        # A member as the package writes it is told from the block's end at once.
        assert f"{SOURCE} is damaged at offset {case.offset}: expected" in str(caught.value)
    else:
        check(caught.value, case)
    if case.what != "reserved field":
        with pytest.raises(ShardError) as caught:
            list(members(kind(case.body), source=SOURCE))
        check(caught.value, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_nothing_is_allocated_for_it(case: Hostile) -> None:
    tracemalloc.start()
    try:
        if not case.whole:
            with pytest.raises(ShardError):
                list(samples(case.body, source=SOURCE))
        with pytest.raises(ShardError):
            list(ArchiveReader([case.body], source=SOURCE))
        assert tracemalloc.get_traced_memory()[1] < 512 * 1024
    finally:
        tracemalloc.stop()


def test_offsets_are_those_of_the_shard() -> None:
    with pytest.raises(CorruptShard, match=r"shards/000007\.tar is damaged at offset 8001281"):
        list(samples(FIRST + member(b"b.cls", b"3", magic=bytes(8)), source=SOURCE, base=8_000_000))
    with pytest.raises(CorruptShard, match="offset 8001281"):
        list(members(FIRST + member(b"b.cls", b"3", magic=bytes(8)), source=SOURCE, base=8_000_000))


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_in_any_header_byte_is_found(bit: int) -> None:
    for start in (0, len(FIRST), len(FIRST) + len(SECOND)):
        for at in range(start, start + 512):
            bad = flipped(GOOD, at, bit)
            for read in (
                lambda data: list(samples(data, source=SOURCE)),
                lambda data: list(members(data, source=SOURCE)),
                lambda data: stream(data + END),
            ):
                with pytest.raises(CorruptShard, match="is damaged at offset"):
                    read(bad)


def test_a_flipped_bit_in_any_padding_or_end_byte_is_found() -> None:
    padding = [*range(513, 1024), *range(1024 + 512 + 700, len(GOOD) - 1024), *range(len(GOOD) - 511, len(GOOD))]
    for at in padding[::7]:
        with pytest.raises(CorruptShard, match="expected NUL bytes up to the next record"):
            list(samples(flipped(GOOD, at), source=SOURCE))
    for at in range(len(GOOD), len(GOOD) + 1024, 13):
        with pytest.raises(CorruptShard):
            stream(flipped(GOOD + END, at))


def test_a_cut_at_any_byte_is_found() -> None:
    whole = GOOD + END
    for length in range(0, len(whole), 11):
        with pytest.raises(CorruptShard):
            stream(whole[:length])
    boundaries = {0, len(FIRST), len(FIRST) + len(SECOND), len(GOOD)}
    for length in range(0, len(GOOD), 11):
        if length not in boundaries:
            for read in (samples, members):
                with pytest.raises(CorruptShard):
                    list(read(GOOD[:length], source=SOURCE))


def test_a_repeated_field_is_found() -> None:
    with pytest.raises(
        DuplicateKey, match=f"{SOURCE} holds the field 'cls' of the sample 'a' twice, the second time at offset {len(FIRST)}"
    ):
        list(samples(FIRST + FIRST, source=SOURCE))
    # Lower-casing makes these one field too.
    with pytest.raises(DuplicateKey, match="the field 'cls' of the sample 'a' twice"):
        list(samples(FIRST + member(b"a.CLS", b"3"), source=SOURCE))


def test_what_is_in_front_of_the_damage_comes_first() -> None:
    found = samples(GOOD + member(b"c.cls", b"1") + b"x" * 512, source=SOURCE)
    assert next(found) == {"__key__": "a", "cls": b"3", "txt": b"x" * 700}
    assert next(found) == {"__key__": "b", "cls": b"4"}
    with pytest.raises(CorruptShard):
        next(found)


def test_a_chain_of_extended_headers_costs_no_memory() -> None:
    """A thousand extended headers of 1 MiB in a row: only the last counts, and only one is held."""

    def chunks() -> Iterator[bytes]:
        bomb = header(b"x", 2**20, kind=b"L")
        for _ in range(100):
            yield bomb
            yield b"n" * 2**20
        yield FIRST + END

    tracemalloc.start()
    try:
        found = [(found.size, found.offset) for found, _ in ArchiveReader(chunks(), source=SOURCE)]
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert found == [(1, 0)]


def survives(data: bytes, *, whole: bytes) -> None:
    """Whatever the bytes are, the readers end well or with an error that names the archive."""
    readers = (
        lambda: list(samples(data, source=SOURCE)),
        lambda: list(members(memoryview(data), source=SOURCE)),
        lambda: stream(whole),
    )
    for read in readers:
        message = SOURCE
        try:
            read()
        except ShardError as error:
            message = str(error)
        assert SOURCE in message


@given(st.binary(max_size=3000), st.integers(0, len(GOOD)))
def test_rubbish_never_gives_another_error(rubbish: bytes, at: int) -> None:
    for data in (rubbish, GOOD[:at] + rubbish + GOOD[at:], GOOD[:at] + rubbish):
        survives(data, whole=data)


@given(st.integers(0, 499), st.binary(min_size=1, max_size=12))
def test_a_forged_header_with_a_right_checksum_never_gives_another_error(at: int, forged: bytes) -> None:
    head = bytearray(FIRST[:512])
    head[at : at + len(forged)] = forged
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    data = bytes(head) + FIRST[512:] + THIRD
    survives(data, whole=data + END)
