"""What the numbers of a machine and its disks mean for a training, as facts with advice. Pure: everything comes in as a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..facts import Fact
from ..installing import install_line
from ..mounts import Judgement
from ..units import format_size
from .disks import Disk
from .machine import Gpu, Machine

_GENERATIONS = {
    (5, 0): "Maxwell",
    (6, 0): "Pascal",
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
}
"""By the lowest compute capability of each."""
_FEW_FILES = 4096
_SMALL_SHM = 1 << 30
_NO_SPACE, _LITTLE_SPACE = 1 << 30, 10 << 30
_WHOLE_CLUSTER = 50e12
_MOST_MOUNTS = 4
_BROKEN = ("mismatch", "device handle", "is lost", "Unknown Error", "did not answer")
"""What ``nvidia-smi`` says where there is a GPU and it cannot be used. What else it says comes on machines without one as well."""
_KERNEL = frozenset(
    ("bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs", "fusectl", "proc", "pstore", "securityfs", "sysfs", "tracefs")
)
_KINDS = {"nvme": "NVMe", "ssd": "SSD", "disk": "a rotating or virtual disk", "memory": "memory", "network": "over the network"}


def generation(capability: tuple[int, int]) -> str:
    """The name of a GPU generation."""
    known = [lowest for lowest in _GENERATIONS if lowest <= capability]
    return _GENERATIONS[max(known)] if known else "before Maxwell"


def machine_facts(machine: Machine) -> list[Fact]:
    """What ``machine`` is, in the order in which it is shown."""
    versions = {"stagekit": machine.stagekit, "python": machine.python, "system": machine.system}
    return [
        Fact("software", "ok", f"stagekit {machine.stagekit}, Python {machine.python}, {machine.system}", values=versions),
        _torch_fact(machine),
        _gpu_fact(machine),
        _memory_fact(machine),
        _limits_fact(machine),
        _engines_fact(machine.engines),
    ]


def _torch_fact(machine: Machine) -> Fact:
    torch = machine.torch
    if torch is None:
        advice = f"install PyTorch before training here: {install_line('torch', 'torch')}"
        return Fact("torch", "note", "not installed", advice, {"version": None})
    built = f"built for CUDA {torch.cuda}" if torch.cuda else "built for the CPU"
    values = {"version": torch.version, "cuda": torch.cuda, "cuda_available": torch.available}
    if torch.trouble is not None:
        return Fact("torch", "bad", f"{torch.version}: {torch.trouble}", "repair PyTorch: it is installed here and cannot be used", values)
    text = f"{torch.version}, {built}"
    if machine.gpus and not torch.available:
        why = "it was built for the CPU" if torch.cuda is None else f"CUDA {torch.cuda} does not work with this driver"
        return Fact("torch", "bad", f"{text}, sees no GPU", f"install another PyTorch: there is a GPU here, and {why}", values)
    missing = sorted({_sm(gpu) for gpu in machine.gpus if gpu.capability and not _has_kernels(gpu.capability, torch.kernels)})
    if torch.available and missing:
        advice = f"install a newer PyTorch: this one has no code for {', '.join(missing)}, the GPU in this machine"
        return Fact("torch", "bad", f"{text}, for {', '.join(torch.kernels)}", advice, values)
    return Fact("torch", "ok", text, values=values)


def _sm(gpu: Gpu) -> str:
    assert gpu.capability is not None
    return f"sm_{gpu.capability[0]}{gpu.capability[1]}"


def _has_kernels(capability: tuple[int, int], kernels: Iterable[str]) -> bool:
    """Whether code for ``capability`` is there: of the same major number and not newer, or to be compiled for whatever comes later."""
    for one in kernels:
        kind, _, digits = one.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            return True  # not CUDA's names: cannot tell
        major, minor = int(digits[:-1]), int(digits[-1])
        if (kind == "sm" and major == capability[0] and minor <= capability[1]) or (kind == "compute" and (major, minor) <= capability):
            return True
    return False


def _gpu_fact(machine: Machine) -> Fact:
    if not machine.gpus:
        if machine.gpu_trouble is None:
            return Fact("gpu", "note", "none was found", values={"gpus": []})
        broken = any(word in machine.gpu_trouble for word in _BROKEN)
        mend = "repair the driver, or rent another server" if broken else "start the container with --gpus all, or install the driver"
        text = f"none can be used: {machine.gpu_trouble}"
        return Fact("gpu", "bad" if broken else "unknown", text, f"{mend}, if there should be a GPU here", {"gpus": []})
    kinds: dict[Gpu, int] = {}
    for gpu in machine.gpus:
        kinds[gpu] = kinds.get(gpu, 0) + 1
    parts, advice = [], None
    for gpu, count in kinds.items():
        words = [f"{count} × {gpu.name}"]
        if gpu.capability is not None:
            words.append(f"{generation(gpu.capability)} ({gpu.capability[0]}.{gpu.capability[1]}), bf16 {'yes' if gpu.bf16 else 'no'}")
            if not gpu.bf16:
                advice = f"train with fp16 and a gradient scaler, or in fp32: {gpu.name} has no bf16 units (bf16=True is slow or fails)"
        if gpu.bytes is not None:
            words.append(f"{format_size(gpu.bytes)} each" if count > 1 else format_size(gpu.bytes))
        if gpu.driver is not None:
            words.append(f"driver {gpu.driver}")
        parts.append(", ".join(words))
    values = {"gpus": [{"name": gpu.name, "capability": gpu.capability, "bytes": gpu.bytes} for gpu in machine.gpus]}
    if machine.gpu_trouble is not None:
        text = f"{'; '.join(parts)}; and {machine.gpu_trouble}"
        return Fact("gpu", "bad", text, "rent another server, or reset the GPU that does not answer: training may hang on it", values)
    return Fact("gpu", "note" if advice else "ok", "; ".join(parts), advice, values)


def _memory_fact(machine: Machine) -> Fact:
    vram = sum(gpu.bytes or 0 for gpu in machine.gpus)
    values = {"ram_bytes": machine.ram_bytes, "vram_bytes": vram, "cores": machine.cores}
    cores = f"{machine.cores:g} cores"
    if machine.ram_bytes is None:
        return Fact("memory", "unknown", f"{cores}; the system does not tell its memory", values=values)
    text = f"{format_size(machine.ram_bytes)} of RAM for {cores}" + (f", {format_size(vram)} of VRAM" if vram else "")
    if vram and machine.ram_bytes < vram:
        advice = (
            "load weights straight to the GPU (device_map=, mmap=True) and save in shards: there is less RAM than VRAM here, so what fills "
            "the GPU does not fit into RAM as well"
        )
        return Fact("memory", "note", text, advice, values)
    return Fact("memory", "ok", text, values=values)


def _limits_fact(machine: Machine) -> Fact:
    shm = "no /dev/shm" if machine.shm_bytes is None else f"/dev/shm {format_size(machine.shm_bytes)}"
    files = "any number of open files" if machine.open_files < 0 else f"{machine.open_files:,} open files"
    text, values = f"{files}, {shm}", {"open_files": machine.open_files, "shm_bytes": machine.shm_bytes}
    advice = []
    if 0 <= machine.open_files < _FEW_FILES:
        advice.append(f"raise the limit on open files (ulimit -n 65536): {machine.open_files:,} are few for workers and connections")
    if machine.shm_bytes is not None and machine.shm_bytes < _SMALL_SHM:
        advice.append(
            f"start the container with a larger /dev/shm (--shm-size=8g), or keep num_workers=0: {format_size(machine.shm_bytes)} end in a "
            "bus error once DataLoader workers hand over batches"
        )
    return Fact("limits", "note" if advice else "ok", text, "; ".join(advice) or None, values)


def _engines_fact(engines: Mapping[str, str | None]) -> Fact:
    there = ", ".join(f"{name} {version}" for name, version in engines.items() if version)
    absent = ", ".join(name for name, version in engines.items() if not version)
    text = there + (f"; not installed: {absent}" if absent else "")
    return Fact("engines", "ok", text, values={"engines": dict(engines)})


def mounts_fact(mounts: Sequence[Judgement] | None) -> Fact:
    """The mounts of this machine that are not simply local, each with its class."""
    if mounts is None:
        return Fact("mounts", "unknown", "the system does not tell what is mounted where")
    found = [(one.kind, one.mount) for one in mounts if one.mount is not None]
    values = {"mounts": [{"class": kind, "type": mount.type, "point": mount.point} for kind, mount in found]}
    if not found:
        return Fact("mounts", "ok", "all local", values=values)
    text = ", ".join(f"{mount.point} ({mount.type}, {kind})" for kind, mount in found[:_MOST_MOUNTS])
    more = f" and {len(found) - _MOST_MOUNTS} more" if len(found) > _MOST_MOUNTS else ""
    refused = [mount.point for kind, mount in found if kind == "refused"]
    advice = f"read buckets by their URLs, not through {', '.join(refused[:_MOST_MOUNTS])}" if refused else None
    return Fact("mounts", "note" if refused else "ok", text + more, advice, values)


def disk_fact(disk: Disk, purpose: str, *, must_write: bool, named: bool = False) -> Fact:
    """What ``disk`` means for ``purpose``: ``"output"``, ``"cache"``, a path somebody ``named``, who is told when nothing is there."""
    judged, mount = disk.judged, disk.judged.mount
    values = {
        "path": str(disk.path),
        "class": judged.kind,
        "type": mount.type if mount else None,
        "mount": mount.point if mount else None,
        "disk": disk.kind,
        "free_bytes": disk.free_bytes,
        "total_bytes": disk.total_bytes,
        "writable": disk.writable,
        "exists": disk.existing == disk.path,
    }
    if judged.kind == "refused" and mount is not None:
        text = f"{disk.path}: {mount.type} on {mount.point}, refused: {judged.reason}"
        instead = disk.url or "the bucket's own URL (s3://bucket/prefix)"
        advice = f"unmount it (umount -l {mount.point}) and use a local disk" if judged.silent else f"use {instead} instead of {disk.path}"
        return Fact(purpose, "bad", text, advice, values)
    if disk.is_file:
        what = "it is a file" if disk.existing == disk.path else f"{disk.existing} is a file"
        return Fact(
            purpose,
            "bad",
            f"{disk.path}: {what}, so it holds no others",
            f"name a directory instead, such as {disk.existing.parent}",
            values,
        )
    if mount is not None and mount.type in _KERNEL:
        text = f"{disk.path}: {mount.type} on {mount.point} is the kernel's own, and takes no files"
        return Fact(purpose, "bad", text, f"use a directory on a disk instead of {disk.path}", values)
    words = [str(disk.path)]
    if named and disk.existing != disk.path:
        words.append("which is not there yet")
    if mount is not None:
        words.append(f"{mount.type} on {mount.point}")
    if disk.kind is not None:
        words.append(_KINDS[disk.kind])
    if disk.free_bytes is None or disk.total_bytes is None:
        return Fact(purpose, "unknown", f"{', '.join(words)}: the file system does not tell its space", values=values)
    words.append(f"{format_size(disk.free_bytes)} of {format_size(disk.total_bytes)} free")
    text = ", ".join(words)
    if must_write and disk.writable is False:
        return Fact(
            purpose,
            "bad",
            f"{text}, may not be written",
            f"give yourself the right to write in {disk.existing}, or use another directory",
            values,
        )
    if disk.free_bytes < _NO_SPACE:
        return Fact(purpose, "bad", text, f"free some space below {disk.existing}: a checkpoint will not fit", values)
    if judged.kind == "warned":
        whole = ""
        if disk.total_bytes > _WHOLE_CLUSTER:
            whole = (
                f" {format_size(disk.total_bytes)} is the size of the whole cluster: what this container may use is its quota, which "
                "cannot be seen here."
            )
        advice = f"keep data and caches on a local disk; {disk.path} is right for output.{whole}"
        return Fact(purpose, "note", f"{text}; {judged.reason}", advice, values)
    if disk.free_bytes < _LITTLE_SPACE:
        return Fact(purpose, "note", text, f"free some space below {disk.existing}: less than {format_size(_LITTLE_SPACE)} is left", values)
    if named and disk.existing != disk.path:
        advice = (
            f"check how {disk.path} is written: nothing is there yet, and whoever writes there makes it below {disk.existing}, which was "
            "looked at"
        )
        return Fact(purpose, "note", text, advice, values)
    return Fact(purpose, "ok", text, values=values)


def same_disk(facts: Iterable[tuple[str, Path]]) -> dict[Path, str]:
    """Purposes by path, those of one path joined: what lies at one place is shown once."""
    joined: dict[Path, str] = {}
    for purpose, path in facts:
        joined[path] = f"{joined[path]}, {purpose}" if path in joined else purpose
    return joined
