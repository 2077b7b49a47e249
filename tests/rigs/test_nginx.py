"""nginx serves byte ranges at once, and as a distant server would."""

from __future__ import annotations

import time
from urllib.request import Request, urlopen

import pytest

from tests.rigs.nginx import Nginx


@pytest.mark.parametrize("wan", [False, True])
def test_byte_ranges(nginx: Nginx, wan: bool) -> None:
    (nginx.root / "file").write_bytes(bytes(range(256)) * 1000)
    url = f"{nginx.wan_url if wan else nginx.fast_url}/file"
    with urlopen(Request(url, headers={"Range": "bytes=300-309"}), timeout=10) as reply:
        assert (reply.status, reply.headers["Content-Range"]) == (206, "bytes 300-309/256000")
        assert reply.read() == bytes(range(44, 54))


def test_the_distant_server_takes_its_time(nginx: Nginx) -> None:
    (nginx.root / "small").write_bytes(b"1")
    began = time.monotonic()
    with urlopen(f"{nginx.wan_url}/small", timeout=10) as reply:
        assert reply.read() == b"1"
    assert time.monotonic() - began >= 0.03
