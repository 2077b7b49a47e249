"""docs/format.md is complete enough to write a reader from: this one shares nothing with the package."""

from __future__ import annotations

import io
import random
import re
import tarfile
from pathlib import Path

import pytest

import stagekit
from stagekit.order import Epoch, Position, batches, share

from . import golden, handread

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def test_it_reads_the_golden_data_set(tmp_path: Path) -> None:
    with stagekit.ShardWriter(tmp_path, samples_per_shard=3) as writer:
        for key, fields in (one for samples in golden.SHARDS for one in samples):
            writer.write({"__key__": key, **dict(fields)})
    for file in sorted(one for one in golden.FOLDER.rglob("*") if one.is_file()):
        assert (tmp_path / file.relative_to(golden.FOLDER)).read_bytes() == file.read_bytes(), file
    assert handread.read_dataset(tmp_path) == [{"__key__": key, **dict(fields)} for samples in golden.SHARDS for key, fields in samples]


@pytest.fixture(scope="module")
def several_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 samples of up to 9 MB in 3 shards, some with a block of their own."""
    folder, numbers = tmp_path_factory.mktemp("blocks"), random.Random(0)
    with stagekit.ShardWriter(folder, shard_size="32MB") as writer:
        for number in range(23):
            size = 9_000_000 if number == 5 else numbers.randrange(5_500_000)
            writer.write({"__key__": f"s/{number:02d}", "bin": bytes([number]) * size, "cls": number})
    return folder


def test_it_reads_several_shards_of_several_blocks(several_blocks: Path) -> None:
    manifest = handread.read_manifest(several_blocks)
    assert len(manifest["shards"]) > 1
    assert any(len(shard["block_samples"]) > 1 for shard in manifest["shards"])
    assert any(1 in shard["block_samples"] for shard in manifest["shards"])
    read = handread.read_dataset(several_blocks)
    assert read == list(stagekit.Dataset(several_blocks))
    assert [sample["cls"] for sample in read] == [b"%d" % number for number in range(23)]


@pytest.mark.parametrize("window", [2, 16])
def test_it_reads_in_the_same_order(several_blocks: Path, window: int) -> None:
    manifest = handread.read_manifest(several_blocks)
    counts = [count for shard in manifest["shards"] for count in shard["block_samples"]]
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    for seed, number in ((0, 0), (-3, 7)):
        order = handread.epoch_of(manifest, seed, number, window)
        assert sorted(order) == list(range(23))
        epoch = Epoch(counts, number, digest=manifest["digest"], seed=seed, shuffle=True, window=window)

        def ours(intervals: tuple[tuple[int, int], ...], epoch: Epoch = epoch) -> list[int]:
            return [
                firsts[stretch.blocks[slot]] + sample
                for stretch in epoch.stretches(intervals)
                for slot, sample in zip(stretch.slots, stretch.samples, strict=True)
            ]

        assert ours(((0, 23),)) == order
        # Two batches of 2 on each of 3 ranks, one of 3 on each of 2; then the rest for 4 ranks, in batches of 1 and of 2.
        position = Position().advanced(3, 2).advanced(3, 2).advanced(2, 3)
        left = position.left(23)
        for batch_size, drop_last in ((1, True), (2, False), (2, True)):
            theirs = handread.batches_of(order, [[3, 4], [2, 3]], 4, batch_size, drop_last=drop_last)
            each = batches(sum(end - begin for begin, end in left), 4, batch_size, drop_last=drop_last)
            for rank in range(4):
                mine = ours(share(left, rank, 4))
                assert [mine[i * batch_size : (i + 1) * batch_size] for i in range(each)] == theirs[rank]


def test_it_reads_tars_made_elsewhere(tmp_path: Path) -> None:
    tars = tmp_path / "tars"
    tars.mkdir()
    expected = []
    long = "folder/" + "long/" * 30
    for number, format in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT)):
        with tarfile.open(tars / f"{number}.tar", "w", format=format) as tar:
            for name, kind in (("folder", tarfile.DIRTYPE), ("README", tarfile.REGTYPE), ("__meta__/x.json", tarfile.REGTYPE)):
                entry = tarfile.TarInfo(name)
                entry.type, entry.size = kind, 3 if kind == tarfile.REGTYPE else 0
                tar.addfile(entry, io.BytesIO(b"{}\n"))
            for key in (f"./{number}/é", f"{long}{number}"):
                for field in ("JPG", "json"):
                    entry = tarfile.TarInfo(f"{key}.{field}")
                    entry.size, entry.mtime, entry.uname = 600, 1_700_000_000 + (0.5 if format == tarfile.PAX_FORMAT else 0), "somebody"
                    tar.addfile(entry, io.BytesIO(bytes([number]) * 600))
                link = tarfile.TarInfo(f"{key}.lnk")
                link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
                tar.addfile(link)
                expected.append({"__key__": key, "jpg": bytes([number]) * 600, "json": bytes([number]) * 600})
    stagekit.index(sorted(tars.iterdir()), tmp_path / "dataset")
    assert all("url" in shard for shard in handread.read_manifest(tmp_path / "dataset")["shards"])
    assert handread.read_dataset(tmp_path / "dataset") == expected == list(stagekit.Dataset(tmp_path / "dataset"))


@pytest.mark.parametrize(
    "path", ["manifest.json", "shards/000000.tar", "shards/000000.tar.idx", "shards/000000.blocks", "shards/000000.samples"]
)
def test_it_notices_a_changed_byte_of_any_file(tmp_path: Path, path: str) -> None:
    with stagekit.ShardWriter(tmp_path) as writer:
        writer.write({"__key__": "a", "txt": "text"})
    data = bytearray((tmp_path / path).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / path).write_bytes(data)
    with pytest.raises((AssertionError, ValueError)):
        handread.read_dataset(tmp_path)


def test_the_page_s_permutations_follow_from_its_words() -> None:
    rows = re.findall(r"\| `(..)` × 32, (−?\d+), (\d+), `(\w+)`, (\d+) \| ([\d ]+) \|", PAGE.read_text())
    assert len(rows) == 4
    for pair, seed, epoch, purpose, number, expected in rows:
        found = handread.permutation(10, pair * 32, int(seed.replace("−", "-")), int(epoch), purpose, int(number))
        assert found == [int(number) for number in expected.split()]


def test_the_page_has_the_numbers_of_the_code() -> None:
    from stagekit.order import State
    from stagekit.shards import archive, index, manifest

    page = PAGE.read_text()
    for text in (
        f"{index.BLOCK_SIZE:,} (8 MiB)",
        f"{archive.LARGEST_MEMBER:,} bytes",
        manifest.FORMAT,
        "header is at most 1 MiB",
        manifest.WIDS,
        *(f"`{name}`" for name in State("", 0, True, 1, None, Position()).to_dict()),
    ):
        assert text in page
    assert archive.LARGEST_EXTENSION == 2**20
    assert manifest.VERSION == 1
