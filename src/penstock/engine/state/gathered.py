"""`gathered` blocks: whole parameters for people to read, and to write with `modify`."""

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
    """Gathers units for `with` blocks, and takes over what was written inside.

    Arguments:
        gatherer: makes parameters usable.
        access: knows parameters, and when updates have reached their homes.
        watch_saved: sees what autograd saves of the parameters inside.

    Attributes:
        modifying: how many blocks are open that may write parameters.
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
        """Gather whole parameters for the time of a `with` block, and take over what was written. Collective."""
        self._access.finish()  # updates are over then: what `modify` writes to homes by hand follows no event
        wanted = [self._access.unit_of(p) for p in parameters] if parameters is not None else self._context.units
        units = sorted(dict.fromkeys(wanted), key=lambda unit: unit.index)
        outer = {unit: unit.holding.blocks for unit in units}
        try:
            for unit in units:
                unit.holding.take(Holder.BLOCK)
                self._gatherer.acquire_exact(unit)
            before = {unit: unit.full.clone() for unit in units} if modify else {}
        except BaseException:
            self._let_go(outer)
            raise
        self.modifying += modify
        try:
            with self._watch_saved():  # else a backward would read what autograd saved inside after its release
                yield
            if self._closed:
                return  # inside: the parameters have their values
            if modify:
                self._access.finish()  # homes may have moved inside, and are written here
            for unit in units:
                if modify:
                    for parameter in unit.parameters:
                        parameter.take_in(unit.full)
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
        """Set how many blocks hold each unit from now on, and release those that none holds."""
        for unit, count in blocks.items():
            unit.holding.leave_blocks(count)
            if not self._closed:
                self._gatherer.release(unit)

    @property
    def _closed(self) -> bool:
        return any(unit.is_dropped for unit in self._context.units)

    def _take_over(self, unit: Unit, before: Tensor) -> None:
        """Take over a modified full buffer, the first rank's on every rank; masters keep what did not change."""
        self._context.ranks.broadcast(unit.full)  # else each rank would go on with what was written on it
        alike = [slot for slot in unit.layout.slots if slot.region is None]  # on all ranks that divide others
        broadcast_alike([unit.full[slot.start : slot.stop] for slot in alike], self._context.ranks)
        start, stop = unit.own_range
        now, before = unit.full[start:stop], before[start:stop]
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
    """Find the slots whose values in the full buffer are others than before, bit for bit."""
    pairs = [(unit.full[slot.start : slot.stop], before[slot.start : slot.stop]) for slot in unit.layout.slots]
    return [index for index, (new, old) in enumerate(pairs) if not torch.equal(as_bytes(new), as_bytes(old))]


def _restore(unit: Unit, values: Tensor) -> None:
    """Undo what was written into the parameters: into their home, too, if they rested where compute reads them."""
    unit.full.copy_(values)
    _write_replica(unit)
    start, stop = unit.own_range
    for first, last, weights in unit.visit(0, stop - start, modify=True):
        weights.param.copy_(values[start + first : start + last])
        if weights.shadow is not None:  # a move inside has made it of what was written
            weights.shadow.copy_(values[start + first : start + last])


def _write_replica(unit: Unit) -> None:
    """Write the full buffer into the home of all parameters, where the unit has one apart from it."""
    if unit.replica is not None and not unit.resident:
        for first, last, (values,) in unit.replica.visit(0, unit.replica.stop, modify=True):
            values.copy_(unit.full[first:last])
