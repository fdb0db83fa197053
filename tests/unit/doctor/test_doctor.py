"""`penstock.doctor`: what is fine, slow or broken about a machine, on machines that the tests make."""

import os
import resource
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.doctor import Finding, Verdict, disks, examine, memory, software
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
    assert {"penstock", "torch", "device", "instructions", "cores", "memory", "huge pages", "malloc"} < set(about)
    assert about[-1] == f"disk {tmp_path}"
    assert os.listdir(tmp_path) == []


def test_a_look_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: 1 / 0)
    [finding] = [finding for finding in examine() if finding.about == "cores"]
    assert finding.verdict is Verdict.SLOW
    assert "ZeroDivisionError" in finding.found
    assert "memory" in [finding.about for finding in examine()]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_driver_without_a_device_is_broken(tmp_path: Path, loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "default_device", lambda: torch.device("cpu"))
    file = tmp_path / "version"
    if loaded:
        file.write_text("580.1\n")
    finding = only(software.devices({"an NVIDIA": file}))
    assert finding.verdict is (Verdict.BROKEN if loaded else Verdict.FINE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = only(software.devices({"an NVIDIA": file}))
    assert hidden.verdict is (Verdict.SLOW if loaded else Verdict.FINE)
    assert ("CUDA_VISIBLE_DEVICES" in hidden.mend) is loaded


def test_a_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "default_device", lambda: ACCELERATOR)
    monkeypatch.setattr(software, "accelerator", lambda device: ("Big\x1b[1m GPU", 24 << 30, 2))
    monkeypatch.setattr(software, "driver", lambda device: "580.1")
    assert only(software.devices()).found == "2 x Big\\x1b[1m GPU, 24.0 GiB, cuda 580.1"


@pytest.mark.parametrize(
    ("chosen", "verdict"), [("avx512", "fine"), ("avx2", "fine"), ("neon", "fine"), ("generic", "slow")]
)
def test_instructions(chosen: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "instruction_set", lambda: chosen)
    monkeypatch.setattr(software.platform, "machine", lambda: "x86_64")
    finding = list(software.processor())[-1]
    assert (finding.verdict, finding.found) == (verdict, chosen)
    monkeypatch.setattr(software.platform, "machine", lambda: "riscv64")  # where there is no other
    assert list(software.processor())[-1].verdict is Verdict.FINE


@pytest.mark.parametrize(
    ("quota", "verdict", "says"), [(None, "fine", "4"), (8.0, "fine", "4"), (1.5, "slow", "OMP_NUM_THREADS=1")]
)
def test_a_quota_of_cores(quota: float | None, verdict: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(memory, "core_quota", lambda: quota)
    finding = only(memory.cores())
    assert finding.verdict == verdict
    assert says in finding.found + finding.mend


@pytest.mark.parametrize(
    ("left", "verdict"),
    [(None, "slow"), (HostMemory(1 << 20, "the host has"), "broken"), (HostMemory(2 << 30, "x"), "fine")],
)
def test_memory(left: HostMemory | None, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_memory", lambda: left)
    assert only(memory.memory()).verdict == verdict


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
    finding = only(memory.huge_pages(file))
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
    monkeypatch.setattr(memory, "default_device", lambda: device)
    assert only(memory.locked_memory()).verdict == verdict


State = namedtuple("State", "f_bavail f_frsize")


@pytest.mark.parametrize(("pages", "verdict"), [(16384, "slow"), (1 << 20, "fine")])
def test_shared_memory(pages: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: State(pages, 4096))
    assert only(memory.shared_memory()).verdict == verdict


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert only(memory.shared_memory(tmp_path / "none")).verdict is Verdict.SLOW


@pytest.mark.parametrize(
    ("limits", "verdict", "mend"),
    [((256, 65536), "slow", "4096"), ((256, 1000), "slow", "1000"), ((65536, 65536), "fine", "")],
)
def test_open_files(limits: tuple[int, int], verdict: str, mend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    finding = only(memory.open_files())
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
    monkeypatch.setattr(memory, "default_device", lambda: device)
    monkeypatch.setattr(memory.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert only(memory.allocator(environment)).verdict == verdict


def test_nodes_that_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cores in enumerate(("0-1", "2-3", "4-5")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert only(memory.numa(tmp_path)).found.startswith("2: ")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert list(memory.numa(tmp_path)) == []


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
    monkeypatch.setattr(disks, "file_system", lambda folder: kind)
    monkeypatch.setattr(disks, "_takes_direct", lambda folder: direct)
    monkeypatch.setattr(disks.shutil, "disk_usage", lambda folder: (free, 0, free))
    assert only(disks.disks([tmp_path])).verdict == verdict


@pytest.mark.parametrize("folder", ["missing\x1b[1m", "a\0b", "file"])
def test_folders_that_are_none(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    finding = only(disks.disks([tmp_path / folder]))
    assert finding.verdict is Verdict.BROKEN
    assert "\x1b" not in finding.about + finding.found
