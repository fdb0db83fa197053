"""What is asked of the planner: every argument that can be wrong, and what one rank may take."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError
from penstock.optim import Lamb
from penstock.planner.machine import Machine
from tests.lib.planning import asked, desktop


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.weight.sum().item()


def linear() -> nn.Module:
    return nn.Linear(2, 2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"world_size": 0}, "world_size=0 is no number of world size. Use 1 or more."),
    "hosts": ({"hosts": 1.5}, "hosts=1.5 is no number of hosts. Use 1 or more."),
    "no mesh": ({"mesh": {"pp": 2}}, "mesh has a dimension 'pp'. Use dp_replicate"),
    "mesh and ranks": ({"mesh": {"dp_shard": 4}, "world_size": 2}, "world_size=2 contradicts a mesh of 4 ranks."),
    "whole parameters": (
        {"mesh": {"dp_shard": 4, "tp": 2}},
        "mesh divides the parameters over 2 ranks, and no parameter of Linear is a DTensor. Divide it first:",
    ),
    "micro-batches": ({"micro_batches": -1}, "micro_batches=-1 is no number of micro batches. Use 1 or more."),
    "batch": ({"batch": {"ids": 3}}, "batch is a dict. Give a function that makes one micro-batch."),
    "device": ({"device_bytes": 0}, "device_bytes=0 is no number of bytes. Use 1 or more, or None."),
    "model": ({"model": 3}, "model is a int. Give a module, or a function that makes one."),
    "on meta": ({"model": lambda: Meta()}, "model() failed on the meta device: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    changes, words = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        asked(**{"model": linear, **changes})
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["placement", "plan", "batch"])
def test_arguments_of_prepare_that_no_plan_is_made_for_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}= is no argument of prepare\(\) that a plan is made for"):
        asked(linear, arguments={name: None})


class TestLimits:
    def test_ranks_of_a_host_share_its_memory_and_its_disks_and_not_their_devices(self) -> None:
        machine = desktop().replace(host_memory=8000, disk_free=4000, folders=2, device_memory=500)
        one, four = asked(linear, machine=machine), asked(linear, machine=machine, world_size=4, hosts=2)
        assert one.limits.bytes == {"device": 475, "cpu": 7600, "nvme": 7840}  # some is left free
        assert four.limits.bytes == {"device": 475, "cpu": 3800, "nvme": 3920}

    def test_what_is_said_comes_before_the_machine(self) -> None:
        limits = asked(linear, device_bytes=1000, host_bytes=2000).limits
        assert (limits.bytes["device"], limits.bytes["cpu"]) == (950, 1900)

    def test_a_cpu_has_one_memory(self) -> None:
        request = asked(linear, machine=Machine.read("cpu-laptop"), device_bytes=1000, host_bytes=2000)
        assert request.limits.shared
        assert request.limits.room("device") == 950
        assert not request.on_accelerator

    def test_folders_are_those_that_are_named_or_stand_for_those_of_the_machine(self) -> None:
        machine = desktop().replace(folders=2)
        assert asked(linear, machine=machine).folders == ["nvme0", "nvme1"]
        assert asked(linear, machine=machine, folders=["/a"]).folders == ["/a"]


@pytest.mark.parametrize("form", ["class", "instance"])
def test_rules_over_whole_parameters_have_no_plan(form: str) -> None:
    """The update of a matrix is made of products, and no figure of a machine says how long these take."""
    optimizer = Lamb if form == "class" else Lamb([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ConfigError, match=r"^Lamb looks at whole parameters, and a plan times updates by their bytes"):
        asked(linear, optimizer=optimizer)
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"^Lamb looks at whole parameters"):
        penstock.prepare(model, Lamb(model.parameters()), placement="auto", batch=lambda: torch.zeros(2, 4))
    assert model.weight.shape == (4, 4)
