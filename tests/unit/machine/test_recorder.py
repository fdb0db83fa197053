"""What an observer sees of each back end: when work ran, what it followed, who waited for it."""

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from penstock.ext.observe import observer
from penstock.ext.observe.observer import WaitSums, observe
from penstock.ext.observe.timeline import Recording, TraceTimeline
from penstock.runtime import hardware
from penstock.runtime.accelerator import AcceleratorStreams
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import (
    DOWNLOAD,
    FETCH,
    READ,
    UPDATE,
    UPLOAD,
    WRITE,
    Event,
    InlineStreams,
    Streams,
    all_of,
)
from penstock.trace import Label
from tests.lib.accelerator import FakeAccelerator
from tests.lib.streams import BrokenError, simulated, until_waited_for

CPU = torch.device("cpu")


class Transfer:
    """A read or write that is over since it was made."""

    def __init__(self) -> None:
        self.ended = time.monotonic()

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...


def zero(buffer: torch.Tensor) -> None:
    buffer.zero_()


def hold(gate: threading.Event) -> None:
    gate.wait()


def sleep() -> None:
    time.sleep(0.002)


@pytest.fixture
def inline() -> Iterator[InlineStreams]:
    streams = InlineStreams(CPU)
    yield streams
    streams.close()


@pytest.fixture
def late() -> Iterator[SimulatedStreams]:
    streams = simulated(most_seconds=0)
    yield streams
    streams.close()


@contextmanager
def recorded(streams: Streams, **options: Any) -> Iterator[list[Recording]]:
    """The recording is in the list after the block."""
    found: list[Recording] = []
    watching = observe(streams)
    watching.begin_trace(**options)
    yield found
    found.append(watching.end_trace(wait=True))


class TestWork:
    def test_a_transfer_is_over_when_it_is_over_not_when_somebody_looks(self, inline):
        transfer = Transfer()
        with recorded(inline) as found:
            event = inline.submit(READ, lambda: transfer, nbytes=8)
            sleep()
            event.wait()
        (span,) = found[0].spans
        assert span.stop == transfer.ended

    def test_work_that_failed_is_in_it_and_its_error_where_it_was(self, late):
        def fail() -> None:
            raise BrokenError

        with recorded(late) as found:
            failed = late.submit(READ, fail)
            follows = late.submit(UPLOAD, lambda: None, after=(failed,))
            for event in (failed, follows):
                with pytest.raises(BrokenError):
                    event.wait()
                with pytest.raises(BrokenError):
                    event.check()
        assert [span.row for span in found[0].spans] == [READ], "what never ran is not"

    def test_buffers_of_work_that_has_run_are_let_go_of(self, late):
        buffer = torch.zeros(10)
        gone = weakref.ref(buffer)
        with recorded(late):
            event = late.submit(UPLOAD, partial(zero, buffer))
            event.wait()
            late.submit(UPLOAD, lambda: None).wait()
            del buffer
            assert gone() is None

    def test_events_go_on_after_the_trace(self, late):
        """They stay with units, and must not keep the notes alive."""
        with recorded(late) as found:
            first = late.submit(READ, lambda: None)
            event = late.submit(UPLOAD, lambda: None, after=(first,))
        event.wait()
        assert event.done()
        late.submit(DOWNLOAD, lambda: None, after=(event,)).synchronize()
        assert len(found[0].spans) == 2
        job = event.job  # type: ignore[attr-defined]
        assert job.before == ()


class TestWaits:
    """Compute and the host are the same where compute is the host."""

    def test_compute_and_the_host_wait(self, late):
        with recorded(late) as found:
            late.submit(UPLOAD, until_waited_for).wait()
            late.submit(DOWNLOAD, until_waited_for).synchronize()
            late.submit(WRITE, until_waited_for, label=Label("update", "a"))  # what is left at the end
        waits = found[0].waits
        assert [(wait.span, wait.by_host) for wait in waits[:2]] == [(0, False), (1, False)]
        assert [wait.span for wait in waits] == [0, 1, 2]
        assert all(wait.start < wait.stop for wait in waits)
        assert "update a (write)" in TraceTimeline(found[0]).summary().waits

    def test_a_wait_for_what_is_done_is_none(self, late):
        with recorded(late) as found:
            event = late.submit(UPLOAD, lambda: None)
            while not event.done():
                sleep()
            event.wait()
        assert found[0].waits == []

    def test_work_that_waits_for_work_is_none_either(self, late):
        """Nor is work that waits inside, as an update does for the copies it submits."""
        with recorded(late) as found:
            read = late.submit(READ, sleep)
            update = late.submit(
                UPDATE, lambda: late.submit(DOWNLOAD, sleep).synchronize(), after=(read, all_of([read, read]))
            )
            while not update.done():
                sleep()
        assert found[0].waits == []
        assert sorted(span.row for span in found[0].spans) == [DOWNLOAD, READ, UPDATE]

    def test_every_event_of_several_is_waited_for(self, late):
        with recorded(late) as found:
            second: list[Event] = []
            first = late.submit(READ, until_waited_for)
            second.append(late.submit(UPLOAD, partial(until_waited_for, second)))
            all_of([first, *second]).wait()
        assert [wait.span for wait in found[0].waits] == [0, 1]


class TestEnd:
    def test_work_under_way_is_left_out_where_nobody_may_wait(self, late):
        gate = threading.Event()
        watching = observe(late)
        watching.begin_trace()
        late.submit(READ, lambda: None, label=Label("done")).wait()
        late.submit(READ, partial(hold, gate), label=Label("under way"))
        late.submit(UPLOAD, lambda: None, label=Label("also done")).wait()
        found = watching.end_trace(wait=False)
        assert late.observer is None
        gate.set()
        assert sorted(str(span.label) for span in found.spans) == ["also done", "done"]

    @pytest.mark.parametrize("notes", ["spans", "turns"])
    def test_notes_are_bounded_and_the_trace_ends_there(self, inline, notes):
        with recorded(inline, limit=3) as found:
            for number in range(10):
                if notes == "spans":
                    inline.submit(UPLOAD, lambda: None, label=Label(str(number)))
                else:
                    inline.observer.turn_to(Label(str(number)))
            ended = time.monotonic()
            sleep()
        assert not found[0].complete
        assert found[0].stop <= ended
        assert [str(span.label) for span in found[0].spans] == (["0", "1", "2"] if notes == "spans" else [])
        assert [str(what) for _, what in found[0].compute] == ([] if notes == "spans" else ["0", "1", "2"])


class TestDevices:
    """The device's own time, by the events of its streams; nobody waits for it before the end."""

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
        fake = FakeAccelerator()
        monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
        monkeypatch.setattr(hardware, "time", fake.time)
        monkeypatch.setattr(observer, "time", fake.time)
        return fake

    @pytest.fixture
    def streams(self, device: FakeAccelerator) -> Iterator[AcceleratorStreams]:
        streams = AcceleratorStreams(CPU)
        yield streams
        streams.close()

    def test_spans_and_waits_are_in_the_devices_time(self, streams, device):
        with recorded(streams) as found:
            streams.observer.turn_to(Label("forward", "a"))
            device.work(3)
            upload = streams.submit(UPLOAD, partial(device.work, 4), label=Label("gather", "a"), nbytes=8)
            device.work(1)
            upload.wait()
            device.work(2)
            streams.observer.turn_to(Label())
            assert device.time.now == 1000, "nobody waited"
        seen = found[0]
        assert (seen.start, seen.stop) == (1000, 1009)
        assert [(s.row, s.start, s.stop) for s in seen.spans] == [(UPLOAD, 1003, 1007)]
        assert not seen.spans[0].inline
        assert [(w.start, w.stop, w.by_host) for w in seen.waits if not w.by_host] == [(1004, 1007, False)]
        summary = TraceTimeline(seen).summary()
        assert summary.rows["compute"].busy_seconds == pytest.approx(6)
        assert summary.waits == {"gather a (upload)": pytest.approx(3)}

    def test_streams_that_wait_for_each_other_are_no_waits_of_compute(self, streams, device):
        with recorded(streams) as found:
            upload = streams.submit(UPLOAD, partial(device.work, 4))
            streams.submit(DOWNLOAD, partial(device.work, 1), after=(all_of([upload, upload]),))
            streams.submit(DOWNLOAD, partial(device.work, 1), after=(upload,))
            for worker in streams._workers.values():
                worker.submit(lambda: None).synchronize()
        assert [(s.row, s.start, s.stop, s.after) for s in found[0].spans] == [
            (UPLOAD, 1000, 1004, ()),
            (DOWNLOAD, 1004, 1005, (0, 0)),
            (DOWNLOAD, 1005, 1006, (0,)),
        ]
        assert [wait for wait in found[0].waits if not wait.by_host] == []

    def test_device_work_after_device_work_is_enqueued_by_its_caller(self, streams, device):
        """As without an observer: a watched event must not make a thread of it."""
        threads = []
        with recorded(streams):
            upload = streams.submit(UPLOAD, partial(device.work, 4))
            streams.submit(DOWNLOAD, lambda: threads.append(threading.current_thread()), after=(upload,))
            assert threads == [threading.current_thread()]

    def test_marks_that_the_device_has_not_reached_have_no_time(self, streams, device):
        watching = observe(streams)
        watching.begin_trace()
        watching.turn_to(Label("forward", "a"))
        device.work(3)
        watching.turn_to(Label("forward", "b"))
        found = watching.end_trace(wait=False)
        assert found.compute == [], "the first is where the trace ends"


def test_a_chain_of_events_is_let_go_of() -> None:
    """Each event knows what it follows, and that what it followed: kept, a run would keep all of its steps."""
    streams = simulated(most_seconds=0.0)
    observe(streams).waits = WaitSums(streams)
    go = threading.Event()
    first = streams.submit(UPDATE, partial(hold, go))
    gone = weakref.finalize(streams.submit(FETCH, lambda: None, after=[first]), lambda: None)
    last = first
    for _ in range(50):
        last = streams.submit(UPLOAD, lambda: None, after=[last])
    go.set()
    last.synchronize()
    streams.submit(UPLOAD, lambda: None, after=[last]).synchronize()
    streams.submit(UPLOAD, lambda: None).synchronize()
    assert not gone.alive
    assert last.job.before == ()  # type: ignore[attr-defined]
    streams.close()
