"""How many ranks a command starts, and which layouts only the same number can load."""

from __future__ import annotations

import shlex

import pytest

from stagekit.errors import CheckpointError
from stagekit.wrapping.world import Fixed, fixed_by, refuse_other_world, world_size_of


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torchrun --nproc-per-node=8 train.py", 8),
        ("torchrun --nproc_per_node 4 --nnodes 2 train.py", 8),
        ("torchrun train.py", 1),
        ("torchrun --nproc-per-node=gpu train.py", None),
        ("torchrun --nnodes=1:4 --nproc-per-node=2 train.py", None),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", 2),
        ("accelerate launch --num_processes 3 train.py", 3),
        ("accelerate launch --num-processes=3 train.py", 3),
        ("accelerate launch train.py", None),
        ("deepspeed --num_gpus 2 --num_nodes=2 train.py", 4),
        ("deepspeed train.py", None),
        ("env X=1 mpirun -np 6 python train.py", 6),
        ("srun --ntasks=5 python train.py", 5),
        ("bash -c 'cd x && torchrun --nproc-per-node 2 train.py'", 2),
        ("python train.py", None),
        ("bash train.sh", None),
        ("bash -c 'unclosed \"'", None),
    ],
)
def test_launchers(command: str, expected: int | None) -> None:
    assert world_size_of(shlex.split(command), {}) == expected


def test_what_is_stated_beats_the_launcher_and_the_launcher_beats_the_environment() -> None:
    command = ["torchrun", "--nproc-per-node", "2", "x.py"]
    assert world_size_of(command, {"WORLD_SIZE": "4"}, 8) == 8
    assert world_size_of(command, {"WORLD_SIZE": "4"}) == 2
    assert world_size_of(["python", "x.py"], {"WORLD_SIZE": "4"}) == 4
    assert world_size_of(["python", "x.py"], {"WORLD_SIZE": "many"}) is None


ZERO = [f"global_step7/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]


def test_layouts() -> None:
    assert fixed_by([*ZERO, "trainer_state.json"]) == Fixed(2, "DeepSpeed's global_step7/, one part for each rank")
    assert fixed_by(["last.ckpt/checkpoint/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]) is not None
    assert fixed_by(["pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin"]) == Fixed(
        2, "pytorch_model_fsdp_rank*.bin, one file for each rank"
    )
    assert fixed_by(["model.safetensors", "rng_state_0.pth", "rng_state_1.pth"]) is None
    assert fixed_by(["__0_0.distcp", "__1_0.distcp", ".metadata"]) is None
    assert fixed_by(["reranker_rank0.bin"]) is None


def test_only_another_number_is_refused() -> None:
    assert refuse_other_world("step 7", ["model.safetensors"], 2, 4) is None
    assert refuse_other_world("step 7", ZERO, 2, 2) is None
    with pytest.raises(
        CheckpointError, match=r"step 7 was saved by 2 ranks in a layout that no other number can load .* starts 4; nothing"
    ):
        refuse_other_world("step 7", ZERO, None, 4)
    with pytest.raises(CheckpointError, match="was saved by 4 ranks"):
        refuse_other_world("step 7", ZERO, 4, 2)
    warning = refuse_other_world("step 7", ZERO, None, None)
    assert warning is not None
    assert "can be loaded by 2 ranks only" in warning
    assert "--world-size N says it" in warning
