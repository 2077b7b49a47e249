"""examples/lora_plain.py, after the two pulls that its first lines tell."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import stagekit

stagekit.pull(f"{os.environ['BUCKET']}/models/llama", "base")
stagekit.pull(f"{os.environ['BUCKET']}/chat", "data")
runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lora_plain.py"), run_name="__main__")
