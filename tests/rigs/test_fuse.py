"""The FUSE mount is a real one, and it is nobody else's."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.fuse import FuseMount
from tests.rigs.servers import S3Server


def test_a_bucket_can_be_read_through_the_mount(fuse: FuseMount, rclone_server: S3Server) -> None:
    rclone_server.client().put_object(Bucket=fuse.bucket, Key="dir/a", Body=b"bytes")
    assert fuse.run("cat", fuse.mount_point / "dir" / "a").stdout == "bytes"
    kind = fuse.run("stat", "-f", "-c", "%T", fuse.mount_point)
    assert kind.stdout.strip() == "fuseblk", kind.stderr  # what coreutils calls every FUSE file system


def test_stagekit_knows_it_for_what_it_is(fuse: FuseMount) -> None:
    asked = fuse.python("import sys; from stagekit.mounts import mount_of; print(mount_of(sys.argv[1]))", fuse.mount_point)
    assert "fuse.rclone" in asked.stdout, asked.stderr


def test_the_mount_is_in_a_namespace_of_its_own(fuse: FuseMount) -> None:
    assert "fuse.rclone" in fuse.run("cat", "/proc/self/mountinfo").stdout
    assert str(fuse.mount_point) not in Path("/proc/self/mountinfo").read_text()
    assert list(fuse.mount_point.iterdir()) == []
