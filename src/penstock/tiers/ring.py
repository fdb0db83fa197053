"""Buffers of a tile each, or of a stretch of tiles, used in turn."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.machine.streams import DONE, Event, all_of

#: Elements of a stretch, at most.
STRETCH_NUMEL = 16 << 20

#: The one buffer of a slot whose values only pass.
PASSING = "passing"


class Kept(NamedTuple):
    """A buffer that still holds what a record says, once `ready`, until its slot is used for something else."""

    buffer: Tensor
    ready: Event
    slot: "RingSlot"


class Keeper(Protocol):
    """Whoever has records.

    Attributes:
        kept: the buffers from which records can be had without loading, by tile.
    """

    kept: dict[int, Kept]


@dataclass(eq=False)
class RingSlot:
    """Buffers of bytes for one tile, or for a stretch.

    Attributes:
        near: the buffers where the tile is used, by home.
        host: the buffers where records are loaded and stored, by home: the same ones, unless a device uses the tile.
        free: the event after which work on the slot is over.
        holds: the records that its buffers still hold.
    """

    near: Mapping[str, Tensor]
    host: Mapping[str, Tensor]
    free: Event = DONE
    holds: dict[tuple[Keeper, int], None] = field(default_factory=dict)

    def keep(self, section: Keeper, number: int, buffer: Tensor, ready: Event) -> None:
        """Let others take a record from the slot until it is used again."""
        section.kept[number] = Kept(buffer, ready, self)
        self.holds[section, number] = None

    def forget(self) -> None:
        """Let nobody take a record from the slot any more: it is used for something else."""
        for section, number in self.holds:
            kept = section.kept.get(number)
            # Another slot may have come to hold the record since: that one's note stays.
            if kept is not None and kept.slot is self:
                section.kept.pop(number, None)  # whoever frees what a move has left drops it on another thread
        self.holds.clear()

    def add_use(self, event: Event) -> None:
        """Note one more use of the buffers as they are now."""
        # A record may be taken from a slot that is being put back: it is free after both.
        self.free = event if self.free.done() else all_of([self.free, event])  # site slot.earlier_use, slot.new_use


class Ring:
    """Slots, used in turn.

    Arguments:
        before_use: called when a slot is wanted and there is none: it fills the ring.

    Attributes:
        tiles: how many tiles a slot holds.
        lock: is held by whoever takes slots one after the other where another thread may do so, too.
    """

    def __init__(self, before_use: Callable[[], None] = lambda: None) -> None:
        self._before_use = before_use
        self.tiles = 1
        self.lock = threading.Lock()
        self._slots: deque[RingSlot] = deque()

    def fill(self, slots: Sequence[RingSlot]) -> None:
        """Use these slots."""
        self._slots.extend(slots)

    @property
    def is_empty(self) -> bool:
        """Return True if there are no slots."""
        return not self._slots

    def take(self, wanted: RingSlot | None = None) -> RingSlot:
        """Take the slot that was used least recently, or the one that is wanted."""
        if not self._slots:
            self._before_use()
        assert self._slots, "the ring was planned without slots"
        slot = next((slot for slot in self._slots if slot is wanted), self._slots[0])
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    @property
    def free(self) -> Event:
        """Work on all slots is over."""
        return all_of(slot.free for slot in self._slots)  # site ring.free

    def forget(self) -> None:
        """Let nobody take a record from the slots from now on: what is under way with them is all there will be."""
        for slot in self._slots:
            slot.forget()

    def drop(self) -> None:
        """Let go of the slots, once work on them is over. Who needs what has failed gets its error from it."""
        for slot in self._slots:
            with contextlib.suppress(Exception):
                # Else the memory is taken by others while a copy still writes it.
                slot.free.synchronize()  # site ring.free_to_drop
            slot.forget()
        self._slots.clear()
