"""A trainer that knows nothing of Stagekit: ``python toy.py OUT STEPS [how it misbehaves]``. Saves as transformers' Trainer does."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

END = b"PK\x05\x06" + bytes(18)  # an empty zip: what ends a file of torch.save


def save(out: Path, step: int, *, upto: str = "") -> None:
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "pytorch_model.bin").write_bytes(bytes([step]) * 60_000 + END)
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        if name == upto:
            return
        (folder / name).write_bytes(END)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": float(step), "log_history": [{"loss": 1 / step}]}))


def newest(out: Path) -> int:
    """What ``resume_from_checkpoint=True`` would find."""
    return max((int(path.name.rpartition("-")[2]) for path in out.glob("checkpoint-*") if path.name[11:].isdigit()), default=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--kill-self-in", type=int, help="kill -9 in the middle of saving this step")
    parser.add_argument("--hang", action="store_true", help="do not end after the last step")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--save-on-term", action="store_true")
    parser.add_argument("--wait-for", type=Path, help="go on with the last step once this file is there")
    options = parser.parse_args()
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.save_on_term:

        def term(number: int, frame: object) -> None:
            save(options.out, options.steps + 1)
            print("saved on SIGTERM", flush=True)
            sys.exit(0)

        signal.signal(signal.SIGTERM, term)
    first = newest(options.out) + 1
    print(f"from {first - 1} of {os.environ.get('STAGEKIT_RUN')} in {os.environ.get('STAGEKIT_RESUME_DIR') or 'nothing'}", flush=True)
    for step in range(first, options.steps + 1):
        if step == options.steps and options.wait_for is not None:
            while not options.wait_for.exists():
                time.sleep(0.02)
        if step == options.kill_self_in:
            save(options.out, step, upto="scheduler.pt")
            os.kill(os.getpid(), signal.SIGKILL)
        save(options.out, step)
    (options.out / "train.log").write_text(f"trained to {options.steps}\n")
    print("done", flush=True)
    if options.hang:
        while True:
            time.sleep(600)
    sys.exit(options.exit)


if __name__ == "__main__":
    main()
