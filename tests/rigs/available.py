"""Which rigs this machine can run, and what becomes of the tests that need another one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from . import rgw

SYSTEM_RIGS = ("rgw", "fuse", "nginx", "chromium")
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing_rigs() -> dict[str, str]:
    """The rigs that cannot start here, each with the reason and the remedy."""
    found = {}
    remedy = "On Debian or Ubuntu, tools/test installs it when run as root."
    if lacking := rgw.missing():
        found["rgw"] = f"A real Ceph gateway needs {', '.join(lacking)}. {remedy}"
    if lacking := [name for name in ("fusermount3", "unshare") if shutil.which(name, path=PATH) is None]:
        found["fuse"] = f"A real FUSE mount needs {', '.join(lacking)}. {remedy}"
    elif os.geteuid() != 0 or not Path("/dev/fuse").exists():
        found["fuse"] = "A real FUSE mount needs root and /dev/fuse."
    if shutil.which("nginx", path=PATH) is None:
        found["nginx"] = f"The fast web server is nginx. {remedy}"
    if not any(shutil.which(name, path=PATH) for name in BROWSERS):
        found["chromium"] = f"The browser is Chromium. {remedy}"
    return found


def must_run(environ: Mapping[str, str] = os.environ, *, root: bool | None = None) -> bool:
    """Whether tests whose rig is missing run all the same, and fail. Root can install it, and a build (``CI=true``) must have it."""
    return (os.geteuid() == 0 if root is None else root) or environ.get("CI", "").lower() in ("1", "true")


def reasons_to_leave_out(*, quick: bool) -> dict[str, str]:
    """What a test may need that keeps it out of this run, with the reason."""
    if quick:
        return dict.fromkeys((*SYSTEM_RIGS, "slow"), "You asked for --quick.")
    return {} if must_run() else missing_rigs()


def rigs_of(item: pytest.Item) -> set[str]:
    """What a test needs: by the fixtures it names, by ``@pytest.mark.rig("…")`` where it asks for one while it runs, and time."""
    marked = {name for mark in item.iter_markers("rig") for name in mark.args}
    slow = {"slow"} if item.get_closest_marker("slow") else set()
    return marked | slow | (set(SYSTEM_RIGS) & set(getattr(item, "fixturenames", ())))
