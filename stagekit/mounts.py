"""What lies behind a path: a local disk, a network volume, or an object store that pretends to be a file system.

``/proc/self/mountinfo`` tells, and nothing else is asked unless it must be: a ``stat`` on a mount whose daemon hangs blocks for ever
and cannot be interrupted. A path is therefore walked component by component with ``readlink``, and the mount of each component is
looked up *before* it is touched. Where a look is unavoidable (network volumes), a child process does it and nobody waits for it.

Three classes:

========  ==========================================================================================================
fine      local disks, memory, and FUSE file systems that read local disks
warned    network volumes: slower than a disk, and right for output directories
refused   object stores behind FUSE, FUSE types nobody has told us about, and mounts that do not answer
========  ==========================================================================================================

It is *random* access that is refused, because each small read becomes a round trip.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import select
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import MountRefused

Kind = Literal["fine", "warned", "refused", "unknown"]

MOUNTINFO = Path("/proc/self/mountinfo")
PROBE_TIMEOUT_S = 1.0
MEASURED = "a real rclone mount gave 195 small files/s (13 MB/s) in random order and 284 MB/s for the same bytes in sequence"


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. ``root`` is the part of the file system that is mounted at ``point`` (not ``/`` for a bind mount)."""

    mount_id: int
    parent_id: int
    device: str
    root: str
    point: str
    options: str
    type: str
    source: str
    super_options: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table: file systems of ``type`` whose source matches ``source`` are ``kind``, because of ``reason``."""

    type: str
    kind: Kind
    reason: str
    source: str = "*"
    stacks: bool = False  # reads other directories of this machine: their mounts decide, not this one


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a mount is and why. ``mount`` is ``None`` where the system does not tell (macOS). ``silent``: it does not answer."""

    kind: Kind
    reason: str
    mount: Mount | None = None
    silent: bool = False

    @property
    def warning(self) -> str | None:
        """One sentence for the person at the terminal, or ``None`` when there is nothing to say."""
        if self.mount is None or self.kind == "fine":
            return None
        return f"{self.mount.point} is a mount of type {self.mount.type} ({self.mount.source}): {self.reason}"


_STORE = "an object store behind FUSE: each small read becomes a request"
_NETWORK = "a network volume: slower than a local disk, and shared with others"

# The first row that matches decides. Patterns are those of a shell, compared without regard to case.
RULES: tuple[Rule, ...] = (
    # Object stores behind FUSE, known by their subtype.
    Rule("fuse.rclone", "refused", f"{_STORE} (rclone mount; rclone.org/commands/rclone_mount)"),
    Rule("fuse.s3fs", "refused", f"{_STORE} (s3fs-fuse; its README: random writes and metadata have poor performance)"),
    Rule("fuse.goofys", "refused", f"{_STORE} (goofys; its README: a filey system, only sequential reads are fast)"),
    Rule("fuse.geesefs", "refused", f"{_STORE} (geesefs)"),
    Rule("fuse.tigrisfs", "refused", f"{_STORE} (tigrisfs)"),
    Rule("fuse.gcsfuse", "refused", f"{_STORE} (gcsfuse; its documentation: higher latency than a local file system)"),
    Rule("fuse.juicefs", "refused", f"{_STORE} (JuiceFS, chunks in an object store)"),
    Rule("fuse.s3ql", "refused", f"{_STORE} (S3QL)"),
    Rule("fuse.s3backer", "refused", f"{_STORE} (s3backer, a block device of objects)"),
    Rule("fuse.mountpoint-s3", "refused", f"{_STORE} (Mountpoint for Amazon S3)"),
    Rule("fuse.blobfuse*", "refused", f"{_STORE} (BlobFuse)"),
    Rule("fuse.cloudfuse", "refused", f"{_STORE} (Cloudfuse)"),
    Rule("fuse.objectivefs", "refused", f"{_STORE} (ObjectiveFS)"),
    Rule("fuse.ossfs*", "refused", f"{_STORE} (ossfs)"),
    Rule("fuse.cosfs", "refused", f"{_STORE} (cosfs)"),
    Rule("fuse.obsfs", "refused", f"{_STORE} (obsfs)"),
    Rule("fuse.hf-mount*", "refused", f"{_STORE} (Hugging Face repositories, hf-mount)"),
    Rule("fuse.sshfs", "refused", "another machine behind FUSE: each small read becomes a round trip (sshfs)"),
    Rule("fuse.curlftpfs", "refused", "a server behind FUSE: each small read becomes a round trip (curlftpfs)"),
    Rule("fuse.davfs*", "refused", "a WebDAV server behind FUSE: each small read becomes a round trip"),
    # FUSE daemons that give no subtype are told apart by their source.
    Rule("fuse", "refused", f"{_STORE} (Mountpoint for Amazon S3)", source="mountpoint-s3*"),
    Rule("fuse", "refused", f"{_STORE} (BlobFuse)", source="blobfuse*"),
    Rule("fuse", "refused", f"{_STORE} (Hugging Face repositories, hf-mount)", source="hf-mount*"),
    Rule("fuse", "refused", f"{_STORE} (s3fs-fuse)", source="s3fs*"),
    Rule("fuse", "refused", f"{_STORE} (JuiceFS, chunks in an object store)", source="juicefs:*"),
    Rule("fuse", "warned", f"{_NETWORK} (MooseFS, RunPod's /workspace)", source="mfs#*"),
    Rule("fuse.mfs*", "warned", f"{_NETWORK} (MooseFS)"),
    Rule("fuse.moosefs*", "warned", f"{_NETWORK} (MooseFS)"),
    Rule("fuse.glusterfs", "warned", f"{_NETWORK} (GlusterFS)"),
    Rule("fuse.ceph*", "warned", f"{_NETWORK} (CephFS)"),
    Rule("fuse.lizardfs*", "warned", f"{_NETWORK} (LizardFS)"),
    Rule("fuse.saunafs*", "warned", f"{_NETWORK} (SaunaFS)"),
    Rule("fuse.grpcfuse", "warned", "a directory of the host behind Docker Desktop: slower than a local disk"),
    Rule("fuse.vmhgfs-fuse", "warned", "a directory of the host behind VMware: slower than a local disk"),
    # FUSE on local disks.
    Rule("fuseblk", "fine", "a local disk through FUSE (NTFS, exFAT)"),
    Rule("fuse.mergerfs", "fine", "local directories joined by mergerfs", stacks=True),
    Rule("fuse.bindfs", "fine", "a local directory seen through bindfs", stacks=True),
    Rule("fuse.gocryptfs", "fine", "a local directory, encrypted by gocryptfs", stacks=True),
    Rule("fuse.fuse-overlayfs", "fine", "a container's root directory (fuse-overlayfs)"),
    Rule("fuse.squashfuse*", "fine", "a local image file (squashfuse)"),
    Rule("fuse.dwarfs", "fine", "a local image file (DwarFS)"),
    Rule("fuse.lxcfs", "fine", "a container's view of /proc (lxcfs)"),
    Rule("fuse.*.appimage", "fine", "a local image file (AppImage)"),
    Rule("fuse", "fine", "a container's view of /proc (lxcfs)", source="lxcfs"),
    Rule("fuse", "fine", "a container's root directory (fuse-overlayfs)", source="fuse-overlayfs"),
    Rule("fuse", "fine", "a local image file (squashfuse)", source="squashfuse*"),
    Rule("fuse", "fine", "a local image file (DwarFS)", source="dwarfs"),
    Rule("fuse", "fine", "a local image file (AppImage)", source="*.appimage"),
    Rule("fuse", "refused", "a FUSE file system that Stagekit does not know, so it may be a bucket"),
    Rule("fuse.*", "refused", "a FUSE file system that Stagekit does not know, so it may be a bucket"),
    # Network volumes of the kernel.
    Rule("nfs*", "warned", f"{_NETWORK} (NFS)"),
    Rule("cifs", "warned", f"{_NETWORK} (SMB)"),
    Rule("smb*", "warned", f"{_NETWORK} (SMB)"),
    Rule("lustre", "warned", f"{_NETWORK} (Lustre)"),
    Rule("ceph", "warned", f"{_NETWORK} (CephFS)"),
    Rule("beegfs*", "warned", f"{_NETWORK} (BeeGFS)"),
    Rule("gpfs", "warned", f"{_NETWORK} (GPFS)"),
    Rule("afs", "warned", f"{_NETWORK} (AFS)"),
    Rule("orangefs", "warned", f"{_NETWORK} (OrangeFS)"),
    Rule("glusterfs", "warned", f"{_NETWORK} (GlusterFS)"),
    Rule("wekafs", "warned", f"{_NETWORK} (WEKA)"),
    Rule("autofs", "warned", f"{_NETWORK} (mounted on demand)"),
    Rule("9p", "warned", "a directory of the host: slower than a local disk (9p)"),
    Rule("virtiofs", "warned", "a directory of the host: slower than a local disk (virtiofs)"),
    Rule("vboxsf", "warned", "a directory of the host: slower than a local disk (VirtualBox)"),
    # A container's root, and everything else that the kernel serves itself.
    Rule("overlay", "fine", "local directories, layered", stacks=True),
    Rule("*", "fine", "a file system of this machine"),
)

_NFS_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[?::1\]?):", re.IGNORECASE)


def parse_mountinfo(data: bytes) -> tuple[Mount, ...]:
    """The mounts of a mountinfo text, in its order. Octal escapes (``\\040``) are decoded on bytes; a malformed line is left out."""
    mounts = []
    for line in data.split(b"\n"):
        head, separator, tail = line.partition(b" - ")
        front, back = head.split(b" "), tail.split(b" ")
        if not separator or len(front) < 6 or len(back) < 3 or not (front[0].isdigit() and front[1].isdigit()):
            continue
        mounts.append(
            Mount(
                mount_id=int(front[0]),
                parent_id=int(front[1]),
                device=_decode(front[2]),
                root=_decode(front[3]),
                point=_decode(front[4]),
                options=_decode(front[5]),
                type=_decode(back[0]),
                source=_decode(back[1]),
                super_options=_decode(b" ".join(back[2:])),
            )
        )
    return tuple(mounts)


def _decode(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match.group(1), 8) & 255]), field))


class MountTable:
    """The mounts this process sees. Looking up is pure; ``resolve`` touches the file system, and only where it is safe."""

    def __init__(self, mounts: Sequence[Mount]) -> None:
        self.mounts = tuple(mounts)
        self._ids = {mount.mount_id for mount in self.mounts}
        self._at: dict[str, list[Mount]] = {}
        for mount in self.mounts:
            self._at.setdefault(mount.point, []).append(mount)

    @classmethod
    def read(cls) -> MountTable | None:
        """The table of this process, or ``None`` where the system has none (macOS)."""
        try:
            return cls(parse_mountinfo(MOUNTINFO.read_bytes()))
        except FileNotFoundError:
            return None

    def is_point(self, path: str) -> bool:
        """Whether something is mounted at ``path``, which is absolute and has no symbolic links."""
        return path in self._at

    def top(self, point: str, below: Mount | None) -> Mount | None:
        """The mount that is seen at ``point`` by somebody who comes from ``below``: the uppermost of those stacked there, or ``None``.

        The tree of parents decides, so a mount that another one hides is never found.
        """
        found = None
        parent = below
        while True:
            candidates = [
                mount
                for mount in self._at.get(point, ())
                if mount is not found and (mount.parent_id == parent.mount_id if parent else self._is_root(mount))
            ]
            if not candidates:
                return found
            found = parent = candidates[-1]

    def _is_root(self, mount: Mount) -> bool:
        return mount.parent_id not in self._ids or mount.parent_id == mount.mount_id

    def at(self, path: str) -> Mount | None:
        """The mount of ``path``, taken as it is written: absolute, no ``..``, no symbolic links."""
        current = self.top("/", None)
        point = ""
        for component in path.split("/"):
            if component:
                point = f"{point}/{component}"
                current = self.top(point, current) or current
        return current

    def resolve(
        self, path: str, *, readlink: Callable[[str], str] = os.readlink, answers: Callable[[str], bool] | None = None
    ) -> Mount | None:
        """The mount that holds the absolute ``path`` after its symbolic links. Components on a refused mount are never touched.

        ``answers`` tells whether a network mount answers; one that does not is returned without being touched.
        """
        alive: dict[int, bool] = {}
        rest = [part for part in path.split("/") if part not in ("", ".")]
        here = ""
        current = self.top("/", None)
        links = 0
        while rest:
            component = rest.pop(0)
            if component == "..":
                here = here.rpartition("/")[0]
                current = self.at(here or "/")
                continue
            entered = self.top(f"{here}/{component}", current)
            if entered is not None:  # a mount point is never a symbolic link, so there is no need to touch it
                here, current = f"{here}/{component}", entered
                continue
            if current is not None and not self._may_touch(current, alive, answers):
                deeper = self._mount_below(here, [component, *rest], current)
                if deeper is None:
                    return current
                here, current, rest = deeper
                continue
            here = f"{here}/{component}"
            try:
                target = readlink(here)
            except OSError as error:
                if error.errno in (errno.ENOTCONN, errno.ESTALE, errno.EIO):
                    return current
                continue  # no link, not there yet, or not ours to see: the name as it is written
            links += 1
            if links > 40:
                return current
            here = "" if target.startswith("/") else here.rpartition("/")[0]
            current = self.at(here or "/")
            rest = [part for part in target.split("/") if part not in ("", ".")] + rest
        return current

    def _may_touch(self, mount: Mount, alive: dict[int, bool], answers: Callable[[str], bool] | None) -> bool:
        kind = rule_of(mount).kind
        if kind == "warned" and answers is not None:
            if mount.mount_id not in alive:
                alive[mount.mount_id] = answers(mount.point)
            return alive[mount.mount_id]
        return kind != "refused"

    def _mount_below(self, here: str, rest: list[str], current: Mount) -> tuple[str, Mount, list[str]] | None:
        """The first mount point on the way ``rest``, as it is written, below a mount that must not be touched."""
        point = here
        for number, component in enumerate(rest):
            if component == "..":
                return None
            point = f"{point}/{component}"
            entered = self.top(point, current)
            if entered is not None:
                return point, entered, rest[number + 1 :]
        return None

    def classify(self, mount: Mount, *, _seen: frozenset[int] = frozenset()) -> Judgement:
        """What ``mount`` is, by the table alone. A file system that stacks on others is what the worst of them is."""
        rule = rule_of(mount)
        if mount.type.startswith("nfs") and (_NFS_LOOPBACK.match(mount.source) or re.search(r"\baddr=(127\.|::1)", mount.super_options)):
            return Judgement("refused", f"{_STORE} (NFS served by this machine itself: hf-mount, rclone nfsmount)", mount)
        if rule.stacks:
            for directory in _beneath(mount):
                under = self.at(directory)
                # A container's layers have names of the host: here they only lead back to the overlay itself.
                if under is None or under.mount_id == mount.mount_id or under.mount_id in _seen:
                    continue
                judged = self.classify(under, _seen=_seen | {mount.mount_id})
                if judged.kind != "fine":
                    return Judgement(judged.kind, f"it reads {directory}, which is {judged.reason}", mount)
            if mount.type != "overlay" and not any(_beneath(mount)):
                return Judgement("warned", f"{rule.reason}, and what lies beneath cannot be told from its source", mount)
        return Judgement(rule.kind, rule.reason, mount)


def rule_of(mount: Mount) -> Rule:
    """The row of ``RULES`` for ``mount``."""
    type_, source = mount.type.lower(), mount.source.lower()
    return next(rule for rule in RULES if fnmatch.fnmatchcase(type_, rule.type) and fnmatch.fnmatchcase(source, rule.source))


def _beneath(mount: Mount) -> Iterator[str]:
    """The directories a stacking file system reads, as far as mountinfo names them."""
    if mount.type == "overlay":
        for option in re.split(r"(?<!\\),", mount.super_options):
            name, _, value = option.partition("=")
            if name in ("lowerdir", "lowerdir+", "datadir+", "upperdir"):
                for part in re.split(r"(?<!\\):+", value):
                    if part.startswith("/"):
                        yield re.sub(r"\\(.)", r"\1", part)
        return
    for part in mount.source.split(":"):
        if part.startswith("/"):
            yield part


def mount_of(path: str | os.PathLike[str]) -> Mount | None:
    """The mount that holds ``path``, or ``None`` where the system does not tell. Never blocks on a mount that hangs."""
    table = MountTable.read()
    return table.resolve(_absolute(path), answers=_answers) if table else None


def _absolute(path: str | os.PathLike[str]) -> str:
    """``path`` made absolute with its ``..`` kept: after a symbolic link they mean another directory than the text says."""
    text = os.fspath(path)
    return text if text.startswith("/") else f"{Path.cwd()}/{text}"


def judge(path: str | os.PathLike[str], *, probe: bool = False, table: MountTable | None = None) -> Judgement:
    """What ``path`` lies on. Answers within about a second, also for a mount that hangs; ``probe`` looks whether a refused one answers.

    ``table`` spares reading the mounts again where many paths are judged.
    """
    table = table or MountTable.read()
    if table is None:
        return Judgement("unknown", f"{sys.platform} does not tell what is mounted where ({MOUNTINFO} is missing)")
    mount = table.resolve(_absolute(path), answers=_answers)
    if mount is None:
        return Judgement("unknown", f"{MOUNTINFO} does not list the mount of {os.fspath(path)}")
    judged = table.classify(mount)
    if (judged.kind == "warned" or (probe and judged.kind == "refused")) and not _answers(mount.point):
        return Judgement("refused", "it does not answer: its server or its daemon hangs or is gone", mount, silent=True)
    return judged


def refuse_mount(path: str | os.PathLike[str], purpose: str, *, allow_mount: bool = False) -> Judgement:
    """Raise ``MountRefused`` when ``path`` lies on an object store behind FUSE, or on a mount that does not answer.

    ``purpose`` is what the path is wanted for, as in "reading a data set from". ``allow_mount`` lets everything pass that answers. Returns
    the judgement, whose ``warning`` belongs in front of the person. Nothing on a refused mount is touched, so a hung one cannot block.
    """
    judged = judge(path, probe=allow_mount)
    if judged.kind != "refused" or judged.mount is None:
        return judged
    if allow_mount and not judged.silent:
        return judged
    mount = judged.mount
    what = f"{purpose} {os.fspath(path)} is refused: {mount.point} is a mount of type {mount.type} (source {mount.source!r})"
    if judged.silent:
        raise MountRefused(f"{what}, and {judged.reason}. Unmount it (umount -l {shlex.quote(mount.point)}) and use a local disk")
    url = bucket_url(mount, _absolute(path)) or "the bucket's own URL (s3://bucket/prefix)"
    raise MountRefused(
        f"{what}, {judged.reason}. Measured: {MEASURED}. Use {url} instead, and for data that is read many times cache_limit= or "
        "stagekit pull. If you know better, allow_mount=True (--allow-mount) accepts the mount"
    )


def bucket_url(mount: Mount, path: str) -> str | None:
    """The URL of what ``path`` shows, guessed from the source of ``mount``; ``None`` when the source does not name a bucket."""
    type_ = mount.type.removeprefix("fuse.").lower()
    source = mount.source
    scheme = "s3"
    if type_ == "rclone":
        remote, separator, rest = source.rpartition(":")
        if not separator or not rest.strip("/") or not remote or rest.startswith("/"):  # the last is a directory of a machine
            return None
    elif type_ in ("gcsfuse",):
        scheme, rest = "gs", source
    elif type_ in ("goofys", "geesefs", "tigrisfs"):
        rest = source.replace(":", "/", 1)
    elif source.startswith(("s3://", "gs://")):
        scheme, _, rest = source.partition("://")
    else:
        return None
    bucket, _, prefix = rest.strip("/").partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", bucket) or bucket.lower() == type_:
        return None
    inside = path[len(mount.point) :] if path == mount.point or path.startswith(mount.point.rstrip("/") + "/") else ""
    parts = [part.strip("/") for part in (bucket, prefix, mount.root, inside)]
    return f"{scheme}://" + "/".join(part for part in parts if part)


# Asking for the free space reaches the daemon or server each time; a stat may be answered by the kernel's cache.
_PROBE = f"""
import os, sys
try:
    os.stat(sys.argv[1])
    os.statvfs(sys.argv[1])
except OSError as error:
    if error.errno in {(errno.ENOENT, errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN)}:
        sys.exit()
os.write(1, b"+")
"""
_unreaped: set[int] = set()


def _answers(point: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether what is mounted at ``point`` says something within ``timeout_s``, be it that it may not be looked at.

    A child process asks. If it hangs it is killed, which takes effect when the mount answers or goes; nobody waits for it, so this
    process can still end at once.
    """
    for pid in list(_unreaped):
        _reap(pid)
    reading, writing = os.pipe()
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", "-c", _PROBE, point],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)],
        )
        os.close(writing)
        writing = -1
        ready, _, _ = select.select([reading], [], [], timeout_s)
        answered = bool(ready) and os.read(reading, 1) == b"+"
        if not answered and not ready:
            os.kill(pid, signal.SIGKILL)
        _unreaped.add(pid)
        _reap(pid)
        return answered
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _reap(pid: int) -> None:
    try:
        done, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        done = pid
    if done:
        _unreaped.discard(pid)
