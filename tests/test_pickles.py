"""Pickles are read without running anything of them."""

from __future__ import annotations

import collections
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from stagekit import pickles
from stagekit.pickles import Stand


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_what_may_be_a_pickle_is_told_by_its_beginning(tmp_path: Path) -> None:
    values = ({"a": 1}, [1], (1, 2), collections.OrderedDict(a=1), Hostile(tmp_path))
    assert all(pickles.may_be(pickle.dumps(value, protocol)[:4]) for value in values for protocol in range(6))
    for zipped in (True, False):
        torch.save({"a": torch.zeros(1)}, tmp_path / "saved", _use_new_zipfile_serialization=zipped)
        assert pickles.may_be((tmp_path / "saved").read_bytes()[:4])
    assert not any(pickles.may_be(head) for head in (b"", b"e", b"\x00\x01\x02\x03", b"GGUF", b"\x80\x3f\x00\x00"))


def test_nothing_of_a_hostile_pickle_is_run(tmp_path: Path) -> None:
    data = pickle.dumps({"step": 3, "trap": Hostile(tmp_path / "made")})
    found = pickles.read(data)
    assert found["step"] == 3
    assert isinstance(found["trap"], Stand)
    assert found["trap"].args == (str(tmp_path / "made"),)
    assert not (tmp_path / "made").exists()
    pickle.loads(data)
    assert (tmp_path / "made").exists(), "the trap is one"


def test_plain_values_come_back_and_objects_keep_what_was_said_of_them() -> None:
    values = {"list": [1, 2.5, None], "tuple": (True, "x"), "ordered": collections.OrderedDict(a=1), "set": {1}}
    assert pickles.read(pickle.dumps(values)) == values
    stand = pickles.read(pickle.dumps(collections.Counter("aab")))
    assert stand.args == ({"a": 2, "b": 1},)


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps(list(range(1000)))[:-5]])
def test_what_is_no_whole_pickle_is_told(data: bytes) -> None:
    with pytest.raises(ValueError, match="it is no whole pickle"):
        pickles.read(data)


def test_a_file_of_torch_is_read_without_its_tensors(tmp_path: Path) -> None:
    torch.save({"global_step": 7, "weights": {"w": torch.ones(3)}, "model": torch.nn.Linear(1, 1).state_dict()}, tmp_path / "x.ckpt")
    found = pickles.read_saved(tmp_path / "x.ckpt")
    assert found["global_step"] == 7
    assert isinstance(found["weights"]["w"], Stand)
    assert list(found["model"]) == ["weight", "bias"]
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "x.ckpt").read_bytes()[:-40])
    with pytest.raises(ValueError, match="or is cut"):
        pickles.read_saved(tmp_path / "cut.ckpt")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "x")
    with pytest.raises(ValueError, match=r"is a zip and not what torch\.save writes"):
        pickles.read_saved(tmp_path / "other.zip")
