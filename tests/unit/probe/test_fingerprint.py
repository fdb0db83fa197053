"""What tells machines apart, and what is left out."""

import getpass
import json
import os
import platform
from pathlib import Path

import pytest
import torch

from penstock.planner.machine import machine_name
from penstock.probe.fingerprint import cpu_model, fingerprint

CPU = torch.device("cpu")


def test_it_is_the_same_each_time_and_json(tmp_path: Path) -> None:
    found = fingerprint(CPU, [tmp_path])
    assert found == fingerprint(CPU, [tmp_path]) == json.loads(json.dumps(found))
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert (found["device"], found["devices"], found["torch"]) == ("cpu", 1, torch.__version__)


def test_disks_are_told_apart_and_paths_are_not(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    one, other = (fingerprint(CPU, [tmp_path / name]) for name in ("one", "other"))
    assert one == other  # of one disk
    assert one != fingerprint(CPU)
    number = os.stat(tmp_path).st_dev
    assert one["disks"][0].endswith(f" {os.major(number)}:{os.minor(number)}")


def test_nobody_is_named(tmp_path: Path) -> None:
    text = json.dumps(fingerprint(CPU, [tmp_path]))
    for name in (
        platform.node(),
        getpass.getuser(),
        str(tmp_path),
        Path("/proc/sys/kernel/random/boot_id").read_text(),
    ):
        assert f'"{name.strip()}"' not in text
        assert len(name) < 6 or name.strip() not in text


def test_the_same_memory_is_a_little_more_or_less_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_PHYS_PAGES": 6_160_384, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    before = fingerprint(CPU)
    pages["SC_PHYS_PAGES"] -= 750
    assert fingerprint(CPU) == before
    assert before["memory_bytes"] == round(6_160_384 * 4096 / 2**28) * 2**28


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor: 0\nmodel name\t: AMD EPYC 9554\nmodel name\t: other\n", "AMD EPYC 9554"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "0x41 0xd4f"),
        ("", platform.machine()),
    ],
)
def test_the_processor_has_a_name_or_its_makers_numbers(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_model(tmp_path / "cpuinfo") == name


def test_a_machine_is_named_by_its_accelerators_and_its_processor() -> None:
    found = {"cpu": "EPYC", "cores": 64, "device": "cuda", "devices": 8, "device_name": "H100"}
    assert machine_name(found) == "8 x H100, EPYC, 64 cores"
    assert machine_name(found | {"device": "cpu"}) == "EPYC, 64 cores"
    assert len(machine_name(found | {"cpu": "x" * 999, "device_name": "y" * 999})) < 200
