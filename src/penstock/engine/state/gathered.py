"""`gathered` blocks: whole parameters to read, and to write with `modify`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.forward_backward.gather import Gatherer
from penstock.engine.state.access import StateAccess
from penstock.engine.step.context import EngineContext
from penstock.engine.unit.first_values import broadcast_alike
from penstock.engine.unit.unit import Holder, Unit
from penstock.runtime.collectives import as_bytes


class GatheredBlocks:
    """Gather units for `with` blocks, and store the values that were written inside.

    Arguments:
        gatherer: gathers and releases units.
        access: finds the unit of a parameter, and waits for pending updates.
        watch_saved: handles what autograd saves of the parameters inside.

    Attributes:
        modifying: the number of open blocks that may write parameters.
    """

    def __init__(
        self,
        context: EngineContext,
        gatherer: Gatherer,
        access: StateAccess,
        watch_saved: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._context = context
        self._gatherer = gatherer
        self._access = access
        self._watch_saved = watch_saved
        self.modifying = 0

    @contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter] | None, *, modify: bool) -> Iterator[None]:
        """Gather whole parameters for a `with` block, and store the values that were written inside. Collective."""
        self._access.finish()  # `modify` writes storage from the host, which waits for no event (ordering rule 3)
        wanted = [self._access.unit_of(p) for p in parameters] if parameters is not None else self._context.units
        units = sorted(dict.fromkeys(wanted), key=lambda unit: unit.index)
        outer = {unit: unit.holding.blocks for unit in units}
        try:
            for unit in units:
                unit.holding.take(Holder.BLOCK)
                self._gatherer.acquire_exact(unit)
            before = {unit: unit.gathered_buffer.clone() for unit in units} if modify else {}
        except BaseException:
            self._let_go(outer)
            raise
        self.modifying += modify
        try:
            with self._watch_saved():  # else a backward would read parameters that were released since
                yield
            if self._closed:
                return  # `close` in the block has given the parameters their values
            if modify:
                self._access.finish()  # storage that is written below may have moved in the block
            for unit in units:
                if modify:
                    for parameter in unit.parameters:
                        parameter.take_in(unit.gathered_buffer)
                    self._take_over(unit, before[unit])
                    unit.count_writes(_changed(unit, before[unit]))
                    unit.note_versions()
                elif unit.holding.blocks == 1:
                    unit.check_written()
        except BaseException:
            if not self._closed:
                self._access.finish()
                for unit, values in before.items():
                    _restore(unit, values)
                    unit.note_versions()
            raise
        finally:
            self.modifying -= modify
            left = {unit: unit.holding.blocks - 1 for unit in units}
            try:
                self._let_go(left)
            except BaseException:  # an interrupt
                self._let_go(left)
                raise

    def _let_go(self, blocks: Mapping[Unit, int]) -> None:
        """Set the number of blocks that hold each unit, and release units that no block holds."""
        for unit, count in blocks.items():
            unit.holding.leave_blocks(count)
            if not self._closed:
                self._gatherer.release(unit)

    @property
    def _closed(self) -> bool:
        return any(unit.is_dropped for unit in self._context.units)

    def _take_over(self, unit: Unit, before: Tensor) -> None:
        """Store the first rank's gathered buffer on every rank. Master weights of unchanged elements stay."""
        # Else each rank would store the values that were written on it.
        self._context.ranks.broadcast(unit.gathered_buffer)
        alike = [slot for slot in unit.layout.slots if slot.region is None]  # whole on all tensor-parallel ranks
        broadcast_alike([unit.gathered_buffer[slot.start : slot.stop] for slot in alike], self._context.ranks)
        start, stop = unit.own_range
        now, before = unit.gathered_buffer[start:stop], before[start:stop]
        for first, last, weights in unit.visit(0, stop - start, modify=True):
            new, old = now[first:last], before[first:last]
            if unit.trained is None:
                weights.param.copy_(new)
                continue
            kept = weights.read()
            changed = (new != old).to(kept.device)
            weights.write(torch.where(changed, new.to(kept.device).float(), kept))
        if unit.secondary is not None:
            unit.outdate_parts()
        _write_replica(unit)


def _changed(unit: Unit, before: Tensor) -> list[int]:
    """List the slots whose bits in the gathered buffer have changed."""
    pairs = [
        (unit.gathered_buffer[slot.start : slot.stop], before[slot.start : slot.stop]) for slot in unit.layout.slots
    ]
    return [index for index, (new, old) in enumerate(pairs) if not torch.equal(as_bytes(new), as_bytes(old))]


def _restore(unit: Unit, values: Tensor) -> None:
    """Restore the values of before, in the gathered buffer and in the storage that a block may have written."""
    unit.gathered_buffer.copy_(values)
    _write_replica(unit)
    start, stop = unit.own_range
    for first, last, weights in unit.visit(0, stop - start, modify=True):
        weights.param.copy_(values[start + first : start + last])
        if weights.param_staging is not None:  # a move in the block may have copied written values
            weights.param_staging.copy_(values[start + first : start + last])


def _write_replica(unit: Unit) -> None:
    """Copy the gathered buffer into the replica of a unit that has one apart from it."""
    if unit.replica is not None and not unit.resident:
        for first, last, (values,) in unit.replica.visit(0, unit.replica.stop, modify=True):
            values.copy_(unit.gathered_buffer[first:last])
