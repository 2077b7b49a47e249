"""Installing Stagekit changes nothing that is there already.

Trainers' environments are fragile: one package moved, and a pinned one no longer fits. So the built wheel is resolved against what
people have, by pip itself and without downloading any of it: an environment is pretended from the resolver's own report.
"""

from __future__ import annotations

import email.parser
import json
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# "dev" is for this repository alone.
EXTRAS = sorted(set(PROJECT["optional-dependencies"]) - {"dev"})

# MosaicML's package keeps numpy and transformers old: whoever wants to write its format has an environment for that.
BESIDE_A_TRAINER = [extra for extra in EXTRAS if extra != "mosaicml"]

# Looked up before the tests' own home directory takes the place of the user's.
CACHE = os.environ.get("PIP_CACHE_DIR") or Path("~/.cache/pip").expanduser()

# What images and trainers of those years pin. aiobotocore takes one release of botocore only, boto3 few, and s3fs its own year's fsspec.
OF_2024 = ("s3fs==2024.6.1", "fsspec==2024.6.1", "aiobotocore==2.13.1", "boto3==1.34.131", "botocore==1.34.131", "s3transfer==0.10.4")
OF_2023 = ("s3fs==2023.6.0", "fsspec==2023.6.0", "aiobotocore==2.5.0", "boto3==1.26.76", "botocore==1.29.76", "s3transfer==0.6.2")

pytestmark = pytest.mark.timeout(900)


def pip(*arguments: str | Path, python: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *(["--python", str(python)] if python else []), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_CACHE_DIR": str(CACHE)},
    )
    assert done.returncode == 0, f"pip {arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def all_requirements() -> list[str]:
    """Every line of pyproject.toml that names a package, the extras' included."""
    return [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]


Distribution = dict[str, Any]


def resolve(*requirements: str | Path, python: Path | None = None, alone: bool = False) -> dict[str, Distribution]:
    """What pip would install for ``requirements``, by name: into the environment of ``python``, else into an empty one."""
    options = [*([] if python else ["--ignore-installed"]), *(["--no-deps"] if alone else [])]
    report = json.loads(pip("install", "--quiet", "--dry-run", "--report", "-", *options, *requirements, python=python))
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in report["install"]}


def pretend_installed(directory: Path, distributions: Iterable[Distribution]) -> Path:
    """An environment in which pip finds ``distributions`` installed (too), without a byte of their code. Returns its Python."""
    if not directory.exists():
        venv.create(directory, with_pip=False)
    site = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for one in distributions:
        folder = site / f"{canonicalize_name(one['name']).replace('-', '_')}-{one['version']}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {one['name']}", f"Version: {one['version']}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in one.get("requires_dist", [])]
        lines += [f"Provides-Extra: {extra}" for extra in one.get("provides_extra", [])]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        (folder / "RECORD").touch()
        (folder / "INSTALLER").write_text("pip\n")
    return directory / "bin" / "python"


def names(distributions: Iterable[str]) -> list[str]:
    return sorted(distributions)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as anyone would build it."""
    directory = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, ROOT)
    (built,) = directory.glob("*.whl")
    return built


def with_extras(wheel: Path, extras: Iterable[str]) -> str:
    return f"stagekit-ml[{','.join(extras)}] @ {wheel.as_uri()}"


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"stagekit_ml-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        listed = set(archive.namelist())
        scripts = archive.read(next(name for name in listed if name.endswith("entry_points.txt"))).decode()
        metadata = email.parser.Parser().parsestr(archive.read(next(name for name in listed if name.endswith("METADATA"))).decode())
    assert {name.partition("/")[0] for name in listed} == {"stagekit", f"stagekit_ml-{PROJECT['version']}.dist-info"}
    assert "stagekit/py.typed" in listed
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "stagekit").rglob("*.py")}
    assert sources <= listed
    assert "stagekit = stagekit.cli:main" in scripts
    assert metadata["Name"] == "stagekit-ml"
    assert set(metadata.get_all("Provides-Extra", [])) == {*EXTRAS, "dev"}


def test_the_core_install_is_small(wheel: Path) -> None:
    closure = set(resolve(wheel))
    assert closure >= {"stagekit-ml", "numpy", "botocore", "fsspec", "xxhash", "click", "rich"}
    assert closure & {"torch", "s3fs", "aiobotocore", "boto3", "pandas", "pyarrow", "obstore", "scikit-learn", "pillow"} == set()
    assert len(closure) <= 20, names(closure)


def test_nothing_is_pinned() -> None:
    """A ceiling or an exact version in a library turns every later release of a dependency into a conflict in somebody's environment."""
    for line in all_requirements():
        operators = {one.operator for one in Requirement(line).specifier}
        assert operators <= {">=", "!="}, line
        assert operators, f"{line} has no floor"


def test_installing_beside_the_newest_boto3_changes_nothing(wheel: Path, tmp_path: Path) -> None:
    installed = resolve("boto3")
    python = pretend_installed(tmp_path / "venv", installed.values())
    for extras in ((), ("fast", "rclone")):
        added = resolve(with_extras(wheel, extras), python=python)
        assert "stagekit-ml" in added
        assert names(added.keys() & installed.keys()) == []


def test_installing_beside_boto3_and_s3fs_of_2024_changes_nothing(wheel: Path, tmp_path: Path) -> None:
    installed = resolve(*OF_2024, alone=True)
    python = pretend_installed(tmp_path / "venv", installed.values())
    added = resolve(with_extras(wheel, ["s3fs"]), python=python)
    assert "stagekit-ml" in added
    assert names(added.keys() & installed.keys()) == []


def test_the_floors_leave_boto3_and_s3fs_of_2023_in_place() -> None:
    there = dict(line.split("==") for line in OF_2023)
    floors = {str(canonicalize_name(one.name)): one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    assert floors.keys() >= {"botocore", "fsspec"}
    assert [name for name in floors.keys() & there.keys() if there[name] not in floors[name]] == []


@pytest.mark.slow
def test_installing_into_axolotls_environment_changes_nothing(wheel: Path, tmp_path: Path) -> None:
    """Every requirement of Axolotl that our packages meet anywhere, with all extras, is taken at its word."""
    (axolotl,) = resolve("axolotl", alone=True).values()
    wanted = {
        str(canonicalize_name(one.name)): str(one)
        for one in map(Requirement, axolotl["requires_dist"])
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }
    assert "==" in wanted["s3fs"], "Axolotl no longer pins s3fs, the reason for which it is an extra here"
    pins = tmp_path / "axolotl.txt"
    pins.write_text("\n".join(line for line in wanted.values() if "[" not in line))
    direct = {str(canonicalize_name(Requirement(line).name)) for line in all_requirements()}

    # First what both ask for by name, then, as often as needed, what ours would bring and Axolotl has as well.
    python = pretend_installed(tmp_path / "venv", [])
    installed: dict[str, Distribution] = {}
    shared = direct & wanted.keys()
    while shared:
        more = resolve(*(wanted[name] for name in shared), "--constraint", pins, python=python)
        pretend_installed(tmp_path / "venv", more.values())
        installed.update(more)
        added = resolve(with_extras(wheel, BESIDE_A_TRAINER), python=python)
        assert names(added.keys() & installed.keys()) == []
        shared = added.keys() & wanted.keys()
    assert "s3fs" in installed
    assert "stagekit-ml" in added
    assert names(resolve(wheel, python=python).keys() & installed.keys()) == []


def test_the_pretended_environment_would_show_a_change(tmp_path: Path) -> None:
    """The two tests above can fail: pip does move what does not fit."""
    python = pretend_installed(tmp_path / "venv", [{"name": "click", "version": "7.0", "requires_dist": []}])
    assert "click" in resolve("click>=8.1", python=python)
    assert "click" not in resolve("click>=7.0", python=python)


def import_beside(directory: Path, distribution: str) -> str:
    """What importing prints to standard error with ``distribution`` installed as well."""
    (directory / distribution).mkdir(parents=True)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", "import stagekit"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0
    return done.stderr


@pytest.mark.parametrize("distribution", ["stagekit-0.3.1.dist-info", "Stagekit-2.0-py3.11.egg-info", "stagekit.egg-info"])
def test_import_tells_when_the_unrelated_stagekit_is_installed_too(tmp_path: Path, distribution: str) -> None:
    printed = import_beside(tmp_path / "site", distribution)
    assert f"UserWarning: The unrelated distribution 'stagekit' is installed too ({tmp_path / 'site' / distribution})" in printed
    assert "Remove both with: pip uninstall stagekit stagekit-ml, then install Stagekit again, from its clone or git URL." in printed


@pytest.mark.parametrize("distribution", ["stagekit_ml-0.1.0.dist-info", "stagekit_tools-1.0.dist-info", "stagekit", "other-1.0.dist-info"])
def test_import_is_quiet_otherwise(tmp_path: Path, distribution: str) -> None:
    assert import_beside(tmp_path / "site", distribution) == ""


def test_the_top_level_folders() -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert {name for name in folders if not any(fnmatch(name, pattern) for pattern in ignored)} == {
        "stagekit",
        "tools",
        "tests",
        "examples",
        "docs",
    }
