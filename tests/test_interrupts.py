"""An interrupt while a process forks ends it as at any other moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORKS = """
import os, signal, sys, time

def interrupt():
    if os.getpid() == parent:
        os.kill(parent, signal.SIGINT)

parent = os.getpid()
os.register_at_fork(**{sys.argv[1]: interrupt})  # where what Python does itself would see it
from stagekit.interrupts import keep_over_forks
keep_over_forks()
keep_over_forks()
if sys.argv[2] == "own":
    signal.signal(signal.SIGINT, lambda *_: sys.exit("mine"))
child = os.fork()
if not child:
    os._exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
code = os.waitpid(child, 0)[1]
print("child", code, flush=True)
time.sleep(60)
print("lost")
"""


@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
def test_an_interrupt_in_a_fork_is_not_lost(moment: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORKS, moment, "none"], capture_output=True, text=True, timeout=50, check=False)
    assert "lost" not in done.stdout
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert "Exception ignored" not in done.stderr
    assert "child 256" not in done.stdout, "its handler is the usual one"


def test_a_handler_of_the_program_stays() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS, "after_in_parent", "own"], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (1, "mine\n")
