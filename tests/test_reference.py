"""The Python reference is what the docstrings say."""

from __future__ import annotations

from pathlib import Path

import stagekit.torch
from stagekit.reference import render, replaced

PAGE = Path(__file__).parent.parent / "docs" / "python.md"


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
