"""A server that gives the answers a test asks for: what real ones give only on bad days."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """``length`` announces more bytes than are sent: the body is then cut."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


def refusal(status: int, code: str, message: str = "", **headers: str) -> Answer:
    """An S3 error document."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()
    return Answer(status, body, {"Content-Type": "application/xml", **{name.replace("_", "-"): value for name, value in headers.items()}})


@contextmanager
def answering(answer: Callable[[Request], Answer]) -> Iterator[str]:
    """The URL of a server on loopback that answers every request with ``answer(request)``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            given = answer(Request(self.command, self.path, dict(self.headers), body))
            self.send_response_only(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(given.body) if given.length is None else given.length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(given.body)
            if given.length is not None:
                self.close_connection = True

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the test looks at requests itself."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
