"""Ranks that are not there, for models whose parameters they divide: a mesh without anybody at its other ends."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError

#: The dimensions over which ranks have parts of one model and of one sequence: outermost first, as in a job.
WITHIN = ("cp", "tp", "ep")


@contextmanager
def simulated_mesh(sizes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Give the first rank's mesh of the dimensions within a copy of the model: `cp`, `tp` and `ep`.

    Inside, this process is a job of that many ranks, of which the others are not there: nothing is sent, and nothing
    received. Other dimensions of the mesh are the engine's own.

    Arguments:
        sizes: the number of ranks along each dimension, by its name; one of them is `cp`, `tp` or `ep`.

    Raises:
        ConfigError: there are ranks already.

    Example:
        >>> with imagined_mesh({"dp_shard": 4, "tp": 2}) as mesh:
        ...     mesh["tp"].size()
        2
    """
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed has ranks already, and a model is to be made for others. Give the model itself, with "
            "DTensors on a mesh of the ranks that are there."
        )
    # Registers the backend. It is torch's own for tests of what needs a process group, and moves nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    within = {name: sizes[name] for name in WITHIN if name in sizes}
    count = prod(within.values())
    # With another copy beside: a dimension that had all ranks would have the job's own group, which tells no name.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2 * count)
    try:
        ranks = torch.arange(count, device="cpu").view(*within.values())
        yield DeviceMesh("cpu", ranks, mesh_dim_names=tuple(within))
    finally:
        dist.destroy_process_group()
