"""The demo's S3 server after the demo has ended (``--keep``): a process of its own that serves until it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import StagekitError
from ..testing.rclone import RcloneServer

_STAY = b"stay\n"
_READY = b"ready\n"


class Keeper:
    """Serves ``root`` on ``port`` with the keys in ``credentials``, which the ``with`` block's end stops unless ``stay()`` was called.

    The child waits for a word on a pipe, and a pipe whose other end is gone says the same as "no": however this process ends before
    ``stay()``, no server is left.
    """

    def __init__(self, root: Path, port: int, credentials: Mapping[str, str], *, log: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(root.absolute()), str(port), str(log.absolute())],
            env={**os.environ, **credentials},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._child.stdout is not None
        if self._child.stdout.readline() != _READY:
            self._child.wait()
            raise StagekitError(f"the S3 server did not start again on port {port}; the end of {log} says why")

    @property
    def pid(self) -> int:
        return self._child.pid

    def stay(self) -> None:
        """Let it serve on after this process."""
        assert self._child.stdin is not None
        self._child.stdin.write(_STAY)
        self._child.stdin.flush()
        # It is meant to outlive us: without this, Popen warns about a child that still runs.
        self._child.returncode = 0

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()
        self._child.wait()


def _serve(root: Path, port: int, log: Path) -> None:
    server = RcloneServer(
        root, access_key=os.environ["AWS_ACCESS_KEY_ID"], secret_key=os.environ["AWS_SECRET_ACCESS_KEY"], port=port, log=log
    )
    with server:
        sys.stdout.buffer.write(_READY)
        sys.stdout.buffer.flush()
        if sys.stdin.buffer.readline() == _STAY:
            signal.sigwait({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    _serve(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
