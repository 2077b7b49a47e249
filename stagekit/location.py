"""Where something lies: a URL or path, parsed once.

==================================  =========================================================
``data/raw``, ``file:///data/raw``  a directory
``s3://bucket/prefix``              S3-compatible storage, endpoint and keys from the environment
``s3://PROFILE@bucket/prefix``      the same, endpoint and keys from that AWS profile
``memory://name/prefix``            this process's memory (tests, examples)
``gs://…``, ``az://…``, ``hf://…``  whatever fsspec opens
``rclone:remote:path``              a remote of the user's own rclone configuration
==================================  =========================================================
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import LocationError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_RCLONE = re.compile(r"rclone:([^/:\s]+):(.*)", re.DOTALL)
_PROFILE = re.compile(r"[^/@:\s]+")


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed URL or path; ``str()`` gives it back, so it can be pickled, printed and compared.

    ``scheme`` is ``"file"``, ``"s3"``, ``"memory"``, ``"rclone"`` or a scheme that fsspec knows. ``bucket`` is the S3 bucket, the name of a
    memory store, rclone's remote, or the host part of another URL, and empty for files. ``path`` is absolute for files, and may be for
    rclone; elsewhere it has no leading or trailing slash. Object keys are taken as they stand: ``%2F``, ``+``, ``#`` and ``?`` are never
    decoded.
    """

    scheme: str
    bucket: str
    path: str
    profile: str | None = None

    @classmethod
    def parse(cls, text: str | os.PathLike[str] | Location) -> Location:
        """Parse ``text``; a relative path is made absolute against the current directory, symbolic links are kept.

        Raises ``LocationError`` for what is no text or an empty one, a URL without a bucket or with bytes that are no UTF-8, a bucket name
        no store allows, or a password in the URL.
        """
        if isinstance(text, Location):
            return text
        if not isinstance(text, str | os.PathLike):
            raise LocationError(f"{text!r} is no location; give a directory or a URL such as s3://bucket/prefix")
        raw = os.fsdecode(text)
        if not raw:
            raise LocationError("an empty text is no location; give a directory or a URL such as s3://bucket/prefix")
        if remote := _RCLONE.fullmatch(raw):
            path = remote.group(2)
            return cls("rclone", remote.group(1), path.rstrip("/") or path[:1])
        match = _SCHEME.fullmatch(raw)
        if match is None:
            if re.match(r"(s3|gs|az|hf|memory|file):", raw):
                raise LocationError(f"{raw!r} looks like a URL without its two slashes; write {raw.split(':')[0]}://…")
            return cls("file", "", os.path.abspath(os.path.expanduser(raw)))
        scheme, rest = match.group(1).lower(), match.group(2)
        if scheme == "file":
            if not rest.startswith("/"):
                raise LocationError(f"{raw!r}: a file URL needs an absolute path, file:///…")
            return cls("file", "", os.path.abspath(rest))
        if any("\ud800" <= letter <= "\udfff" for letter in rest):
            raise LocationError(f"{raw!a} is not UTF-8, and keys are; check the URL, and that the locale is a UTF-8 one")
        bucket, _, path = rest.partition("/")
        profile: str | None = None
        if "@" in bucket and scheme == "s3":
            profile, _, bucket = bucket.rpartition("@")
            if ":" in profile:
                raise LocationError("a URL with a key or password in it is not accepted; put credentials into a profile or the environment")
            if not _PROFILE.fullmatch(profile):
                raise LocationError(f"{raw!r}: {profile!r} is no profile name; write s3://PROFILE@bucket/prefix")
        elif "@" in bucket and ":" in bucket.split("@")[0]:
            raise LocationError("a URL with a key or password in it is not accepted; put credentials into the environment")
        if not bucket:
            raise LocationError(f"{raw!r} names no bucket; write {scheme}://bucket/prefix")
        if scheme == "s3" and not _BUCKET.fullmatch(bucket):
            raise LocationError(f"{raw!r}: {bucket!r} is no bucket name (letters, digits, '.', '-' and '_', at least 3)")
        return cls(scheme, bucket, path.strip("/"), profile)

    @property
    def is_directory(self) -> bool:
        """Whether this is a path on this machine."""
        return self.scheme == "file"

    @property
    def local_path(self) -> Path:
        """The path on this machine. Raises ``LocationError`` when it is not one."""
        if not self.is_directory:
            raise LocationError(f"{self} is not a directory on this machine")
        return Path(self.path)

    @property
    def name(self) -> str:
        """The last component, or the bucket when there is no path."""
        return self.path.rpartition("/")[2] or self.bucket

    @property
    def root_name(self) -> str:
        """What all that lies in one bucket has in common: ``s3://bucket``; of a directory its path."""
        return str(self) if self.is_directory else str(replace(self, path=""))

    @property
    def parent(self) -> Location:
        """One component up; the bucket's (or file system's) root is its own parent."""
        head = self.path.rpartition("/")[0]
        return replace(self, path=head or ("/" if self.is_directory else ""))

    def __truediv__(self, relative: str) -> Location:
        """``relative`` (slashes allowed) below this location."""
        below = relative.strip("/")
        if not below:
            return self
        return replace(self, path=f"{self.path.rstrip('/')}/{below}" if self.path else below)

    def contains(self, other: Location) -> bool:
        """Whether ``other`` is this location or lies below it, by name alone (symbolic links are not followed)."""
        if (self.scheme, self.bucket, self.profile) != (other.scheme, other.bucket, other.profile):
            return False
        root = self.path.rstrip("/")
        return not root or other.path == root or other.path.startswith(root + "/")

    def __str__(self) -> str:
        if self.is_directory:
            return self.path
        if self.scheme == "rclone":
            return f"rclone:{self.bucket}:{self.path}"
        authority = f"{self.profile}@{self.bucket}" if self.profile else self.bucket
        return f"{self.scheme}://{authority}/{self.path}" if self.path else f"{self.scheme}://{authority}"
