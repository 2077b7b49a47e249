"""A reader of runs put together from docs/format.md alone, without the package: what the code is compared with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = re.compile(r"(?P<step>[0-9]{12})-(?P<generation>[0-9]{6})-(?P<counter>[0-9]{6})-(?P<owner>[0-9a-f]{8})")


def unseal(path: Path, kind: str) -> dict[str, Any]:
    """A sealed record (9.2)."""
    values: dict[str, Any] = json.loads(path.read_text("utf-8"))
    checksum = values.pop("checksum")
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(canonical.encode()).hexdigest() == checksum, path
    assert (values["format"], values["version"]) == (kind, 1)
    return values


def newest_first(run: Path) -> Iterator[str]:
    """Names of checkpoint folders (9.1)."""
    found = [match for folder in (run / "checkpoints").iterdir() if (match := NAME.fullmatch(folder.name))]
    for match in sorted(found, key=lambda one: (one["generation"], one["step"], one["counter"], one["owner"]), reverse=True):
        yield match[0]


def read(run: Path) -> tuple[int, dict[str, bytes]]:
    """The newest whole checkpoint (9.4) of a run in a directory, whose listings do not lag: its step and its files."""
    for name in newest_first(run):
        folder = run / "checkpoints" / name
        if not (folder / "manifest.json").exists():
            continue
        manifest = unseal(folder / "manifest.json", "stagekit-checkpoint")
        assert manifest["name"] == name
        assert set(manifest) <= {"format", "version", "name", "step", "epoch", "metrics", "identity", "files", "best", "saved_s"}
        files = {}
        for record in manifest["files"]:
            assert set(record) <= {"path", "bytes", "sha256", "object", "sample"}
            files[record["path"]] = (run / record["object"] if "object" in record else folder / "files" / record["path"]).read_bytes()
            data = files[record["path"]]
            assert (len(data), hashlib.sha256(data).hexdigest()) == (record["bytes"], record["sha256"])
        return manifest["step"], files
    raise AssertionError("no checkpoint")


def everything_is_described(run: Path) -> set[str]:
    """The kinds of objects of 9 that are there. Fails for an object that the page does not describe."""
    name, owner, path = NAME.pattern.replace("?P<", "?:<"), "[0-9]{6}-[0-9a-f]{8}", ".+"
    name = re.sub(r"\?:<[a-z]+>", "?:", name)
    kinds = {
        r"run\.json": "stagekit-run",
        rf"owners/{owner}\.json": "stagekit-owner",
        rf"checkpoints/{name}/manifest\.json": "stagekit-checkpoint",
        rf"checkpoints/{name}/parts/rank-[0-9]{{5}}\.json": "stagekit-part",
        rf"superseded/{name}\.json": "stagekit-superseded",
        r"owners/[0-9]{6}\.claim": r"[0-9a-f]{8}",
        rf"owners/{owner}\.closed": "",
        rf"commits/{owner}/[0-9]{{6}}": name,
        rf"checkpoints/{name}/files/{path}": None,
    }
    seen = set()
    for file in sorted(one for one in run.rglob("*") if one.is_file()):
        key = file.relative_to(run).as_posix()
        kind, holds = next((kind, holds) for kind, holds in kinds.items() if re.fullmatch(kind, key))
        seen.add(kind.partition("/")[0] + ("/files" if holds is None else "/parts" if "/parts/" in key else ""))
        if key.endswith(".closed") and file.stat().st_size:
            unseal(file, "stagekit-traffic")  # where object storage was asked for something meanwhile
        elif holds is not None and holds.startswith("stagekit-"):
            unseal(file, holds)
        elif holds is not None:
            assert re.fullmatch(holds, file.read_text()), key
    return seen
