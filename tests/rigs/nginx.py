"""nginx on loopback: as fast as a web server gets, and the same files once more as over a long, thin line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stagekit.testing.daemon import Daemon, wait_until

from .available import PATH
from .rgw import accepts, free_ports


@dataclass(frozen=True)
class Nginx:
    """Serves the files below ``root``, byte ranges included."""

    root: Path
    fast_url: str
    wan_url: str


@contextmanager
def nginx(directory: Path, *, first_byte_s: float = 0.03, rate: str = "50m") -> Iterator[Nginx]:
    """``fast_url`` answers at once; ``wan_url`` after ``first_byte_s``, with ``rate`` bytes a second for each connection.

    Raises ``RuntimeError`` with the end of the log when it does not start.
    """
    binary = shutil.which("nginx", path=PATH)
    if binary is None:
        raise RuntimeError("nginx is not installed")
    root = directory / "www"
    root.mkdir(parents=True)
    fast, wan = free_ports(2)
    echo = Path("/usr/lib/nginx/modules/ngx_http_echo_module.so")
    config = directory / "nginx.conf"
    # As root, nginx would give its workers to a user who may not read a test's directories.
    config.write_text(f"""\
{f"load_module {echo};" if echo.exists() else ""}
{"user root;" if os.geteuid() == 0 else ""}
daemon off;
worker_processes 1;
pid {directory}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 512; }}
http {{
  access_log off;
  sendfile on;
  tcp_nodelay on;
  client_body_temp_path {directory}/tmp-body;
  proxy_temp_path {directory}/tmp-proxy;
  fastcgi_temp_path {directory}/tmp-fastcgi;
  uwsgi_temp_path {directory}/tmp-uwsgi;
  scgi_temp_path {directory}/tmp-scgi;
  server {{
    listen 127.0.0.1:{fast};
    root {root};
  }}
  server {{
    listen 127.0.0.1:{wan};
    root {root};
    location / {{ echo_sleep {first_byte_s:g}; echo_exec @file; }}
    location @file {{ limit_rate {rate}; }}
  }}
}}
""")
    with Daemon([binary, "-c", str(config), "-e", "stderr", "-p", str(directory)], directory / "nginx.log") as daemon:
        for port in (fast, wan):
            wait_until(lambda port=port: accepts(port), daemon, "nginx", 15)  # type: ignore[misc]
        yield Nginx(root, f"http://127.0.0.1:{fast}", f"http://127.0.0.1:{wan}")
