"""Plain WebDataset tars without a manifest: what can be promised of them is, and what cannot is said."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from stagekit.config import StoreConfig
from stagekit.errors import CorruptShard, DuplicateKey, RandomAccessRefused, SourceError, StateMismatch, UsageError
from stagekit.progress import Event, Message
from stagekit.store import open_store
from stagekit.stream.tars import TarReader, Tars
from stagekit.testing.proxy import FaultProxy
from stagekit.torch import StreamDataset, StreamLoader

from ..rigs.servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:.*these tars have no manifest")


def a_tar(numbers: range, *, size: int = 0, format: int = tarfile.PAX_FORMAT) -> bytes:
    """As people make them: Python's tarfile, two fields a sample, a directory and a file without extension in between."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        folder = tarfile.TarInfo("photos")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for number in numbers:
            for field, value in (("cls", str(number).encode()), ("TXT", f"text {number}".encode().ljust(size))):
                member = tarfile.TarInfo(f"photos/{number:06d}.{field}")
                member.size = len(value)
                tar.addfile(member, io.BytesIO(value))
        readme = tarfile.TarInfo("README")
        tar.addfile(readme)
    return buffer.getvalue()


@pytest.fixture
def tars(tmp_path: Path) -> str:
    """Four tars of 10, 7, 1 and 12 samples."""
    for number, (begin, end) in enumerate(((0, 10), (10, 17), (17, 18), (18, 30))):
        (tmp_path / f"shard-{number:06d}.tar").write_bytes(a_tar(range(begin, end)))
    return str(tmp_path / "shard-{000000..000003}.tar")


def loader(source: Any, batch_size: int = 4, **options: Any) -> StreamLoader:
    return StreamLoader(source, batch_size, **{"threads": 0, "connections": 2, **options})


def numbers(batches: Any) -> list[int]:
    found = []
    for batch in batches:
        real = [number for number, key in zip(batch["cls"].tolist(), batch["__key__"], strict=True) if key]
        assert [f"photos/{number:06d}" for number in real] == [key for key in batch["__key__"] if key]
        assert batch["txt"][: len(real)] == [f"text {number}" for number in real]
        found += real
    return found


class TestReading:
    def test_what_cannot_be_promised_is_said_once(self, tars: str) -> None:
        told: list[Event] = []
        with pytest.warns(UserWarning, match=r"these tars have no manifest.*flipped bit.*len\(\) is unknown.*`?stagekit index") as warned:
            made = loader(tars, on_event=told.append)
        list(made)
        list(made)
        assert len(warned) == 1
        assert [one.level for one in told if isinstance(one, Message) and "no manifest" in one.text] == ["warning"]

    @pytest.mark.parametrize("threads", [0, 3])
    def test_unshuffled_is_the_order_in_the_tars(self, tars: str, threads: int) -> None:
        made = loader(tars, shuffle=False, drop_last=False, threads=threads)
        batches = list(made)
        assert numbers(batches) == list(range(30))
        assert [int(batch["__mask__"].sum()) for batch in batches] == [4] * 7 + [2]
        assert made.receipt is not None
        assert (made.receipt.expected, made.receipt.delivered, made.receipt.complete) == (30, 30, True)
        assert made.receipt.bytes_fetched == made.receipt.data_bytes
        assert numbers(loader(tars, shuffle=False, threads=threads)) == list(range(28))

    def test_shuffled_epochs_differ_and_hold_everything(self, tars: str) -> None:
        made = loader(tars, drop_last=False)
        first, second = numbers(made), numbers(made)
        assert sorted(first) == sorted(second) == list(range(30))
        assert first != second != sorted(second)
        assert numbers(loader(tars, drop_last=False)) == first
        assert numbers(loader(tars, drop_last=False, seed=1)) != first

    def test_samples_are_shuffled_within_about_a_window(self, tmp_path: Path) -> None:
        (tmp_path / "a.tar").write_bytes(a_tar(range(200)))
        tars = Tars(tmp_path / "a.tar")
        reader = TarReader(tars, [0], 1, seed=0, epoch=0, shuffle=1200, ahead_bytes=2**20)
        got = [int(sample["cls"]) for [sample] in reader if sample is not None]
        assert sorted(got) == list(range(200))
        assert max(abs(place - number) for place, number in enumerate(got)) < 60
        assert got != sorted(got)

    def test_ranks_read_whole_tars_and_together_all(self, tars: str) -> None:
        ranks = [numbers(loader(tars, 3, rank=rank, world_size=3, drop_last=False)) for rank in range(3)]
        assert sorted(number for rank in ranks for number in rank) == list(range(30))
        with pytest.raises(UsageError, match=r"4 tars cannot be divided among 5 ranks\. Index them \(`stagekit index`\)"):
            list(loader(tars, rank=0, world_size=5))

    def test_a_list_of_names_and_tars_of_every_dialect(self, tmp_path: Path) -> None:
        for name, format in (("a", tarfile.USTAR_FORMAT), ("b", tarfile.GNU_FORMAT)):
            (tmp_path / f"{name}.tar").write_bytes(a_tar(range(5) if name == "a" else range(5, 9), format=format))
        assert numbers(loader([tmp_path / "a.tar", str(tmp_path / "b.tar")], 3, shuffle=False)) == list(range(9))

    @pytest.mark.parametrize("name", ["moto", "rclone"])
    def test_a_tar_is_fetched_in_ranges_at_the_same_time(
        self,
        name: str,
        s3_server: Callable[[str], S3Server],
        credentials_for: Callable[[S3Server], StoreConfig],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("stagekit.stream.tars.PIECE", 20_000)
        server = s3_server(name)
        bucket, config = server.create_bucket(), credentials_for(server)
        data = a_tar(range(40), size=3000)
        open_store(f"s3://{bucket}", config).put("wds/a-0.tar", data)
        open_store(f"s3://{bucket}", config).put("wds/a-1.tar", a_tar(range(40, 60), size=3000))
        with FaultProxy(server.endpoint_url) as proxy:
            config = StoreConfig(endpoint_url=proxy.endpoint_url, profile=config.profile)
            made = StreamLoader(f"s3://{bucket}/wds/a-{{0..1}}.tar", 6, shuffle=False, connections=4, store=config)
            assert [key for batch in made for key in batch["__key__"]] == [f"photos/{number:06d}" for number in range(60)]
            ranges = sorted(one.range for one in proxy.requests if one.method == "GET" and one.key == "wds/a-0.tar")
        assert len(ranges) == -(-len(data) // 20_000)


class TestResume:
    def test_as_many_ranks_go_on_exactly(self, tars: str) -> None:
        for rank in range(2):
            straight = loader(tars, 4, rank=rank, world_size=2, drop_last=False)
            wanted = [number for _ in range(2) for number in numbers(straight)]
            made = loader(tars, 4, rank=rank, world_size=2, drop_last=False)
            batches = iter(made)
            got = numbers([next(batches), next(batches)])
            again = loader(tars, 4, rank=rank, world_size=2, drop_last=False, threads=2)
            again.load_state_dict(made.state_dict())
            assert got + numbers(again) + numbers(again) == wanted
            batches.close()  # type: ignore[attr-defined]

    def test_other_ranks_or_other_tars_are_refused(self, tars: str, tmp_path: Path) -> None:
        made = loader(tars)
        batches = iter(made)
        next(batches)
        state = made.state_dict()
        batches.close()  # type: ignore[attr-defined]
        again = loader(tars, rank=0, world_size=2)
        again.load_state_dict(state)
        with pytest.raises(StateMismatch, match=r"saved on 1 ranks and is loaded on 2.*`stagekit index`"):
            next(iter(again))
        with pytest.raises(StateMismatch, match="belongs to the data set"):
            loader(tmp_path / "shard-000000.tar").load_state_dict(state)


class TestInsideADataLoader:
    def samples(self, made: Any) -> list[int]:
        return [int(sample["cls"]) for sample in made]

    def test_it_gives_what_the_loader_gives(self, tars: str) -> None:
        with pytest.warns(UserWarning, match=r"these tars have no manifest.*stagekit index"):
            made = StreamDataset(tars, connections=2)
        epochs = [self.samples(made), self.samples(made)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 2
        whole = loader(tars, 1)
        assert epochs == [numbers(whole), numbers(whole)]
        assert made.receipt is not None
        assert (made.receipt.expected, made.receipt.delivered, made.receipt.complete) == (30, 30, True)
        with pytest.raises(TypeError, match=r"is not known; `stagekit index` counts them"):
            len(made)

    @pytest.mark.parametrize("stop", [0, 1, 13, 29, 30])
    def test_it_goes_on_where_it_was_with_the_loaders_state_too(self, tars: str, stop: int) -> None:
        for rank in range(2):
            straight = StreamDataset(tars, rank=rank, world_size=2)
            wanted = [*self.samples(straight), *self.samples(straight)]
            made = StreamDataset(tars, rank=rank, world_size=2)
            samples = iter(made)
            got = self.samples(sample for _, sample in zip(range(stop), samples, strict=False))
            state = made.state_dict()
            samples.close()  # type: ignore[attr-defined]
            again = StreamDataset(tars, rank=rank, world_size=2)
            again.load_state_dict(state)
            rest = self.samples(again)
            whole = loader(tars, 1, rank=rank, world_size=2)
            whole.load_state_dict(state)
            assert numbers(whole) == rest
            assert (got + rest + self.samples(again))[: len(wanted)] == wanted

    @pytest.mark.parametrize("workers", [1, 2, 3, 5])
    @pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:This process .* is multi-threaded")
    def test_workers_read_whole_tars_and_together_all(self, tars: str, workers: int) -> None:
        ranks = []
        for rank in range(2):
            made = StreamDataset(tars, rank=rank, world_size=2)
            batches = DataLoader(made, batch_size=3, num_workers=workers, multiprocessing_context="fork")
            ranks += [[number for batch in batches for number in batch["cls"].tolist()] for _ in range(2)]
        assert sorted(ranks[0] + ranks[2]) == sorted(ranks[1] + ranks[3]) == list(range(30))

    def test_a_state_of_no_workers_cannot_be_divided_among_some(self, tars: str) -> None:
        made = StreamDataset(tars)
        samples = iter(made)
        next(samples)
        state = made.state_dict()
        samples.close()  # type: ignore[attr-defined]
        again = StreamDataset(tars)
        again.load_state_dict(state)
        with pytest.raises(StateMismatch, match=r"saved without workers and is loaded by 2.*`stagekit index`"):
            list(DataLoader(again, batch_size=3, num_workers=2, multiprocessing_context="fork"))
        again = StreamDataset(tars, rank=0, world_size=2)
        again.load_state_dict(state)
        with pytest.raises(StateMismatch, match=r"saved on 1 ranks and is loaded on 2.*`stagekit index`"):
            list(again)

    def test_damage_is_an_error_and_never_a_short_epoch(self, tars: str, tmp_path: Path) -> None:
        shard = tmp_path / "shard-000001.tar"
        shard.write_bytes(broken(a_tar(range(10, 25)), "cut at a member's border"))
        with pytest.raises(CorruptShard, match=r"shard-000001\.tar is damaged at offset \d+"):
            list(StreamDataset(tars))


def broken(data: bytes, how: str) -> bytes:
    middle = 20 * 1024 - 512  # a header, behind nine samples and the folder
    return {
        "cut at a member's border": data[:middle],
        "cut in a header": data[: middle + 100],
        "cut in a payload": data[: middle + 520],
        "without its last end block": data[: data.rindex(b"README") + 1024],
        "flipped bit in a header": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "more behind its end": data + a_tar(range(1)),
        "empty": b"",
        "a web page": b"<html>Please log in</html>" * 100,
    }[how]


class TestFaults:
    @pytest.mark.parametrize(
        "how",
        [
            "cut at a member's border",
            "cut in a header",
            "cut in a payload",
            "without its last end block",
            "flipped bit in a header",
            "more behind its end",
            "empty",
            "a web page",
        ],
    )
    def test_a_broken_tar_is_an_error_with_its_name_and_never_a_short_epoch(self, tars: str, tmp_path: Path, how: str) -> None:
        shard = tmp_path / "shard-000001.tar"
        shard.write_bytes(broken(a_tar(range(10, 25)), how))
        with pytest.raises(CorruptShard, match=r"shard-000001\.tar is damaged at offset \d+: expected .*, found"):
            list(loader(tars, shuffle=False))
        made = loader(tars, shuffle=False, drop_last=False, on_bad="skip")
        with pytest.warns(RuntimeWarning, match=r"the rest of a tar was left out: .*shard-000001\.tar"):
            got = numbers(made)
        assert got[:10] == list(range(10))
        assert got[-13:] == list(range(17, 30))

    def test_replaced_while_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stagekit.stream.tars.PIECE", 4096)
        tar = tmp_path / "a.tar"
        tar.write_bytes(a_tar(range(40)))
        made = loader(tar, shuffle=False, connections=1, memory=10**9)
        tar.unlink()
        tar.write_bytes(a_tar(range(100, 140)))
        with pytest.raises(CorruptShard, match=r"a\.tar cannot be read"):
            list(made)

    def test_a_field_twice(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name in ("a.cls", "a.CLS"):
                tar.addfile(tarfile.TarInfo(name))
        (tmp_path / "a.tar").write_bytes(buffer.getvalue())
        with pytest.raises(DuplicateKey, match="the field 'cls' of the sample 'a' twice"):
            list(loader(tmp_path / "a.tar", decode=None))

    def test_missing_and_what_cannot_be_meant(self, tars: str, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match=r"shard-000004\.tar: it is not there; check the pattern"):
            loader(str(tmp_path / "shard-{000000..000004}.tar"))
        with pytest.raises(UsageError, match="a compressed tar cannot be read by ranges; decompress it first"):
            loader("s3://bucket/a.tar.gz")
        with pytest.raises(UsageError, match=r"'\*' is no brace notation"):
            loader(str(tmp_path / "*.tar"))
        with pytest.raises(UsageError, match="the list names none; check what it was made from, such as the pattern of a glob"):
            StreamLoader([], 4)
        with pytest.raises(UsageError, match="reading tars: 3 is no name of a tar"):
            StreamLoader([3], 4)  # type: ignore[list-item]
        with pytest.raises(UsageError, match=r"does not end in \.tar"):
            loader([str(tmp_path / "shard-000000.tar"), "data"])
        with pytest.raises(UsageError, match="virtual_ranks: plain tars are divided whole"):
            loader(tars, virtual_ranks=2)
        with pytest.raises(UsageError, match=r"cache_limit: .* has no digests to cache by"):
            loader(tars, cache_limit="1GB")
        with pytest.raises(UsageError, match=r"memory: .* needs 151 MB \(a window of 16 times 8 MiB"):
            loader(tars, memory="100MB")
        with pytest.raises(TypeError, match=r"is not known; `stagekit index` counts them"):
            len(loader(tars))
        with pytest.raises(RandomAccessRefused, match="tars are read in sequence"):
            loader(tars)[0]

    def test_pickles_are_refused_when_they_are_met(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("a.pkl"))
        (tmp_path / "a.tar").write_bytes(buffer.getvalue())
        with pytest.raises(UsageError, match="the field 'pkl' holds pickles"):
            list(loader(tmp_path / "a.tar", 1))

    def test_leaving_early_leaves_nothing(self, tars: str) -> None:
        for threads in (0, 2):
            for _ in loader(tars, 1, threads=threads):
                break
