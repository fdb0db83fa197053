"""Collectives that a model itself issues, of ranks that need not be there: none is sent, each is told.

They come of DTensors that are divided otherwise than an operation wants them, and of models that call
`torch.distributed` themselves. Of fake tensors they return fake ones; of real ones what they would if all ranks had
the same: as for the engine's own (`planner/simulation/ranks.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.planner.simulation.fake_tensor import contiguous_strides, is_fake, mark
from penstock.planner.simulation.operation_cost import tensors_in
from penstock.planner.simulation.program import Collective
from penstock.planner.simulation.shapes import Shaped

#: The libraries of operators that collectives are in, and that of DTensor's own one.
NAMESPACES = frozenset(("c10d", "_c10d_functional", "_dtensor"))

_ELSEWHERE = "model"  # the dimension of a group that no mesh has made
_OF_A_MESH = "mesh_"  # how torch begins the description of a mesh's group; the dimension's name follows


class _Form(NamedTuple):
    """How an operation says what it sends.

    Attributes:
        name: of the collective.
        sent: which argument is sent.
        into: which argument takes what is received; `None` where that is returned.
        group: which argument names the ranks.
    """

    name: str
    sent: int
    into: int | None
    group: int


#: Operations by name, without their library: those of `_c10d_functional`, ...
_FUNCTIONAL: Mapping[str, _Form] = {
    "all_reduce": _Form("all_reduce", 0, None, 2),
    "all_reduce_": _Form("all_reduce", 0, 0, 2),
    "all_reduce_coalesced": _Form("all_reduce", 0, None, 2),
    "all_gather_into_tensor": _Form("all_gather", 0, None, 2),
    "all_gather_into_tensor_coalesced": _Form("all_gather", 0, None, 2),
    "reduce_scatter_tensor": _Form("reduce_scatter", 0, None, 3),
    "reduce_scatter_tensor_coalesced": _Form("reduce_scatter", 0, None, 3),
    "all_to_all_single": _Form("all_to_all", 0, None, 3),
    "broadcast": _Form("broadcast", 0, None, 2),
    "broadcast_": _Form("broadcast", 0, 0, 2),
}
#: ... and those of `c10d`.
_IN_PLACE: Mapping[str, _Form] = {
    "allreduce_": _Form("all_reduce", 0, 0, 1),
    "broadcast_": _Form("broadcast", 0, 0, 1),
    "_allgather_base_": _Form("all_gather", 1, 0, 2),
    "_reduce_scatter_base_": _Form("reduce_scatter", 1, 0, 2),
    "alltoall_base_": _Form("all_to_all", 1, 0, 2),
}


class FakeCollectives:
    """What a model's collectives return.

    Arguments:
        make: makes a fake tensor.
        refusal: makes the error of an operation.
        sink: told of each collective of several ranks.
    """

    def __init__(
        self,
        make: Callable[[Shaped], Tensor],
        refusal: Callable[[Any, str], Exception],
        sink: Callable[[Collective], object] | None,
    ) -> None:
        self._make = make
        self._refusal = refusal
        self._sink = sink

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Note a collective, and return what it would."""
        name = func._overloadpacket.__name__
        if func.namespace == "c10d":
            return self._in_place(name, func, args)
        if name == "wait_tensor":
            return args[0]
        if name == "_wrap_tensor_autograd":
            return func(*args)  # has whoever uses it wait first
        if name == "shard_dim_alltoall":
            return self._divided_otherwise(*args)
        form = _FUNCTIONAL.get(name)
        if form is None or kwargs:
            raise self._refusal(func, "is a collective that no simulation knows")
        group = _group_of(args[form.group])
        if form.into is not None:
            self._write(func, form, args[form.sent], args[form.into], group, args)
            return args[form.into]
        made = [self._received(func, form, sent, group, args) for sent in tensors_in(args[form.sent])]
        return made if isinstance(args[form.sent], (list, tuple)) else made[0]

    def _in_place(self, name: str, func: Any, args: Sequence[Any]) -> Any:
        """Note a collective of `torch.distributed`, which returns what it wrote and torch's handle of the work."""
        work = torch._C._distributed_c10d.FakeWork().boxed()
        if name == "barrier":
            return work
        form = _IN_PLACE.get(name)
        if form is None:
            raise self._refusal(func, "is a collective that no simulation knows")
        group = _group_of(args[form.group])
        assert form.into is not None
        for sent, into in zip(tensors_in(args[form.sent]), tensors_in(args[form.into]), strict=True):
            self._write(func, form, sent, into, group, args)
        return work if name == "alltoall_base_" else (args[form.into], work)

    def _write(
        self, func: Any, form: _Form, sent: Tensor, into: Tensor, group: dist.ProcessGroup, args: Sequence[Any]
    ) -> None:
        """Note the collective of one tensor, and put what this rank gets where it belongs."""
        self._note(form.name, max(sent.nbytes, into.nbytes), group)
        if is_fake(sent):
            mark(into)
        elif not is_fake(into):
            into.copy_(_as_if_alike(func, form.name, sent, group.size(), args).view(into.shape))

    def _received(self, func: Any, form: _Form, sent: Tensor, group: dist.ProcessGroup, args: Sequence[Any]) -> Tensor:
        """Note the collective of one tensor, and make what this rank gets."""
        ranks, shape = group.size(), list(sent.shape)
        self._note(form.name, sent.nbytes * (ranks if form.name == "all_gather" else 1), group)
        if form.name == "all_to_all":
            shape[0] = sum(args[1]) if args[1] else shape[0]
        elif form.name == "all_gather":
            shape[0] *= ranks
        elif form.name == "reduce_scatter":
            shape[0] //= ranks
        if is_fake(sent) or (form.name == "all_to_all" and shape[0] != sent.shape[0]):
            return self._make(Shaped(tuple(shape), contiguous_strides(shape), sent.dtype))
        return _as_if_alike(func, form.name, sent, ranks, args)

    def _divided_otherwise(self, sent: Tensor, gathered: int, divided: int, group: Any) -> Tensor:
        """Note DTensor's own exchange: what was divided along one dimension is then divided along another."""
        group = _group_of(group)
        self._note("all_to_all", sent.nbytes, group)
        shape = list(sent.shape)
        shape[gathered] *= group.size()
        shape[divided] //= group.size()
        return self._make(Shaped(tuple(shape), contiguous_strides(shape), sent.dtype))

    def _note(self, name: str, nbytes: int, group: dist.ProcessGroup) -> None:
        """Note a collective, where there is anybody to send to."""
        members = dist.get_process_group_ranks(group)
        if self._sink is None or len(members) < 2:
            return
        described = group.group_desc
        dimension = described.removeprefix(_OF_A_MESH) if described.startswith(_OF_A_MESH) else _ELSEWHERE
        self._sink(Collective(name, nbytes, len(members), dimension, max(1, members[1] - members[0])))


def _as_if_alike(func: Any, name: str, sent: Tensor, ranks: int, args: Sequence[Any]) -> Tensor:
    """Make what a rank gets of real values, where all ranks have the same."""
    if name == "all_gather":
        return torch.cat([sent] * ranks)
    if name == "reduce_scatter":
        sent = sent.chunk(ranks)[0]
    if name in ("all_reduce", "reduce_scatter") and _sums(func, args):
        return sent * ranks
    return sent.clone()


def _sums(func: Any, args: Sequence[Any]) -> bool:
    """Whether a reduction adds up; others give what all ranks have alike."""
    if func.namespace != "c10d":
        return str(args[1]).lower() == "sum"
    op = next(a for a, of in zip(args, func._schema.arguments, strict=False) if of.name == "reduce_op")
    return bool(dist.ReduceOp.unbox(op) == dist.ReduceOp.SUM) if hasattr(dist.ReduceOp, "unbox") else True


def _group_of(named: Any) -> dist.ProcessGroup:
    """Find a process group by its name, or in the box in which operators get it."""
    if isinstance(named, dist.ProcessGroup):
        return named
    if isinstance(named, str):
        c10d: Any = dist.distributed_c10d  # torch does not type what it does not show
        found: dist.ProcessGroup = c10d._resolve_process_group(named)
        return found
    unboxed: dist.ProcessGroup = dist.ProcessGroup.unbox(named)
    return unboxed
