"""A proxy in front of a real S3 server that spoils requests and replies by script, and keeps a record of all of them.

::

    with FaultProxy(server.endpoint_url) as proxy:
        proxy.fault(Cut(1000), method="GET", key="*.tar", times=1)
        ...                                                    # use proxy.endpoint_url as the endpoint
        assert [one.status for one in proxy.requests] == [206, 206]

The Host header reaches the server as the client sent it, so that signatures hold.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

_CHUNK = 64 * 1024
_HOP_BY_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"}

Where = Literal["reply", "request"]


@dataclass(frozen=True, slots=True)
class Throttle:
    """Send the body no faster than this."""

    bytes_per_s: float
    of: Where = "reply"


@dataclass(frozen=True, slots=True)
class Cut:
    """Break the connection after so many bytes of the body."""

    after: int
    of: Where = "reply"


@dataclass(frozen=True, slots=True)
class Stall:
    """Send so many bytes of the reply's body, then nothing, with the connection open, until ``release()`` or the proxy's end."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class FlipBit:
    """Flip one bit of the body's byte ``offset``."""

    offset: int
    bit: int = 0
    of: Where = "reply"


@dataclass(frozen=True, slots=True)
class Status:
    """Answer with an error of S3 without asking the server. The request's body is read first."""

    status: int
    code: str = "InternalError"
    message: str = "made by the fault proxy"
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class SlowDown:
    """503 SlowDown, as S3 answers a client that asks too much."""

    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ShortBody:
    """Leave out the last bytes of the body, and say so in Content-Length: a message that is well formed and wrong."""

    missing: int = 1
    of: Where = "reply"


@dataclass(frozen=True, slots=True)
class Html:
    """200 with a web page, as a captive portal answers."""

    page: str = "<!DOCTYPE html><html><body>Please log in</body></html>"


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait before the request is forwarded."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WrongDate:
    """Shift the reply's Date header by so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class HideKeys:
    """Leave keys that match the pattern out of listings."""

    key: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Break the connection instead of answering. With ``after_request`` the server carries the request out first: a lost reply."""

    after_request: bool = False


@dataclass(frozen=True, slots=True)
class Hang:
    """Never answer, with the connection open, until ``release()`` or the proxy's end breaks it. ``after_request`` as in ``Drop``."""

    after_request: bool = False


Fault = Throttle | Cut | Stall | FlipBit | Status | SlowDown | ShortBody | Html | Delay | WrongDate | HideKeys | Drop | Hang


@dataclass(slots=True)
class Request:
    """One request as it passed. ``key`` is decoded and without the bucket, so empty for a listing.

    ``range`` is the header, or empty. ``status`` is what the client got, 0 when the connection broke before. ``sent`` counts the bytes
    of the reply's body, ``received`` those of the request's.
    """

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    range: str
    headers: dict[str, str] = field(repr=False, default_factory=dict)
    status: int = 0
    sent: int = 0
    received: int = 0
    faults: tuple[Fault, ...] = ()


@dataclass(slots=True)
class _Rule:
    faults: tuple[Fault, ...]
    method: str
    key: str
    where: Callable[[Request], bool] | None
    skip: int
    times: int | None

    def takes(self, request: Request) -> bool:
        if not fnmatchcase(request.method, self.method) or not fnmatchcase(request.key, self.key):
            return False
        if self.where is not None and not self.where(request):
            return False
        if self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class FaultProxy:
    """Forwards to the server at ``target_url`` from a free loopback port, in threads, while the ``with`` block lasts.

    ``ca_bundle`` is for a target with https; ``certificate`` (a PEM file and its key's) makes the proxy speak https itself. ``sleep``
    is what throttling and delays wait with.
    """

    def __init__(
        self,
        target_url: str,
        *,
        ca_bundle: str | None = None,
        certificate: tuple[Path, Path] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        target = urlsplit(target_url)
        if target.hostname is None or target.port is None:
            raise ValueError(f"{target_url!r} names no host and port to forward to")
        self._host, self._port = target.hostname, target.port
        self._tls = ssl.create_default_context(cafile=ca_bundle) if target.scheme == "https" else None
        self._own_tls = None
        if certificate is not None:
            self._own_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._own_tls.load_cert_chain(*certificate)
        self.sleep = sleep
        self.released = threading.Event()
        self._rules: list[_Rule] = []
        self._requests: list[Request] = []
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def endpoint_url(self) -> str:
        if self._server is None:
            raise RuntimeError("the proxy is not running")
        return f"{'https' if self._own_tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request so far, in the order in which they came in."""
        with self._lock:
            return tuple(self._requests)

    def fault(
        self,
        *faults: Fault,
        method: str = "*",
        key: str = "*",
        where: Callable[[Request], bool] | None = None,
        skip: int = 0,
        times: int | None = None,
    ) -> None:
        """Apply ``faults`` to requests whose method and key match the patterns: to ``times`` of them, or all, after the first ``skip``.

        Rules are asked in the order in which they were added, and the first that takes a request is the only one.
        """
        with self._lock:
            self._rules.append(_Rule(faults, method, key, where, skip, times))

    def clear(self) -> None:
        """Forget all rules and requests, and let stalled replies go on."""
        self.release()
        with self._lock:
            self._rules.clear()
            self._requests.clear()

    def release(self) -> None:
        """Let replies that stalled go on."""
        self.released.set()
        self.released = threading.Event()

    def start(self) -> None:
        self._server = _Server(self, self._own_tls)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="fault-proxy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Break every connection. Raises what went wrong in the proxy itself, if anything did. Stopping twice is no error."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        # In this order: what stalled must not go on.
        self._server.break_connections()
        self.release()
        self._server.server_close()
        self._server = self._thread = None
        if self._errors:
            raise RuntimeError("the fault proxy failed") from self._errors[0]

    def begin(self, request: Request) -> None:
        """Record a request, and decide its faults."""
        with self._lock:
            self._requests.append(request)
            request.faults = next((rule.faults for rule in self._rules if rule.takes(request)), ())

    def failed(self, error: BaseException) -> None:
        self._errors.append(error)

    def connect(self) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=60, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=60)

    def __enter__(self) -> FaultProxy:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, proxy: FaultProxy, tls: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy
        self._tls = tls
        self._open: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            # The handshake belongs to the connection's own thread, or one silent client would keep all others out.
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def break_connections(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        error = sys.exc_info()[1]
        # A client that went away is what half of the faults are for.
        if error is not None and not isinstance(error, OSError):
            self.proxy.failed(error)


class _Broken(Exception):
    """The connection is to be broken here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are recorded, not printed."""

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        request = Request(
            self.command,
            bucket,
            key,
            dict(parse_qsl(parts.query, keep_blank_values=True)),
            self.headers.get("Range", ""),
            {name.lower(): value for name, value in self.headers.items()},
        )
        self.server.proxy.begin(request)
        try:
            self._exchange(request)
        except (_Broken, http.client.HTTPException, OSError):
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _exchange(self, request: Request) -> None:
        faults = request.faults
        for fault in faults:
            if isinstance(fault, Delay):
                self.server.proxy.sleep(fault.seconds)
            elif isinstance(fault, (Drop, Hang)) and not fault.after_request:
                self._leave(fault)
            elif isinstance(fault, (Status, SlowDown, Html)):
                for piece in self._request_body():
                    request.received += len(piece)
                self._answer(request, fault)
                return
        if self._upstream is None:
            self._upstream = self.server.proxy.connect()
        upstream = self._upstream
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        chunked = self.headers.get("Transfer-Encoding", "").lower() == "chunked"
        short = sum(fault.missing for fault in faults if isinstance(fault, ShortBody) and fault.of == "request")
        length = max(0, int(self.headers.get("Content-Length") or 0) - short)
        for name, value in self.headers.items():
            # "Expect: 100-continue" was answered here already.
            if name.lower() not in _HOP_BY_HOP | {"expect"}:
                upstream.putheader(name, str(length) if name.lower() == "content-length" else value)
        if chunked:
            upstream.putheader("Transfer-Encoding", "chunked")
        upstream.endheaders()
        body = self._spoiled(self._request_body(), faults, "request")
        for piece in _first(body, length) if short and not chunked else body:
            request.received += len(piece)
            upstream.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            upstream.send(b"0\r\n\r\n")
        # A server that ends the connection leaves its socket to the reply, which nobody else closes when a fault leaves it half read.
        with upstream.getresponse() as reply:
            for fault in faults:
                if isinstance(fault, (Drop, Hang)):
                    reply.read()
                    self._leave(fault)
            self._pass_on(request, reply)

    def _leave(self, fault: Drop | Hang) -> NoReturn:
        if isinstance(fault, Hang):
            self.server.proxy.released.wait()
        raise _Broken

    def _pass_on(self, request: Request, reply: http.client.HTTPResponse) -> None:
        faults = request.faults
        pieces: Iterator[bytes] = iter(lambda: reply.read(_CHUNK), b"")
        # http.client reads no body where there must be none, yet the length of what a GET would have sent is to be passed on.
        stated = reply.headers.get("Content-Length")
        bodiless = self.command == "HEAD" or reply.status in (204, 304)
        length = int(stated) if stated is not None else None
        hidden = [fault.key for fault in faults if isinstance(fault, HideKeys)]
        if not bodiless and (length is None or hidden):
            body = reply.read()
            if hidden and not request.key:
                body = _without_keys(body, hidden)
            length, pieces = len(body), iter([body] if body else [])
        for fault in faults:
            if isinstance(fault, ShortBody) and fault.of == "reply" and length is not None and not bodiless:
                length = max(0, length - fault.missing)
                pieces = _first(pieces, length)
        self.send_response_only(reply.status, reply.reason)
        for name, value in reply.headers.items():
            if name.lower() in _HOP_BY_HOP | {"content-length"}:
                continue
            if name.lower() == "date":
                shift = sum(fault.seconds for fault in faults if isinstance(fault, WrongDate))
                value = email.utils.formatdate(email.utils.parsedate_to_datetime(value).timestamp() + shift, usegmt=True)
            self.send_header(name, value)
        if length is not None and reply.status != 204:
            self.send_header("Content-Length", str(length))
        request.status = reply.status
        self.end_headers()
        if bodiless:
            reply.read()
            return
        for piece in self._spoiled(pieces, faults, "reply"):
            request.sent += len(piece)
            self.wfile.write(piece)
        # A body left unread would be taken for the next reply.
        reply.read()

    def _answer(self, request: Request, fault: Status | SlowDown | Html) -> None:
        if isinstance(fault, SlowDown):
            fault = Status(503, "SlowDown", "Please reduce your request rate.", fault.retry_after_s)
        if isinstance(fault, Html):
            status, kind, body = 200, "text/html", fault.page.encode()
        else:
            status, kind = fault.status, "application/xml"
            body = (
                '<?xml version="1.0" encoding="UTF-8"?>'
                f"<Error><Code>{fault.code}</Code><Message>{fault.message}</Message><RequestId>fault-proxy</RequestId></Error>"
            ).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        shift = sum(one.seconds for one in request.faults if isinstance(one, WrongDate))
        self.send_header("Date", email.utils.formatdate(time.time() + shift, usegmt=True))
        if isinstance(fault, Status) and fault.retry_after_s is not None:
            self.send_header("Retry-After", f"{fault.retry_after_s:g}")
        request.status = status
        self.end_headers()
        if self.command != "HEAD":
            request.sent = len(body)
            self.wfile.write(body)

    def _request_body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            piece = self.rfile.read(min(left, _CHUNK))
            if not piece:
                raise _Broken
            left -= len(piece)
            yield piece

    def _spoiled(self, pieces: Iterator[bytes], faults: tuple[Fault, ...], of: Where) -> Iterator[bytes]:
        position = 0
        for piece in pieces:
            for fault in faults:
                if isinstance(fault, FlipBit) and fault.of == of and position <= fault.offset < position + len(piece):
                    spoiled = bytearray(piece)
                    spoiled[fault.offset - position] ^= 1 << fault.bit
                    piece = bytes(spoiled)
            for fault in faults:
                if isinstance(fault, Throttle) and fault.of == of:
                    self.server.proxy.sleep(len(piece) / fault.bytes_per_s)
                elif isinstance(fault, Cut) and fault.of == of and position + len(piece) >= fault.after:
                    yield piece[: fault.after - position]
                    raise _Broken
                elif isinstance(fault, Stall) and of == "reply" and position <= fault.after < position + len(piece):
                    released = self.server.proxy.released
                    yield piece[: fault.after - position]
                    released.wait()
                    piece, position = piece[fault.after - position :], fault.after
            yield piece
            position += len(piece)


def _first(pieces: Iterator[bytes], length: int) -> Iterator[bytes]:
    for piece in pieces:
        if length:
            yield piece[:length]
        length -= min(length, len(piece))


def _without_keys(listing: bytes, patterns: list[str]) -> bytes:
    """The XML of a listing without the entries whose key matches, its count corrected."""

    def keep(entry: re.Match[bytes]) -> bytes:
        key = re.search(rb"<(?:Key|Prefix)>(.*?)</", entry.group(0), re.DOTALL)
        name = unquote(key.group(1).decode()) if key else ""
        return b"" if any(fnmatchcase(name, pattern) for pattern in patterns) else entry.group(0)

    entries = re.compile(rb"<(Contents|CommonPrefixes)>.*?</\1>", re.DOTALL)
    shown = entries.sub(keep, listing)
    count = sum(1 for _ in entries.finditer(shown))
    return re.sub(rb"<KeyCount>\d+</KeyCount>", b"<KeyCount>%d</KeyCount>" % count, shown)
