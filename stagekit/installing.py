"""The line that installs what an extra brings.

The distribution is on no package index: it comes from a clone or a git URL. So the line names the other packages, which are.
"""

from __future__ import annotations

import re
import shlex
from importlib import metadata

_DISTRIBUTION = "stagekit-ml"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?P<versions>[^;]*?)\s*;.*\bextra\s*==\s*['\"](?P<extra>[\w.-]+)['\"]")


def install_line(extra: str, package: str) -> str:
    """``pip install 'pyarrow>=14.0.1'``: ``package``, and whatever else the extra ``extra`` brings and is not here."""
    brought = _brought_by(extra)
    missing = [name + versions for name, versions in brought.items() if name != package and not _is_here(name)]
    return " ".join(["pip install", *map(shlex.quote, [package + brought.get(package, ""), *missing])])


def _brought_by(extra: str) -> dict[str, str]:
    """The packages of an extra and the versions that will do. Empty where this package runs without having been installed."""
    try:
        requirements = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    matches = [match for match in map(_REQUIREMENT.fullmatch, requirements) if match is not None]
    return {match["name"]: match["versions"] for match in matches if match["extra"] == extra}


def _is_here(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
