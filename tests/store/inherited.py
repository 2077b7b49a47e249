"""Run in an interpreter of its own, with ``guarded`` or ``unguarded``: what a forked child reads when its sibling died while reading.

The first child asks for ``slow`` and is killed before the answer. The server answers it once another request came over the same
connection, or the connection was closed. The second child then asks for ``mine``, and prints what it got.
"""

import os
import select
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if sys.argv[1] == "unguarded":
    parent = os.getpid()
    os.getpid = lambda: parent
    os.register_at_fork = lambda **_: None

from stagekit.config import StoreConfig
from stagekit.store.s3 import S3Store

asked = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        key = self.path.rpartition("/")[2]
        if key == "slow":
            asked.set()
            select.select([self.connection], [], [])
        body = key.ljust(10).encode()
        self.send_response_only(200)
        self.send_header("ETag", '"e"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ.update(AWS_ACCESS_KEY_ID="k", AWS_SECRET_ACCESS_KEY="s")
store = S3Store("s3://bucket", StoreConfig(endpoint_url=f"http://127.0.0.1:{server.server_address[1]}"))
assert bytes(store.get("warm")) == b"warm      "

first = os.fork()
if first == 0:
    store.get("slow")
    os._exit(1)
asked.wait()
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)

second = os.fork()
if second == 0:
    os.write(1, b"asked for mine, got " + bytes(store.get("mine")).strip())
    os._exit(0)
os.waitpid(second, 0)
