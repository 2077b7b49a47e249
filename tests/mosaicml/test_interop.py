"""``stagekit.interop.mosaicml``: MosaicML's real ``StreamingDataset`` with downloads through the store, beside what it does by itself."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from streaming.base.storage.download import DOWNLOADER_MAPPINGS, S3Downloader
from streaming.base.util import merge_index

import stagekit
import stagekit.interop
from stagekit.config import StoreConfig
from stagekit.errors import BadDigest, CorruptShard, InvalidReply, ManifestError, UsageError
from stagekit.interop.leftovers import SHARED_MEMORY
from stagekit.interop.mosaicml import Downloads
from stagekit.store import open_store
from stagekit.testing.proxy import FaultProxy, FlipBit

from ..rigs.servers import S3Server

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of what the package may do some day
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # what the package leaves open
]

COUNT = 100
KEYS = [f"{number:04d}" for number in range(COUNT)]


@pytest.fixture(scope="module")
def mds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set made by ``shard --format mds``, in a directory: some ten shards."""
    root = tmp_path_factory.mktemp("interop")
    (root / "raw").mkdir()
    rng = random.Random(0)
    for number, key in enumerate(KEYS):
        (root / "raw" / f"{key}.cls").write_text(str(number))
        (root / "raw" / f"{key}.bin").write_bytes(rng.randbytes(300))
    stagekit.shard_mds(root / "raw", root / "mds", shard_size=4_000)
    return root / "mds"


def sent(folder: Path, server: S3Server, config: StoreConfig) -> str:
    """``folder`` in a new bucket of ``server``."""
    url = f"s3://{server.create_bucket()}/mds"
    store = open_store(url, config)
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(str(path.relative_to(folder)), path.read_bytes())
    return url


@pytest.fixture
def config(rclone_server: S3Server, credentials_for: Callable[[S3Server], StoreConfig]) -> StoreConfig:
    """Endpoint and keys that MosaicML's own downloader would not find."""
    return credentials_for(rclone_server)


def keys(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch["__key__"]]


def test_order_state_and_loader_are_mosaicml_s(mds: Path, rclone_server: S3Server, config: StoreConfig, tmp_path: Path) -> None:
    url = sent(mds, rclone_server, config)
    settings: dict[str, Any] = {"batch_size": 8, "shuffle": True, "shuffle_seed": 7, "num_canonical_nodes": 2}

    def ours(local: str, workers: int) -> StreamingDataLoader:
        dataset = stagekit.interop.mosaicml(url, tmp_path / local, store=config, **settings)
        assert type(dataset) is StreamingDataset
        return StreamingDataLoader(dataset, batch_size=8, num_workers=workers)

    by_itself = StreamingDataset(local=str(mds), **settings)
    wanted = keys(StreamingDataLoader(by_itself, batch_size=8, num_workers=2))
    first = ours("one", 2)
    got: list[str] = []
    for number, batch in enumerate(first):
        got += batch["__key__"]
        if number == 9:
            state = json.loads(json.dumps(first.state_dict()))
    assert got == wanted != KEYS
    assert sorted(got) == KEYS
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in mds.iterdir()}, "whole files, and nothing else"

    other = ours("two", 0)
    other.load_state_dict(state)
    assert keys(other) == wanted[80:]
    assert DOWNLOADER_MAPPINGS["s3"] is S3Downloader
    assert type(Stream(remote="s3://elsewhere/x", local=str(tmp_path / "x"))._downloader) is S3Downloader


def test_what_mosaicml_wrote_and_several_streams(rclone_server: S3Server, config: StoreConfig, tmp_path: Path) -> None:
    for part in range(2):
        columns = {"number": "int", "text": "str"}
        out = str(tmp_path / "made" / f"part-{part}")
        with MDSWriter(out=out, columns=columns, compression="zstd:3", hashes=["sha1", "xxh3_64"], size_limit=900) as writer:
            for number in range(part * 50, part * 50 + 50):
                writer.write({"number": number, "text": "é" * number})
    merge_index(str(tmp_path / "made"))
    assert list((tmp_path / "made").rglob("*.zstd"))
    url = sent(tmp_path / "made", rclone_server, config)
    dataset = stagekit.interop.mosaicml(url, tmp_path / "local", store=config, batch_size=4)
    assert [(dataset[number]["number"], len(dataset[number]["text"])) for number in range(100)] == [(n, n) for n in range(100)]
    assert list((tmp_path / "local").glob("part-*/*.mds"))
    assert not list((tmp_path / "local").rglob("*.zstd")), "keep_zip is MosaicML's default"
    read = stagekit.interop.mosaicml(url, tmp_path / "split", split="part-1", store=config, batch_size=4)
    assert [read[number]["number"] for number in range(50)] == list(range(50, 100))

    class Doubled(StreamingDataset):  # type: ignore[misc]  # the package has no types here
        def __getitem__(self, index: int) -> int:
            return 2 * int(super().__getitem__(index)["number"])

    streams = [Stream(remote=f"{url}/part-{part}", local=str(tmp_path / f"s{part}")) for part in range(2)]
    several = stagekit.interop.mosaicml(streams, dataset=Doubled, store=config, batch_size=4, shuffle=True)
    assert sorted(several) == list(range(0, 200, 2))
    with pytest.raises(UsageError, match=r"^local: each of several streams has a local directory of its own"):
        stagekit.interop.mosaicml(streams, tmp_path, store=config)


def test_damage_heals_or_is_told(mds: Path, rclone_server: S3Server, config: StoreConfig, tmp_path: Path) -> None:
    url = sent(mds, rclone_server, config)
    entry = json.loads((mds / "index.json").read_text())["shards"][3]["raw_data"]
    with FaultProxy(rclone_server.endpoint_url) as proxy:
        there = replace(config, endpoint_url=proxy.endpoint_url)
        for number, other_hash in enumerate((None, "md5")):
            if other_hash:  # as MosaicML's writer lists it
                index = json.loads((mds / "index.json").read_text())
                for shard in index["shards"]:
                    shard["raw_data"]["hashes"] = {"xxh64": _hash("xxh64", (mds / shard["raw_data"]["basename"]).read_bytes())}
                open_store(url, config).put("index.json", json.dumps(index).encode())
            downloads = Downloads.of(url, "", tmp_path / f"local-{number}", there, lambda event: None)
            target = tmp_path / f"local-{number}" / entry["basename"]
            proxy.fault(FlipBit(100), method="GET", key=f"*{entry['basename']}", times=1)
            downloads.download(f"{url}/{entry['basename']}", str(target))
            assert target.read_bytes() == (mds / entry["basename"]).read_bytes()
            target.unlink()
            proxy.fault(FlipBit(100), method="GET", key=f"*{entry['basename']}")
            with pytest.raises(BadDigest, match=rf"{entry['basename']}: expected .* and then .*damaged or was replaced"):
                downloads.download(f"{url}/{entry['basename']}", str(target))
            proxy.clear()
            assert list(target.parent.iterdir()) == [], "nothing half-written"
        open_store(url, config).put(entry["basename"], b"short")
        with pytest.raises(InvalidReply, match=rf"expected {entry['bytes']} bytes, the store holds 5"):
            downloads.download(f"{url}/{entry['basename']}", str(target))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("spoil", [lambda data: data[:1000], lambda data: data[:400] + b"??" + data[402:]], ids=["cut", "flipped"])
def test_an_epoch_over_damaged_data_is_an_error_and_not_a_short_one(
    mds: Path, tmp_path: Path, spoil: Callable[[bytes], bytes], workers: int
) -> None:
    shutil.copytree(mds, tmp_path / "remote")
    third = sorted((tmp_path / "remote").glob("*.mds"))[2]
    third.write_bytes(spoil(third.read_bytes()))
    dataset = stagekit.interop.mosaicml(f"file://{tmp_path / 'remote'}", local=tmp_path / "local", batch_size=4, shuffle=False)
    with pytest.raises((BadDigest, InvalidReply), match=third.name):
        for _ in StreamingDataLoader(dataset, batch_size=4, num_workers=workers):
            pass


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "compressed"])
def test_what_lies_there_from_an_earlier_run_is_compared_before_it_is_used(
    rclone_server: S3Server, config: StoreConfig, tmp_path: Path, compressed: bool
) -> None:
    options: dict[str, Any] = {"compression": "zstd:3"} if compressed else {}
    hashes = ["xxh3_64"] if compressed else ["md5", "sha256"]
    with MDSWriter(out=str(tmp_path / "made"), columns={"data": "bytes"}, hashes=hashes, size_limit=2_500, **options) as writer:
        rng = random.Random(1)
        wanted = [rng.randbytes(300) for _ in range(60)]
        for data in wanted:
            writer.write({"data": data})
    url = sent(tmp_path / "made", rclone_server, config)
    here = tmp_path / "local"

    def read(workers: int, **more: Any) -> list[bytes]:
        dataset = stagekit.interop.mosaicml(url, here, store=config, batch_size=4, **more)
        return [data for batch in StreamingDataLoader(dataset, batch_size=4, num_workers=workers) for data in batch["data"]]

    assert read(0, keep_zip=compressed) == wanted
    whole = {path.name: path.read_bytes() for path in here.iterdir()}
    for workers in (0, 2):
        for number, (damage, part) in enumerate([(flipped, "mds"), (shortened, "mds"), (flipped, "mds.zstd"), (shortened, "mds.zstd")]):
            path = here / f"shard.{number:05d}.{part}"
            if path.exists():
                path.write_bytes(damage(path.read_bytes()))
            if compressed and part == "mds.zstd":
                path.with_suffix("").unlink()  # as a run that was killed before it unpacked leaves it
        (here / "shard.00004.mds").unlink()
        untouched = {name: (here / name).stat().st_mtime_ns for name in ("shard.00000.mds", "shard.00005.mds")}
        assert read(workers, keep_zip=compressed) == wanted
        assert {path.name: path.read_bytes() for path in here.iterdir()} == whole
        changed = {name for name, at in untouched.items() if (here / name).stat().st_mtime_ns != at}
        assert changed == {"shard.00000.mds"}, "what is whole is not fetched again"

    if not compressed:
        damaged = tmp_path / "made" / "shard.00001.mds"
        damaged.write_bytes(flipped(damaged.read_bytes()))
        in_place = stagekit.interop.mosaicml(tmp_path / "made", batch_size=4)
        assert in_place[0]["data"] == wanted[0]
        with pytest.raises(CorruptShard, match=rf"^reading {damaged}: expected sha256 .*, found .*; the file is damaged"):
            list(in_place)


def flipped(data: bytes) -> bytes:
    return data[:-50] + bytes([data[-50] ^ 1]) + data[-49:]


def shortened(data: bytes) -> bytes:
    return data[:-200]


def _hash(name: str, data: bytes) -> str:
    from streaming.base.hashing import get_hash

    return str(get_hash(name, data))


def test_where_it_is_kept(mds: Path, rclone_server: S3Server, config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = sent(mds, rclone_server, config)
    dataset = stagekit.interop.mosaicml(url, store=config, batch_size=4)
    local = Path(dataset.streams[0].local)
    assert local.parent == tmp_path / "cache" / "stagekit" / "mosaicml"
    with pytest.raises(UsageError, match=rf"^local: {local} is in use by another StreamingDataset"):
        stagekit.interop.mosaicml(url, store=config, batch_size=4)
    del dataset
    assert stagekit.interop.mosaicml(url, store=config, batch_size=4).streams[0].local == str(local)

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.json").write_text('{"shards": [], "version": 2}')
    with pytest.raises(UsageError, match=r"mine/index\.json is not the index at s3://.*holds another data set"):
        stagekit.interop.mosaicml(url, tmp_path / "mine", store=config)
    with pytest.raises(
        ManifestError, match=r"holds no data set in MosaicML's format: there is no s3://.*nothing/index\.json.*--format mds"
    ):
        stagekit.interop.mosaicml(f"{url}/nothing", store=config)
    open_store(url, config).put("index.json", b"[]")
    with pytest.raises(ManifestError, match=r"index\.json is no index of MosaicML's format"):
        stagekit.interop.mosaicml(url, store=config)
    in_place = stagekit.interop.mosaicml(mds, batch_size=4)
    second = stagekit.interop.mosaicml(mds, batch_size=4)
    assert [in_place[5]["__key__"], second[6]["__key__"]] == ["0005", "0006"]
    assert (in_place.streams[0].local, in_place.streams[0].remote) == (str(mds), None)


# Makes a dataset in the local directory, says so, and reads when it is told to.
_RUN = """
import json, sys, stagekit.interop
from streaming import StreamingDataLoader
dataset = stagekit.interop.mosaicml(*sys.argv[1:], batch_size=5, shuffle=True)
print(f"{dataset._shm_prefix_int:06}", flush=True)
sys.stdin.readline()
print(json.dumps([key for batch in StreamingDataLoader(dataset, batch_size=5, num_workers=2) for key in batch["__key__"]]))
"""


class Process:
    """A process of a run, in a session of its own, so that its helpers are killed with it."""

    def __init__(self, url: str, local: Path, environment: dict[str, str]) -> None:
        argv = [sys.executable, "-W", "ignore", "-c", _RUN, url, str(local)]
        pipe = subprocess.PIPE
        self.running = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)

    def number(self) -> str:
        """That of its dataset in shared memory, once it is made."""
        assert self.running.stdout is not None
        line = self.running.stdout.readline()
        assert line, self.running.communicate()[1]
        return line.strip()

    def go_on(self) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write("\n")
        self.running.stdin.flush()

    def read(self) -> list[str]:
        out, err = self.running.communicate(timeout=240)
        assert self.running.returncode == 0, err
        keys: list[str] = json.loads(out)
        return keys

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.running.pid, signal.SIGKILL)
        self.running.communicate()


def test_a_killed_run_does_not_stop_the_next_one_and_two_ranks_that_live_read_on(
    mds: Path, rclone_server: S3Server, config: StoreConfig, tmp_path: Path
) -> None:
    url = sent(mds, rclone_server, config)
    alone = {
        **os.environ,
        "AWS_ENDPOINT_URL": rclone_server.endpoint_url,
        "AWS_ACCESS_KEY_ID": rclone_server.access_key,
        "AWS_SECRET_ACCESS_KEY": rclone_server.secret_key,
        "OMP_NUM_THREADS": "1",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    group |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [Process(url, tmp_path / "alive", {**alone, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    killed = Process(url, tmp_path / "killed", alone)
    try:
        [living] = {rank.number() for rank in ranks}
        dead = killed.number()
        killed.kill()
        assert str(tmp_path / "killed").encode() in (SHARED_MEMORY / f"{dead}_locals").read_bytes()
        with pytest.raises(ValueError, match="Reused local directory"):  # what MosaicML's package makes of it by itself
            StreamingDataset(remote=url, local=str(tmp_path / "killed"), batch_size=4)
        (tmp_path / "killed" / ".shard.00000.mds.1-2.part").write_bytes(b"half")
        with pytest.raises(UsageError, match=r"alive is in use by another StreamingDataset"):
            stagekit.interop.mosaicml(url, tmp_path / "alive", store=config, batch_size=4)
        dataset = stagekit.interop.mosaicml(url, tmp_path / "killed", store=config, batch_size=4)
        assert sorted(sample["__key__"] for sample in dataset) == KEYS
        assert not list((tmp_path / "killed").glob(".*")), "what it was downloading is gone, too"
        assert (SHARED_MEMORY / f"{living}_locals").exists()
        for rank in ranks:
            rank.go_on()  # all of them: their workers wait for each other
        read = [rank.read() for rank in ranks]
        assert [len(one) for one in read] == [COUNT // 2] * 2
        assert sorted(read[0] + read[1]) == KEYS
    finally:
        for process in (*ranks, killed):
            process.kill()
