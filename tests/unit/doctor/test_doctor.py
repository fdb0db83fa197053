"""`penstock.doctor`: what is fine, slow or broken about a machine, on machines that the tests make."""

import ctypes
import errno
import os
import resource
import struct
from collections import namedtuple
from collections.abc import Iterator
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


def test_a_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "default_device", lambda: ACCELERATOR)
    monkeypatch.setattr(looks, "accelerator", lambda device: ("Big\x1b[1m GPU", 24 << 30, 2))
    monkeypatch.setattr(looks, "driver", lambda device: "580.1")
    assert only(looks.devices()).found == "2 x Big\\x1b[1m GPU, 24.0 GiB, cuda 580.1"


@pytest.mark.parametrize(
    ("chosen", "verdict"), [("avx512", "fine"), ("avx2", "fine"), ("neon", "fine"), ("generic", "slow")]
)
def test_instructions(chosen: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "instruction_set", lambda: chosen)
    monkeypatch.setattr(looks.platform, "machine", lambda: "x86_64")
    finding = only(looks.processor())
    assert (finding.verdict, finding.found.rpartition(", ")[2]) == (verdict, chosen)
    monkeypatch.setattr(looks.platform, "machine", lambda: "riscv64")  # where there is no other
    assert only(looks.processor()).verdict is Verdict.FINE


@pytest.mark.parametrize(
    ("quota", "verdict", "says"), [(None, "fine", "4"), (8.0, "fine", "4"), (1.5, "slow", "OMP_NUM_THREADS=1")]
)
def test_a_quota_of_cores(quota: float | None, verdict: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(looks, "core_quota", lambda: quota)
    finding = only(looks.cores())
    assert finding.verdict == verdict
    assert says in finding.found + finding.mend


@pytest.mark.parametrize(
    ("left", "verdict"),
    [(None, "slow"), (HostMemory(1 << 20, "the host has"), "broken"), (HostMemory(2 << 30, "x"), "fine")],
)
def test_memory(left: HostMemory | None, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "available_host_memory", lambda: left)
    assert only(looks.memory()).verdict == verdict


@pytest.mark.parametrize(
    ("setting", "verdict", "found"),
    [
        ("always [madvise] never", "fine", "madvise"),
        ("[always] madvise never", "fine", "always"),
        ("always madvise [never]", "slow", "never"),
        ("what is \x1b this", "slow", "what is \\x1b this"),
        (None, "fine", "the kernel does not say"),
    ],
)
def test_huge_pages(tmp_path: Path, setting: str | None, verdict: str, found: str) -> None:
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    finding = only(looks.huge_pages(file))
    assert (finding.verdict, finding.found) == (verdict, found)


@pytest.mark.parametrize(
    ("limit", "device", "verdict"),
    [
        (8 << 20, torch.device("cpu"), "fine"),
        (8 << 20, ACCELERATOR, "slow"),
        (resource.RLIM_INFINITY, ACCELERATOR, "fine"),
    ],
)
def test_locked_memory(limit: int, device: torch.device, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(looks, "default_device", lambda: device)
    assert only(looks.locked_memory()).verdict == verdict


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free", "verdict"), [(64 << 20, "slow"), (4 << 30, "fine")])
def test_shared_memory(tmp_path: Path, free: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks.shutil, "disk_usage", lambda folder: Usage(free, 0, free))
    assert only(looks.shared_memory(tmp_path)).verdict == verdict


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert only(looks.shared_memory(tmp_path / "none")).verdict is Verdict.SLOW


@pytest.mark.parametrize(
    ("limits", "verdict", "mend"),
    [((256, 65536), "slow", "4096"), ((256, 1000), "slow", "1000"), ((65536, 65536), "fine", "")],
)
def test_open_files(limits: tuple[int, int], verdict: str, mend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    finding = only(looks.open_files())
    assert finding.verdict == verdict
    assert mend in finding.mend


@pytest.mark.parametrize(
    ("environment", "device", "verdict"),
    [
        ({}, torch.device("cpu"), "slow"),
        ({}, ACCELERATOR, "fine"),
        ({"MALLOC_MMAP_THRESHOLD_": "8000000000"}, torch.device("cpu"), "fine"),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=8000000000"}, torch.device("cpu"), "fine"),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, torch.device("cpu"), "fine"),
    ],
)
def test_allocator(
    environment: dict[str, str], device: torch.device, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "default_device", lambda: device)
    monkeypatch.setattr(looks.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert only(looks.allocator(environment)).verdict == verdict


def test_nodes_that_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cores in enumerate(("0-1", "2-3", "4-5")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores)
    monkeypatch.setattr(looks, "core_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert "on 2 NUMA nodes" in only(looks.cores(tmp_path)).found
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert "NUMA" not in only(looks.cores(tmp_path)).found


@pytest.mark.parametrize(
    ("kind", "direct", "free", "verdict"),
    [
        ("ext4", True, 1 << 40, "fine"),
        ("ext4", True, 1 << 30, "slow"),
        ("ext4", False, 1 << 40, "slow"),
        ("tmpfs", True, 1 << 40, "slow"),
        ("nfs4", True, 1 << 40, "slow"),
    ],
)
def test_a_disk(
    tmp_path: Path, kind: str, direct: bool, free: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "file_system", lambda folder: kind)
    monkeypatch.setattr(looks, "_takes_direct", lambda folder: direct)
    monkeypatch.setattr(looks.shutil, "disk_usage", lambda folder: Usage(free, 0, free))
    assert next(looks.disks([tmp_path])).verdict == verdict


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


class Admin:
    """Answers NVMe admin commands with a log page, in the place of the kernel."""

    def __init__(self, page: bytes | OSError) -> None:
        self.page = page
        self.status = 0

    def ioctl(self, file: Any, request: int, command: bytearray) -> int:
        assert (request, len(command)) == (0xC0484E41, 72)
        opcode, namespace, address, nbytes, page = struct.unpack("<B3xI16xQ4xII28x", command)
        assert (opcode, namespace, nbytes, page) == (2, 0xFFFFFFFF, 512, 0x007F0002)
        if isinstance(self.page, OSError):
            raise self.page
        ctypes.memmove(address, self.page, nbytes)
        return self.status


def test_a_drive_that_refuses_the_command_has_no_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks.read_wear(tmp_path / "nvme0n1") is None, "not there, as in a container"
    (tmp_path / "nvme0n1").touch()
    assert looks.read_wear(tmp_path / "nvme0n1") is None, "no drive"
    admin = Admin(log_page())
    monkeypatch.setattr(looks.fcntl, "ioctl", admin.ioctl)
    assert looks.read_wear(tmp_path / "nvme0n1") == looks.Wear((), 4, 72_650_000 * 512_000)
    admin.status = 0x4002  # invalid field in command
    assert looks.read_wear(tmp_path / "nvme0n1") is None


WORN = "Samsung SSD 990 PRO 2TB, 2.00 TB, 41 °C, 37.2 TB written, "


@pytest.mark.parametrize(
    ("page", "verdict", "found"),
    [
        (log_page(), "fine", WORN + "4 % of its life used"),
        (log_page(used=80), "slow", WORN + "80 % of its life used"),
        (log_page(used=100), "broken", WORN + "100 % of its life used"),
        (log_page(spare=9), "broken", WORN + "4 % of its life used; spare blocks run out"),
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
    monkeypatch.setattr(looks.fcntl, "ioctl", Admin(page).ioctl)
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
