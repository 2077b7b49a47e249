"""Runs programs in forks of one process that has the frameworks loaded: their import takes ten times as long as a tiny training.

Each line of standard input is a JSON list of programs that run side by side, each with ``program``, ``cwd``, ``env`` and ``out``, the file
for what it says. The answer is a line with the list of their exit codes.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401
import lightning.pytorch  # noqa: F401
import peft  # noqa: F401
import torch
import transformers  # noqa: F401

import stagekit.hooks.accelerate
import stagekit.hooks.lightning
import stagekit.hooks.transformers
import stagekit.torch  # noqa: F401
from tests.examples.hooks import sitecustomize


def become(order: dict[str, Any]) -> str:
    """What a new process of this program would be."""
    os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    said = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(said, number)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.argv = [order["program"]]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    if "POWER_CUT" in os.environ:
        sitecustomize.cut(**json.loads(os.environ["POWER_CUT"]))
    return sys.argv[0]


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each fork looks through all of it once more when it ends
    while line := sys.stdin.readline():
        children = []
        for order in json.loads(line):
            child = os.fork()
            if not child:
                program = become(order)
                runpy.run_path(program, run_name="__main__")
                return
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("default")
    main()
