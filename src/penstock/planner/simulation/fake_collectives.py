"""Ranks that need not be there: a mesh of them, and the collectives that a model of theirs issues.

Collectives come of DTensors that are divided otherwise than an operation wants them, and of models that call
`torch.distributed` themselves. None is sent, each is noted. Of fake tensors they return fake ones; of real ones what
they would if all ranks had the same: as for the engine's own (`planner/simulation/ranks.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError
from penstock.planner.simulation.engine_internals import Grid, divided_over, is_divided
from penstock.planner.simulation.fake_tensor import Shaped, contiguous_strides, is_fake, mark
from penstock.planner.simulation.operation_cost import tensors_in
from penstock.planner.simulation.program import Collective

#: The libraries of operators that collectives are in, and that of DTensor's own one.
NAMESPACES = frozenset(("c10d", "_c10d_functional", "_dtensor"))

#: The dimensions over which ranks have parts of one model and of one sequence: outermost first, as in a job.
_WITHIN = ("cp", "tp", "ep")
_ELSEWHERE = "model"  # the dimension of a group that no mesh has made
_OF_A_MESH = "mesh_"  # how torch begins the description of a mesh's group; the dimension's name follows

#: By operation, of whichever library, the collective.
_COLLECTIVES = {
    **dict.fromkeys(("all_reduce", "all_reduce_", "all_reduce_coalesced", "allreduce_"), "all_reduce"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "_allgather_base_"), "all_gather"),
    **dict.fromkeys(
        ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base_"), "reduce_scatter"
    ),
    **dict.fromkeys(("all_to_all_single", "alltoall_base_", "shard_dim_alltoall"), "all_to_all"),
    **dict.fromkeys(("broadcast", "broadcast_"), "broadcast"),
}
#: What operators call the argument that is sent, that which takes what is received, and the ranks.
_SENT, _INTO, _GROUP = (
    ("input", "inputs", "input_tensor", "tensors"),
    ("output", "output_tensor"),
    ("group_name", "process_group"),
)


def fake_collective(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    make: Callable[[Shaped], Tensor],
    sink: Callable[[Collective], object] | None,
) -> Any:
    """Note a collective, and return what it would.

    Arguments:
        func: the operation, of one of `NAMESPACES`.
        args: as it is called.
        kwargs: likewise.
        make: makes a fake tensor.
        sink: told of each collective of several ranks.

    Raises:
        NotImplementedError: it is none that a simulation knows.
    """
    name = func._overloadpacket.__name__
    if name == "wait_tensor":
        return args[0]
    if name == "_wrap_tensor_autograd":
        return func(*args)  # has whoever uses it wait first
    # Those of `torch.distributed` return torch's handle of the work beside what they wrote.
    work = torch._C._distributed_c10d.FakeWork().boxed() if func.namespace == "c10d" else None
    if name == "barrier":
        return work
    if name not in _COLLECTIVES:
        raise NotImplementedError
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    sent, into = _first(named, _SENT), _first(named, _INTO)
    if into is None and name.endswith("_"):
        into = sent
    group, parts = _group_of(_first(named, _GROUP)), list(tensors_in(sent))
    targets = [None for _ in parts] if into is None else list(tensors_in(into))
    made = []
    for part, target in zip(parts, targets, strict=True):
        received = _on_meta(func, part, named) if target is None else target
        shape = list(received.shape)
        _tell(sink, _COLLECTIVES[name], max(part.nbytes, received.nbytes), group)
        values = None if is_fake(part) else _as_if_alike(_COLLECTIVES[name], part, shape, group.size(), named)
        if target is None:
            empty = Shaped(tuple(shape), contiguous_strides(shape), part.dtype)
            made.append(make(empty) if values is None else values)
        elif values is None:
            mark(target)
        elif not is_fake(target):
            target.copy_(values.view(shape))
    if into is None:
        return made if isinstance(sent, (list, tuple)) else made[0]
    return into if work is None else work if name == "alltoall_base_" else (into, work)


def _tell(sink: Callable[[Collective], object] | None, name: str, nbytes: int, group: dist.ProcessGroup) -> None:
    members = dist.get_process_group_ranks(group)
    if sink is not None and len(members) > 1:
        dimension = group.group_desc.removeprefix(_OF_A_MESH) if group.group_desc.startswith(_OF_A_MESH) else _ELSEWHERE
        sink(Collective(name, nbytes, len(members), dimension, max(1, members[1] - members[0])))


def _first(named: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((named[name] for name in names if name in named), None)


def _on_meta(func: Any, sent: Tensor, named: Mapping[str, Any]) -> Tensor:
    """Ask torch for the shape of what a rank gets of one tensor."""
    given = {key: value for key, value in named.items() if key not in _SENT}
    name = next(key for key in named if key in _SENT)
    empty = torch.empty_like(sent, device="meta")
    (found,) = tensors_in(func(**given, **{name: [empty] if name == "inputs" else empty}))
    return found


def _as_if_alike(
    collective: str, sent: Tensor, shape: list[int], ranks: int, named: Mapping[str, Any]
) -> Tensor | None:
    """Make what a rank gets of real values, where all ranks have the same; `None` where the parts of others differ."""
    if collective == "all_to_all" and list(sent.shape) != shape:
        return None
    if collective == "all_gather":
        return torch.cat([sent] * ranks)
    if collective == "reduce_scatter":
        sent = sent.chunk(ranks)[0]
    op = named.get("reduce_op")  # others than sums give what all ranks have alike
    if isinstance(op, str):
        sums = op.lower() == "sum"
    else:  # in the box in which operators get it, which not every torch opens
        sums = op is not None and (not hasattr(dist.ReduceOp, "unbox") or dist.ReduceOp.unbox(op) == dist.ReduceOp.SUM)
    return sent * ranks if sums else sent.clone()


def _group_of(named: Any) -> dist.ProcessGroup:
    """Find a process group by its name, or in the box in which operators get it."""
    if isinstance(named, dist.ProcessGroup):
        return named
    c10d: Any = dist.distributed_c10d  # torch does not type what it does not show
    found: dist.ProcessGroup = (
        c10d._resolve_process_group(named) if isinstance(named, str) else dist.ProcessGroup.unbox(named)
    )
    return found


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
        >>> with simulated_mesh({"dp_shard": 4, "tp": 2}) as mesh:
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

    within = {name: sizes[name] for name in _WITHIN if name in sizes}
    count = prod(within.values())
    # With another copy beside: a dimension that had all ranks would have the job's own group, which tells no name.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2 * count)
    try:
        ranks = torch.arange(count, device="cpu").view(*within.values())
        yield DeviceMesh("cpu", ranks, mesh_dim_names=tuple(within))
    finally:
        dist.destroy_process_group()


def check_parts(model: nn.Module, grid: Grid) -> nn.Module:
    """Refuse a model of which ranks have other parts than the mesh says.

    Raises:
        ConfigError: names the parameter.
    """
    divided = [(name, divided_over(p)) for name, p in model.named_parameters() if is_divided(p)]
    if grid.tp > 1 and not divided:
        raise ConfigError(
            f"mesh divides the parameters over {grid.tp} ranks, and no parameter of {type(model).__name__} is a "
            "DTensor. Divide it first: with penstock.planner.simulated_mesh(mesh) as there: plan(parallelised(model, "
            "there['tp']), ..., mesh=mesh)."
        )
    for name, lines in divided:
        for line in lines:
            if grid.tp % len(line):
                raise ConfigError(
                    f"Parameter '{name}' is a DTensor of {len(line)} ranks, and mesh divides parameters over "
                    f"{grid.tp}. Give the model's own number: mesh={{..., 'tp': {len(line)}}}."
                )
    return model
