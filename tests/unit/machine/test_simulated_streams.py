"""The simulated back end hides no missing wait: what is read too early is NaN."""

import threading

import pytest
import torch

from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DOWNLOAD, UPDATE, UPLOAD


def wait_for(gate: threading.Event) -> None:
    gate.wait()


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def streams(gate: threading.Event) -> SimulatedStreams:
    """Streams whose uploads wait for the gate once they have begun."""
    streams = SimulatedStreams(lambda stream, nbytes: 0.0)
    yield streams
    gate.set()
    streams.close()


def test_a_buffer_is_nan_from_lease_and_after_release(streams):
    buffer = torch.ones(4)
    streams.allocate(buffer)
    assert buffer.isnan().all()
    buffer.fill_(1)
    streams.deallocate(buffer)
    assert buffer.isnan().all()


@pytest.mark.parametrize("verb", ["allocate", "deallocate"])
def test_a_buffer_that_work_still_writes_cannot_change_hands(streams, gate, verb):
    buffer = torch.ones(8)
    event = streams.submit(UPLOAD, lambda: wait_for(gate), writes=(buffer[2:4],))
    with pytest.raises(AssertionError, match="being written"):
        getattr(streams, verb)(buffer)
    gate.set()
    event.wait()
    getattr(streams, verb)(buffer)


def test_close_runs_an_update_that_still_has_copies_to_submit():
    """Copies were closed before updates: the update waited for its copy forever, and close for the update."""
    streams = SimulatedStreams(lambda stream, nbytes: 0.0)
    gate = threading.Event()
    copied = []

    def update() -> None:
        gate.wait()
        streams.submit(DOWNLOAD, lambda: copied.append(True)).synchronize()

    streams.submit(UPDATE, update)
    threading.Timer(0.05, gate.set).start()
    closing = threading.Thread(target=streams.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert copied == [True]
