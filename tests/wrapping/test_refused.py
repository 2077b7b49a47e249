"""Keys that may not write: each refused step is told once, by what was to be written, and teardown does not tell it again for each try."""

from __future__ import annotations

from pathlib import Path

from stagekit.testing.proxy import FaultProxy, Status

from ..rigs.servers import S3Server
from .machine import Machine

STEPS = (100, 200, 300)
SAVES = "; ".join(f"mkdir -p out/checkpoint-{step}; echo {step} > out/checkpoint-{step}/weights.bin" for step in STEPS)


def test_what_is_refused_is_told_once(rclone_server: S3Server, tmp_path: Path) -> None:
    with FaultProxy(rclone_server.endpoint_url) as proxy:
        environ = {
            "AWS_ENDPOINT_URL": proxy.endpoint_url,
            "AWS_ACCESS_KEY_ID": rclone_server.access_key,
            "AWS_SECRET_ACCESS_KEY": rclone_server.secret_key,
        }
        url = f"s3://{rclone_server.create_bucket()}/runs/refused"
        machine = Machine(tmp_path / "machine", url, environ=environ)
        for method in ("PUT", "POST"):
            proxy.fault(Status(403, "AccessDenied"), method=method)
        done = machine.stagekit(*machine.line(["bash", "-c", SAVES], "--quiet", "0s"))
        assert done.code == 1
        torn = machine.stagekit("teardown")
        assert torn.code == 3
    for ended in (done, torn):
        lines = ended.err.splitlines()
        for step in STEPS:
            told = [line for line in lines if f"error: step {step} is not in the bucket yet: " in line]
            assert len(told) == 1
            assert f": trying to write below {url}: access denied; the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in told[0]
        refused = [line for line in lines if "access denied" in line and not line.startswith(("NO", "CANNOT TELL"))]
        assert len(refused) <= 6
        assert len(refused) == len(set(refused))
        assert ".stagekit-probe" not in ended.err + ended.out
    [row] = [line for line in torn.out.splitlines() if "stagekit run has ended here before everything was sent" in line]
    assert row.count("left below") == 1
    assert "may be in no bucket: steps 100, 200, 300 are not in" in row
