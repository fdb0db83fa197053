"""The machine that a plan is for: probed once, then read, with what is free looked at anew."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.planner import this_machine
from penstock.planner.machine import Machine
from penstock.planner.rates import Rate
from penstock.planner.this_machine import machine_for, path_of, remember
from penstock.probe.fingerprint import fingerprint


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How often the machine was measured: nothing is."""
    asked: list[Any] = []

    def measure(*, folders: Any, seconds: float, groups: Any, control_group: Any, device: torch.device) -> Any:
        assert control_group.size == 1, "ranks of a host would wait for each other"
        asked.append((list(folders), seconds))
        figures = {name: Rate(3e9, 2e9, 4e9, "as a test says") for name in ("host_memory", "update")}
        return figures, fingerprint(torch.device("cpu"), folders)

    monkeypatch.setattr(this_machine, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


def test_a_machine_is_probed_once(probes: list[Any]) -> None:
    first = machine_for(None, seconds=5)
    assert probes == [([], 5)]
    assert first.figures["update"] == Rate(3e9, 2e9, 4e9, "as a test says")
    assert first.probed
    second = machine_for(None)
    assert len(probes) == 1
    assert second.figures["update"] == first.figures["update"]
    assert second.fingerprint == first.fingerprint


def test_other_folders_are_another_machine(probes: list[Any], tmp_path: Path) -> None:
    machine_for(None)
    machine_for(None, folders=[tmp_path])
    machine_for(None, folders=[tmp_path])
    assert probes == [([], 60), ([tmp_path], 60)]


def test_a_damaged_file_is_probed_again_and_replaced(probes: list[Any]) -> None:
    machine_for(None)
    path = path_of(fingerprint(torch.device("cpu")))
    other = Machine.read(path)
    replace(other, fingerprint={"cpu": "another one"}).write(path)
    machine_for(None)
    assert len(probes) == 2
    path.write_text('{"penstock": "machine", "version": 9}')
    machine_for(None)
    assert len(probes) == 3
    assert Machine.read(path).value("update") == 3e9


def test_a_cache_that_cannot_be_written_is_none(
    probes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert machine_for(None).value("update") == 3e9
    assert len(probes) == 1
    assert remember(Machine.read("cpu-laptop")) is None


def test_of_several_that_ask_at_once_one_probes(probes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, measure = threading.Barrier(4), this_machine.measure

    def slow(**arguments: Any) -> Any:
        time.sleep(0.05)
        return measure(**arguments)

    monkeypatch.setattr(this_machine, "measure", slow)

    def ask(_: int) -> Machine:
        at_once.wait(60)
        return machine_for(None)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert len(probes) == 1
    assert {machine.value("update") for machine in found} == {3e9}


def test_a_folder_that_is_none_is_refused_before_anything(probes: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing' cannot be probed: No such file"):
        machine_for(None, folders=[tmp_path / "missing"])
    assert probes == []
