"""One rank of a training over gloo: ``python -m tests.hooks.group RUN INIT OUT EPOCHS SEED``, with RANK and WORLD_SIZE set.

Every rank draws from its own generator, so that its weights tell whether its own came back.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stagekit.hooks.loop import Run

from .toy import ToyLoader

TERM_AT = 4


class Silent:
    """A loader's state, without a word about its batches."""

    def __init__(self, loader: ToyLoader) -> None:
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict


def main() -> None:
    url, init, out, epochs, seed = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout_s = float(os.environ.get("TIMEOUT_S", "600"))
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ToyLoader(batches=12)
    torch.manual_seed(seed * 100 + rank)
    random.seed(seed * 100 + rank)
    run = Run(url, drain_s=60)
    if late := os.environ.get("LATE"):
        finish, load = run._finish_backlog, torch.load

        def slowly(work: Any) -> Any:
            def run_it(*arguments: Any, **named: Any) -> Any:
                time.sleep(2 * timeout_s)
                return work(*arguments, **named)

            return run_it

        if rank == 0 and late == "sending":
            run._finish_backlog = slowly(finish)  # type: ignore[method-assign]
        if rank == 1 and late == "loading":
            torch.load = slowly(load)
    every = "0s" if os.environ.get("EVERY") else None
    steps = os.environ.get("STEPS")  # the loop tells of steps, and the loader does not
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if steps != "without loader":
        state["loader"] = Silent(loader) if steps else loader
    for _epoch in run.epochs(epochs, state=state, every=every):
        for number, batch in enumerate(loader):
            if number == TERM_AT and os.environ.get("TERM_RANK") == str(rank):
                os.kill(os.getpid(), signal.SIGTERM)
            noise = torch.randn(4, 8) + random.random()
            loss = (model(batch + noise) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if steps:
                run.step()
    drawn = f"{torch.rand(1).item()} {random.random()}".encode()
    out.with_suffix(f".{rank}").write_bytes(model.module.weight.detach().numpy().tobytes() + drawn)
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
