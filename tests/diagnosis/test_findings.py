"""What numbers of a machine mean, without a machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stagekit.diagnosis.disks import Disk, look_at_disk
from stagekit.diagnosis.findings import disk_fact, generation, machine_facts, mounts_fact
from stagekit.diagnosis.machine import Gpu, Machine, Torch, driver_gpus, read_smi
from stagekit.facts import Fact
from stagekit.mounts import Judgement, Mount

H200 = Gpu("NVIDIA H200", (9, 0), 150 * 10**9, "570.1")
TORCH = Torch("2.9.1", "12.8", available=True, kernels=("sm_80", "sm_90", "sm_100"))
MACHINE = Machine(
    stagekit="1",
    python="3.12.1",
    system="Linux",
    cores=16.0,
    ram_bytes=256 * 10**9,
    torch=TORCH,
    gpus=(H200,),
    open_files=1_000_000,
    shm_bytes=8 * 10**9,
    engines={"botocore": "1.43", "rclone": None},
)


def facts(machine: Machine) -> dict[str, Fact]:
    return {fact.name: fact for fact in machine_facts(machine)}


def test_a_good_machine_has_nothing_to_change() -> None:
    found = facts(MACHINE)
    assert {fact.state for fact in found.values()} == {"ok"}
    assert found["gpu"].text == "1 × NVIDIA H200, Hopper (9.0), bf16 yes, 150 GB, driver 570.1"
    assert found["memory"].text == "256 GB of RAM for 16 cores, 150 GB of VRAM"
    assert found["engines"].text == "botocore 1.43; not installed: rclone"


@pytest.mark.parametrize(
    ("capability", "name"),
    [((3, 7), "before Maxwell"), ((7, 0), "Volta"), ((7, 5), "Turing"), ((8, 6), "Ampere"), ((8, 9), "Ada"), ((12, 0), "Blackwell")],
)
def test_generations_go_by_compute_capability(capability: tuple[int, int], name: str) -> None:
    assert generation(capability) == name


@pytest.mark.parametrize(
    ("change", "name", "state", "words"),
    [
        ({"gpus": (Gpu("Tesla T4", (7, 5), 16 * 10**9),)}, "gpu", "note", "Tesla T4 has no bf16 units"),
        ({"ram_bytes": 100 * 10**9}, "memory", "note", "less RAM than VRAM"),
        ({"ram_bytes": None}, "memory", "unknown", None),
        ({"open_files": 1024}, "limits", "note", "ulimit -n 65536"),
        ({"shm_bytes": 64 << 20}, "limits", "note", "--shm-size=8g"),
        ({"torch": None}, "torch", "note", "install PyTorch"),
        ({"torch": Torch("2.9", trouble="it was not imported within 40 s")}, "torch", "bad", "repair PyTorch"),
        ({"torch": Torch("2.9+cpu")}, "torch", "bad", "it was built for the CPU"),
        ({"torch": Torch("2.9", "13.0")}, "torch", "bad", "CUDA 13.0 does not work with this driver"),
        ({"torch": replace(TORCH, kernels=("sm_70", "sm_80"))}, "torch", "bad", "no code for sm_90"),
        ({"torch": replace(TORCH, kernels=("sm_70", "compute_80"))}, "torch", "ok", None),
        ({"torch": replace(TORCH, kernels=("gfx942",))}, "torch", "ok", None),
        ({"gpus": ()}, "gpu", "note", None),
    ],
)
def test_what_stands_in_the_way_is_told(change: dict[str, object], name: str, state: str, words: str | None) -> None:
    fact = facts(replace(MACHINE, **change))[name]  # type: ignore[arg-type]  # the fields are parameters
    assert fact.state == state
    assert (fact.advice is None) == (words is None)
    assert words is None or words in str(fact.advice)


# What nvidia-smi prints, as people have reported it: MIG and unified memory leave fields out, containers forbid some of them.
_MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.133\n"
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed "
    "and running.\n"
)
_LOST = "Unable to determine the device handle for GPU3: 0000:5F:00.0: Unknown Error"


@pytest.mark.parametrize(
    ("printed", "gpus", "state", "words"),
    [
        (
            "NVIDIA H200, 9.0, 143771, 570.86.15\nNVIDIA H200, 9.0, 143771, 570.86.15\n",
            (Gpu("NVIDIA H200", (9, 0), 143771 << 20, "570.86.15"),) * 2,
            "ok",
            "2 × NVIDIA H200, Hopper (9.0), bf16 yes, 151 GB each, driver 570.86.15",
        ),
        (
            "NVIDIA A100-SXM4-80GB MIG 1g.10gb, 8.0, [Insufficient Permissions], 535.129.03\n",
            (Gpu("NVIDIA A100-SXM4-80GB MIG 1g.10gb", (8, 0), None, "535.129.03"),),
            "ok",
            "1 × NVIDIA A100-SXM4-80GB MIG 1g.10gb, Ampere (8.0), bf16 yes, driver 535.129.03",
        ),
        (
            "NVIDIA GB10, 12.1, [N/A], 580.159.03\n",
            (Gpu("NVIDIA GB10", (12, 1), None, "580.159.03"),),
            "ok",
            "1 × NVIDIA GB10, Blackwell (12.1), bf16 yes, driver 580.159.03",
        ),
        ("Orin (nvgpu), [N/A], [N/A], 540.5.0\n", (Gpu("Orin (nvgpu)", None, None, "540.5.0"),), "ok", "1 × Orin (nvgpu), driver 540.5.0"),
        ("Tesla K80, [Not Supported], 11441, [N/A]\n", (Gpu("Tesla K80", None, 11441 << 20),), "ok", "1 × Tesla K80, 12.0 GB"),
        ("No devices were found\n", (), "note", "none was found"),
        ("", (), "note", "none was found"),
        (_NO_DRIVER, (), "unknown", "none can be used: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make"),
        (_MISMATCH, (), "bad", "none can be used: Failed to initialize NVML: Driver/library version mismatch"),
        (f"{_LOST}\n", (), "bad", f"none can be used: {_LOST}"),
        (
            f"{_LOST}\nNVIDIA GeForce RTX 3080, 8.6, 10240, 550.54.14\n",
            (Gpu("NVIDIA GeForce RTX 3080", (8, 6), 10240 << 20, "550.54.14"),),
            "bad",
            f"1 × NVIDIA GeForce RTX 3080, Ampere (8.6), bf16 yes, 10.7 GB, driver 550.54.14; and {_LOST}",
        ),
    ],
)
def test_what_nvidia_smi_prints_is_read_and_what_it_complains_of_is_told(
    printed: str, gpus: tuple[Gpu, ...], state: str, words: str
) -> None:
    found, trouble = read_smi(printed)
    assert found == gpus
    fact = facts(replace(MACHINE, gpus=found, gpu_trouble=trouble))["gpu"]
    assert fact.state == state
    assert fact.text.startswith(words)
    assert (fact.advice is not None) == (trouble is not None)


def test_an_old_driver_is_asked_again_without_what_it_does_not_know(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; esac\n'
        "echo Tesla V100-SXM2-16GB, 16160, 470.182.03\n"
    )
    program.chmod(0o755)
    assert driver_gpus(str(program)) == ((Gpu("Tesla V100-SXM2-16GB", None, 16160 << 20, "470.182.03"),), None)
    assert driver_gpus(str(tmp_path / "nothing")) == ((), None)
    program.write_text(f"#!/bin/sh\necho '{_LOST}' >&2; exit 15\n")
    assert driver_gpus(str(program)) == ((), _LOST)


def mount(type_: str, source: str = "source") -> Mount:
    return Mount(1, 0, "0:1", "/", "/mnt", "rw", type_, source, "rw")


FINE = Disk(Path("/data"), Path("/data"), Judgement("fine", "", mount("ext4")), "nvme", 50 * 10**9, 100 * 10**9, True)


@pytest.mark.parametrize(
    ("disk", "state", "words"),
    [
        (FINE, "ok", None),
        (replace(FINE, free_bytes=2 * 10**9), "note", "less than 10.7 GB is left"),
        (replace(FINE, free_bytes=10**8), "bad", "a checkpoint will not fit"),
        (replace(FINE, is_file=True), "bad", "name a directory instead, such as /"),
        (replace(FINE, path=Path("/data/a/b"), existing=Path("/data/a"), is_file=True), "bad", "name a directory instead, such as /data"),
        (replace(FINE, judged=Judgement("fine", "", mount("proc")), free_bytes=0), "bad", "use a directory on a disk instead of /data"),
        (replace(FINE, path=Path("/data/no/such")), "note", "check how /data/no/such is written: nothing is there yet, and whoever writes"),
        (replace(FINE, path=Path("/data/no/such"), writable=False), "bad", "give yourself the right to write in /data, or"),
        (replace(FINE, writable=False), "bad", "give yourself the right to write in /data"),
        (replace(FINE, free_bytes=None), "unknown", None),
        (replace(FINE, judged=Judgement("warned", "a network volume", mount("fuse", "mfs#x"))), "note", "right for output"),
        (
            replace(FINE, judged=Judgement("warned", "a network volume", mount("fuse", "mfs#x")), total_bytes=10**15),
            "note",
            "1.00 PB is the size of the whole cluster",
        ),
        (
            replace(FINE, judged=Judgement("refused", "a store behind FUSE", mount("fuse.rclone")), url="s3://bucket/data"),
            "bad",
            "use s3://bucket/data instead of /data",
        ),
        (replace(FINE, judged=Judgement("refused", "it does not answer", mount("nfs4"), silent=True)), "bad", "umount -l /mnt"),
    ],
)
def test_what_a_disk_means(disk: Disk, state: str, words: str | None) -> None:
    fact = disk_fact(disk, "path", must_write=True, named=True)
    assert fact.state == state
    assert "/data" in fact.text
    assert (fact.advice is None) == (words is None)
    assert words is None or words in str(fact.advice)


def test_mounts_are_told_with_their_class() -> None:
    assert mounts_fact([]).text == "all local"
    assert mounts_fact(None).state == "unknown"
    network = Judgement("warned", "a network volume", mount("nfs4"))
    told = mounts_fact([network])
    assert (told.state, told.text, told.advice) == ("ok", "/mnt (nfs4, warned)", None)
    told = mounts_fact([network, *[Judgement("refused", "a store behind FUSE", mount("fuse.rclone"))] * 5])
    assert told.state == "note"
    assert told.text.endswith("/mnt (fuse.rclone, refused) and 2 more")
    assert told.advice is not None
    assert told.advice.startswith("read buckets by their URLs, not through /mnt")


def test_what_is_there_is_seen_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    told = disk_fact(look_at_disk(tmp_path / "empty.json"), "path", must_write=True, named=True)
    assert told.text == f"{tmp_path}/empty.json: it is a file, so it holds no others"
    told = disk_fact(look_at_disk(tmp_path / "empty.json" / "x"), "path", must_write=True, named=True)
    assert told.text == f"{tmp_path}/empty.json/x: {tmp_path}/empty.json is a file, so it holds no others"
    absent = look_at_disk(tmp_path / "a" / "b")
    assert (absent.existing, absent.is_file) == (tmp_path, False)
    assert f"{tmp_path}/a/b, which is not there yet, " in disk_fact(absent, "path", must_write=True, named=True).text
    assert "not there yet" not in disk_fact(absent, "cache", must_write=True).text, "it is made when it is needed"
    assert "/proc is the kernel's own, and takes no files" in disk_fact(look_at_disk(Path("/proc")), "path", must_write=True).text


def test_who_only_reads_needs_no_right_to_write() -> None:
    assert disk_fact(replace(FINE, writable=False), "path", must_write=False).state == "ok"
