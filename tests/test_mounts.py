"""Mounts: the parser, the walk, the table, and real mounts in a mount namespace of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekit import mounts
from stagekit.errors import MountRefused
from stagekit.mounts import Mount, MountTable, bucket_url, parse_mountinfo
from stagekit.testing.rclone import rclone_binary

# Lines as Linux printed them on a cloud server, in a container and on RunPod; only names are changed.
RECORDED = rb"""27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard,resv_strict
22 27 0:21 / /proc rw,relatime - proc proc rw
40 27 0:45 / /mnt/bucket rw,nosuid,nodev,relatime shared:9 master:3 - fuse.rclone contabo:datasets/imagenet rw,user_id=0,group_id=0
41 27 0:46 / /mnt/with\040space\134 rw,relatime - fuse.s3fs s3fs rw,user_id=0,group_id=0
42 27 0:47 / /mnt/mp rw,relatime - fuse mountpoint-s3 rw
43 27 0:48 / /workspace rw,relatime - fuse mfs#eu.runpod.net:9421 rw,user_id=0
44 27 0:49 / /mnt/nfs rw,relatime - nfs4 10.0.0.2:/export rw,vers=4.2,addr=10.0.0.2
45 27 0:50 / /mnt/hf rw,relatime - nfs 127.0.0.1:/ rw,vers=3,addr=127.0.0.1
46 40 0:51 / /mnt/bucket/cache rw,relatime - tmpfs tmpfs rw
47 27 0:45 /train /srv/train rw,relatime - fuse.rclone contabo:datasets/imagenet rw
48 27 0:45 /one.tar /srv/one.tar rw,relatime - fuse.rclone contabo:datasets/imagenet rw
49 27 0:52 / /mnt/over rw - overlay overlay rw,lowerdir=/mnt/bucket:/srv/x,upperdir=/var/u,workdir=/var/w
50 27 0:53 / /mnt/covered rw - fuse.goofys my-bucket:pre rw
51 50 0:54 / /mnt/covered rw - tmpfs tmpfs rw
52 27 0:55 / /mnt/odd rw - fuse.somethingfs x rw
53 27 0:56 / /mnt/pool rw - fuse.mergerfs /mnt/nfs:/srv rw
54 27 0:57 / /mnt/hidden rw - tmpfs tmpfs rw
55 54 0:58 / /mnt/hidden/deep rw - fuse.gcsfuse gbucket rw
56 54 0:59 / /mnt/hidden rw - tmpfs tmpfs rw
57 27 0:60 / /mnt/mergedlocal rw - fuse.mergerfs /srv:/var rw
58 27 0:61 / /mnt/vague rw - fuse.mergerfs 1/data:2/data rw
a malformed line
"""

TABLE = MountTable(parse_mountinfo(RECORDED))


def untouchable(path: str) -> str:
    """A readlink for which nothing is a link, and which must not be called on a refused mount."""
    for point in ("/mnt/bucket", "/mnt/mp", "/mnt/odd", "/srv/train", "/srv/one.tar"):
        if f"{path}/".startswith(f"{point}/") and not path.startswith("/mnt/bucket/cache"):
            raise AssertionError(f"{path} was touched")
    raise OSError(22, "not a link")


def resolved(path: str) -> Mount:
    mount = TABLE.resolve(path, readlink=untouchable, answers=lambda point: True)
    assert mount is not None
    return mount


def test_a_line_is_parsed_with_optional_fields_and_octal_escapes() -> None:
    by_id = {mount.mount_id: mount for mount in parse_mountinfo(RECORDED)}
    assert len(by_id) == 21
    assert by_id[40] == Mount(
        40,
        27,
        "0:45",
        "/",
        "/mnt/bucket",
        "rw,nosuid,nodev,relatime",
        "fuse.rclone",
        "contabo:datasets/imagenet",
        "rw,user_id=0,group_id=0",
    )
    assert by_id[41].point == "/mnt/with space\\"
    assert by_id[47].root == "/train"


def test_bytes_that_are_not_utf8_survive() -> None:
    (mount,) = parse_mountinfo(b"1 0 0:1 / /mnt/\\377\xfe rw - tmpfs t rw\n")
    assert os.fsencode(mount.point) == b"/mnt/\xff\xfe"


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=1, max_size=40).filter(lambda raw: b"\0" not in raw))
def test_any_name_survives_the_kernels_escaping(raw: bytes) -> None:
    # The kernel escapes space, tab, newline and backslash in octal, and nothing else.
    escaped = b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" else bytes([byte]) for byte in raw)
    (mount,) = parse_mountinfo(b"7 1 0:1 / /" + escaped + b" rw - ext4 /dev/x rw\n")
    assert os.fsencode(mount.point) == b"/" + raw


@pytest.mark.parametrize(
    ("path", "mount_id"),
    [
        ("/", 27),
        ("/home/me/data", 27),
        ("/mnt/bucket", 40),
        ("/mnt/bucket/a/b.tar", 40),
        ("/mnt/bucketeer", 27),
        ("/mnt/bucket/cache/x", 46),
        ("/mnt/bucket/cache", 46),
        ("/mnt/with space\\/x", 41),
        ("/srv/train/x", 47),
        ("/srv/one.tar", 48),
        ("/srv/two.tar", 27),
        ("/mnt/covered/x", 51),
        ("/mnt/hidden/deep/x", 56),
        ("/mnt/mp/../x", 27),
        ("/mnt/./bucket//x", 40),
    ],
)
def test_the_mount_of_a_path_is_found_without_touching_refused_mounts(path: str, mount_id: int) -> None:
    assert resolved(path).mount_id == mount_id


def test_links_are_followed_before_the_mount_is_told() -> None:
    links = {"/data": "mnt/bucket", "/loop": "/loop", "/up": "/mnt/nfs/../../data/x", "/abs": "/srv"}

    def readlink(path: str) -> str:
        if path in links:
            return links[path]
        return untouchable(path)

    def id_of(path: str) -> int | None:
        mount = TABLE.resolve(path, readlink=readlink, answers=lambda point: True)
        return mount and mount.mount_id

    assert id_of("/data/train/x") == 40
    assert id_of("/up/y") == 40
    assert id_of("/abs/train") == 47
    assert id_of("/loop/x") == 27


def test_a_network_mount_that_does_not_answer_is_not_touched() -> None:
    def readlink(path: str) -> str:
        assert not path.startswith("/mnt/nfs/"), "touched a mount that does not answer"
        raise OSError(22, "not a link")

    asked: list[str] = []
    mount = TABLE.resolve("/mnt/nfs/a/b", readlink=readlink, answers=lambda point: bool(asked.append(point)))
    assert mount is not None
    assert mount.mount_id == 44
    assert asked == ["/mnt/nfs"]


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("/", "fine", "this machine"),
        ("/mnt/bucket", "refused", "rclone mount"),
        ("/mnt/with space\\", "refused", "s3fs-fuse"),
        ("/mnt/mp", "refused", "Mountpoint"),
        ("/workspace", "warned", "MooseFS"),
        ("/mnt/nfs", "warned", "NFS"),
        ("/mnt/hf", "refused", "served by this machine itself"),
        ("/mnt/bucket/cache", "fine", "this machine"),
        ("/mnt/over", "refused", "it reads /mnt/bucket"),
        ("/mnt/covered", "fine", "this machine"),
        ("/mnt/odd", "refused", "does not know"),
        ("/mnt/pool", "warned", "it reads /mnt/nfs"),
        ("/mnt/mergedlocal", "fine", "mergerfs"),
        ("/mnt/vague", "warned", "cannot be told"),
    ],
)
def test_each_mount_has_its_class(path: str, kind: str, words: str) -> None:
    judged = TABLE.classify(resolved(path))
    assert judged.kind == kind
    assert words in judged.reason
    assert (judged.warning is None) == (kind == "fine")


def test_a_containers_overlay_root_whose_layers_are_the_hosts_is_fine() -> None:
    table = MountTable(parse_mountinfo(b"9 1 0:70 / / rw - overlay overlay rw,lowerdir=/var/lib/docker/l/A:/var/lib/docker/l/B\n"))
    mount = table.at("/root")
    assert mount is not None
    assert table.classify(mount).kind == "fine"


def test_every_row_of_the_table_can_be_reached() -> None:
    for rule in mounts.RULES:
        mount = Mount(1, 0, "0:1", "/", "/m", "rw", rule.type.replace("*", "x"), rule.source.replace("*", "x"), "rw")
        assert mounts.rule_of(mount) == rule, f"{rule.type} with source {rule.source} is shadowed by an earlier row"
        assert rule.reason


@pytest.mark.parametrize(
    ("line", "path", "url"),
    [
        (b"fuse.rclone contabo:datasets/imagenet", "/m/train/x", "s3://datasets/imagenet/train/x"),
        (b"fuse.rclone contabo:", "/m", None),
        (b"fuse.rclone :s3,endpoint=x:bucket", "/m/a", "s3://bucket/a"),
        (b"fuse.gcsfuse gbucket", "/m/a", "gs://gbucket/a"),
        (b"fuse.goofys my-bucket:pre", "/m/a", "s3://my-bucket/pre/a"),
        (b"fuse.goofys goofys", "/m/a", None),
        (b"fuse.s3fs s3fs", "/m/a", None),
        (b"fuse mountpoint-s3", "/m/a", None),
    ],
)
def test_the_bucket_is_guessed_from_the_source(line: bytes, path: str, url: str | None) -> None:
    (mount,) = parse_mountinfo(b"1 0 0:1 / /m rw - " + line + b" rw")
    assert bucket_url(mount, path) == url


def test_a_system_without_mountinfo_says_that_it_cannot_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "MOUNTINFO", tmp_path / "none")
    judged = mounts.refuse_mount(tmp_path, "reading a data set from")
    assert judged.kind == "unknown"
    assert "does not tell what is mounted" in judged.reason
    assert mounts.mount_of(tmp_path) is None


def test_a_local_path_is_untouched(tmp_path: Path) -> None:
    assert mounts.refuse_mount(tmp_path / "not" / "there", "staging checkpoints in").kind == "fine"


def test_a_child_that_hangs_is_left_behind_within_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_PROBE", "import time; time.sleep(60)")
    assert mounts._answers(str(tmp_path), timeout_s=0.2) is False
    monkeypatch.undo()
    assert mounts._answers(str(tmp_path), timeout_s=30.0) is True
    assert mounts._answers(str(tmp_path / "gone"), timeout_s=30.0) is False


def in_a_mount_namespace(setup: str, program: str, tmp_path: Path, cleanup: str = "") -> dict[str, object]:
    """Run ``setup`` (shell) and then ``program`` (Python, printing one JSON object) where mounts are nobody else's business.

    The program must end by itself within 20 s, before ``cleanup`` (shell).
    """
    script = tmp_path / "program.py"
    script.write_text("import json, os\nfrom stagekit import mounts\n" + textwrap.dedent(program))
    done = subprocess.run(
        [
            "unshare",
            "-m",
            "--propagation",
            "private",
            "bash",
            "-ec",
            f"cd {tmp_path}\n{setup}\ncode=0; timeout 20 {sys.executable} {script} || code=$?\n{cleanup}\nexit $code",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def test_real_mounts_are_told_as_the_kernel_tells_them(tmp_path: Path) -> None:
    setup = """
    mkdir a b c 'with space' dir; echo x > file; echo y > dir/file; touch bound
    mount -t tmpfs one a; mount -t tmpfs two a; mkdir a/sub; touch a/sub/f
    mount --bind a/sub b; mount --bind file bound; mount -t tmpfs spaced 'with space'
    mkdir low up work merged; mount -t overlay overlay -o lowerdir=low,upperdir=up,workdir=work merged || mount -t tmpfs overlay merged
    ln -s a/sub link; ln -s ../a c/up
    """
    program = """
    result = {}
    for name in ["a", "a/sub/f", "b/f", "bound", "file", "with space/x", "merged", "link/f", "c/up/sub", "dir/file", "c/up/../a"]:
        path = os.path.abspath(".") + "/" + name
        told = mounts.mount_of(path)
        try:
            handle = os.open(path, os.O_PATH)
        except FileNotFoundError:
            handle = os.open(os.path.dirname(path), os.O_PATH)
        truth = next(int(line.split()[1]) for line in open(f"/proc/self/fdinfo/{handle}") if line.startswith("mnt_id"))
        result[name] = [told.mount_id, truth, told.source]
    print(json.dumps(result))
    """
    result = in_a_mount_namespace(setup, program, tmp_path)
    for name, (told, truth, _source) in result.items():  # type: ignore[misc]
        assert told == truth, name
    assert result["a/sub/f"][2] == "two"  # type: ignore[index]
    assert result["with space/x"][2] == "spaced"  # type: ignore[index]


def test_the_refusal_names_everything_a_person_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MountTable, "read", classmethod(lambda cls: TABLE))
    with pytest.raises(MountRefused) as caught:
        mounts.refuse_mount("/mnt/bucket/train", "reading a data set from")
    message = str(caught.value)
    for words in (
        "reading a data set from /mnt/bucket/train is refused",
        "fuse.rclone",
        "contabo:datasets/imagenet",
        "/mnt/bucket is a mount",
        "195 small files/s",
        "s3://datasets/imagenet/train",
        "cache_limit=",
        "stagekit pull",
        "--allow-mount",
    ):
        assert words in message
    with pytest.raises(MountRefused, match="does not know"):
        mounts.refuse_mount("/mnt/odd", "reading a data set from")
    monkeypatch.setattr(mounts, "_answers", lambda point: True)
    allowed = mounts.refuse_mount("/mnt/bucket", "reading a data set from", allow_mount=True)
    assert allowed.warning is not None
    assert "rclone mount" in allowed.warning
    assert mounts.refuse_mount("/workspace/out", "staging checkpoints in").kind == "warned"
    monkeypatch.setattr(mounts, "_answers", lambda point: False)
    for path in ("/mnt/bucket", "/workspace/out"):
        with pytest.raises(MountRefused, match=r"does not answer.*umount -l"):
            mounts.refuse_mount(path, "staging checkpoints in", allow_mount=True)


RCLONE = """
mkdir source bucket elsewhere 'with space' single lower upper work merged
echo hello > source/a.txt; touch single/file
{rclone} mount :local:$PWD/source "$PWD/bucket" --daemon --daemon-wait 20s --vfs-cache-mode off > log 2>&1
{rclone} mount :local:$PWD/source "$PWD/with space" --daemon --daemon-wait 20s --vfs-cache-mode off > log 2>&1
mount --bind bucket elsewhere
mount --bind bucket/a.txt single/file
mkdir covered; mount --bind bucket covered; mount -t tmpfs over covered
ln -s bucket link
"""

REFUSALS = """
result = {}
names = ["bucket", "bucket/a.txt", "elsewhere/a.txt", "single/file", "with space/a.txt", "link/a.txt"]
for name in [*names, "covered/x", "single", "source/a.txt"]:
    try:
        result[name] = mounts.refuse_mount(os.path.abspath(".") + "/" + name, "reading a data set from").kind
    except mounts.MountRefused as error:
        result[name] = str(error)
"""

ALLOWED = """
judged = mounts.refuse_mount("bucket", "reading a data set from", allow_mount=True)
result["allowed"] = judged.warning
"""

HUNG = """
import signal, subprocess, time
found = subprocess.run(["pgrep", "-f", f"^[^ ]*rclone mount .*{os.getcwd()}"], capture_output=True, text=True)
daemons = [int(pid) for pid in found.stdout.split()]
for pid in daemons:
    os.kill(pid, signal.SIGSTOP)
began_s = time.monotonic()
try:
    mounts.refuse_mount("bucket/a.txt", "staging checkpoints in", allow_mount=%s)
except mounts.MountRefused as error:
    result["hung"] = str(error)
result["took_s"] = time.monotonic() - began_s
with open("daemons", "w") as file:
    print(*daemons, file=file)
print(json.dumps(result), flush=True)
"""

CLEANUP = """
kill -KILL $(cat daemons)
"""


@pytest.mark.rig("fuse")
@pytest.mark.parametrize("allow", [False, True])
def test_a_real_rclone_mount_is_refused_by_every_way_that_leads_to_it_also_when_it_hangs(tmp_path: Path, allow: bool) -> None:
    setup = RCLONE.format(rclone=rclone_binary())
    result = in_a_mount_namespace(setup, REFUSALS + ALLOWED + HUNG % allow, tmp_path, CLEANUP)
    for name in ("bucket", "bucket/a.txt", "elsewhere/a.txt", "single/file", "with space/a.txt", "link/a.txt"):
        message = str(result[name])
        assert "is refused" in message, name
        assert "fuse.rclone" in message
    assert str(tmp_path / "with space") in str(result["with space/a.txt"])
    for name in ("covered/x", "single", "source/a.txt"):
        assert result[name] == "fine", name
    assert "rclone mount" in str(result["allowed"])
    assert "is refused" in str(result["hung"])
    assert ("does not answer" in str(result["hung"])) is allow
    assert float(str(result["took_s"])) < 2.5
