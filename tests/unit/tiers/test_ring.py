"""Buffers used in turn, and the records that they still hold."""

import torch

from penstock.runtime.streams import DONE
from penstock.tiers.storage import PASSING, KeptRecord, RingSlot


def test_a_record_that_another_thread_drops_meanwhile_is_forgotten_all_the_same() -> None:
    """A move that nobody waited for frees the sections that it left, while the rings are planned anew."""

    class Dropped(dict[int, KeptRecord]):
        def get(self, number: int, default: object = None) -> KeptRecord | None:  # type: ignore[override]
            found = super().get(number)
            self.clear()  # as the other thread does, right after we have looked
            return found

    class Section:
        def __init__(self) -> None:
            self.kept: dict[int, KeptRecord] = Dropped()

    segment, buffer = Section(), torch.zeros(8, dtype=torch.uint8)
    slot = RingSlot({PASSING: buffer}, {PASSING: buffer})
    slot.keep(segment, 0, buffer, DONE)
    slot.forget()
    assert not slot.holds
