"""How much of a step's device work goes through a thread of the host, which only what the host does first should."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from penstock.runtime.accelerator import AcceleratorStreams
from penstock.runtime.streams import COLLECTIVE, ON_DEVICE, Event, HostEvent
from tests.parity.rows import Arithmetic, Movement, train
from tests.unit.machine.test_streams import FakeAccelerator

KIB = 1 << 10
ON_CPU = Movement(params="cpu", grads="cpu", optimizer="cpu").but(tile_bytes=4 * KIB)
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
        (ON_CPU.but(streamed_updates=1.0), 0.0),
        # The host updates the other half, and takes turns in a ring with what is brought for that.
        (ON_CPU.but(streamed_updates=0.5), 0.5),
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
