"""Putting together what ranks have of a parameter or of a state, and finding this rank's part of a value."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.state.values import among_zeros, check_value, flat_part
from penstock.engine.units.unit import Unit
from penstock.errors import NvmeError
from penstock.layout import Slot
from penstock.machine.collectives import Ranks

#: Values of a range of this rank's shard, piece by piece: first element, one past the last, values.
Pieces = Iterator[tuple[int, int, Tensor]]


class _Part(NamedTuple):
    """Elements `start` to `stop` of what is put together, which are the rank's."""

    rank: int
    start: int
    stop: int


class Parts:
    """Puts together what ranks have. Every call that reads is collective.

    Arguments:
        ranks: all that train the model together.
        device: where parts are while they travel.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def whole(self, unit: Unit, index: int, read: Callable[[int, int], Pieces]) -> Tensor:
        """Put the parts of all ranks together, in fp32."""
        return self.assembled(unit, index, self.own(unit, index, read))

    def assembled(self, unit: Unit, index: int, own: Tensor) -> Tensor:
        """Put together what ranks have of a parameter that they divide."""
        slot = unit.layout.slots[index]
        if slot.region is None:
            return own
        whole = among_zeros(own, slot.region).to(self._device)
        self._ranks.assemble(whole)
        return whole.cpu()

    def own(
        self, unit: Unit, index: int, read: Callable[[int, int], Pieces], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Put the parts of all shards together. `read` gives the values of a range of this rank's shard."""
        slot = unit.layout.slots[index]
        first = unit.own_range[0] - slot.start  # of this rank's shard, counted from the slot

        def fill(part: Tensor, start: int, stop: int) -> None:
            for begin, end, values in read(start - first, stop - first):
                part[begin + first - start : end + first - start] = values

        parts = [_Part(rank, start - slot.start, stop - slot.start) for rank, start, stop in _shares(unit, slot)]
        return self._collect(unit, parts, fill, slot.numel, dtype).view(slot.shape)

    def of_owner(self, unit: Unit, index: int, shape: tuple[int, ...], read: Callable[[], Tensor]) -> Tensor:
        """Give all ranks what the one that has a whole parameter keeps of it, in fp32. `read` gives it there, flat."""
        ((owner, _, _),) = _shares(unit, unit.layout.slots[index])
        numel = torch.Size(shape).numel()

        def fill(part: Tensor, start: int, stop: int) -> None:
            del start, stop
            part.copy_(read())

        return self._collect(unit, [_Part(owner, 0, numel)], fill, numel, torch.float32).view(shape)

    def _collect(
        self,
        unit: Unit,
        parts: Sequence[_Part],
        fill: Callable[[Tensor, int, int], None],
        numel: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Put parts together, flat, each filled by the rank that has it."""
        whole = torch.empty(numel, dtype=dtype, device="cpu")
        failure: NvmeError | None = None
        for rank, start, stop in parts:
            part = torch.empty(stop - start, dtype=dtype, device=self._device)
            if rank == unit.rank:
                try:
                    fill(part, start, stop)
                except NvmeError as error:
                    failure = error  # raised below: the other ranks wait for this part, whatever it holds
            self._ranks.broadcast_part(part, rank)
            whole[start:stop] = part.cpu()
        # Only a read of a file fails on one rank alone: the others would go on with a part that is not there.
        if unit.layout.shards > 1 and any(home.in_files for home in unit.homes.values()):
            self._ranks.council.agree(failure)
        elif failure is not None:
            raise failure
        return whole


def own_part(unit: Unit, index: int, value: Tensor) -> tuple[int, int, Tensor] | None:
    """Find the range of this rank's shard that holds a part of the slot, and that part of `value`.

    In fp32 for a trained unit, in the dtype that it came in for a frozen one.
    """
    slot = unit.layout.slots[index]
    check_value(unit.spec.names[index], slot, value)
    overlap = unit.layout.overlap(slot, unit.rank)
    if overlap is None:
        return None
    start, stop = overlap
    first = unit.own_range[0]
    values = flat_part(value, unit.parameters[index].tensor, slot)[start - slot.start : stop - slot.start]
    return start - first, stop - first, values.float() if unit.trained else values


def _shares(unit: Unit, slot: Slot) -> Iterator[_Part]:
    """Say which ranks have which elements of the unit's buffer that are a slot's."""
    for rank in range(unit.layout.shards):
        overlap = unit.layout.overlap(slot, rank)
        if overlap is not None:
            yield _Part(rank, *overlap)
