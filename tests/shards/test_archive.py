"""Tar archives: what is written, and what of other programs' tars is read. Damage is in test_hostile.py."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from stagekit.errors import KeyNotAllowed
from stagekit.shards.archive import END, LARGEST_MEMBER, ArchiveReader, header, member_bytes, members, padding, samples

from . import handmade

SOURCE = "some.tar"


def read(data: bytes, chunk: int = 10_000) -> list[tuple[str, bytes]]:
    chunks = (data[at : at + chunk] for at in range(0, len(data), chunk))
    return [(member.name, b"".join(payload)) for member, payload in ArchiveReader(chunks, source=SOURCE)]


def webdataset_samples(data: bytes) -> list[dict[str, Any]]:
    files = tar_file_expander([{"url": SOURCE, "stream": io.BytesIO(data)}])
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in group_by_keys(files)]


# ------------------------------------------------------------------------------------------------------------------------- writing


def test_sizes_count_headers_and_padding() -> None:
    for size, expected in [(0, 512), (1, 1024), (511, 1024), (512, 1024), (513, 1536), (LARGEST_MEMBER, 512 + 8 * 2**30)]:
        assert member_bytes("a.bin", size) == expected
    assert [len(padding(size)) for size in (0, 1, 511, 512, 513)] == [0, 511, 1, 0, 511]


NAMES = st.lists(
    st.text(st.characters(exclude_characters="\0\n/", exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
        lambda part: part not in (".", "..")
    ),
    min_size=1,
    max_size=6,
).map("/".join)


@given(NAMES, st.integers(0, LARGEST_MEMBER))
def test_a_header_is_what_tarfile_writes_and_reads(name: str, size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = size
    try:
        theirs = info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError:
        with pytest.raises(KeyNotAllowed, match="USTAR holds 100"):
            header(name, size)
        return
    try:
        ours = header(name, size)
    except KeyNotAllowed:
        assert name.startswith("__")
        return
    assert ours == theirs
    back = tarfile.TarInfo.frombuf(ours, "utf-8", "strict")
    assert (back.name, back.size, back.mode, back.mtime, back.type) == (name, size, 0o644, 0, tarfile.REGTYPE)


@pytest.mark.parametrize("make", [header, member_bytes])
def test_eight_gib_are_refused(make: Callable[[str, int], object]) -> None:
    make("a.bin", LARGEST_MEMBER)
    with pytest.raises(
        KeyNotAllowed, match=r"a shard cannot hold 'big/a\.bin': it has 8,589,934,592 bytes, and a USTAR member ends at 8 GiB"
    ):
        make("big/a.bin", 8 * 2**30)
    with pytest.raises(KeyNotAllowed, match="it is absolute"):
        make("/a.bin", 1)
    with pytest.raises(ValueError, match="a size of -1 bytes"):
        make("a.bin", -1)


# ------------------------------------------------------------------------------------------------------------------------- reading

FIELDS = st.dictionaries(st.sampled_from(["jpg", "cls", "seg.png", "json", "é"]), st.binary(max_size=1500), min_size=1, max_size=3)
KEYS = st.lists(
    st.text(st.characters(exclude_characters="\0\n/.", exclude_categories=["Cs"]), min_size=1, max_size=30), min_size=1, max_size=5
).map("/".join)
SAMPLES = st.dictionaries(KEYS.filter(lambda key: not key.startswith("__") and len(key.encode()) < 90), FIELDS, min_size=1, max_size=5)


@given(SAMPLES, st.integers(1, 2000), st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_round_trip_and_every_reader_agrees(content: dict[str, dict[str, bytes]], chunk: int, form: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8") as archive:
        for key, fields in content.items():
            for field, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    whole = out.getvalue()
    flat = [(f"{key}.{field}", data) for key, fields in content.items() for field, data in fields.items()]
    expected = [{"__key__": key, **fields} for key, fields in content.items()]
    reader = ArchiveReader([whole[at : at + chunk] for at in range(0, len(whole), chunk)], source=SOURCE)
    assert [(member.name, b"".join(payload)) for member, payload in reader] == flat
    assert (reader.offset, not reader.skipped) == (len(whole), True)
    body = whole[: reader.end]
    for kind in (bytes, bytearray, memoryview):
        assert list(samples(kind(body), source=SOURCE)) == expected
        found = list(members(kind(body), source=SOURCE, base=512))
        assert [(member.name, whole[member.data_offset - 512 :][: member.size]) for member in found] == flat
    assert [member.end for member in found[:-1]] == [member.offset for member in found[1:]]
    assert (found[0].offset, found[-1].end) == (512, 512 + reader.end)
    assert webdataset_samples(whole) == expected


def test_a_sample_does_not_change_with_its_buffer() -> None:
    buffer = bytearray(handmade.member(b"a.cls", b"3"))
    (sample,) = samples(buffer, source=SOURCE)
    buffer[512:513] = b"4"
    assert sample == {"__key__": "a", "cls": b"3"}
    assert type(sample["cls"]) is bytes


def test_what_is_no_sample_is_passed_over_like_webdataset_does() -> None:
    body = b"".join(
        [
            handmade.member(b"README", b"no extension"),
            handmade.member(b".hidden", b"x"),
            handmade.member(b"a.jpg", b"1"),
            handmade.member(b"a.b/README", b"x"),
            handmade.member(b"jpg", b"x"),
            handmade.member(b"__meta__/a.jpg", b"x"),
            handmade.member(b"__a.b__", b"x"),
            handmade.member(b"a.CLS", b"2"),
            handmade.header(b"sub", 0, kind=b"5"),
            handmade.member(b"./b.x/c.seg.PNG", b"3"),
            handmade.member(b"__c.png", b"4"),
        ]
    )
    expected = [
        {"__key__": "a", "jpg": b"1", "cls": b"2"},
        {"__key__": "./b.x/c", "seg.png": b"3"},
        {"__key__": "__c", "png": b"4"},
    ]
    assert list(samples(body, source=SOURCE)) == expected
    assert webdataset_samples(body + END) == expected


def test_dot_files_in_directories_are_no_samples() -> None:
    """WebDataset gives this one the key 'd/'; docs/format.md tells why it is none here."""
    body = handmade.member(b"a.jpg", b"1") + handmade.member(b"d/.jpg", b"2") + handmade.member(b"e..jpg", b"3")
    assert list(samples(body, source=SOURCE)) == [{"__key__": "a", "jpg": b"1"}, {"__key__": "e", ".jpg": b"3"}]


def test_members_of_every_other_kind_are_counted() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind in [
            ("d", tarfile.DIRTYPE),
            ("hard.jpg", tarfile.LNKTYPE),
            ("soft.jpg", tarfile.SYMTYPE),
            ("soft2.jpg", tarfile.SYMTYPE),
            ("null", tarfile.CHRTYPE),
            ("disk", tarfile.BLKTYPE),
            ("pipe", tarfile.FIFOTYPE),
        ]:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "a.jpg" if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE) else ""
            archive.addfile(info)
        info = tarfile.TarInfo("a.jpg")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"bytes"))
    reader = ArchiveReader([out.getvalue()], source=SOURCE)
    assert [(member.name, b"".join(payload)) for member, payload in reader] == [("a.jpg", b"bytes")]
    assert reader.skipped == {"directory": 1, "hard link": 1, "symbolic link": 2, "device": 2, "fifo": 1}
    assert reader.skipped_names["symbolic link"] == "soft.jpg"
    body = out.getvalue()[: reader.end]
    assert list(samples(body, source=SOURCE)) == [{"__key__": "a", "jpg": b"bytes"}]
    assert [member.name for member in members(body, source=SOURCE)] == ["a.jpg"]


@pytest.mark.parametrize(("form", "extra"), [("ustar", []), ("gnu", []), ("posix", []), ("gnu", ["--sparse"]), ("posix", ["--sparse"])])
def test_gnu_tar_s_archives(tmp_path: Path, form: str, extra: list[str]) -> None:
    folder = tmp_path / "in"
    deep = folder / ("long-directory-name-" * 3) / ("another-" * 6)
    deep.mkdir(parents=True)
    (deep / "picture.JPG").write_bytes(b"j" * 1000)
    (deep / "picture.cls").write_bytes(b"1")
    (folder / "é.txt").write_text("text")
    (folder / "link.txt").symlink_to("é.txt")
    os.link(folder / "é.txt", folder / "twin.txt")
    with (folder / "holes.bin").open("wb") as file:
        for number in range(30):  # more holes than one header has room for
            file.seek(number * 131072)
            file.write(b"x" * 4096)
        file.truncate(31 * 131072)
    path = tmp_path / "out.tar"
    subprocess.run(
        ["tar", f"--format={form}", "--sort=name", *extra, "-cf", str(path), "-C", str(folder), "."],
        check=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
    )
    data = path.read_bytes()
    reader = ArchiveReader([data], source=SOURCE)
    found = {member.name: b"".join(payload) for member, payload in reader}
    with tarfile.open(path) as archive:
        theirs = {info.name: info for info in archive}
    files = {f"./{name.removeprefix('./')}" for name, info in theirs.items() if info.isreg() and not info.issparse()}
    assert set(found) == files
    assert found[f"./{deep.relative_to(folder)}/picture.JPG"] == b"j" * 1000
    assert reader.skipped["symbolic link"] == 1
    assert reader.skipped["hard link"] == 1
    assert reader.skipped["directory"] == 3
    assert reader.skipped["sparse file"] == sum(info.issparse() for info in theirs.values()) == len(extra)
    keys = [sample["__key__"] for sample in samples(data[: reader.end], source=SOURCE)]
    assert f"./{deep.relative_to(folder)}/picture" in keys


def test_extended_headers_name_the_next_member_only() -> None:
    long = b"d/" * 200 + b"x.jpg"
    body = b"".join(
        [
            handmade.pax(handmade.pax_record(b"comment", b"hello"), b"g"),
            handmade.pax(handmade.pax_record(b"mtime", b"1.5") + handmade.pax_record(b"path", "é/y.jpg".encode())),
            handmade.member(b"short.jpg", b"1"),
            handmade.member(b"././@LongLink", long + b"\0", kind=b"L"),
            handmade.member(long[:100], b"2"),
            handmade.member(b"././@LongLink", b"target\0", kind=b"K"),
            handmade.header(b"link.jpg", 0, kind=b"2"),
            handmade.member(b"z.jpg", b"3"),
        ]
    )
    assert [(sample["__key__"], sample["jpg"]) for sample in samples(body, source=SOURCE)] == [
        ("é/y", b"1"),
        ("d/" * 200 + "x", b"2"),
        ("z", b"3"),
    ]
    found = list(members(body, source=SOURCE))
    # A member starts at its first extended header, so that a block or an index that points there finds its name.
    assert found[0].offset == 0
    assert list(samples(body[found[1].offset : found[1].end], source=SOURCE)) == [{"__key__": "d/" * 200 + "x", "jpg": b"2"}]
    assert read(body + END) == [("é/y.jpg", b"1"), (long.decode(), b"2"), ("z.jpg", b"3")]


def test_a_name_may_look_like_a_compressed_file() -> None:
    body = handmade.member(b"BZhang.jpg", b"x")
    assert list(samples(body, source=SOURCE)) == [{"__key__": "BZhang", "jpg": b"x"}]
    assert read(body + END) == [("BZhang.jpg", b"x")]


def test_a_pax_size_wins() -> None:
    body = handmade.pax(handmade.pax_record(b"size", b"600")) + handmade.header(b"a.bin", 0) + handmade.pad(b"x" * 600)
    assert list(samples(body, source=SOURCE)) == [{"__key__": "a", "bin": b"x" * 600}]
    assert read(body + END) == [("a.bin", b"x" * 600)]


@pytest.mark.parametrize(
    "size",
    [b"         31 ", b"00000000031\0", b"31\0\0\0\0\0\0\0\0\0\0", b"000000000031", b"\x80" + bytes(10) + b"\x19", b"31          "],
)
def test_other_spellings_of_a_size(size: bytes) -> None:
    body = handmade.header(b"a.bin", size) + handmade.pad(b"x" * 25)
    assert list(samples(body, source=SOURCE)) == [{"__key__": "a", "bin": b"x" * 25}]
    assert read(body + END) == [("a.bin", b"x" * 25)]


@pytest.mark.parametrize("checksum", [b"%06o\0 ", b"%07o\0", b"%07o ", b"%6o\0 ", b" %5o \0"])
def test_other_spellings_of_a_checksum(checksum: bytes) -> None:
    total = int(handmade.header(b"a.bin", 1)[148:154], 8)
    body = handmade.member(b"a.bin", b"x", checksum=checksum % total)
    assert list(samples(body, source=SOURCE)) == [{"__key__": "a", "bin": b"x"}]


def test_other_regular_types_and_old_directories() -> None:
    body = (
        handmade.member(b"a.bin", b"1", kind=b"\0") + handmade.member(b"b.bin", b"2", kind=b"7") + handmade.header(b"dir.x/", 0, kind=b"\0")
    )
    body += handmade.member(b"c.bin", b"3", magic=b"ustar  \0", prefix=b"not a prefix in GNU's header")
    assert [sample["__key__"] for sample in samples(body, source=SOURCE)] == ["a", "b", "c"]
    reader = ArchiveReader([body + END], source=SOURCE)
    assert [member.name for member, _ in reader] == ["a.bin", "b.bin", "c.bin"]
    assert reader.skipped == {"directory": 1}


def test_payloads_may_be_left_unread() -> None:
    body = handmade.member(b"a.bin", b"1" * 3000) + handmade.member(b"b.bin", b"2" * 3000)
    consumed = bytearray()
    names = []
    reader = ArchiveReader([body[:700], b"", body[700:] + END + bytes(8192)], source=SOURCE, on_bytes=consumed.extend)
    for member, payload in reader:
        names.append(member.name)
        if member.name == "b.bin":
            assert next(payload)
    assert names == ["a.bin", "b.bin"]
    assert bytes(consumed) == body + END + bytes(8192)
    assert (reader.end, reader.offset) == (len(body), len(body) + 1024 + 8192)


def test_memory_is_constant() -> None:
    size = 64 * 2**20
    piece = bytes(2**20)

    def chunks() -> Iterator[bytes]:
        yield handmade.header(b"a.bin", size)
        for _ in range(64):
            yield piece
        yield END

    tracemalloc.start()
    try:
        (total,) = [sum(len(part) for part in payload) for _, payload in ArchiveReader(chunks(), source=SOURCE)]
        assert tracemalloc.get_traced_memory()[1] < 256 * 1024
    finally:
        tracemalloc.stop()
    assert total == size


def test_the_caches_of_the_block_reader_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from stagekit.shards import archive

    def many() -> Iterable[bytes]:
        for number in range(60):
            yield handmade.member(b"k%d.x%d" % (number, number), b"x" * number)

    for cache in (archive._fields, archive._sizes, archive._sums):
        cache.clear()
    monkeypatch.setattr(archive, "_CACHE", 10)
    found = list(samples(b"".join(many()), source=SOURCE))
    assert [(sample["__key__"], sample[f"x{number}"]) for number, sample in enumerate(found)] == [(f"k{n}", b"x" * n) for n in range(60)]
    assert max(len(archive._fields), len(archive._sizes), len(archive._sums)) == 10


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its files open
def test_webdataset_s_own_writer(tmp_path: Path) -> None:
    path = tmp_path / "theirs.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(5):
            writer.write({"__key__": f"dir/{number}", "cls": number, "txt": "x" * number, "seg.npy": np.arange(number)})
    data = path.read_bytes()
    ours = list(samples(data[: end_of(data)], source=SOURCE))
    assert ours == webdataset_samples(data)
    assert [sample["cls"] for sample in ours] == [b"0", b"1", b"2", b"3", b"4"]
    gc.collect()


def end_of(data: bytes) -> int:
    reader = ArchiveReader([data], source=SOURCE)
    for _ in reader:
        pass
    return reader.end
