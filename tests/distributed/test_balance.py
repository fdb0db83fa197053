"""Stage 2 with gradients on the host: at every moment of backward each rank copies its share of the bytes."""

from typing import Any

import pytest
from torch import Tensor

from penstock.engine.unit.unit import Unit
from penstock.runtime.streams import DOWNLOAD, Event, Work
from tests.lib.streams import SeparateStreams, separate
from tests.parity.rows import Arithmetic, Movement, batches, loss_of, prepared
from tests.support import run_ranks

UNITS = 3
KIB = 1 << 10


class Counting(SeparateStreams):
    """Counts the bytes of copies to the host."""

    def __init__(self) -> None:
        super().__init__(separate().device)
        self.downloaded = 0

    def submit(self, stream: str, work: Work, **rest: Any) -> Event:
        if stream == DOWNLOAD:
            self.downloaded += rest["nbytes"]
        return super().submit(stream, work, **rest)


def windows(rank: int, world_size: int) -> list[list[tuple[str, int, int]]]:
    """For each backward, of its windows in turn: the unit, its bytes, and the bytes that this rank copied.

    A window is what lies between entering a unit's backward and leaving it, and ends with its gradient on its way.
    """
    streams = Counting()
    how = Movement(2, grads="cpu", optimizer="cpu").but(tile_bytes=4 * KIB)
    model, optimizer = prepared(Arithmetic(precision="bf16"), how, streams)
    backward = optimizer._engine.hooks.backward
    settle = backward._end_unit
    found: list[tuple[str, int, int]] = []
    before_the_end: list[int] = []  # windows that backward had left when it ended, by backward
    end_backward = backward._end

    def end() -> None:
        before_the_end.append(len(found))
        end_backward()

    backward._end = end

    def note(unit: Unit) -> None:
        arrived = unit.trained.gradient.pending is not None
        settle(unit)
        if arrived:
            found.append((unit.name, unit.nbytes, streams.downloaded))
            streams.downloaded = 0

    backward._end_unit = note
    backwards = []
    for micro_batches in batches(world_size, 1)[:2]:
        streams.downloaded = 0
        loss: Tensor = loss_of(model, micro_batches[0][rank])
        optimizer.backward(loss)
        assert streams.downloaded == 0, "copied outside every window"
        backwards.append(list(found))
        found.clear()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    assert before_the_end == [UNITS - 2] * 2, "the root and the last block are left when backward ends"
    return backwards


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_copies_its_share_of_each_units_gradient_in_each_window(world_size: int) -> None:
    for of_rank in run_ranks(windows, world_size, world_size):
        for backward in of_rank:
            assert len(backward) == UNITS
            assert len({name for name, _, _ in backward}) == UNITS
            for name, nbytes, copied in backward:
                assert copied * world_size == nbytes, name
