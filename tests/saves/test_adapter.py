"""An adapter's files name the model they continue, as the live model does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagekit.saves.adapter import base_of_files, content_revision


def adapter(folder: Path, name: object, revision: str | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name, "revision": revision}))
    return folder


def test_a_directory_is_told_by_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")
    expected = f"base@content-{content_revision(base)}"
    assert base_of_files(adapter(tmp_path / "one", str(base))) == expected
    monkeypatch.chdir(tmp_path)
    assert base_of_files(adapter(tmp_path / "two", "base")) == expected
    (base / "model.safetensors").write_bytes(b"weightz")
    assert base_of_files(tmp_path / "two") != expected


def test_a_model_of_the_hub_is_told_by_the_commit_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    saved = adapter(tmp_path / "one", "org/base")
    assert base_of_files(saved) == "org/base@main"
    refs = tmp_path / "hub" / "models--org--base" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0123abcd")
    assert base_of_files(saved) == "org/base@0123abcd"
    assert base_of_files(adapter(tmp_path / "two", "org/base", "v2")) == "org/base@v2"


def test_several_adapters_lie_in_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    adapter(tmp_path / "saved" / "second", "org/base")
    assert base_of_files(tmp_path / "saved") == "org/base@main"


def test_what_is_no_adapter_or_names_no_base_continues_none(tmp_path: Path) -> None:
    assert base_of_files(tmp_path) is None
    assert base_of_files(adapter(tmp_path / "unnamed", None)) is None
    (tmp_path / "unnamed" / "adapter_config.json").write_text("{")
    assert base_of_files(tmp_path / "unnamed") is None
    (tmp_path / "file.ckpt").write_bytes(b"")
    assert base_of_files(tmp_path / "file.ckpt") is None
