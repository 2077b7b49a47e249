"""The Python reference is what the docstrings say."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import stagekit.interop
import stagekit.torch
from stagekit.reference import render, replaced

PAGE = Path(__file__).parent.parent / "docs" / "python.md"
PICTURE = np.zeros((8, 8, 3), np.uint8)


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == replaced(page), "write it again: python -m stagekit.reference docs/python.md"


def test_a_changed_page_is_noticed() -> None:
    page = PAGE.read_text()
    assert replaced(page.replace("every byte", "some bytes").replace("Every byte", "Some bytes")) == page


def test_every_public_name_has_its_section() -> None:
    text = render()
    for package in (stagekit, stagekit.torch):
        for name in package.__all__:
            assert name.startswith("__") or f"\n### {package.__name__}.{name}\n" in f"\n{text}", name
    assert " at 0x" not in text, "a default that is another one in each process"


def test_signatures_docstrings_and_methods_are_laid_out() -> None:
    text = render()
    for words in (
        "    weights: Mapping[str, float] | Sequence[float] | None = None,\n",
        "\n```text\nstagekit.Location(scheme: str, bucket: str, path: str, profile: str | None = None)\n```\n",
        "\n- `batch_size`: samples in a batch of this rank\n",
        "\n- `cache_dir`, `cache_limit`: ",
        "\n| `.epochs(n, *, state, every=None, allow_fresh=False, monotonic=monotonic)` | Yield the epochs that are still due of `n`",
        "\n| `.latest()` | ",
        "\n| `.digest` | The data set's identity",
        '\n```python\nwith stagekit.ShardWriter("s3://bucket/digits") as writer:\n    writer.write(',
    ):
        assert words in text, words
    assert "``" not in text.replace("```", "")
    assert ":param" not in text


# These need the Hub, a profile, or a package with an environment of its own, where tests/mosaicml has the same calls.
ELSEWHERE = ("hf://", "profile=", "-mds")


def test_the_examples_of_the_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a directory in place of the bucket, and with what an example supposes to be there."""
    found = re.findall(r"^```python\n((?s:.*?))^```$|^Example: `(.*)`\.$", render(), re.MULTILINE)
    examples = [fenced or inline for fenced, inline in found]
    chosen = [code for code in examples if not any(word in code for word in ELSEWHERE)]
    assert len(chosen) > 12
    assert len(examples) - len(chosen) <= 4
    for number, code in enumerate(chosen):
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        prepare(place, code)
        names = {"stagekit": stagekit, "StreamLoader": stagekit.torch.StreamLoader}
        if "model" in code:
            model = torch.nn.Linear(2, 1)
            loader = stagekit.torch.StreamLoader(place / "bucket" / "digits", 32)
            names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "loader": loader, "loss": torch.tensor(0.1)}
        try:
            exec(re.sub("s3://(my-)?bucket", str(place / "bucket"), code), names)
        except Exception as error:
            error.add_note(code)
            raise


def prepare(place: Path, code: str) -> None:
    bucket = place / "bucket"
    writes = "ShardWriter(" in code or "stagekit.shard(" in code
    for name in () if writes else ("digits", "web", "code"):
        with stagekit.ShardWriter(bucket / name) as writer:
            for number in range(64):
                writer.write({"__key__": f"{number}", "png": PICTURE, "cls": number})
    for folder in ("raw/digits/zero", "raw/digits/one", "outputs", "out/checkpoint-500", "bucket/imagenet"):
        (place / folder).mkdir(parents=True)
        (place / folder / f"{folder[-1]}.txt").write_text(folder)
    for number in range(147 if "imagenet" in code else 0):
        with tarfile.open(bucket / "imagenet" / f"train-{number:04d}.tar", "w") as tar:
            tar.add(place / "outputs" / "s.txt", f"{number}.txt")
    for name in ("run", "runs/first") if "epochs" not in code else ():
        with stagekit.Run(bucket / name) as run, run.checkpoint(step=1200 if name == "run" else 100) as directory:
            (directory / "weights.bin").write_bytes(b"weights")
