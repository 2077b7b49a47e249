"""One other reader, measured in a Python of its own: ``tools/bench stream --peer NAME --python PYTHON`` runs this file with it.

It imports nothing of Stagekit and nothing but that peer, since some keep packages old that others want new. Its data lies behind
``--endpoint``, which takes unsigned S3 requests; it reads for ``--seconds`` at most and prints one line of JSON.

``mosaicml``         ``StreamingDataset``, without workers: first with nothing on the local disk (cold), then again (warm)
``s3torchconnector`` the bytes of whole shards, several at the same time, with nothing done to them
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def rate(samples: Iterable[Any], size_of: Callable[[Any], int], seconds: float) -> dict[str, float]:
    """Samples and bytes a second, from the first one asked for."""
    count = size = 0
    began = time.perf_counter()
    for sample in samples:
        count += 1
        size += size_of(sample)
        if not count % 200 and time.perf_counter() - began > seconds:
            break
    took_s = time.perf_counter() - began
    return {"samples/s": count / took_s, "MB/s": size / 1e6 / took_s}


def mosaicml(options: argparse.Namespace) -> dict[str, float]:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    # It signs what it asks for, and nobody looks at that here.
    os.environ |= {"S3_ENDPOINT_URL": options.endpoint, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE"):
        os.environ.pop(name, None)
    folder = Path(options.root) / f"mosaicml-{options.size}"
    pool = os.urandom(64 * options.size)
    with MDSWriter(out=str(folder), columns={"data": "bytes"}, hashes=["xxh128"]) as writer:
        for number in range(options.count):
            start = number * 7919 % (63 * options.size)
            writer.write({"data": pool[start : start + options.size]})
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-mosaicml-") as local:
        for name in ("cold", "warm"):
            clean_stale_shared_memory()
            dataset = StreamingDataset(
                remote=f"s3://{options.bucket}/{folder.name}", local=local, shuffle=False, batch_size=64, validate_hash="xxh128"
            )
            found |= {f"{name}, {unit}": value for unit, value in rate(dataset, lambda one: len(one["data"]), options.seconds).items()}
            del dataset
    return found


def s3torchconnector(options: argparse.Namespace) -> dict[str, float]:
    from s3torchconnector import S3ClientConfig, S3MapDataset  # type: ignore[import-not-found]  # it is in an environment of its own

    dataset = S3MapDataset.from_objects(
        [f"s3://{options.bucket}/{key}" for key in options.keys],
        region="us-east-1",
        endpoint=options.endpoint,
        s3client_config=S3ClientConfig(force_path_style=True, unsigned=True),
    )
    began = time.perf_counter()
    with ThreadPoolExecutor(options.connections) as pool:
        size = sum(pool.map(lambda number: len(dataset[number].read()), range(len(dataset))))
    return {"MB/s": size / 1e6 / (time.perf_counter() - began)}


PEERS = {"mosaicml": mosaicml, "s3torchconnector": s3torchconnector}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--root", required=True, help="the folder that the bucket shows, to put data of the peer's own format into")
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--size", type=int, required=True, help="bytes of a sample")
    parser.add_argument("--count", type=int, required=True, help="samples to write, where the peer has a format of its own")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("keys", nargs="*", help="shards, for peers that read those")
    options = parser.parse_args()
    json.dump(PEERS[options.peer](options), sys.stdout)
    print()


if __name__ == "__main__":
    main()
