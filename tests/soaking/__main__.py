"""The child of tools/soak: the workload in a process of its own, whose memory and descriptors are watched.

    python -m tests.soaking ENDPOINT BUCKET SECONDS DIRECTORY

Prints one JSON object: what was done, and a reading of memory and descriptors for every second.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from stagekit.config import StoreConfig
from stagekit.store import open_store

from .workload import soak


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    endpoint, bucket, seconds, directory = sys.argv[1:]
    config = StoreConfig(endpoint_url=endpoint, read_timeout_s=10, connect_timeout_s=5)
    began = time.monotonic()
    until = began + float(seconds)
    readings: list[tuple[float, int, int, int]] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            fds = len(list(Path("/proc/self/fd").iterdir()))
            readings.append((round(time.monotonic() - began, 1), resident_bytes(), fds, threading.active_count()))

    threading.Thread(target=watch, daemon=True).start()
    outcome = soak(
        lambda folder: open_store(f"s3://{bucket}/{folder}", config),
        Path(directory),
        stop=lambda: time.monotonic() > until,
        pause=time.sleep,
    )
    ended.set()
    told = asdict(outcome) | {"errors": [f"{type(error).__name__}: {error}" for error in outcome.errors]}
    print(json.dumps(told | {"took_s": time.monotonic() - began, "readings": readings}))


if __name__ == "__main__":
    main()
