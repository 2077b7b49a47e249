"""The demo's raw data: scikit-learn's handwritten digits as the files a person would have."""

from __future__ import annotations

from pathlib import Path

from ..errors import MissingExtra

SAMPLES = 1797
TRAIN = 1440  # a multiple of the trainer's batch of 32, so that an epoch drops no tail


def export_digits(directory: Path) -> tuple[int, int]:
    """Write the 1,797 digits as ``train/00000.png`` + ``train/00000.cls`` and so on; the last 357 go to ``held-out/``.

    Returns how many samples went to each. Raises ``MissingExtra`` without scikit-learn or Pillow.
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as missing:
        package = "pillow" if missing.name == "PIL" else "scikit-learn"
        raise MissingExtra.of("demo", package, "The demo's data set") from missing
    digits = load_digits()
    pictures = (digits.images * (255 / 16)).round().astype("uint8")
    for part in ("train", "held-out"):
        (directory / part).mkdir(parents=True, exist_ok=True)
    for number, (picture, label) in enumerate(zip(pictures, digits.target, strict=True)):
        stem = directory / ("train" if number < TRAIN else "held-out") / f"{number:05d}"
        Image.fromarray(picture).save(stem.with_suffix(".png"))
        stem.with_suffix(".cls").write_text(f"{label}\n")
    return TRAIN, len(pictures) - TRAIN
