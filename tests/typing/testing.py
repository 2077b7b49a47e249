"""What an editor infers for the names that tests of others are written with. Checked by mypy, never run."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

from stagekit.store.base import ObjectInfo
from stagekit.store.memory import MemoryStore
from stagekit.testing.faults import Call, FaultStore
from stagekit.testing.proxy import FaultProxy, Request
from stagekit.testing.rclone import RcloneServer

with RcloneServer(Path("root")) as server:
    assert_type(server, RcloneServer)
    assert_type(server.endpoint_url, str)
with FaultProxy("http://127.0.0.1:1") as proxy:
    assert_type(proxy.requests, tuple[Request, ...])
store = FaultStore(MemoryStore("memory://name"))
assert_type(store.put("a", b""), ObjectInfo)
assert_type(store.calls, list[Call])
