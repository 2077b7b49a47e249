"""The demo's raw data: scikit-learn's handwritten digits as the files a person would have.

``python -m stagekit.demo.digits`` writes those for training into ``digits/``, which is what the documentation packs and streams.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingExtra

SAMPLES = 1797
TRAIN = 1440  # a multiple of the trainer's batch of 32, so that an epoch drops no tail


def export_digits(directory: Path) -> tuple[int, int]:
    """Write the 1,797 digits as ``train/00000.png`` + ``train/00000.cls`` and so on; the last 357 go to ``held-out/``.

    Returns how many samples went to each. Raises ``MissingExtra`` without scikit-learn or Pillow.
    """
    digits = _load()
    _write(directory / "train", digits[:TRAIN], 0)
    _write(directory / "held-out", digits[TRAIN:], TRAIN)
    return TRAIN, len(digits) - TRAIN


def _load() -> list[tuple[Any, int]]:
    """Pictures of 8 × 8 grey values, each with its label."""
    try:
        import PIL  # noqa: F401
        from sklearn.datasets import load_digits
    except ImportError as missing:
        package = "pillow" if missing.name == "PIL" else "scikit-learn"
        raise MissingExtra.of("demo", package, "The demo's data set") from missing
    digits = load_digits()
    return list(zip((digits.images * (255 / 16)).round().astype("uint8"), digits.target, strict=True))


def _write(directory: Path, digits: list[tuple[Any, int]], first: int) -> None:
    from PIL import Image

    directory.mkdir(parents=True, exist_ok=True)
    for number, (picture, label) in enumerate(digits, first):
        stem = directory / f"{number:05d}"
        Image.fromarray(picture).save(stem.with_suffix(".png"))
        stem.with_suffix(".cls").write_text(f"{label}\n")


def main(arguments: Sequence[str]) -> int:
    """Write the digits for training into ``arguments[0]``, else ``digits``, and return the exit code. Errors are one line."""
    target = Path(*arguments[:1] or ["digits"])
    try:
        _write(target, _load()[:TRAIN], 0)
    except MissingExtra as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"writing the digits into {target}: {error.strerror}; name another folder: python -m stagekit.demo.digits FOLDER")
    sys.stdout.write(f"{TRAIN:,} pictures and their labels are in {target}\n")
    return 0


def _fail(text: str) -> int:
    sys.stderr.write(f"stagekit: error: {text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
