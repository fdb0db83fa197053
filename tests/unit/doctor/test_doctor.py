"""`penstock.doctor`: what is fine, slow or broken about a machine, on machines that the tests make."""

import ctypes
import errno
import os
import resource
import struct
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.doctor import Finding, Verdict, examine, looks
from penstock.runtime.host_memory import HostMemory

ACCELERATOR = torch.device("cuda", 0)


def only(look: Iterator[Finding]) -> Finding:
    [finding] = look
    assert bool(finding.mend) is (finding.verdict is not Verdict.FINE)
    assert "\n" not in finding.found
    return finding


def test_this_machine_is_looked_at_whole(tmp_path: Path) -> None:
    about = [finding.about for finding in examine([tmp_path])]
    assert len(set(about)) == len(about)
    assert {"libraries", "device", "processor", "cores", "memory", "huge pages", "malloc"} < set(about)
    assert f"disk {tmp_path}" in about
    assert os.listdir(tmp_path) == []


def test_a_look_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: 1 / 0)
    [finding] = [finding for finding in examine() if finding.about == "cores"]
    assert finding.verdict is Verdict.SLOW
    assert "ZeroDivisionError" in finding.found
    assert "memory" in [finding.about for finding in examine()]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_driver_without_a_device_is_broken(tmp_path: Path, loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "default_device", lambda: torch.device("cpu"))
    file = tmp_path / "version"
    if loaded:
        file.write_text("580.1\n")
    finding = only(looks.devices({"an NVIDIA": file}))
    assert finding.verdict is (Verdict.BROKEN if loaded else Verdict.FINE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = only(looks.devices({"an NVIDIA": file}))
    assert hidden.verdict is (Verdict.SLOW if loaded else Verdict.FINE)
    assert ("CUDA_VISIBLE_DEVICES" in hidden.mend) is loaded


Usage = namedtuple("Usage", "total used free")
LOOKS = "penstock.doctor.looks."
CPU = torch.device("cpu")
CORES = {"os.sched_getaffinity": {0, 1, 2, 3}}
MALLOC = {LOOKS + "platform.libc_ver": ("glibc", "2.36")}
ON_CPU, ON_ACCELERATOR = ({LOOKS + "default_device": device} for device in (CPU, ACCELERATOR))


def free(nbytes: int) -> dict[str, Any]:
    return {LOOKS + "shutil.disk_usage": Usage(nbytes, 0, nbytes)}


def instructions(chosen: str, machine: str = "x86_64") -> dict[str, Any]:
    return {LOOKS + "instruction_set": chosen, LOOKS + "platform.machine": machine}


def locked(limit: int) -> dict[str, Any]:
    return {"resource.getrlimit": (limit, limit)}


def pages(setting: str | None) -> Callable[[Path], Iterator[Finding]]:
    def look(folder: Path) -> Iterator[Finding]:
        if setting is not None:
            (folder / "enabled").write_text(setting)
        return looks.huge_pages(folder / "enabled")

    return look


#: A look, what functions return meanwhile, the verdict, and a part of what is said.
VERDICTS: dict[str, tuple[Callable[[Path], Iterator[Finding]], dict[str, Any], str, str]] = {
    "a device": (
        lambda _: looks.devices(),
        {**ON_ACCELERATOR, LOOKS + "accelerator": ("Big\x1b[1m GPU", 24 << 30, 2), LOOKS + "driver": "580.1"},
        "fine",
        "2 x Big\\x1b[1m GPU, 24.0 GiB, cuda 580.1",
    ),
    "avx512": (lambda _: looks.processor(), instructions("avx512"), "fine", ", avx512"),
    "generic": (lambda _: looks.processor(), instructions("generic"), "slow", ", generic"),
    "no quota": (lambda _: looks.cores(), {**CORES, LOOKS + "core_quota": None}, "fine", "4"),
    "a small quota": (lambda _: looks.cores(), {**CORES, LOOKS + "core_quota": 1.5}, "slow", "OMP_NUM_THREADS=1"),
    "no memory": (
        lambda _: looks.memory(),
        {LOOKS + "available_host_memory": HostMemory(1 << 20, "the host has")},
        "broken",
        "the host has",
    ),
    "madvise": (pages("always [madvise] never"), {}, "fine", "madvise"),
    "never": (pages("always madvise [never]"), {}, "slow", "never"),
    "locked memory": (lambda _: looks.locked_memory(), ON_ACCELERATOR | locked(8 << 20), "slow", ""),
    "unlimited": (lambda _: looks.locked_memory(), ON_ACCELERATOR | locked(resource.RLIM_INFINITY), "fine", ""),
    "little shared memory": (looks.shared_memory, free(64 << 20), "slow", ""),
    "no shared memory": (lambda folder: looks.shared_memory(folder / "none"), {}, "slow", ""),
    "few files": (lambda _: looks.open_files(), {"resource.getrlimit": (256, 65536)}, "slow", "4096"),
    "malloc": (lambda _: looks.allocator({}), ON_CPU | MALLOC, "slow", ""),
    "a threshold": (lambda _: looks.allocator({"MALLOC_MMAP_THRESHOLD_": "8000000000"}), ON_CPU | MALLOC, "fine", ""),
    **{
        f"a disk with {kind}, {'direct' if direct else 'cached'}, {nbytes >> 30} GiB": (
            lambda folder: iter([next(looks.disks([folder]))]),
            {LOOKS + "file_system": kind, LOOKS + "_takes_direct": direct, **free(nbytes)},
            verdict,
            "",
        )
        for kind, direct, nbytes, verdict in (
            ("ext4", True, 1 << 40, "fine"),
            ("ext4", False, 1 << 40, "slow"),
            ("tmpfs", True, 1 << 40, "slow"),
        )
    },
}


@pytest.mark.parametrize("case", VERDICTS)
def test_verdicts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look, returned, verdict, says = VERDICTS[case]
    for name, value in returned.items():
        monkeypatch.setattr(name, lambda *_, value=value: value)
    finding = only(look(tmp_path))
    assert finding.verdict == verdict
    assert says in finding.found + finding.mend


@pytest.mark.parametrize("folder", ["missing\x1b[1m", "a\0b", "file"])
def test_folders_that_are_none(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    finding = only(looks.disks([tmp_path / folder]))
    assert finding.verdict is Verdict.BROKEN
    assert "\x1b" not in finding.about + finding.found


def block(root: Path, path: str, *parts: str) -> Path:
    """A block device as the kernel has it: a folder of its own, and links to the devices that it is made of."""
    made = root / "devices" / path
    (made / "slaves").mkdir(parents=True)
    for part in parts:
        (made / "slaves" / Path(part).name).symlink_to(root / "devices" / part)
    return made


def test_drives_are_found_below_partitions_mappers_and_raid(tmp_path: Path) -> None:
    for drive in ("nvme0n1", "nvme1n1"):
        block(tmp_path, f"pci/{drive}")
        (block(tmp_path, f"pci/{drive}/{drive}p1") / "partition").write_text("1\n")
    raid = block(tmp_path, "virtual/md0", "pci/nvme0n1/nvme0n1p1", "pci/nvme1n1/nvme1n1p1")
    mapper = block(tmp_path, "virtual/dm-0", "virtual/md0")
    number = os.stat(tmp_path).st_dev
    link = tmp_path / f"{os.major(number)}:{os.minor(number)}"
    assert list(looks.drives(tmp_path, tmp_path)) == [], "a file system that is on no block device"
    for device, below in ((tmp_path / "devices/pci/nvme1n1/nvme1n1p1", [1]), (raid, [0, 1]), (mapper, [0, 1])):
        link.symlink_to(device)
        assert [found.name for found in looks.drives(tmp_path, tmp_path)] == [f"nvme{n}n1" for n in below]
        link.unlink()


def log_page(*, warnings: int = 0, spare: int = 100, used: int = 4, data_units: int = 72_650_000) -> bytes:
    """The SMART log of a drive: page 02h of the NVM Express Base Specification."""
    page = bytearray(512)
    page[0], page[3], page[4], page[5] = warnings, spare, 10, used
    page[48:64] = data_units.to_bytes(16, "little")
    return bytes(page)


def answer(file: Any, request: int, command: bytearray, *, page: bytes | OSError) -> int:
    """Answer an NVMe admin command with a log page, in the place of the kernel."""
    assert (request, len(command)) == (0xC0484E41, 72)
    opcode, namespace, address, nbytes, wanted = struct.unpack("<B3xI16xQ4xII28x", command)
    assert (opcode, namespace, nbytes, wanted) == (2, 0xFFFFFFFF, 512, 0x007F0002)
    if isinstance(page, OSError):
        raise page
    ctypes.memmove(address, page, nbytes)
    return 0


def test_a_drive_that_refuses_the_command_has_no_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks.read_wear(tmp_path / "nvme0n1") is None, "not there, as in a container"
    (tmp_path / "nvme0n1").touch()
    assert looks.read_wear(tmp_path / "nvme0n1") is None, "no drive"
    monkeypatch.setattr(looks.fcntl, "ioctl", partial(answer, page=log_page()))
    assert looks.read_wear(tmp_path / "nvme0n1") == looks.Wear((), 4, 72_650_000 * 512_000)
    monkeypatch.setattr(looks.fcntl, "ioctl", lambda *_: 0x4002)  # invalid field in command
    assert looks.read_wear(tmp_path / "nvme0n1") is None


WORN = "Samsung SSD 990 PRO 2TB, 2.00 TB, 41 °C, 37.2 TB written, "


@pytest.mark.parametrize(
    ("page", "verdict", "found"),
    [
        (log_page(), "fine", WORN + "4 % of its life used"),
        (log_page(used=80), "slow", WORN + "80 % of its life used"),
        (log_page(warnings=0b1010), "broken", WORN + "4 % of its life used; it is too hot; it is read-only"),
        (OSError(errno.EACCES, "no"), "fine", "written since the system started; its wear: sudo penstock doctor, or"),
    ],
)
def test_the_life_of_a_drive(
    tmp_path: Path, page: bytes | OSError, verdict: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = block(tmp_path, "pci/nvme0n1")
    (drive / "device" / "hwmon1").mkdir(parents=True)
    (drive / "device" / "hwmon2" / "temp1_input").mkdir(parents=True)  # cannot be read, as that of a drive that sleeps
    (drive / "size").write_text("3907029168\n")
    (drive / "stat").write_text(" 1 2 3 4 5 6 2000000000 8 9 10 11\n")
    (drive / "device" / "model").write_text("Samsung SSD 990 PRO 2TB                 \n")
    (drive / "device" / "hwmon1" / "temp1_input").write_text("40850\n")
    (tmp_path / "nvme0n1").touch()
    monkeypatch.setattr(looks.fcntl, "ioctl", partial(answer, page=page))
    monkeypatch.setattr(looks, "drives", lambda folder: iter([drive]))
    read_wear = looks.read_wear
    monkeypatch.setattr(looks, "read_wear", lambda device: read_wear(tmp_path / Path(device).name))
    monkeypatch.setattr(looks, "_disk", lambda about, folder: Finding(about, Verdict.FINE, ""))
    (tmp_path / "other").mkdir()
    *_, finding = two = list(looks.disks([tmp_path, tmp_path / "other"]))
    assert len(two) == 3, "a drive that two folders are on is described once"
    assert (finding.about, finding.verdict) == ("drive nvme0n1", verdict)
    assert found in finding.found
    assert bool(finding.mend) is (verdict != "fine")
    if isinstance(page, OSError):
        assert "1.02 TB written since" in finding.found
