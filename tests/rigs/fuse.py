"""A real FUSE mount: a bucket behind ``rclone mount``, in a mount namespace of its own so that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stagekit.testing.daemon import Daemon, wait_until
from stagekit.testing.rclone import rclone_binary

from .servers import S3Server


@dataclass(frozen=True)
class FuseMount:
    """A bucket as a directory, which only programs run with ``run`` can see."""

    mount_point: Path
    bucket: str
    daemon: Daemon

    def run(self, *argv: str | Path, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a program where the mount is."""
        inside = ["nsenter", "--mount", "--target", str(self.daemon.pid), f"--wd={Path.cwd()}", "--"]
        return subprocess.run([*inside, *map(str, argv)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)

    def python(self, code: str, *argv: str | Path, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run ``code`` with this Python where the mount is."""
        return self.run(sys.executable, "-c", code, *argv, timeout_s=timeout_s)


@contextmanager
def mounted(server: S3Server, bucket: str, directory: Path) -> Iterator[FuseMount]:
    """``bucket`` of ``server``, mounted below ``directory``. Gone, with all that used it, when the block ends: no unmount is needed.

    Raises ``RuntimeError`` with the end of rclone's log when it does not come up.
    """
    mount_point = directory / "mount"
    mount_point.mkdir(parents=True)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RCLONE_", "AWS_"))},
        "RCLONE_CONFIG": str(directory / "none.conf"),
        "RCLONE_S3_PROVIDER": "Other",
        "RCLONE_S3_ENDPOINT": server.endpoint_url,
        "RCLONE_S3_ACCESS_KEY_ID": server.access_key,
        "RCLONE_S3_SECRET_ACCESS_KEY": server.secret_key,
    }
    # unshare becomes rclone, so that the daemon is the mount's own process: it dies with us, and the namespace with it.
    argv = ["unshare", "--mount", "--propagation", "private", str(rclone_binary()), "mount", f":s3:{bucket}", str(mount_point)]
    with Daemon([*argv, "--dir-cache-time", "1s", "--cache-dir", str(directory / "cache")], directory / "mount.log", env=env) as daemon:
        mount = FuseMount(mount_point, bucket, daemon)

        def up() -> bool:
            mounts = Path(f"/proc/{daemon.pid}/mountinfo").read_text()
            return f" {mount_point} " in mounts and " fuse.rclone " in mounts

        wait_until(up, daemon, f"rclone mount of {bucket}", 30)
        yield mount
