"""The simulated back end hides no missing wait: what is read too early is NaN."""

import threading

import pytest
import torch

from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DOWNLOAD, UPDATE, UPLOAD, copy
from tests.parity.waits import DroppingStreams


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


def test_what_work_overwrites_is_nan_until_it_has_run(streams, gate):
    target, begun = torch.zeros(4), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait()
        copy(target, torch.ones(4))

    event = streams.submit(UPLOAD, work, writes=(target,))
    begun.wait()
    assert target.isnan().all()
    assert not event.done()
    gate.set()
    event.wait()
    assert target.eq(1).all()


def test_poison_comes_after_the_work_that_this_one_follows(streams, gate):
    shared, read = torch.ones(4), torch.zeros(4)

    def slow_read() -> None:
        gate.wait()
        copy(read, shared)

    reading = streams.submit(DOWNLOAD, slow_read)
    overwriting = streams.submit(
        UPLOAD, lambda: copy(shared, torch.full((4,), 2.0)), after=(reading,), writes=(shared,)
    )
    gate.set()
    overwriting.synchronize()
    assert read.eq(1).all()
    assert shared.eq(2).all()


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


def test_every_wait_is_noted_by_its_place_and_can_be_dropped(gate):
    def use(streams: DroppingStreams) -> bool:
        event = streams.submit(UPLOAD, lambda: wait_for(gate))
        later = streams.submit(DOWNLOAD, lambda: None, after=(event,))
        event.wait()
        return later.done() or not gate.is_set()

    streams = DroppingStreams(lambda stream, nbytes: 0.0)
    threading.Timer(0.02, gate.set).start()
    use(streams)
    streams.close()
    line = use.__code__.co_firstlineno
    name = use.__code__.co_filename
    assert streams.seen == {f"{name}:{line + 2}#0", f"{name}:{line + 3}"}

    gate.clear()
    dropping = DroppingStreams(lambda stream, nbytes: 0.0, f"{name}:{line + 3}")
    assert use(dropping), "returns while the gate is closed"
    assert not gate.is_set()
    gate.set()
    dropping.close()


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
