"""A line of so many bytes a second in front of a server on this machine, for ``tools/bench``: all connections share each direction.

It runs in a process of its own and copies bytes between sockets, so that it takes little of the cores that are measured.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

_PIECE = 64 * 1024


class _Direction:
    """What is let through: each piece waits until the line has carried those before it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._piece_s = 1 / bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_PIECE):
                with self._lock:
                    self._free_s = max(self._free_s, time.monotonic()) + len(data) * self._piece_s
                    through_s = self._free_s
                time.sleep(max(0.0, through_s - time.monotonic()))
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def serve(host: str, port: int, bytes_per_s: float) -> None:
    """Print the port it listens at, and forward to ``host`` and ``port`` until the process is killed."""
    up, down = _Direction(bytes_per_s), _Direction(bytes_per_s)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            client, _ = listening.accept()
            server = socket.create_connection((host, port))
            for direction, source, sink in ((up, client, server), (down, server, client)):
                for one in (source, sink):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=direction.carry, args=(source, sink), daemon=True).start()


@contextmanager
def line(endpoint_url: str, bytes_per_s: float) -> Iterator[str]:
    """The endpoint behind such a line, while the block lasts."""
    there = urlsplit(endpoint_url)
    command = [sys.executable, __file__, str(there.hostname), str(there.port), str(bytes_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"{there.scheme}://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
