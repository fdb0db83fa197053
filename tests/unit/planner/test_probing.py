"""The machine that a plan is for: probed once, then read, with what is free looked at anew."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.forecast.figures import Figure
from penstock.planner import machines
from penstock.planner.machines import Machine, here, remember
from penstock.probe.fingerprint import fingerprint
from penstock.probe.measure import Measured
from penstock.probe.sampling import Measurement


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How often the machine was measured: nothing is."""
    asked: list[Any] = []

    def measure(*, folders: Any = (), seconds: float = 60, progress: Any = None) -> Measured:
        asked.append((list(folders), seconds))
        figures = {name: Measurement(3.0, 2.0, 4.0, "as a test says") for name in ("host_memory", "update")}
        return Measured("a machine", "cpu", figures, fingerprint(torch.device("cpu"), folders))

    monkeypatch.setattr(machines, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


def test_a_machine_is_probed_once(probes: list[Any]) -> None:
    first = here(seconds=5)
    assert probes == [([], 5)]
    assert first.figures["update"] == Figure(3.0, 2.0, 4.0, "as a test says")
    assert first.probed
    second = here()
    assert len(probes) == 1
    assert second.figures["update"] == first.figures["update"]
    assert second.fingerprint == first.fingerprint


def test_what_is_free_is_of_now(probes: list[Any], tmp_path: Path) -> None:
    machine = here(folders=[tmp_path])
    assert machine.value("host_memory") > 1e6
    assert machine.value("device_memory") == machine.value("host_memory")
    assert machine.value("disk_free") > 1e6


def test_other_folders_are_another_machine(probes: list[Any], tmp_path: Path) -> None:
    here()
    here(folders=[tmp_path])
    here(folders=[tmp_path])
    assert probes == [([], 60), ([tmp_path], 60)]


def test_a_machine_that_was_probed_by_hand_is_remembered(probes: list[Any], tmp_path: Path) -> None:
    known = fingerprint(torch.device("cpu"))
    machine = Machine("by hand", "cpu", {"update": Figure.stated(7e9)}, known, probed=True)
    path = remember(machine)
    assert path is not None
    assert path.is_relative_to(tmp_path / "cache" / "penstock" / "machines")
    assert here().value("update") == 7e9
    assert probes == []


def test_a_damaged_file_is_probed_again_and_replaced(probes: list[Any]) -> None:
    here()
    (path,) = Path(machines.cache.path_of(fingerprint(torch.device("cpu")))).parent.glob("*.json")
    path.write_text('{"penstock": "machine", "version": 9}')
    here()
    assert len(probes) == 2
    assert Machine.read(path).value("update") == 3.0
