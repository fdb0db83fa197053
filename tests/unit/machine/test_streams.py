"""Events, workers and the back ends that run on a host."""

import errno
import gc
import threading
import traceback
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from penstock.errors import CheckpointError, NvmeError
from penstock.ext.observe.observer import observe
from penstock.runtime.accelerator import AcceleratorStreams
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import (
    COLLECTIVE,
    DONE,
    DOWNLOAD,
    FETCH,
    READ,
    SAVE,
    UPDATE,
    UPLOAD,
    WRITE,
    Event,
    FailedEvent,
    HostEvent,
    HostWorker,
    InlineStreams,
    Streams,
    all_of,
)
from tests.lib.accelerator import FakeAccelerator

CPU = torch.device("cpu")
STREAMS = (UPLOAD, DOWNLOAD, COLLECTIVE, UPDATE, READ, FETCH, WRITE)


def inline() -> Streams:
    return InlineStreams(CPU)


def late() -> Streams:
    return SimulatedStreams(lambda stream, nbytes: 0.005)


BACK_ENDS = [inline, late]


class BrokenError(Exception):
    pass


def fail() -> None:
    raise BrokenError("the disk is gone")


@pytest.mark.parametrize("make", BACK_ENDS)
def test_work_of_a_stream_runs_in_the_order_of_submission(make):
    streams = make()
    order: list[int] = []
    events = [streams.submit(UPDATE, lambda n=number: order.append(n)) for number in range(10)]
    events[-1].synchronize()
    assert order == list(range(10))
    assert all(event.done() for event in events)
    streams.close()


@pytest.mark.parametrize("make", BACK_ENDS)
def test_work_runs_after_the_events_it_names_on_any_stream(make):
    streams = make()
    order: list[str] = []
    first = streams.submit(DOWNLOAD, lambda: order.append(DOWNLOAD))
    second = streams.submit(COLLECTIVE, lambda: order.append(COLLECTIVE), after=(DONE, first))
    third = streams.submit(UPLOAD, lambda: order.append(UPLOAD), after=(first, second))
    third.wait()
    assert order == [DOWNLOAD, COLLECTIVE, UPLOAD]
    streams.close()


@pytest.mark.parametrize("make", BACK_ENDS)
def test_close_runs_what_is_queued_and_ends_the_threads(make):
    before = set(threading.enumerate())
    streams = make()
    ran: list[str] = []
    for stream in STREAMS:
        streams.submit(stream, lambda name=stream: ran.append(name))
    streams.close()
    assert sorted(ran) == sorted(STREAMS)
    assert set(threading.enumerate()) == before


def test_a_retired_buffer_gives_its_memory_back_and_keeps_its_storage():
    """Autograd's saved views must see the bytes of the next gather."""
    streams = inline()
    buffer = torch.ones(1000)
    view, storage = buffer[10:20].view(2, 5), buffer.untyped_storage()
    streams.deallocate(buffer)
    assert storage.nbytes() == 0
    streams.allocate(buffer)
    assert storage.nbytes() == 4000
    buffer.fill_(3)
    assert buffer.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    assert view.eq(3).all()


def zero(buffer: torch.Tensor) -> None:
    buffer.zero_()


class Transfer:
    """A read or write that goes on until it is ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self._over = threading.Event()
        self._error = error

    def end(self) -> None:
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        assert self._over.wait(60)
        if self._error is not None:
            raise self._error


@pytest.fixture
def streams() -> Iterator[InlineStreams]:
    streams = InlineStreams(CPU)
    yield streams
    streams.close()


class TestInlineStreamsBesideTransfers:
    def test_what_follows_on_its_stream_keeps_the_order_and_other_streams_do_not_wait(self, streams):
        transfer, order = Transfer(), []
        read = streams.submit(READ, lambda: transfer)
        streams.submit(UPDATE, lambda: order.append("after the read"), after=(read,))
        last = streams.submit(UPDATE, lambda: order.append("next"))
        streams.submit(UPLOAD, lambda: order.append("elsewhere"))
        assert order == ["elsewhere"]
        transfer.end()
        last.synchronize()
        assert order == ["elsewhere", "after the read", "next"]
        streams.submit(UPDATE, lambda: order.append(threading.current_thread().name))
        assert order[-1] == threading.current_thread().name, "once its thread is idle, at once again"

    def test_chains_over_streams_keep_their_order(self, streams):
        """As in the pipeline of tiles: read, use, write, and the slot's next read after that."""
        order: list[str] = []
        reads, writes = [Transfer() for _ in range(3)], [Transfer() for _ in range(3)]

        def start(name: str, transfer: Transfer) -> Transfer:
            order.append(name)
            return transfer

        free: Event = DONE
        for number in range(3):
            read = streams.submit(FETCH, partial(start, f"read {number}", reads[number]), after=(free,))
            used = streams.submit(UPDATE, partial(order.append, f"use {number}"), after=(read,))
            free = streams.submit(WRITE, partial(start, f"write {number}", writes[number]), after=(used,))
        for transfer in (*writes[::-1], *reads[::-1]):
            transfer.end()
        free.synchronize()
        assert order == [f"{what} {number}" for number in range(3) for what in ("read", "use", "write")]

    def test_an_error_of_a_transfer_reaches_every_wait_and_what_comes_after_it(self, streams):
        transfer, ran = Transfer(BrokenError("the disk is gone")), []
        read = streams.submit(READ, lambda: transfer)
        event = streams.submit(UPDATE, lambda: ran.append(1), after=(read,))
        other = streams.submit(UPDATE, lambda: ran.append(2))
        transfer.end()
        for failed in (read, event, event):
            with pytest.raises(BrokenError, match="the disk is gone"):
                failed.synchronize()
        with pytest.raises(BrokenError):
            event.wait()
        other.synchronize()
        assert ran == [2], "what does not need it goes on"

    def test_a_collective_after_a_read_is_issued_by_its_caller_before_what_that_does_next(self):
        streams = InlineStreams(CPU)
        transfer, gathering, order = Transfer(), Transfer(), []
        read = streams.submit(READ, lambda: transfer)
        copied = streams.submit(UPLOAD, lambda: order.append("copied"), after=(read,))
        timer = threading.Timer(0.02, transfer.end)
        timer.start()

        def gather() -> Transfer:
            order.append(threading.get_ident())
            return gathering

        gathered = streams.submit(COLLECTIVE, gather, after=(copied,))
        order.append("the user's")
        assert order == ["copied", threading.get_ident(), "the user's"]
        assert not gathered.done(), "it goes on"
        gathering.end()
        gathered.wait()
        timer.join()
        streams.close()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    fake = FakeAccelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "no such luck", "a file"),
        OSError("no such luck"),
        NvmeError("no such luck", file="a file", offset=3, errno=errno.EIO),
        CheckpointError("no such luck", field="a field"),
        KeyError("no such luck"),
    ],
    ids=repr,
)
def test_an_error_keeps_no_frames_of_those_who_waited_for_it(error):
    """What they refer to may refer to the event, through what autograd has recorded: nothing of it would ever go."""
    said = str(error), vars(error), getattr(error, "errno", None), getattr(error, "filename", None)

    def fail() -> None:
        raise error

    event = HostEvent()
    event.run(fail)
    own = traceback.extract_tb(event._error.__traceback__)
    for wait in (event.wait, event.synchronize, event.check, FailedEvent(event._error).wait):
        with pytest.raises(type(error), match="no such luck") as caught:
            wait()
        again = caught.value
        assert (str(again), vars(again), getattr(again, "errno", None), getattr(again, "filename", None)) == said
        assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-1] == "fail"
    assert traceback.extract_tb(event._error.__traceback__) == own


class TestAcceleratorStreams:
    """Without a device: what is enqueued where, by which thread, in which order."""

    @pytest.fixture
    def streams(self, accelerator: FakeAccelerator) -> Iterator[AcceleratorStreams]:
        streams = AcceleratorStreams(CPU)
        yield streams
        streams.close()

    def test_device_work_is_enqueued_where_it_is_submitted(self, streams, accelerator):
        accelerator.over = False  # the device is busy: nobody waits for it
        first = streams.submit(UPLOAD, lambda: accelerator.log.append("copy on " + accelerator.current_stream().name))
        second = streams.submit(COLLECTIVE, lambda: accelerator.log.append("gather"), after=(first,))
        second.wait()
        assert accelerator.log == [
            "upload waits for compute",
            "copy on upload",
            "collective waits for compute",
            "collective waits for upload",
            "gather",
            "compute waits for collective",
        ]
        assert not second.done()

    def test_device_work_after_a_read_is_enqueued_when_that_is_over_and_so_is_what_follows(self, streams, accelerator):
        transfer, names = Transfer(), []
        read = streams.submit(READ, lambda: transfer)
        copied = streams.submit(UPLOAD, lambda: names.append(threading.current_thread().name), after=(read,))
        following = streams.submit(UPLOAD, lambda: names.append("second"))
        elsewhere = streams.submit(DOWNLOAD, lambda: names.append("elsewhere"))
        assert names == ["elsewhere"]
        assert elsewhere.done()
        assert not copied.done()
        assert not following.done()
        transfer.end()
        following.synchronize()
        assert names == ["elsewhere", "penstock-upload", "second"]
        assert copied.done()
        copied.wait()
        assert accelerator.log[-1] == "compute waits for upload"
        streams.submit(UPLOAD, lambda: names.append(threading.current_thread().name))
        assert names[-1] == threading.current_thread().name

    def test_a_collective_after_a_read_is_enqueued_by_its_caller_before_what_that_does_next(self, streams, accelerator):
        """And not by a thread, at a time of its own on each rank."""
        transfer, order = Transfer(), []
        read = streams.submit(READ, lambda: transfer)
        copied = streams.submit(UPLOAD, lambda: order.append("copied"), after=(read,))
        timer = threading.Timer(0.02, transfer.end)
        timer.start()
        gathered = streams.submit(COLLECTIVE, lambda: order.append(threading.get_ident()), after=(copied,))
        order.append("the user's")
        assert order == ["copied", threading.get_ident(), "the user's"]
        assert "collective waits for upload" in accelerator.log
        assert gathered.done()
        timer.join()

    def test_what_the_device_alone_waits_for_is_enqueued_at_once(self, streams, accelerator):
        """Also where it is one event of several, and where a thread has enqueued it meanwhile."""
        transfer, names = Transfer(), []
        read = streams.submit(READ, lambda: transfer)
        deferred = streams.submit(UPLOAD, lambda: names.append(threading.current_thread().name), after=(read,))
        transfer.end()
        deferred.synchronize()
        accelerator.over = False  # the device is busy
        both = all_of([streams.submit(UPLOAD, lambda: None), all_of([deferred, streams.submit(SAVE, lambda: None)])])
        accelerator.log.clear()
        streams.submit(DOWNLOAD, lambda: names.append(threading.current_thread().name), after=(both,))
        assert names == ["penstock-upload", threading.current_thread().name]
        waits = ["compute", "upload", "upload", "save"]
        assert accelerator.log == [f"download waits for {stream}" for stream in waits]

    def test_watched_events_that_outlive_their_trace_defer_nothing(self, streams, accelerator):
        observer = observe(streams)
        observer.begin_trace()
        watched = streams.submit(UPLOAD, lambda: None)
        observer.end_trace(wait=False)
        assert streams.observer is None
        accelerator.over = False
        names: list[str] = []
        streams.submit(DOWNLOAD, lambda: names.append(threading.current_thread().name), after=(watched,))
        assert names == [threading.current_thread().name]

    def test_a_thread_of_ours_has_no_compute(self, streams, accelerator):
        """Its current stream is the default one, and training may be on another."""
        worker = HostWorker("test")
        moment = streams.now()
        accelerator.log.clear()
        worker.submit(lambda: streams.submit(SAVE, lambda: None) and None).synchronize()
        assert accelerator.log == []
        worker.submit(lambda: streams.submit(SAVE, lambda: None, after=(moment,)) and None).synchronize()
        assert accelerator.log == ["save waits for compute"]
        for wrong in (streams.now, moment.wait):
            with pytest.raises(AssertionError, match="a thread of ours has no compute"):
                worker.submit(lambda wrong=wrong: wrong() and None).synchronize()
        worker.close()

    def test_compute_that_turns_to_another_stream_follows_the_one_before(self, streams, accelerator):
        streams.submit(UPLOAD, lambda: None)
        with accelerator.stream(accelerator.Stream("another")):
            accelerator.log.clear()
            streams.follow_current_stream()
            streams.follow_current_stream()
            assert accelerator.log == ["another waits for compute"]
            streams.submit(UPLOAD, lambda: None)
        assert accelerator.log[1:] == ["upload waits for another"]

    def test_gathers_have_memory_of_the_uploads(self, streams, accelerator):
        seen = []
        storage = torch.UntypedStorage.resize_

        def resize(self: Any, nbytes: int) -> None:
            seen.append((accelerator.current_stream().name, nbytes))
            storage(self, nbytes)

        buffer = streams.make_buffer(4, torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", resize)
            streams.deallocate(buffer)
            assert accelerator.log == ["upload waits for compute"], "compute may still read it"
            streams.allocate(buffer)
            streams.allocate(buffer)
        assert seen == [("upload", 0), ("upload", 16)]

    def test_what_is_given_up_goes_when_its_event_is_over(self, streams, accelerator):
        accelerator.over = False
        buffer = torch.zeros(3)
        gone = weakref.ref(buffer)
        streams.keep_alive((buffer,), until=streams.submit(UPLOAD, partial(zero, buffer)))
        del buffer
        streams.submit(DOWNLOAD, lambda: None)
        assert gone() is not None, "the device is not past it"
        accelerator.over = True
        streams.submit(DOWNLOAD, lambda: None)
        assert gone() is None

    def test_a_read_that_failed_fails_what_was_to_be_enqueued_after_it(self, streams, accelerator):
        transfer, ran = Transfer(BrokenError("the disk is gone")), []
        read = streams.submit(READ, lambda: transfer)
        copied = streams.submit(UPLOAD, lambda: ran.append(1), after=(read,))
        transfer.end()
        for wait in (copied.wait, copied.synchronize):
            with pytest.raises(BrokenError, match="the disk is gone"):
                wait()
        assert copied.done()
        assert ran == []

    def test_close_enqueues_what_waits_and_finishes_the_device(self, accelerator):
        threads = set(threading.enumerate())
        streams = AcceleratorStreams(CPU)
        transfer, ran = Transfer(), []
        read = streams.submit(READ, lambda: transfer)
        streams.submit(UPLOAD, lambda: ran.append(1), after=(read,))
        transfer.end()
        streams.close()
        assert ran == [1]
        assert accelerator.log[-1] == "host waits for all"
        assert set(threading.enumerate()) == threads


def test_a_worker_keeps_no_buffer_alive_while_it_waits():
    worker = HostWorker("test")
    buffer = torch.zeros(10)
    gone = weakref.ref(buffer)
    worker.submit(partial(zero, buffer)).synchronize()
    del buffer
    worker.submit(lambda: None).synchronize()  # the loop has let go of the work before
    gc.collect()
    assert gone() is None
    worker.close()
