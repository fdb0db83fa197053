"""Buffers of a tile each, or of a stretch of tiles, used in turn."""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.machine.streams import DONE, Event, all_of
from penstock.tiers.records import Kept, Records


@dataclass(eq=False)
class Slot:
    """Buffers of bytes for one tile, or for a stretch.

    Attributes:
        near: by home, where the tile is used.
        host: by home, where files are read and written: the same buffer, unless it is used on a device.
        free: work on the slot is over.
        holds: the records that its buffers still hold.
    """

    near: Mapping[str, Tensor]
    host: Mapping[str, Tensor]
    free: Event = DONE
    holds: dict[tuple[Records, int], None] = field(default_factory=dict)

    def keep(self, section: Records, number: int, buffer: Tensor, ready: Event) -> None:
        """Let others take a record from the slot until it is used again."""
        section.kept[number] = Kept(buffer, ready, self)
        self.holds[section, number] = None

    def forget(self) -> None:
        """The slot is used for something else."""
        for section, number in self.holds:
            kept = section.kept.get(number)
            if kept is not None and kept.slot is self:
                del section.kept[number]
        self.holds.clear()


class Ring:
    """Slots, used in turn.

    Arguments:
        before_use: called when a slot is wanted and there is none: it fills the ring.

    Attributes:
        tiles: that a slot holds.
    """

    def __init__(self, before_use: Callable[[], None] = lambda: None) -> None:
        self._before_use = before_use
        self.tiles = 1
        self._slots: deque[Slot] = deque()

    def fill(self, slots: Sequence[Slot]) -> None:
        """Use these slots."""
        self._slots.extend(slots)

    def take(self, wanted: object = None) -> Slot:
        """The slot that was used least recently, or the one that is wanted."""
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
        return all_of(slot.free for slot in self._slots)

    def forget(self) -> None:
        """From now on nobody takes a record from the slots: what is under way with them is all there will be."""
        for slot in self._slots:
            slot.forget()

    def drop(self) -> None:
        """Let go of the slots, once work on them is over. Who needs what has failed gets its error from it."""
        for slot in self._slots:
            with contextlib.suppress(Exception):
                slot.free.synchronize()
            slot.forget()
        self._slots.clear()


def take_kept(section: Records, number: int, copy_from: Callable[[Tensor, Event], Event]) -> Event | None:
    """Copy a record from the slot that still holds it; `None` where none does."""
    kept = section.kept.get(number)
    if kept is None:
        return None
    assert isinstance(kept.slot, Slot)
    event = copy_from(kept.buffer, kept.ready)
    kept.slot.free = event if kept.slot.free.done() else all_of([kept.slot.free, event])  # not before it was copied
    return event
