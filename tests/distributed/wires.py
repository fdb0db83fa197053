"""What goes between ranks, by the groups that it goes over."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.runtime import collectives
from tests.lib.engines import TILE_BYTES

TILES = {"tile_bytes": TILE_BYTES}
#: By the name of a collective and the ranks of its group: the bytes of whole buffers.
Traffic = Counter[tuple[str, tuple[int, ...]]]
_FLAT = {
    "all_gather": (0, collectives, "all_gather_flat"),
    "reduce_scatter": (1, collectives, "reduce_scatter_flat"),
    "all_to_all": (1, dist, "all_to_all_single"),
}


@contextmanager
def listening() -> Iterator[Traffic]:
    """Count the bytes of whole buffers that flat collectives of an engine have on this rank."""
    found: Traffic = Counter()

    def counted(name: str, whole: int, issue: Callable[..., Any]) -> Callable[..., Any]:
        def count(*tensors: Tensor, group: Any, **rest: Any) -> Any:
            found[name, tuple(dist.get_process_group_ranks(group))] += tensors[whole].nbytes
            return issue(*tensors, group=group, **rest)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name, (whole, module, attribute) in _FLAT.items():
            patch.setattr(module, attribute, counted(name, whole, getattr(module, attribute)))
        yield found


def hybrid(*shape: int) -> DeviceMesh:
    """Copies of shards: a mesh of so many copies and shards, two and two unless it is said."""
    return init_device_mesh("cpu", shape or (2, 2), mesh_dim_names=("replicate", "shard"))
