"""Three routes of a reduced gradient to its home.

    in place    compute reaches the home: the gradient is written or added there where it was reduced
    as a whole  the first micro-batch of a home out of reach: one copy
    added       the later ones: down to the host and added there tile by tile, or, where the home is in files or on
                several tiers, what it holds comes up, is added to, and goes back

Which of them a home takes is decided once, when it is first seen. Norms are taken of what the home holds in the end.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock._native import Pool
from penstock.engine.passes.buffers import BufferRing
from penstock.engine.units.gradient import Gradient
from penstock.engine.units.norms import reached
from penstock.kinds import GRAD
from penstock.layout import Piece
from penstock.machine.streams import DEVICE_UPDATE, DONE, Event, Streams, all_of
from penstock.rules.deposit import Ranges, deposit, deposit_parts, squared_norms
from penstock.tiers.home import Home, buffer_home
from penstock.tiers.movement import Movement
from penstock.trace import Label


@dataclass(frozen=True)
class Reduced:
    """What comes out of a reduction: this rank's shard of a unit's gradient.

    Attributes:
        unit: the unit's name.
        values: the shard, in the reduce dtype.
        parts: what each slot has of it.
        adds: whether the home holds earlier micro-batches, to which it is added.
        stale: the ranges of the home that a step before has left, where other slots hold a gradient of this one.
        norms: the squared norm of each part, where it is known already.
    """

    unit: str
    values: Tensor
    parts: Sequence[Piece]
    adds: bool
    stale: Ranges
    norms: Sequence[float | Tensor] | None = None

    @property
    def ranges(self) -> Ranges:
        """What each slot has of it, as first element and one past the last."""
        return [(start, stop) for _, start, stop in self.parts]

    @property
    def label(self) -> Label:
        """What traces call its way home."""
        return Label("save", self.unit, GRAD)


@dataclass(frozen=True)
class Means:
    """What routes are made of.

    Attributes:
        pool: the threads of what runs on the host beside compute.
        compute_pool: those of what compute's own thread does.
        dtype: the homes' own, in which micro-batches are summed.
        agrees: whether ranks tell each other if a gradient is finite, as soon as it is reduced.
    """

    streams: Streams
    movement: Movement
    pool: Pool
    compute_pool: Pool
    buffers: BufferRing
    dtype: torch.dtype
    agrees: bool


class Route(ABC):
    """How gradients get to one home.

    Attributes:
        values: the home's values, where compute reaches them.
        free: the event that a reduction follows, where it writes the home.
    """

    values: Tensor | None = None
    free: Event = DONE

    def __init__(self, home: Home, means: Means) -> None:
        self._home = home
        self._means = means

    @abstractmethod
    def receive(self, gradient: Gradient, reduced: Reduced) -> None:
        """Do what belongs to the reduction itself, on its stream: write what is in reach, and measure."""

    @abstractmethod
    def send_home(self, gradient: Gradient, reduced: Reduced, received: Event) -> Event:
        """Bring what was received home; return the event after which the reduced values are not needed any more."""


class InPlace(Route):
    """Compute reaches the home."""

    def __init__(self, home: Home, means: Means, values: Tensor) -> None:
        super().__init__(home, means)
        self.values = values

    @property
    def free(self) -> Event:  # type: ignore[override]
        """The home may have moved, and an update may read it."""
        return self._home.memory.free

    def receive(self, gradient: Gradient, reduced: Reduced) -> None:
        """Write or add the gradient, and measure the sum in the same pass."""
        assert self.values is not None
        _clear(self.values, reduced.stale)
        gradient.flawed = None  # from when the home was elsewhere: the norms measured here say it from now on
        norms = deposit_parts(
            self.values, reduced.values, reduced.ranges, add=reduced.adds, pool=self._means.compute_pool
        )
        gradient.measure(reduced.parts, norms)

    def send_home(self, gradient: Gradient, reduced: Reduced, received: Event) -> Event:
        """Note the write: it is home already."""
        # The step, updates and the next micro-batch ask the home. None of them knows of the collective that wrote it.
        self._home.note_write(received)  # site reduce.written_in_place
        return received


class Away(Route):
    """Compute does not reach the home: the first micro-batch goes there as a whole, later ones are added."""

    def receive(self, gradient: Gradient, reduced: Reduced) -> None:
        """Measure the first micro-batch; of later ones, whose sum is measured at home, say whether they are finite."""
        if not reduced.adds:
            norms = reduced.norms
            if norms is None:
                rounded = reduced.values.to(self._means.dtype)
                norms = squared_norms(rounded, reduced.ranges, pool=self._means.compute_pool)
            gradient.measure(reduced.parts, norms)
        if self._means.agrees:
            gradient.flawed = _flaw(reduced.values, gradient.flawed if reduced.adds else None)

    def send_home(self, gradient: Gradient, reduced: Reduced, received: Event) -> Event:
        """Copy the first micro-batch, or add a later one."""
        if reduced.adds:
            return self._add(gradient, reduced, received)
        # After the collective: else what the buffer held before would go home in place of the sum.
        # site reduce.first_received
        return self._means.movement.copy(buffer_home(reduced.values, written=received), self._home, reduced.label)

    @abstractmethod
    def _add(self, gradient: Gradient, reduced: Reduced, received: Event) -> Event:
        """Add a later micro-batch, and measure the sum."""


class AddedOnHost(Away):
    """A home in one piece of host memory: gradients come down once, in the dtype that they were reduced in."""

    def _add(self, gradient: Gradient, reduced: Reduced, received: Event) -> Event:
        """Add tile by tile: while one is added the next one comes down."""
        ((home,),) = (section.tensors for section in self._home.sections)
        pool = self._means.pool

        def add(start: int, landed: Tensor) -> None:
            if start == 0:  # tiles run in order: zeroed later, the stale ranges would lose what was added to them
                _clear(home, reduced.stale)
            deposit(home[start : start + landed.numel()], landed, add=True, pool=pool)
            if start + landed.numel() == home.numel():  # the last: they run in order
                gradient.measure(reduced.parts, squared_norms(home, reduced.ranges, pool=pool))

        # Not before the collective has made the values, nor while an earlier micro-batch still lands in the home or an
        # update or a move still reads it.
        after = all_of([received, self._home.memory.free])  # site host_sum.received, host_sum.storage_free
        added = self._means.movement.land(reduced.values[: home.numel()], add, after=after, label=reduced.label)
        self._home.note_write(added)  # site host_sum.written: the next micro-batch and the update come after the sum
        return added


class AddedOnDevice(Away):
    """A home in files or on several tiers. Of homes in memory only those on a cut are: they must be measured whole."""

    def _add(self, gradient: Gradient, reduced: Reduced, received: Event) -> Event:
        """Bring up what the home holds, add, and put the sum back."""
        means = self._means
        total = means.buffers.lease(reduced.values.numel(), means.dtype)
        brought = means.movement.copy(self._home, buffer_home(total), reduced.label)

        def add() -> None:
            _clear(total, reduced.stale)  # else the sum would hold what a step before has left
            norms = deposit_parts(total, reduced.values, reduced.ranges, add=True, pool=means.pool)
            gradient.measure(reduced.parts, norms)

        # On a stream beside that of collectives: whoever issues one waits on the host for what it follows, and this
        # follows a read of a file. Not before both are there: else half of the sum is missing.
        nbytes = 2 * total.nbytes + reduced.values.nbytes  # read and written
        # site device_sum.received, device_sum.loaded
        added = means.streams.submit(DEVICE_UPDATE, add, after=(received, brought), nbytes=nbytes, label=reduced.label)
        # site device_sum.added
        saved = means.movement.copy(buffer_home(total, written=added), self._home, reduced.label)
        means.buffers.give_back(total, saved)  # the copy home reads it last
        return saved


def route_to(home: Home, means: Means) -> Route:
    """Choose the route to a home."""
    values = reached(home, means.streams)
    if values is not None:
        return InPlace(home, means, values)
    return (AddedOnDevice if len(home.sections) > 1 or home.in_files else AddedOnHost)(home, means)


def _clear(home: Tensor, stale: Ranges) -> None:
    """Zero what a step before has left, where some slots hold a gradient of this one already."""
    for start, stop in stale:
        home[start:stop] = 0


def _flaw(values: Tensor, before: Tensor | None) -> Tensor:
    """Say whether this micro-batch, or one before it, is not finite: 0 or 1. On the device."""
    flaw = torch.linalg.vector_norm(values, math.inf).isfinite().logical_not().float().view(1)
    return flaw if before is None else torch.maximum(before, flaw)
