"""Engines that run jobs on many machines, named by a URL: ``dask://host:port``."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from urllib.parse import urlsplit

from ..errors import MissingExtra, StagekitError, UsageError

_CONNECT_S = 10.0


@contextmanager
def open_executor(engine: str | Executor) -> Iterator[Executor]:
    """The executor that ``engine`` names, closed at the end; an executor is given back as it is, and stays its owner's.

    Raises ``UsageError`` for a name that cannot be meant, ``MissingExtra`` where the engine's package is not installed, and
    ``StagekitError`` where nobody answers.
    """
    if isinstance(engine, Executor):
        yield engine
        return
    if not isinstance(engine, str):
        raise UsageError(f"executor: {engine!r} is neither a concurrent.futures.Executor nor a URL such as dask://host:8786")
    try:
        parts = urlsplit(engine)
        address = f"tcp://{parts.hostname}:{parts.port or 8786}"
    except ValueError:
        parts, address = urlsplit(""), ""
    if parts.scheme != "dask" or not parts.hostname or parts.path.strip("/") or parts.query:
        raise UsageError(
            f"executor: {engine!r} names no engine; write dask://host:port with the address that dask scheduler prints, "
            "or pass any concurrent.futures.Executor in Python"
        )
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtra.of("dask", "distributed", "running shards on a Dask cluster") from None
    try:
        client = Client(address, timeout=_CONNECT_S, set_as_default=False)
    except OSError as error:
        raise StagekitError(f"connecting to {engine}: no Dask scheduler answers there; check host and port, and that it runs") from error
    with client:
        # pure=False: a job that was run before is run again, since what it left in the store may be gone.
        with client.get_executor(pure=False) as executor:
            yield executor
