"""A certificate for loopback, signed by a small authority made for one test run (a self-signed one is refused by rustls)."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    authority: Path
    leaf: Path
    leaf_key: Path


def make_certificates(directory: Path) -> Certificates:
    """Write an authority's certificate, and a leaf for ``127.0.0.1`` and ``localhost``, as PEM files."""
    directory.mkdir(parents=True)

    def openssl(*argv: str) -> None:
        done = subprocess.run(["openssl", *argv], cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"openssl {' '.join(argv)} ended with {done.returncode}:\n{done.stderr}")

    def key(name: str) -> None:
        openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", name)

    (directory / "ca.conf").write_text(
        "[req]\ndistinguished_name = dn\nx509_extensions = ca\nprompt = no\n[dn]\nCN = Test authority\n"
        "[ca]\nbasicConstraints = critical, CA:TRUE\nkeyUsage = critical, keyCertSign, cRLSign\nsubjectKeyIdentifier = hash\n"
    )
    (directory / "leaf.conf").write_text(
        "basicConstraints = CA:FALSE\nkeyUsage = critical, digitalSignature\nextendedKeyUsage = serverAuth\n"
        "subjectKeyIdentifier = hash\nauthorityKeyIdentifier = keyid\nsubjectAltName = IP:127.0.0.1, DNS:localhost\n"
    )
    key("ca.key")
    openssl("req", "-x509", "-new", "-key", "ca.key", "-days", "30", "-config", "ca.conf", "-out", "ca.pem")
    key("leaf.key")
    openssl("req", "-new", "-key", "leaf.key", "-subj", "/CN=localhost", "-out", "leaf.csr")
    openssl(
        *("x509", "-req", "-in", "leaf.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", "30", "-extfile", "leaf.conf", "-out", "leaf.pem"),
    )
    return Certificates(directory / "ca.pem", directory / "leaf.pem", directory / "leaf.key")
