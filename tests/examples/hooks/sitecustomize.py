"""Python loads this by itself when the directory is on its path: the machine under a program is lost at a line that it prints.

``POWER_CUT`` says when, as JSON with the arguments of ``cut``.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import time
from pathlib import Path

_PRINT = builtins.print


def cut(text: str, run: str, checkpoints: int, number: int = 0, held: str = "") -> None:
    """Send this process the signal ``number`` when it prints a line with ``text``, once ``run`` holds so many ``checkpoints``.

    With ``held`` that file is written instead, and the program goes no further until something ends it.
    """

    def printed(*values: object, **options: object) -> None:
        _PRINT(*values, **options)  # type: ignore[call-overload]
        if text not in " ".join(map(str, values)):
            return
        builtins.print = _PRINT
        from stagekit.runs import catalog
        from stagekit.store import open_store

        while len(catalog.read_all(open_store(run)).checkpoints) < checkpoints:
            time.sleep(0.02)
        if held:
            Path(held).touch()
            signal.pause()
        else:
            os.kill(os.getpid(), number)

    builtins.print = printed


if "POWER_CUT" in os.environ:
    cut(**json.loads(os.environ["POWER_CUT"]))
