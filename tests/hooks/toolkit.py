"""Small trainings with Lightning, Accelerate and torch.distributed.checkpoint: ``python -m tests.hooks.toolkit RUN KIND OUT [options]``.

Each draws noise, so that random states have to come back for the weights to. With ``--straight`` a training that nothing interrupts comes
first; its weights go to ``OUT.straight``.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagekit.hooks.loop import Run

EPOCHS, BATCHES = 3, 4


class Stop(Exception):
    """The machine is gone."""


def numbers() -> list[torch.Tensor]:
    return [torch.full((8,), float(number)) / 100 for number in range(16)]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))


def weights(model: nn.Module) -> bytes:
    return b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())


# ------------------------------------------------------------------------------------------------------------------- Lightning


def lightning(
    run: Run | None, out: Path, seed: int, *, stop: Callable[[int], None] = lambda _: None, both: bool = True, **trainer: Any
) -> bytes:
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    from stagekit.hooks.lightning import StagekitCheckpointIO, StagekitHeartbeat

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(seed)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            # Lightning does not save random states, so the noise is a function of where the training is.
            generator = torch.Generator().manual_seed(self.global_step * 10 + self.global_rank)
            loss = (self.net[3](self.net[2](self.net[0](batch + torch.randn(batch.shape, generator=generator)))) - 1).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    class StopAt(Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            stop(trainer.global_step)

    seed_everything(7, verbose=False)  # with several ranks it also seeds the order of the data, so it must stay the same
    model = Module()
    io = StagekitCheckpointIO(run) if run is not None else None
    saver = ModelCheckpoint(dirpath=out / "checkpoints", monitor="loss", save_top_k=1, mode="max", save_on_train_epoch_end=True)
    latest = ModelCheckpoint(dirpath=out / "checkpoints", filename="latest-{epoch}")
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "logger": False, "enable_progress_bar": False}
    options |= {"enable_model_summary": False, "default_root_dir": out, "log_every_n_steps": 1} | trainer
    if io is not None:
        options |= {"plugins": [io], "callbacks": [*([saver] if both else []), latest, StagekitHeartbeat(io), StopAt()]}
    else:
        options |= {"enable_checkpointing": False}
    loader = torch.utils.data.DataLoader(numbers(), batch_size=4 // options["devices"], num_workers=0)  # type: ignore[arg-type]
    path = io.resume_path(out / "restored") if io is not None else None
    Trainer(**options).fit(model, loader, ckpt_path=path)
    return weights(model)


# ------------------------------------------------------------------------------------------------------------------ Accelerate


def accelerate(run: Run | None, out: Path, seed: int, *, stop: Callable[[int], None] = lambda _: None) -> bytes:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from stagekit.hooks.accelerate import load_state, save_state

    # With several ranks the order of a shuffled loader comes back only with this, and with set_epoch() below.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7))
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(numbers(), batch_size=4 // accelerator.num_processes, shuffle=True)  # type: ignore[arg-type,var-annotated]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    random.seed(seed + accelerator.process_index)
    torch.manual_seed(seed + accelerator.process_index)
    found = load_state(accelerator, run) if run is not None else None
    step = found.step if found is not None else 0
    for epoch in range(found.epoch or 0 if found is not None else 0, EPOCHS):
        model.train()
        loader.set_epoch(epoch)
        for batch in loader:
            loss = (model(batch + torch.randn(batch.shape) * random.random()) - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            stop(step)
        if run is not None:
            save_state(accelerator, run, step=step, epoch=epoch + 1, metrics={"loss": loss.item()})
    return weights(accelerator.unwrap_model(model))


# ------------------------------------------------------------------------------------------------------------------------- DCP


def dcp(run: Run | None, out: Path, seed: int, *, stop: Callable[[int], None] = lambda _: None) -> bytes:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    from stagekit.hooks.dcp import load, save

    grouped = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if grouped else 0
    model = DistributedDataParallel(net(seed)) if grouped else net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(seed + rank)

    class App:
        """What users of torch.distributed.checkpoint write. A fresh optimizer has to take a step to tell its state: only when it must."""

        def state_dict(self) -> dict[str, Any]:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments, f"random-{rank}": torch.get_rng_state()}

        def load_state_dict(self, values: dict[str, Any]) -> None:
            set_state_dict(model, optimizer, model_state_dict=values["model"], optim_state_dict=values["optimizer"])
            torch.set_rng_state(values[f"random-{rank}"])

    found = load({"app": App()}, run) if run is not None else None
    step = found.step if found is not None else 0
    for epoch in range(found.epoch or 0 if found is not None else 0, EPOCHS):
        for batch in torch.stack(numbers()).split(4):
            loss = (model(batch + torch.randn(batch.shape)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            stop(step)
        if run is not None:
            save({"app": App()}, run, step=step, epoch=epoch + 1, metrics={"loss": loss.item()})
    return weights(model.module if grouped else model)


# ---------------------------------------------------------------------------------------------------------------------- program


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("kind", choices=("lightning", "accelerate", "dcp"))
    parser.add_argument("out")
    parser.add_argument("--stop-at", type=int)
    parser.add_argument("--straight", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    train: Callable[..., bytes] = {"lightning": lightning, "accelerate": accelerate, "dcp": dcp}[options.kind]
    more = {"devices": world_size, "strategy": "ddp"} if world_size > 1 and options.kind == "lightning" else {}
    if world_size > 1 and options.kind == "dcp":
        torch.distributed.init_process_group("gloo")
    out = Path(f"{options.out}.{os.environ.get('RANK', '0')}")
    if options.straight:
        out.with_suffix(".straight" + out.suffix).write_bytes(train(None, Path.cwd() / "straight", options.seed, **more))
    run = Run(options.run, drain_s=60)

    def stop(step: int) -> None:
        if step == options.stop_at:
            if run.status().generation is not None or run.status().pending:
                run.drain()
            os._exit(9)

    out.write_bytes(train(run, Path.cwd(), options.seed, stop=stop, **more))
    run.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
