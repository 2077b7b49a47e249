"""A real Ceph RADOS gateway over http and https, with one monitor and one in-memory OSD: no root services, no kernel modules."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stagekit.testing.daemon import Daemon, wait_until

from .certificates import make_certificates
from .servers import S3Server

BINARIES = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "monmaptool", "openssl")


@dataclass(frozen=True)
class Rgw:
    """The gateway's two doors, with the same users and buckets behind them, and a second user, who may do nothing that no policy allows."""

    http: S3Server
    https: S3Server
    guest: S3Server

    @property
    def http_url(self) -> str:
        return self.http.endpoint_url

    @property
    def https_url(self) -> str:
        return self.https.endpoint_url

    @property
    def endpoint_url(self) -> str:
        return self.http.endpoint_url

    @property
    def access_key(self) -> str:
        return self.http.access_key

    @property
    def secret_key(self) -> str:
        return self.http.secret_key

    @property
    def ca_bundle(self) -> str:
        assert self.https.ca_bundle is not None
        return self.https.ca_bundle


def missing() -> list[str]:
    """The programs that are not installed."""
    return [name for name in BINARIES if shutil.which(name) is None]


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with ExitStack() as sockets:
        found = []
        for _ in range(count):
            listener = sockets.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            found.append(listener.getsockname()[1])
        return found


@contextmanager
def rgw() -> Iterator[Rgw]:
    """The gateway, answering signed requests on both doors, and gone with its files when the block ends.

    Raises ``RuntimeError`` with the end of the log of the part that did not start; its files then stay for a look.
    """
    # Not below pytest's directory: Ceph puts unix sockets here, whose paths may have 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="rgw-"))
    with ExitStack() as daemons:
        gateway = _start(directory, daemons)
        yield gateway
    shutil.rmtree(directory, ignore_errors=True)


def _start(directory: Path, daemons: ExitStack) -> Rgw:
    monitor_v2, monitor_v1, http_port, https_port = free_ports(4)
    certificates = make_certificates(directory / "tls")
    cluster = str(uuid.uuid4())
    monitor = f"[v2:127.0.0.1:{monitor_v2},v1:127.0.0.1:{monitor_v1}]"
    config = directory / "ceph.conf"
    config.write_text(f"""\
[global]
fsid = {cluster}
mon host = {monitor}
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 1000
admin socket = {directory}/$name.asok
run dir = {directory}
log file =
log to stderr = true
err to stderr = true
[mon]
mon data = {directory}/mon
mon data avail crit = 1
[osd]
osd data = {directory}/osd
osd objectstore = memstore
memstore device bytes = 8589934592
[client]
keyring = {directory}/none
[client.rgw]
rgw data = {directory}/rgw
ms mon client mode = crc
rgw frontends = beast endpoint=127.0.0.1:{http_port} ssl_endpoint=127.0.0.1:{https_port} \
ssl_certificate={certificates.leaf} ssl_private_key={certificates.leaf_key}
rgw gc obj min wait = 5
rgw gc processor period = 5
""")
    for name in ("mon", "osd", "rgw"):
        (directory / name).mkdir()

    def run(*argv: str) -> str:
        # Reads the text of a failed step into the error, since these programs tell everything on standard error.
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def daemon(name: str, *argv: str) -> Daemon:
        return daemons.enter_context(Daemon([*argv, "-c", str(config)], directory / f"{name}.log"))

    def gateway_answers(server: S3Server) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            server.client(read_timeout=5).list_buckets()
        except (BotoCoreError, ClientError):
            return False
        return True

    monmap = str(directory / "monmap")
    conf = ("-c", str(config))
    run("monmaptool", "--create", "--fsid", cluster, "--addv", "a", monitor, monmap)
    run("ceph-mon", *conf, "--mkfs", "-i", "a", "--monmap", monmap)
    ceph_mon = daemon("mon", "ceph-mon", "-f", "-i", "a")
    wait_until(lambda: accepts(monitor_v2), ceph_mon, "ceph-mon", 30)

    osd = str(uuid.uuid4())
    run("ceph", *conf, "osd", "new", osd, "0")
    run("ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
    daemon("osd", "ceph-osd", "-f", "-i", "0")

    as_gateway = (*conf, "-n", "client.rgw", "--no-mon-config")

    def user(name: str) -> tuple[str, str]:
        access_key, secret_key = "RGW" + secrets.token_hex(8).upper(), secrets.token_hex(20)
        run(
            *("radosgw-admin", *as_gateway, "user", "create", "--uid", name, "--display-name", name),
            *("--access-key", access_key, "--secret", secret_key, "--max-buckets", "0"),
        )
        return access_key, secret_key

    tester, guest = user("tester"), user("guest")
    radosgw = daemon("radosgw", "radosgw", "-f", "-n", "client.rgw", "--no-mon-config")
    http = S3Server("rgw-http", f"http://127.0.0.1:{http_port}", *tester)
    https = S3Server("rgw-https", f"https://127.0.0.1:{https_port}", *tester, str(certificates.authority))
    for server in (http, https):
        wait_until(lambda server=server: gateway_answers(server), radosgw, f"radosgw at {server.endpoint_url}", 60)  # type: ignore[misc]
    return Rgw(http, https, S3Server("rgw-guest", http.endpoint_url, *guest))


def accepts(port: int) -> bool:
    """Whether somebody listens on that port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
