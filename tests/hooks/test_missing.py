"""Without its package, a hook says which line installs it."""

from __future__ import annotations

import importlib
import sys

import pytest

from stagekit.errors import MissingExtra


@pytest.mark.parametrize(
    ("module", "package"), [("transformers", "transformers"), ("lightning", "lightning"), ("accelerate", "accelerate"), ("dcp", "torch")]
)
def test_a_missing_package_is_named_with_its_install_line(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"stagekit.hooks.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for loaded in [loaded for loaded in sys.modules if loaded == package or loaded.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra) as caught:
        importlib.import_module(name)
    told = f"{name} needs the package {package!r}, which is not installed. Install it with: pip install "
    assert str(caught.value).startswith(told)
    assert str(caught.value).removeprefix(told).startswith((package, f"'{package}>="))
