"""The public names are few, flat and sorted, each is there, and asking for none of them costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import stagekit

HEAVY = ("torch", "botocore", "boto3", "s3fs", "fsspec", "webdataset", "obstore", "pyarrow", "numpy", "PIL", "click", "rich")


def in_a_fresh_interpreter(code: str) -> object:
    """What ``code`` assigns to ``result``, in a process that has imported nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}\nprint(json.dumps(result))"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_names_are_sorted_and_each_is_there() -> None:
    assert list(stagekit.__all__) == sorted(set(stagekit.__all__))
    for name in stagekit.__all__:
        assert getattr(stagekit, name) is not None
    assert set(stagekit.__all__) <= set(dir(stagekit))


def test_what_is_public_says_what_it_promises() -> None:
    silent = [
        name for name in stagekit.__all__ if callable(getattr(stagekit, name)) and not (getattr(stagekit, name).__doc__ or "").strip()
    ]
    assert silent == []


def test_the_names_are_few() -> None:
    assert len(stagekit.__all__) <= 30


def test_no_public_name_is_that_of_a_module() -> None:
    """Else the module takes the name's place once anybody imports it: ``stagekit.shard`` would be a function today, a module tomorrow."""
    package = Path(stagekit.__file__).parent
    modules = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    public = {name for name in stagekit.__all__ if not isinstance(getattr(stagekit, name), types.ModuleType)}
    assert public & modules == set()


def test_a_name_stays_itself_whatever_is_imported_after() -> None:
    code = """
import importlib, pkgutil, stagekit
before = {name: getattr(stagekit, name) for name in stagekit.__all__}
for module in pkgutil.walk_packages(stagekit.__path__, "stagekit."):
    if module.name not in ("stagekit.demo.train", "stagekit.__main__"):  # programs, which begin when they are imported
        importlib.import_module(module.name)
result = [name for name, value in before.items() if getattr(stagekit, name) is not value]
"""
    assert in_a_fresh_interpreter(code) == []


@pytest.mark.parametrize(
    "statement", ["import stagekit", "import stagekit; stagekit.__all__; dir(stagekit)", "from stagekit import errors"]
)
def test_importing_loads_nothing_heavy(statement: str) -> None:
    assert in_a_fresh_interpreter(f"{statement}\nresult = sorted(set({HEAVY}) & sys.modules.keys())") == []


@pytest.mark.parametrize("name", sorted(stagekit.__all__))
def test_no_public_name_needs_torch_or_an_s3_client(name: str) -> None:
    """Preparing data needs no PyTorch, and reading a directory no S3 client; each is loaded when something is done that needs it."""
    heavy = {"torch", "botocore", "s3fs", "webdataset", "obstore", "pyarrow"}
    assert in_a_fresh_interpreter(f"import stagekit\nstagekit.{name}\nresult = sorted({heavy} & sys.modules.keys())") == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stagekit' has no attribute 'shrad'"):
        _ = stagekit.shrad


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert stagekit.__version__ == version("stagekit-ml")
