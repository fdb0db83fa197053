"""Copies of homes follow the events that the homes know, without being told."""

import pytest
import torch

from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import HostEvent
from penstock.tiers.storage import Ring, Storage, buffer_storage
from penstock.tiers.transfer import Transfers
from penstock.trace import NO_LABEL


def storage(value: float) -> Storage:
    return buffer_storage(torch.full((256,), value))


def values(of: Storage) -> list[float]:
    return of.segments[0].tensors[0].unique().tolist()


@pytest.fixture
def transfers() -> Transfers:
    return Transfers(SimulatedStreams(lambda stream, nbytes: 0.0), Ring())


@pytest.mark.parametrize("what", ["the last write of the source", "the last write of the target", "its reads"])
def test_a_copy_waits_for(what: str, transfers: Transfers) -> None:
    source, target, over = storage(1.0), storage(2.0), HostEvent()
    if what == "its reads":
        target.note_read(HostEvent())
        target.memory.read.parts()[0].run(lambda: None)  # one that is over does not count
        target.note_read(over)
    else:
        (source if what == "the last write of the source" else target).note_write(over)
    copied = transfers.copy(source, target, NO_LABEL)
    assert not copied.done()
    assert values(target) == [2.0]
    over.run(lambda: None)
    copied.synchronize()
    assert values(target) == [1.0]


def test_a_write_is_after_all_reads_before_it(transfers: Transfers) -> None:
    """Nobody waits for those again: a device that is always behind would make a chain of them."""
    one, read = storage(1.0), HostEvent()
    one.note_read(read)
    one.note_write(HostEvent())
    assert one.read.done()


def test_copies_that_repeat_make_no_chain(transfers: Transfers) -> None:
    """A part that every step's gather writes, and nothing else does, kept the events of all steps."""
    source, target = storage(1.0), storage(2.0)
    begin = HostEvent()
    source.note_write(begin)
    for _ in range(5):
        transfers.copy(source, target, NO_LABEL)
    assert len(target.written.parts()) == 1
    begin.run(lambda: None)
    target.written.synchronize()
    assert values(target) == [1.0]
    assert source.read.done()


def test_a_copy_of_nothing_comes_after_what_it_would_have_followed(transfers: Transfers) -> None:
    same, written = storage(1.0), HostEvent()
    same.note_write(written)
    copied = transfers.copy(same, same, NO_LABEL)
    assert not copied.done()
    written.run(lambda: None)
    assert copied.done()
