"""Gradients on their way down: once, in the reduce dtype, cast and added on the host while the next tile comes."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.accelerator import AcceleratorStreams
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import COLLECTIVE, DOWNLOAD, ON_DEVICE, UPDATE, Event, HostEvent, Work
from penstock.tiers.staging import MEMORY_SLOTS
from penstock.trace import NO_LABEL, Label
from tests.lib.engines import TILE_BYTES, prepared
from tests.lib.models import stack
from tests.lib.streams import inline
from tests.parity.rows import Arithmetic, Movement, train
from tests.unit.machine.test_streams import FakeAccelerator

WIDTH = 96  # 2 * 96 * 97 gradients in bf16: 10 tiles of 4 KiB


class InTurn(SimulatedStreams):
    """Each tile is added only once the next one is down, or has been waited for in vain."""

    def __init__(self) -> None:
        super().__init__(lambda stream, nbytes: 0.0)
        self.down: list[threading.Event] = []
        self.begin(0)

    def begin(self, tiles: int) -> None:
        """So many tiles come, and nothing is waited for without."""
        self.down = [threading.Event() for _ in range(tiles)]
        self.coming = iter(self.down)
        self.added = 0
        self.waited_in_vain: list[int] = []

    def submit(self, stream: str, work: Work, *, label: Label = NO_LABEL, **rest: Any) -> Event:
        if not (label.verb == "save" and label.kind == "grad" and stream in (DOWNLOAD, UPDATE)):
            return super().submit(stream, work, label=label, **rest)
        if stream == DOWNLOAD:
            there = next(self.coming, threading.Event())

            def noted() -> Any:
                work()
                there.set()

            return super().submit(stream, noted, label=label, **rest)
        number = self.added
        self.added += 1

        def late() -> Any:
            if number + 1 < len(self.down) and not self.down[number + 1].wait(60):
                self.waited_in_vain.append(number)
            return work()

        return super().submit(stream, late, label=label, **rest)


def landing(streams: Any, **how: Any) -> tuple[nn.Module, penstock.Optimizer]:
    return prepared(lambda: stack(layers=2, width=WIDTH), streams, precision="bf16", **how)


def backward(model: nn.Module, optimizer: penstock.Optimizer, seed: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    optimizer.backward(model(x).square().mean())


def test_the_next_tile_comes_down_while_one_is_added() -> None:
    found = []
    for streams in (inline(), InTurn()):
        model, optimizer = landing(streams, grads="cpu", optimizer="cpu")
        backward(model, optimizer, 0)
        optimizer.synchronize()
        if isinstance(streams, InTurn):
            storages = [unit.trained.gradient.storage for unit in optimizer._engine.context.units]
            streams.begin(sum(segment.tiles for storage in storages for segment in storage.segments))
        backward(model, optimizer, 1)
        found.append([optimizer.full_grad(p) for p in model.parameters()])
        if isinstance(streams, InTurn):
            assert streams.added == len(streams.down) > 8
            assert streams.waited_in_vain == []
            rows = [row for row in optimizer.locations().rows if row.unit.startswith("(landing")]
            assert [row.nbytes for row in rows] == [TILE_BYTES] * MEMORY_SLOTS
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Counting(SimulatedStreams):
    """Counts what copies of gradients move."""

    def __init__(self) -> None:
        super().__init__(lambda stream, nbytes: 0.0)
        self.moved: dict[str, int] = {}

    def submit(self, stream: str, work: Work, *, label: Label = NO_LABEL, nbytes: int = 0, **rest: Any) -> Event:
        if label.verb == "save" and label.kind == "grad":
            if stream == DOWNLOAD:
                target, source = work.args
                nbytes = target.numel() * max(target.element_size(), source.element_size())  # as torch moves them
            self.moved[stream] = self.moved.get(stream, 0) + nbytes
        return super().submit(stream, work, label=label, nbytes=nbytes, **rest)


WHERE: Mapping[str, Any] = {
    "cpu": "cpu",
    "nvme": "nvme",
    "cut": {"device": 0.4, "cpu": 0.6},
    "cut, with files": {"cpu": 0.5, "nvme": 0.5},
}


@pytest.mark.parametrize("where", WHERE)
def test_gradients_summed_in_fp32_come_down_in_the_reduce_dtype(where: str) -> None:
    """Two bytes for each parameter, whatever the home holds. Cast on the device it would be four, and a temporary."""
    streams = Counting()
    model, optimizer = landing(streams, grads=WHERE[where], optimizer="cpu", grad_accumulation_dtype=torch.float32)
    backward(model, optimizer, 0)
    optimizer.synchronize()
    storages = [unit.trained.gradient.storage for unit in optimizer._engine.context.units]
    away = sum(segment.numel for storage in storages for segment in storage.segments if segment.tier != "device")
    assert streams.moved[DOWNLOAD] == 2 * away
    assert all(optimizer.full_grad(p).dtype == torch.float32 for p in model.parameters())


# How much of a step goes through a thread of the host

KIB = 1 << 10
STREAMED = Movement(params="cpu", grads="cpu", optimizer="cpu").but(tile_bytes=4 * KIB)
IN_FILES = Movement(params="nvme", grads="nvme", optimizer="nvme", overlap="forward").but(tile_bytes=16 * KIB)


@pytest.fixture
def streams() -> Iterator[AcceleratorStreams]:
    """Of a device that is always busy: nothing is over when it is asked for, and the host's kernels are its own."""
    fake = FakeAccelerator()
    fake.over = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: fake)
        streams = AcceleratorStreams(torch.device("cpu"))
    yield streams
    streams.close()


def count(streams: AcceleratorStreams, how: Movement, *, accumulation: int) -> tuple[Counter[str], Counter[str]]:
    """What is submitted to each of the device's streams, and what of it goes through a thread."""
    submitted: Counter[str] = Counter()
    deferred: Counter[str] = Counter()
    submit = streams._submit

    def counted(stream: str, *arguments: object) -> Event:
        event = submit(stream, *arguments)  # type: ignore[arg-type]
        if stream in ON_DEVICE:
            submitted[stream] += 1
            deferred[stream] += isinstance(event, HostEvent)
        return event

    streams._submit = counted  # type: ignore[method-assign, assignment]
    train(Arithmetic(accumulation=accumulation, clip=0.5), how, streams=streams, steps=3)
    return submitted, +deferred


@pytest.mark.parametrize(
    ("how", "most"),
    [
        # Nothing of the host is in between: everything is enqueued by whoever submits it.
        (STREAMED.but(streamed_updates=1.0), 0.0),
        # The host updates the other half, and takes turns in a ring with what is brought for that.
        (STREAMED.but(streamed_updates=0.5), 0.5),
        # Gathers and gradients pass files.
        (IN_FILES, 0.9),
    ],
    ids=["streamed", "half streamed", "in files"],
)
def test_what_follows_the_device_alone_goes_through_no_thread(
    streams: AcceleratorStreams, how: Movement, most: float
) -> None:
    submitted, deferred = count(streams, how, accumulation=1)
    assert deferred.total() <= most * submitted.total(), f"{dict(deferred)} of {dict(submitted)}"
    assert COLLECTIVE not in deferred, "reductions follow compute alone"
