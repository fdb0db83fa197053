"""Collectives that a model itself issues: what they return, what is noted of them, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError
from penstock.planner.simulation.fake_collectives import simulated_mesh
from penstock.planner.simulation.fake_operations import FakeOperations
from penstock.planner.simulation.fake_tensor import fake_tensor, is_fake
from penstock.planner.simulation.program import Collective
from penstock.runtime.control_group import all_gather_flat, reduce_scatter_flat

RANKS = 4

Work = Callable[[Tensor, Any], Tensor]


def summed(values: Tensor, group: Any) -> Tensor:
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total


def gathered(values: Tensor, group: Any) -> Tensor:
    whole = torch.empty(RANKS * len(values), *values.shape[1:], dtype=values.dtype)
    all_gather_flat(whole, values.contiguous(), group=group)
    return whole


def reduced(values: Tensor, group: Any) -> Tensor:
    part = torch.empty(len(values) // RANKS, *values.shape[1:], dtype=values.dtype)
    reduce_scatter_flat(part, values.contiguous(), group=group)
    return part


def exchanged(values: Tensor, group: Any) -> Tensor:
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=group)
    return received


def functional(name: str, *arguments: Any) -> Work:
    """Call a functional collective with the group's name last."""
    return lambda values, group: getattr(torch.ops._c10d_functional, name)(values, *arguments, group.group_name)


EVEN = [2] * RANKS
#: What is called, the collective, its whole buffer over what is sent, and what comes of ones: their shape and value.
CALLS: dict[str, tuple[Work, str, int, tuple[int, ...], float]] = {
    "sum": (summed, "all_reduce", 1, (8, 2), RANKS),
    "gather": (gathered, "all_gather", RANKS, (32, 2), 1),
    "reduction": (reduced, "reduce_scatter", 1, (2, 2), RANKS),
    "exchange": (exchanged, "all_to_all", 1, (8, 2), 1),
    "functional sum": (functional("all_reduce", "sum"), "all_reduce", 1, (8, 2), RANKS),
    "functional mean": (functional("all_reduce", "avg"), "all_reduce", 1, (8, 2), 1),
    "functional gather": (functional("all_gather_into_tensor", RANKS), "all_gather", RANKS, (32, 2), 1),
    "functional reduction": (functional("reduce_scatter_tensor", "sum", RANKS), "reduce_scatter", 1, (2, 2), RANKS),
    "functional exchange": (functional("all_to_all_single", EVEN, EVEN), "all_to_all", 1, (8, 2), 1),
}


@pytest.mark.parametrize("is_real", [True, False])
def test_a_collective_is_noted_and_gives_what_ranks_alike_would_get(is_real: bool) -> None:
    with simulated_mesh({"dp_shard": 2, "tp": RANKS}) as mesh:
        for case, (work, name, times, shape, value) in CALLS.items():
            noted: list[Collective] = []
            values = torch.ones(8, 2) if is_real else fake_tensor((8, 2), torch.float32)
            with FakeOperations(collectives=noted.append):
                out = work(values, mesh.get_group("tp"))
            assert noted == [Collective(name, times * 8 * 2 * 4, RANKS, "tp", 1)], case
            assert (tuple(out.shape), is_fake(out)) == (shape, not is_real), case
            if is_real:
                assert torch.equal(out, torch.full(shape, float(value))), case


def test_memory_is_counted_of_what_is_received_and_given_back() -> None:
    with simulated_mesh({"tp": RANKS}) as mesh, FakeOperations() as simulated:
        gather = functional("all_gather_into_tensor", RANKS)
        whole = gather(fake_tensor(1024, torch.float32), mesh.get_group("tp"))
        assert simulated.memory.live_bytes == RANKS * 4096
        del whole
        assert simulated.memory.live_bytes == 0
        with pytest.raises(ConfigError, match=r"c10d\.send.* no simulation"):
            dist.send(torch.ones(1), 1, group=mesh.get_group("tp"))


def test_there_are_no_ranks_afterwards_and_none_beside_others() -> None:
    with simulated_mesh({"cp": 2, "tp": 3}) as mesh:
        assert (mesh.mesh_dim_names, tuple(mesh.mesh.shape)) == (("cp", "tp"), (2, 3))
        assert dist.get_process_group_ranks(mesh.get_group("cp")) == [0, 3]
        with pytest.raises(ConfigError, match="has ranks already"), simulated_mesh({"tp": 2}):
            pass
    assert not dist.is_initialized()
