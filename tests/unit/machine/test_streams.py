"""Events, workers and the back ends that run on a host."""

import gc
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from penstock.machine.simulated import SimulatedStreams
from penstock.machine.streams import (
    COLLECTIVE,
    DONE,
    DOWNLOAD,
    UPDATE,
    UPLOAD,
    HostEvent,
    HostWorker,
    InlineStreams,
    Streams,
    copy,
    streams_for,
)

CPU = torch.device("cpu")
STREAMS = (UPLOAD, DOWNLOAD, COLLECTIVE, UPDATE)


def inline() -> Streams:
    return InlineStreams(CPU)


def late() -> Streams:
    return SimulatedStreams(lambda stream, nbytes: 0.005)


def at_once_on_threads() -> Streams:
    return SimulatedStreams(lambda stream, nbytes: 0.0)


BACK_ENDS = [inline, late, at_once_on_threads]


class BrokenError(Exception):
    pass


def fail() -> None:
    raise BrokenError("the disk is gone")


@pytest.mark.parametrize("make", BACK_ENDS)
def test_work_of_a_stream_runs_in_the_order_of_submission(make: type) -> None:
    streams = make()
    order: list[int] = []
    events = [streams.submit(UPDATE, lambda n=number: order.append(n)) for number in range(10)]
    events[-1].synchronize()
    assert order == list(range(10))
    assert all(event.done() for event in events)
    streams.close()


@pytest.mark.parametrize("make", BACK_ENDS)
def test_work_runs_after_the_events_it_names_on_any_stream(make: type) -> None:
    streams = make()
    order: list[str] = []
    first = streams.submit(DOWNLOAD, lambda: order.append(DOWNLOAD))
    second = streams.submit(COLLECTIVE, lambda: order.append(COLLECTIVE), after=(DONE, first))
    third = streams.submit(UPLOAD, lambda: order.append(UPLOAD), after=(first, second))
    third.wait()
    assert order == [DOWNLOAD, COLLECTIVE, UPLOAD]
    streams.close()


@pytest.mark.parametrize("make", BACK_ENDS)
def test_close_runs_what_is_queued_and_ends_the_threads(make: type) -> None:
    before = set(threading.enumerate())
    streams = make()
    ran: list[str] = []
    for stream in STREAMS:
        streams.submit(stream, lambda name=stream: ran.append(name))
    streams.close()
    assert sorted(ran) == sorted(STREAMS)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("make", [late, at_once_on_threads])
def test_an_error_surfaces_at_every_wait_and_stops_nothing_else(make: type) -> None:
    streams = make()
    event = streams.submit(UPLOAD, fail)
    for wait in (event.wait, event.synchronize, event.wait):
        with pytest.raises(BrokenError, match="the disk is gone"):
            wait()
    assert event.done()
    ran: list[int] = []
    streams.submit(UPLOAD, lambda: ran.append(1)).synchronize()
    assert ran == [1]
    streams.close()


@pytest.mark.parametrize("make", [late, at_once_on_threads])
def test_work_after_failed_work_does_not_run_and_fails_with_it(make: type) -> None:
    streams = make()
    ran: list[int] = []
    failed = streams.submit(COLLECTIVE, fail)
    after = streams.submit(DOWNLOAD, lambda: ran.append(1), after=(failed,))
    with pytest.raises(BrokenError):
        after.synchronize()
    assert ran == []
    streams.close()


def test_inline_work_fails_where_it_is_submitted() -> None:
    with pytest.raises(BrokenError):
        inline().submit(UPLOAD, fail)


def test_only_compute_on_the_host_reaches_the_cpu_tier() -> None:
    assert inline().aliases_host
    streams = late()
    assert not streams.aliases_host
    streams.close()
    assert isinstance(streams_for(CPU), InlineStreams)


def test_done_is_done() -> None:
    DONE.wait()
    DONE.synchronize()
    assert DONE.done()


def test_a_retired_buffer_gives_its_memory_back_and_keeps_its_storage() -> None:
    """Autograd's saved views must see the bytes of the next gather."""
    streams = inline()
    buffer = torch.ones(1000)
    view, storage = buffer[10:20].view(2, 5), buffer.untyped_storage()
    streams.retire(buffer)
    assert storage.nbytes() == 0
    streams.lease(buffer)
    assert storage.nbytes() == 4000
    buffer.fill_(3)
    assert buffer.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    assert view.eq(3).all()


def test_copy_copies() -> None:
    target = torch.zeros(3)
    copy(target, torch.arange(3.0))
    assert target.tolist() == [0, 1, 2]


def zero(buffer: torch.Tensor) -> None:
    buffer.zero_()


class TestHostWorker:
    def test_runs_in_order_on_its_own_thread(self) -> None:
        worker = HostWorker("test")
        seen: list[tuple[int, str]] = []
        for number in range(5):
            event = worker.submit(lambda n=number: seen.append((n, threading.current_thread().name)))
        event.synchronize()
        assert seen == [(number, "penstock-test") for number in range(5)]
        worker.close()

    def test_uses_the_event_it_is_given(self) -> None:
        worker = HostWorker("test")
        event = HostEvent()
        assert not event.done()
        assert worker.submit(lambda: None, event) is event
        event.wait()
        assert event.done()
        worker.close()

    def test_close_finishes_the_queue_and_joins(self) -> None:
        worker = HostWorker("test")
        ran: list[int] = []
        for number in range(3):
            worker.submit(lambda n=number: (time.sleep(0.002), ran.append(n)))
        worker.close()
        assert ran == [0, 1, 2]
        assert not any(thread.name == "penstock-test" for thread in threading.enumerate())

    def test_keeps_no_buffer_alive_while_it_waits(self) -> None:
        worker = HostWorker("test")
        buffer = torch.zeros(10)
        gone = weakref.ref(buffer)
        worker.submit(partial(zero, buffer)).synchronize()
        del buffer
        worker.submit(lambda: None).synchronize()  # the loop has let go of the work before
        gc.collect()
        assert gone() is None
        worker.close()
