"""The whole probe: every figure, in its time, and nothing left behind."""

import ctypes
import gc
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError
from penstock.planner.rates import RATES, Rate
from penstock.probe import measure as probing
from penstock.probe.measure import measure
from penstock.runtime.control_group import ControlGroup
from tests.lib.memory import disks

CPU = torch.device("cpu")
#: What a machine without an accelerator has; links are the others'.
OF_A_CPU = {
    *("device_memory", "host_memory", "pinnable_memory", "host_threads"),
    *("flops_float32", "flops_bfloat16", "device_bandwidth", "op_seconds", "op_host_seconds", "job_seconds"),
    *("host_bandwidth", "update", "update_adamw", "update_sgd", "update_lion", "device_update"),
}
if torch.get_num_threads() > 1:
    OF_A_CPU.add("op_threads_seconds")
OF_FOLDERS = {"disk_read", "disk_write", "disk_mixed", "disk_seconds", "disk_cores", "disk_free", "folders"}


def surroundings(folder: Path) -> dict[str, Any]:
    gc.collect()
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "system threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": sorted(folder.rglob("*")),
        "random": torch.get_rng_state().tolist(),
        "torch threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Rate]]:
    """What is measured; what was measured next was said, what plans rest on most first, and nothing is left behind."""
    (disk,) = disks()
    # A folder of its own: other processes have swap folders in that one, and what ended ones have left is cleared.
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        torch.ones(64, 64) @ torch.ones(64, 64)  # torch's own threads are there for good
        before, said = surroundings(Path(folder)), list[str]()
        # Under inference mode autograd would record nothing, and under autocast products would be of another dtype.
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            found, _ = measure(folders=[folder], seconds=1, device=CPU, progress=said.append)
        assert said == ["device memory", "arithmetic", "host memory and updates", "jobs", "disks", "free memory"]
        assert surroundings(Path(folder)) == before
        yield found


def test_every_figure_is_there_and_can_be_one_of_a_machine(figures: dict[str, Rate]) -> None:
    assert figures.keys() == OF_A_CPU | OF_FOLDERS
    assert figures.keys() <= RATES.keys()
    for name, figure in figures.items():
        assert figure.how, name
        assert not figure.how.endswith("."), name


def test_figures_agree_with_each_other(figures: dict[str, Rate]) -> None:
    value = {name: figure.value for name, figure in figures.items()}
    assert value["update"] == value["update_adamw"] == value["device_update"]
    # What is shared is no less than what each of those who share it gets alone.
    assert value["host_bandwidth"] >= max(value[f"update_{rule}"] for rule in ("adamw", "sgd", "lion"))
    assert value["device_memory"] == value["host_memory"] == value["pinnable_memory"]
    assert value["folders"] == 1


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), True, "60"])
def test_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="seconds="):
        measure(seconds=seconds)


def test_ranks_wait_for_a_probe_that_takes_longer_than_they_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    def noted(*, timeout_s: float, error: Any) -> ControlGroup:
        waits.append(timeout_s)
        return ControlGroup()

    monkeypatch.setattr(probing, "control_group_of_all", noted)
    monkeypatch.setattr(probing, "_measure_alone", lambda *_: {})
    for seconds in (60, 3600):
        measure(seconds=seconds, device=CPU)
    assert waits == [600, 7200]


def test_folders_are_looked_at_before_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_measure_alone", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(ConfigError, match="missing"):
        measure(folders=[tmp_path / "missing"], seconds=1, device=CPU)


def test_an_interrupt_leaves_nothing_and_memory_is_given_back(figures: dict[str, Rate], tmp_path: Path) -> None:
    before = surroundings(tmp_path)
    nbytes = resident_bytes()  # what libraries keep for good is there since the run before

    def interrupt(what: str) -> None:
        if what == "free memory":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(folders=[tmp_path], seconds=1, device=CPU, progress=interrupt)
    assert surroundings(tmp_path) == before
    assert resident_bytes() - nbytes < 32 << 20
