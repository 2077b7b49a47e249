"""The last verdict on each run, as this machine remembers it: a small file per run in its home, for ``info --html``. Nothing is decided by
it: a verdict holds for the moment in which it is given."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config import home_directory
from ..errors import ManifestError
from ..runs.home import record_path
from ..runs.layout import seal, unseal
from .findings import Verdict

_MOST_FINDINGS = 50


@dataclass(frozen=True, slots=True)
class LastVerdict:
    """``answer`` was given at ``time_s`` by this machine's clock. ``findings`` are the first of them, each weight, text and fix (may be
    empty); ``more`` is how many there were besides."""

    answer: str
    time_s: float
    findings: tuple[tuple[str, str, str], ...]
    more: int = 0


def remember_verdict(verdict: Verdict, urls: Iterable[str], now_s: float, home: Path | None = None) -> None:
    """Note ``verdict`` for each of the runs ``urls``. A home that cannot be written costs the note and nothing else."""
    shown = [(finding.weight, finding.text, finding.fix) for finding in verdict.findings[:_MOST_FINDINGS]]
    values = {
        "format": "stagekit-verdict",
        "version": 1,
        "answer": verdict.answer,
        "time_s": round(now_s, 3),
        "findings": shown,
        "more": len(verdict.findings) - len(shown),
    }
    for url in urls:
        path = _path(url, home)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(seal({**values, "url": url}))
            temporary.replace(path)


def last_verdict(url: str, home: Path | None = None) -> LastVerdict | None:
    """The last verdict on the run ``url`` on this machine; ``None`` when there was none, or its note cannot be read."""
    path = _path(url, home)
    try:
        values = unseal(path.read_bytes(), "stagekit-verdict", 1, source=str(path))
        findings = tuple((str(weight), str(text), str(fix)) for weight, text, fix in values["findings"])
        return LastVerdict(str(values["answer"]), float(values["time_s"]), findings, int(values["more"]))
    except (OSError, ManifestError, KeyError, TypeError, ValueError):
        return None


def _path(url: str, home: Path | None) -> Path:
    return record_path(url, home or home_directory()).with_suffix(".verdict")
