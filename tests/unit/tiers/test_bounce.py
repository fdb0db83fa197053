"""Copies between pageable memory and a device: tile by tile, through a few buffers, never by the caller."""

import threading

import pytest
import torch
from torch import Tensor

from penstock.config import Tier
from penstock.runtime.accelerator import AcceleratorStreams
from penstock.runtime.streams import DONE, FETCH, READ, UPDATE, UPLOAD, Event, HostEvent, Streams
from penstock.tiers import transfer as module
from penstock.tiers.host import BOUNCE_READERS, BOUNCE_SLOTS
from penstock.tiers.storage import PASSING, Ring, RingSlot
from penstock.tiers.transfer import CopyRoute, CopyRoutes
from penstock.trace import NO_LABEL
from tests.lib.accelerator import FakeAccelerator
from tests.lib.streams import BreakingStreams, BrokenError, simulated

TILE = 64  # bytes


class Bounce:
    """Copies through bounce buffers, up to the device and down from it."""

    def __init__(self) -> None:
        self.rings = {reader: Ring() for reader in BOUNCE_READERS}
        for ring in self.rings.values():
            buffers = [{PASSING: torch.full((TILE,), 0xFF, dtype=torch.uint8)} for _ in range(BOUNCE_SLOTS)]
            ring.fill([RingSlot(buffer, buffer) for buffer in buffers])

    def copy(self, to: Tier, streams: Streams, target: Tensor, source: Tensor, after: Event, *, reader: str) -> Event:
        way = CopyRoute(to, True, self.rings)
        return CopyRoutes(streams, Ring(), reader).copy(way, (target,), (source,), after, NO_LABEL)


def test_updates_do_not_hold_gathers_up():
    """All updates are submitted at once, and wait; a gather that needs none of them goes through."""
    bounce, streams, over = Bounce(), simulated(most_seconds=0), HostEvent()
    update = bounce.copy(Tier.DEVICE, streams, torch.zeros(1000), torch.ones(1000), over, reader=FETCH)
    target = torch.zeros(1000)
    # The device's stream has an order of its own, so what is uploaded later waits; what goes down does not.
    bounce.copy(Tier.CPU, streams, target, torch.ones(1000), DONE, reader=READ).synchronize()
    assert target.all()
    assert not update.done()
    streams.submit(UPDATE, lambda: None).synchronize()
    over.run(lambda: None)
    update.synchronize()
    streams.close()


@pytest.mark.parametrize("of_device", [False, True])
def test_no_copy_of_pageable_memory_runs_on_the_callers_thread(monkeypatch, of_device):
    """Compute would stand still for it."""
    pageable, threads = torch.ones(100), set()

    def copy(target: Tensor, source: Tensor) -> None:
        if pageable.untyped_storage().data_ptr() in (t.untyped_storage().data_ptr() for t in (target, source)):
            threads.add(threading.current_thread().name)
        target.copy_(source)

    monkeypatch.setattr(module, "copy", copy)
    fake = FakeAccelerator()
    if of_device:
        monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    streams: Streams = AcceleratorStreams(torch.device("cpu")) if of_device else simulated(most_seconds=0)
    bounce, near = Bounce(), torch.zeros(100)
    bounce.copy(Tier.DEVICE, streams, near, pageable, DONE, reader=READ).synchronize()
    bounce.copy(Tier.CPU, streams, pageable, near, DONE, reader=READ).synchronize()
    assert threads == {"penstock-read", "penstock-write"}
    assert near.all()
    streams.close()


def test_a_copy_that_fails_is_raised_wherever_in_the_values_it_was():
    streams = BreakingStreams()
    bounce = Bounce()
    target = torch.zeros(1000)
    streams.broken = UPLOAD
    failed = bounce.copy(Tier.DEVICE, streams, target, torch.ones(1000), DONE, reader=READ)
    streams.broken = None
    with pytest.raises(BrokenError):
        failed.synchronize()
    streams.close()
