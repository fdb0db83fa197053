"""Which device a rank takes, on machines that are made up; who shares one; events."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from penstock import preparing
from penstock.errors import ConfigError
from penstock.runtime import hardware
from penstock.runtime.hardware import (
    DeviceChoice,
    Hardware,
    HardwarePlace,
    Visible,
    check_apart,
    choose_device,
    device_for,
    free_device_memory,
    place_of,
)
from tests.lib.streams import inline

CPU = torch.device("cpu")


def cuda(index: int | None = None) -> torch.device:
    return torch.device("cuda") if index is None else torch.device("cuda", index)


@pytest.mark.parametrize(
    ("visible", "said", "expected"),
    [
        (None, {"local_rank": "1"}, CPU),
        (Visible("cuda", 4, 0), {}, cuda(0)),
        (Visible("cuda", 4, 0), {"local_rank": "3"}, cuda(3)),
        (Visible("cuda", 4, 2), {"local_rank": "3"}, cuda(2)),  # he has called set_device
        (Visible("cuda", 1, 0), {"local_rank": "3"}, cuda(0)),  # the launcher shows each rank its own
        (Visible("cuda", 4, 0), {"local_rank": "5"}, cuda(0)),  # more ranks than devices: refused by name
        (Visible("cuda", 4, 0), {"local_rank": "3", "bound": cuda(1)}, cuda(1)),
        (Visible("cuda", 4, 0), {"local_rank": "3", "bound": CPU}, cuda(3)),
        (Visible("cuda", 4, 0), {"local_rank": "3", "model": cuda(1)}, cuda(1)),
        (Visible("cuda", 4, 2), {"model": cuda()}, cuda(2)),
        (Visible("cuda", 4, 0), {"local_rank": "3", "model": CPU}, cuda(3)),
        (Visible("xpu", 4, 0), {"local_rank": "2"}, torch.device("xpu", 2)),
    ],
)
def test_a_rank_takes_the_device_that_was_said(visible, said, expected):
    assert choose_device(visible, **said).device == expected


def machine_of(patch: pytest.MonkeyPatch, visible: Visible) -> list[torch.device]:
    """An accelerator that is made up. Returns the devices that were made current."""
    current: list[torch.device] = []
    patch.setattr(hardware, "visible_devices", lambda: visible)
    patch.setattr(torch.accelerator, "set_device_index", current.append)
    return current


def test_prepare_takes_the_device_of_the_local_rank_and_makes_it_current(monkeypatch):
    current = machine_of(monkeypatch, Visible("cuda", 4, 0))
    taken: list[torch.device] = []

    def streams_for(device: torch.device, *, debug_release: bool) -> Any:
        taken.append(device)
        return inline()

    monkeypatch.setattr(preparing, "streams_for", streams_for)
    monkeypatch.setenv("LOCAL_RANK", "3")
    model = torch.nn.Linear(4, 4)
    penstock.prepare(model, torch.optim.AdamW(model.parameters())).close()
    assert (taken, current) == ([cuda(3)], [cuda(3)])


def lying_on(*where: torch.device) -> Any:
    return [SimpleNamespace(device=device) for device in where]


def test_model_mesh_and_process_group_say_a_device(monkeypatch):
    machine_of(monkeypatch, Visible("cuda", 4, 0))
    third = {"LOCAL_RANK": "3"}
    assert device_for(lying_on(cuda(1), cuda(1)), None, third).device == cuda(1)
    assert device_for(lying_on(cuda(1), cuda(2)), None, third).device == cuda(3), "a model on two devices says nothing"
    assert device_for(lying_on(cuda(1), CPU), None, third).device == cuda(3)
    on_cpu: Any = SimpleNamespace(device_type="cpu")
    assert device_for(lying_on(cuda(1)), on_cpu, third).device == CPU, "a mesh decides the type"
    groups = [SimpleNamespace(bound_device_id=cuda(2)), SimpleNamespace(bound_device_id=None)]
    mesh: Any = SimpleNamespace(device_type="cuda", get_all_groups=lambda: groups)
    assert device_for(lying_on(CPU), mesh, third) == DeviceChoice(cuda(2), "the process group is bound to it")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d._world, "default_pg", groups[0])
    assert device_for(lying_on(CPU), None, third).device == cuda(2)
    with pytest.raises(ConfigError, match=r"The model lies on cuda:1, and the process group is bound to cuda:2\."):
        device_for(lying_on(cuda(1)), None, third)


def properties(patch: pytest.MonkeyPatch, **known: str) -> None:
    module: Any = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**known))
    patch.setattr(torch, "get_device_module", lambda device: module)


def test_a_place_is_what_machine_device_and_variables_are(monkeypatch, tmp_path):
    (tmp_path / "boot_id").write_text("b00t\n")
    properties(monkeypatch, uuid="GPU-1")
    environment = {"CUDA_VISIBLE_DEVICES": "2,3", "ZE_AFFINITY_MASK": "0", "PATH": "/bin"}
    found = place_of(DeviceChoice(cuda(1), "LOCAL_RANK=1"), environment, tmp_path / "boot_id")
    assert found is not None
    place = HardwarePlace(*found)
    assert place[2:] == ("b00t", "GPU-1", "CUDA_VISIBLE_DEVICES=2,3 ZE_AFFINITY_MASK=0", "LOCAL_RANK=1")
    properties(monkeypatch)
    unknown = place_of(DeviceChoice(cuda(1)), {}, tmp_path / "none")
    assert unknown is not None
    assert HardwarePlace(*unknown).unique == ""
    assert HardwarePlace(*unknown).machine == place.host
    assert place_of(DeviceChoice(CPU), {}, tmp_path / "boot_id") is None


def place(name: str, host: str = "a", machine: str = "b00t", unique: str = "", view: str = "") -> HardwarePlace:
    return HardwarePlace(name, host, machine, unique, view, "it is the current device")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (place("cuda:0", unique="x"), place("cuda:0", unique="x"), True),
        (place("cuda:0", unique="x", view="0"), place("cuda:1", unique="x", view="1,0"), True),
        (place("cuda:0", unique="x", view="0"), place("cuda:0", unique="y", view="1"), False),
        (place("cuda:0", unique="x"), place("cuda:0", host="c", unique="x"), True),  # two containers of a machine
        (place("cuda:0", unique="x"), place("cuda:0", host="c", machine="d", unique="x"), False),
        (place("cuda:0", unique="x"), place("cuda:1", unique="x"), False),  # slices of one device
        (place("npu:0"), place("npu:0"), True),
        (place("npu:0", view="0"), place("npu:0", view="1"), False),
    ],
)
def test_whether_two_ranks_have_one_device(one, other, same):
    assert one.is_that_of(other) is other.is_that_of(one) is same


def test_ranks_that_share_a_device_are_refused_by_name():
    everywhere = [place("cuda:0", unique="x"), None, place("cuda:1", unique="y"), place("cuda:0", unique="x")]
    check_apart(everywhere[:3], (0, 1, 2))
    check_apart([None, None], (0, 1))
    with pytest.raises(ConfigError) as refused:
        check_apart([said if said is None else list(said) for said in everywhere], (4, 5, 6, 7))
    assert str(refused.value) == (
        "Ranks share a device: ranks 4 (cuda:0: it is the current device), 7 (cuda:0: it is the current device) on a, "
        "x. Each needs one of its own: start as many ranks as there are devices, with a launcher that sets LOCAL_RANK "
        "(torchrun), and leave the model on the cpu or move it to the rank's own device; or name that one, "
        "init_process_group(device_id=...)."
    )


def test_an_event_lets_the_host_sleep_where_the_device_has_such_events_and_nobody_asks_it_to_spin(monkeypatch):
    made: list[dict[str, bool]] = []

    class Sleeping:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            made.append({"enable_timing": enable_timing, "blocking": blocking})

    class Spinning:
        def __init__(self, enable_timing: bool = False) -> None:
            made.append({"enable_timing": enable_timing})

    for event, asked in ((Spinning, ""), (Sleeping, ""), (Sleeping, "0"), (Sleeping, "1")):
        monkeypatch.setattr(torch, "get_device_module", lambda device, event=event: SimpleNamespace(Event=event))
        monkeypatch.setenv("PENSTOCK_SPINNING_EVENTS", asked)
        Hardware(cuda(1)).make_event(timing=True)
    assert made == [{"enable_timing": True}] + [{"enable_timing": True, "blocking": how} for how in (True, True, False)]


def test_what_is_free_is_within_the_fraction_of_the_process(monkeypatch):
    """`torch.cuda.set_per_process_memory_fraction` ends in an error of torch where a plan takes more."""
    module = SimpleNamespace(
        mem_get_info=lambda device: (900, 1000),
        memory_reserved=lambda device: 100,
        memory_allocated=lambda device: 60,
        get_per_process_memory_fraction=lambda device: 0.5,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert free_device_memory(cuda(0)) == 500 - 100 + 40
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    module.get_per_process_memory_fraction = lambda device: {1: 0.5}[device.index]
    assert free_device_memory(torch.device("cuda")) == 500 - 100 + 40, "of the current one, where no number is said"
    module.get_per_process_memory_fraction = lambda device: 1.0
    assert free_device_memory(cuda(0)) == 900 + 40
    del module.get_per_process_memory_fraction  # of an accelerator that has none
    assert free_device_memory(cuda(0)) == 900 + 40
