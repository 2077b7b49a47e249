"""What this machine is: the numbers as they are found. What they mean is decided in ``findings``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..parallel import cores
from ..store.rclone import find_rclone
from ..transfer.bulk.s5cmd import s5cmd_binary

TORCH_S = 40.0
TOOL_S = 5.0

# A process of its own: importing torch takes seconds and may hang in a driver, and nobody wants its memory here.
_TORCH = """
import json, torch
told = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
told["available"] = torch.cuda.is_available()
told["kernels"] = torch.cuda.get_arch_list() if told["available"] else []
told["gpus"] = [
    {"name": p.name, "capability": [p.major, p.minor], "bytes": p.total_memory}
    for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if told["available"] else 0))
]
print(json.dumps(told))
"""
_BF16_FROM = (8, 0)
_FIELDS = ("name", "compute_cap", "memory.total", "driver_version")
_NO_SUCH_FIELD = "is not a valid field to query"
_NO_GPU = "No devices were found"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``capability`` is CUDA's, such as (9, 0)."""

    name: str
    capability: tuple[int, int] | None
    bytes: int | None
    driver: str | None = None

    @property
    def bf16(self) -> bool | None:
        """Whether it computes in bf16, as Ampere and newer do; ``None`` where its capability is not known."""
        return self.capability >= _BF16_FROM if self.capability is not None else None


@dataclass(frozen=True, slots=True)
class Torch:
    """PyTorch as it is installed. ``trouble`` tells why it could not be asked; then only ``version`` holds."""

    version: str
    cuda: str | None = None
    available: bool = False
    kernels: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """``ram_bytes`` and ``cores`` are what this container may use; ``None`` where the system does not tell."""

    stagekit: str
    python: str
    system: str
    cores: float
    ram_bytes: int | None
    torch: Torch | None
    gpus: tuple[Gpu, ...]
    open_files: int
    shm_bytes: int | None
    engines: Mapping[str, str | None] = field(default_factory=dict)
    gpu_trouble: str | None = None
    """What the driver's program says instead of telling a GPU."""


def look_at_machine(*, torch_s: float = TORCH_S) -> Machine:
    """This machine. Programs are asked for seconds at most; what does not answer is left out, or told as trouble."""
    torch = _torch(torch_s)
    gpus, gpu_trouble = driver_gpus()
    return Machine(
        stagekit=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=_cores(),
        ram_bytes=ram_bytes(),
        torch=torch,
        gpus=gpus or (torch.gpus if torch is not None else ()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shm_bytes=_size(Path("/dev/shm")),
        engines=_engines(),
        gpu_trouble=gpu_trouble,
    )


def look_at_gpus(*, torch_s: float = TORCH_S) -> tuple[Gpu, ...]:
    """The GPUs of this machine. PyTorch is asked where the driver's program tells none."""
    gpus, _ = driver_gpus()
    if gpus:
        return gpus
    torch = _torch(torch_s)
    return torch.gpus if torch is not None else ()


def driver_gpus(program: str = "nvidia-smi") -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs that the driver's program tells, and what it says of trouble. Neither where there is no such program."""

    def ask(*fields: str) -> str:
        try:
            told = subprocess.run(
                (program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TOOL_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return f"{program} did not answer within {TOOL_S:.0f} s"
        except OSError:
            return ""
        return f"{told.stdout}\n{told.stderr}"  # its complaints are on either, and its exit code may be 0

    text = ask(*_FIELDS)
    if _NO_SUCH_FIELD not in text:
        return read_smi(text)
    # Drivers before 495 know no compute capability.
    return read_smi(ask(*(name for name in _FIELDS if name != "compute_cap")), capability=False)


def _torch(timeout_s: float) -> Torch | None:
    if importlib.util.find_spec("torch") is None:
        return None
    version = _version("torch") or "unknown"
    try:
        told = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _TORCH],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Torch(version, trouble=f"it was not imported within {timeout_s:.0f} s")
    lines = told.stdout.strip().splitlines()
    try:
        values: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (told.stderr.strip().splitlines() or [f"exit code {told.returncode}"])[-1]
        return Torch(version, trouble=f"it cannot be imported ({last[:200]})")
    gpus = tuple(Gpu(one["name"], (one["capability"][0], one["capability"][1]), one["bytes"]) for one in values["gpus"])
    return Torch(values["version"], values["cuda"], values["available"], tuple(values["kernels"]), gpus)


def read_smi(text: str, *, capability: bool = True) -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs in what ``nvidia-smi`` printed, and its first line that is none. What it cannot tell of a GPU stands in brackets there."""
    gpus, trouble = [], None
    for line in filter(None, map(str.strip, text.splitlines())):
        fields = [one.strip() for one in line.split(",")]
        if not capability:
            fields.insert(1, "")
        if len(fields) != len(_FIELDS):
            trouble = trouble or (None if line.startswith(_NO_GPU) else line[:200])
            continue
        known = re.fullmatch(r"(\d+)\.(\d+)", fields[1])
        size = int(fields[2]) << 20 if fields[2].isdigit() else None
        driver = None if fields[3].startswith("[") else fields[3]
        gpus.append(Gpu(fields[0], (int(known[1]), int(known[2])) if known else None, size, driver))
    return tuple(gpus), trouble


def _cores() -> float:
    available = float(cores())
    quota = _words(Path("/sys/fs/cgroup/cpu.max"))
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]):
        available = min(available, int(quota[0]) / int(quota[1]))
    return round(available, 1)


def ram_bytes(root: Path = Path("/")) -> int | None:
    """What this container may use: the machine's memory, or the limit of its control group where that is less."""
    total = None
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        words = _words(root / name)
        if words and words[0].isdigit() and total is not None:
            total = min(total, int(words[0]))
    return total


def _size(path: Path) -> int | None:
    with suppress(OSError):
        told = os.statvfs(path)
        return told.f_blocks * told.f_frsize
    return None


def _engines() -> dict[str, str | None]:
    engines = {name: _version(name) for name in ("botocore", "obstore", "s3fs", "fsspec")}
    for name, binary, word in (("s5cmd", s5cmd_binary(), "version"), ("rclone", find_rclone(), "version")):
        told = _ask((str(binary), word), TOOL_S) if binary is not None else None
        found = re.search(r"v?(\d+\.\d+[\w.-]*)", told or "")
        engines[name] = found[1] if found else None
    return engines


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask(command: Sequence[str], timeout_s: float) -> str | None:
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout if told.returncode == 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()
