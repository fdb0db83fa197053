"""Events, workers and the back ends that run on a host."""

import errno
import threading
import traceback
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from penstock.errors import CheckpointError, NvmeError
from penstock.ext.observe.observer import observe
from penstock.runtime.accelerator import AcceleratorStreams
from penstock.runtime.streams import (
    COLLECTIVE,
    DOWNLOAD,
    FETCH,
    READ,
    SAVE,
    UPDATE,
    UPLOAD,
    WRITE,
    FailedEvent,
    HostEvent,
    HostWorker,
    Streams,
    all_of,
)
from tests.lib.accelerator import FakeAccelerator
from tests.lib.streams import BrokenError, inline, simulated

CPU = torch.device("cpu")
STREAMS = (UPLOAD, DOWNLOAD, COLLECTIVE, UPDATE, READ, FETCH, WRITE)


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
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    fake = FakeAccelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


MAKERS = {"inline": inline, "late": simulated, "accelerator": lambda: AcceleratorStreams(CPU)}


@pytest.fixture
def any_streams(request: pytest.FixtureRequest, accelerator: FakeAccelerator) -> Iterator[Streams]:
    streams = MAKERS[request.param]()
    yield streams
    streams.close()


on = partial(pytest.mark.parametrize, "any_streams", indirect=True)


@pytest.mark.parametrize("name", MAKERS)
def test_close_runs_what_is_queued_and_ends_the_threads(name, accelerator):
    before = set(threading.enumerate())
    streams, transfer = MAKERS[name](), Transfer()
    ran: list[str] = []
    read = streams.submit(READ, lambda: transfer)
    for stream in STREAMS:
        streams.submit(stream, lambda name=stream: ran.append(name), after=(read,) if stream == UPLOAD else ())
    timer = threading.Timer(0.02, transfer.end)
    timer.start()
    streams.close()
    assert sorted(ran) == sorted(STREAMS)
    timer.join()
    assert set(threading.enumerate()) == before
    assert name != "accelerator" or accelerator.log[-1] == "host waits for all"


@on(MAKERS)
def test_an_error_surfaces_at_every_wait_and_at_those_of_what_follows_and_stops_nothing_else(any_streams):
    transfer, ran = Transfer(BrokenError("the disk is gone")), []
    read = any_streams.submit(READ, lambda: transfer)
    follows = any_streams.submit(UPLOAD, lambda: ran.append(1), after=(read,))
    other = any_streams.submit(UPDATE, lambda: ran.append(2))
    transfer.end()
    for event in (read, follows):
        for wait in (event.synchronize, event.wait, event.synchronize):
            with pytest.raises(BrokenError, match="the disk is gone"):
                wait()
        assert event.done()
    other.synchronize()
    assert ran == [2]
    any_streams.submit(UPLOAD, lambda: ran.append(3)).synchronize()
    assert ran == [2, 3], "its stream goes on"


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


def test_what_follows_a_transfer_on_its_stream_keeps_the_order_and_other_streams_do_not_wait():
    streams = inline()
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
    streams.close()


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


def test_a_worker_keeps_no_buffer_alive_while_it_waits():
    worker = HostWorker("test")
    buffer = torch.zeros(10)
    gone = weakref.ref(buffer)
    worker.submit(partial(zero, buffer)).synchronize()
    del buffer
    worker.submit(lambda: None).synchronize()  # the loop has let go of the work before
    assert gone() is None
    worker.close()
