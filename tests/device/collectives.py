"""Collectives between processes that each have strict devices: gloo's, run late, on the stream they were issued from.

As NCCL's they are issued by the host and run when the stream comes to them; they keep nothing alive, and who needs
their result orders himself after that stream. `init_process_group("late")` takes them, for tensors of the device and of
the host.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from tests.device.backend import NAME, native


class _Issued(Work):
    """A collective that is on its stream: to wait for it is to be on that stream."""

    def __init__(self) -> None:
        super().__init__()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def is_completed(self) -> bool:
        return False


class LateGroup(dist.ProcessGroup):
    """A group whose collectives of the device's tensors run late."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._host = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._timeout = timeout
        self._name = ""

    @property
    def group_name(self) -> str:
        """What `torch.distributed` calls it: groups that are written in Python do not hear of it otherwise."""
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "late"

    def _issue(self, reads: Sequence[Tensor], writes: Sequence[Tensor], call: Callable[[], Work]) -> Work:
        """Have gloo called late. `call` must know the memory as kernels do, or it would keep tensors alive."""
        assert self.group_name, "torch knows it by a name"  # and asks for that when it has forgotten it
        if all(tensor.device.type == "cpu" for tensor in (*reads, *writes)):
            return call()
        native.enqueue(lambda: call().wait(self._timeout), reads, writes)
        return _Issued()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        here = [_for_gloo(tensor) for tensor in tensors]
        return self._issue(tensors, tensors, lambda: self._host.allreduce(here, opts))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        here = [_for_gloo(tensor) for tensor in tensors]
        return self._issue(tensors, tensors, lambda: self._host.broadcast(here, opts))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        whole, own = [[_for_gloo(tensor) for tensor in each] for each in outputs], [_for_gloo(t) for t in inputs]
        parts = [tensor for each in outputs for tensor in each]
        return self._issue(inputs, parts, lambda: self._host.allgather(whole, own))

    def all_gather_single(self, output: Tensor, shard: Tensor, opts: Any = None) -> Work:
        whole, own = _for_gloo(output), _for_gloo(shard)
        return self._issue([shard], [output], lambda: _gather(self._host, whole, own))

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Work:
        own, all_of_it = _for_gloo(output), _for_gloo(whole)
        return self._issue([whole], [output], lambda: _reduce(self._host, own, all_of_it, opts))

    def all_to_all_single(
        self, output: Tensor, sent: Tensor, output_splits: list[int], splits: list[int], opts: Any = None
    ) -> Work:
        theirs, own = _for_gloo(output), _for_gloo(sent)
        return self._issue([sent], [output], lambda: _exchange(self._host, theirs, own, output_splits, splits))

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        return self._host.barrier(dist.BarrierOptions())


def _for_gloo(tensor: Tensor) -> Tensor:
    return native.for_kernels(tensor) if tensor.device.type == NAME else tensor


def _gather(group: Any, whole: Tensor, own: Tensor) -> Work:
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    return gather(whole, own)


def _reduce(group: Any, own: Tensor, whole: Tensor, opts: Any) -> Work:
    reduce = getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base
    return reduce(own, whole, opts)


def _exchange(group: Any, received: Tensor, sent: Tensor, *splits: list[int]) -> Work:
    exchange = getattr(group, "all_to_all_single", None) or group.alltoall_base
    return exchange(received, sent, *splits, dist.AllToAllOptions())


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> LateGroup:
    return LateGroup(store, rank, size, timeout)


dist.Backend.register_backend("late", _create, devices=["cpu", NAME])
