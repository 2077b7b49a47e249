"""Which rigs this machine can run, and what becomes of the tests that need another one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from . import rgw


def missing_rigs() -> dict[str, str]:
    """The rigs that cannot start here, each with the reason and the remedy."""
    found = {}
    remedy = "On Debian or Ubuntu, tools/test installs it when run as root."
    if lacking := rgw.missing():
        found["rgw"] = f"A real Ceph gateway needs {', '.join(lacking)}. {remedy}"
    if lacking := [name for name in ("fusermount3", "unshare") if shutil.which(name) is None]:
        found["fuse"] = f"A real FUSE mount needs {', '.join(lacking)}. {remedy}"
    elif os.geteuid() != 0 or not Path("/dev/fuse").exists():
        found["fuse"] = "A real FUSE mount needs root and /dev/fuse."
    if shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None:
        found["nginx"] = f"The fast web server is nginx. {remedy}"
    return found


def may_leave_out() -> bool:
    """Whether tests of missing rigs are left out. Root can install them, and a build (``CI=true``) must have them: there they fail."""
    return os.geteuid() != 0 and os.environ.get("CI", "").lower() not in ("1", "true")


def rigs_of(item: pytest.Item) -> set[str]:
    """The rigs a test needs: by the fixtures it names, and by ``@pytest.mark.rig("…")`` where it asks for one while it runs."""
    marked = {name for mark in item.iter_markers("rig") for name in mark.args}
    return marked | ({"rgw", "fuse", "nginx"} & set(getattr(item, "fixturenames", ())))
