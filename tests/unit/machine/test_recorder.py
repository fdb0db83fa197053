"""What an observer sees of each back end: when work ran, what it followed, who waited for it."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from penstock.ext.observe import observer
from penstock.ext.observe.observer import observe
from penstock.ext.observe.timeline import Recording, TraceSpan, TraceTimeline
from penstock.runtime import hardware
from penstock.runtime.accelerator import AcceleratorStreams
from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import (
    DONE,
    DOWNLOAD,
    READ,
    UPDATE,
    UPLOAD,
    WRITE,
    HostEvent,
    InlineStreams,
    PendingEvent,
    Streams,
    all_of,
)
from penstock.trace import Label

CPU = torch.device("cpu")
TICK = 0.02  # seconds that are told from what the machine adds


class BrokenError(Exception):
    pass


class Transfer:
    """A read or write that takes some time after it was started."""

    def __init__(self, seconds: float) -> None:
        self.ended = time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() >= self.ended

    def wait(self) -> None:
        time.sleep(max(0.0, self.ended - time.monotonic()))


def zero(buffer: torch.Tensor) -> None:
    buffer.zero_()


def hold(gate: threading.Event) -> None:
    gate.wait()


def sleep(seconds: float = TICK) -> None:
    time.sleep(seconds)


@pytest.fixture
def inline() -> Iterator[InlineStreams]:
    streams = InlineStreams(CPU)
    yield streams
    streams.close()


@pytest.fixture
def late() -> Iterator[SimulatedStreams]:
    """Every piece of work takes a tick."""
    streams = SimulatedStreams(lambda stream, nbytes: TICK)
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


def seconds(span: TraceSpan) -> float:
    return span.stop - span.start


class TestWork:
    def test_inline_work_is_seen_where_it_runs(self, inline: InlineStreams) -> None:
        with recorded(inline) as found:
            assert inline.submit(UPLOAD, sleep, nbytes=12, label=Label("gather", "a")) is DONE
        (span,) = found[0].spans
        assert (span.row, str(span.label), span.nbytes, span.inline) == (UPLOAD, "gather a", 12, True)
        assert seconds(span) >= TICK
        assert found[0].start <= span.start < span.stop <= found[0].stop

    def test_late_work_is_seen_with_its_delay_on_its_stream(self, late: SimulatedStreams) -> None:
        with recorded(late) as found:
            first = late.submit(READ, lambda: None, label=Label("gather", "a", tile=0))
            late.submit(UPLOAD, lambda: None, after=(DONE, first), label=Label("gather", "a", tile=0))
        read, upload = found[0].spans
        assert not read.inline
        assert seconds(read) >= TICK
        assert seconds(upload) >= TICK
        assert upload.start >= read.stop
        assert (read.after, upload.after) == ((), (0,))

    def test_what_follows_several_follows_each(self, late: SimulatedStreams) -> None:
        with recorded(late) as found:
            events = [late.submit(READ, lambda: None) for _ in range(3)]
            late.submit(UPLOAD, lambda: None, after=(all_of(events[:2]), events[2]))
        assert found[0].spans[3].after == (0, 1, 2)

    def test_a_transfer_is_over_when_it_is_over_not_when_somebody_looks(self, inline: InlineStreams) -> None:
        with recorded(inline) as found:
            event = inline.submit(READ, partial(Transfer, TICK), nbytes=8)
            sleep(3 * TICK)
            event.wait()
        (span,) = found[0].spans
        assert seconds(span) == pytest.approx(TICK, rel=0.5)

    def test_transfers_of_a_late_stream_end_with_the_transfer(self, late: SimulatedStreams) -> None:
        with recorded(late) as found:
            late.submit(READ, partial(Transfer, 2 * TICK))
        assert seconds(found[0].spans[0]) >= 3 * TICK

    def test_without_an_observer_events_are_the_streams_own(self, late: SimulatedStreams) -> None:
        assert isinstance(late.submit(UPLOAD, lambda: None), HostEvent)
        with recorded(late):
            assert not isinstance(late.submit(UPLOAD, lambda: None), HostEvent)
        assert isinstance(late.submit(UPLOAD, lambda: None), HostEvent)

    def test_work_that_failed_is_in_it_and_its_error_where_it_was(self, late: SimulatedStreams) -> None:
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

    def test_inline_work_that_fails_fails_where_it_is_submitted(self, inline: InlineStreams) -> None:
        def fail() -> None:
            raise BrokenError

        with recorded(inline) as found:
            with pytest.raises(BrokenError):
                inline.submit(READ, fail)
            inline.submit(UPLOAD, lambda: None)
        assert [span.row for span in found[0].spans] == [UPLOAD]

    def test_buffers_of_work_that_has_run_are_let_go_of(self, late: SimulatedStreams) -> None:
        buffer = torch.zeros(10)
        gone = weakref.ref(buffer)
        with recorded(late):
            event = late.submit(UPLOAD, partial(zero, buffer))
            event.wait()
            late.submit(UPLOAD, lambda: None).wait()
            del buffer
            gc.collect()
            assert gone() is None

    def test_events_go_on_after_the_trace(self, late: SimulatedStreams) -> None:
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
    def test_compute_and_the_host_are_the_same_where_compute_is_the_host(self, late: SimulatedStreams) -> None:
        with recorded(late) as found:
            late.submit(UPLOAD, lambda: None).wait()
            late.submit(DOWNLOAD, lambda: None).synchronize()
        waits = found[0].waits
        assert [(wait.span, wait.by_host) for wait in waits] == [(0, False), (1, False)]
        assert all(wait.stop - wait.start > 0.9 * TICK for wait in waits)

    def test_a_wait_for_what_is_done_is_none(self, late: SimulatedStreams) -> None:
        with recorded(late) as found:
            event = late.submit(UPLOAD, lambda: None)
            sleep(3 * TICK)
            event.wait()
        assert found[0].waits == []

    def test_work_that_waits_for_work_is_none_either(self, late: SimulatedStreams) -> None:
        """Nor is work that waits inside, as an update does for the copies it submits."""
        with recorded(late) as found:
            read = late.submit(READ, lambda: None)
            update = late.submit(
                UPDATE, lambda: late.submit(DOWNLOAD, lambda: None).synchronize(), after=(read, all_of([read, read]))
            )
            while not update.done():
                sleep()
        assert found[0].waits == []
        assert sorted(span.row for span in found[0].spans) == [DOWNLOAD, READ, UPDATE]

    def test_every_event_of_several_is_waited_for(self, late: SimulatedStreams) -> None:
        with recorded(late) as found:
            all_of([late.submit(READ, lambda: None), late.submit(READ, lambda: None)]).wait()
        assert [wait.span for wait in found[0].waits] == [0, 1]

    def test_what_is_left_at_the_end_is_waited_for(self, late: SimulatedStreams) -> None:
        with recorded(late) as found:
            late.submit(WRITE, lambda: None, label=Label("update", "a"))
        assert [wait.span for wait in found[0].waits] == [0]
        assert list(TraceTimeline(found[0]).summary().waits) == ["update a (write)"]

    def test_inline_transfers_are_waited_for(self, inline: InlineStreams) -> None:
        with recorded(inline) as found:
            event = inline.submit(READ, partial(Transfer, TICK))
            assert not isinstance(event, PendingEvent)
            event.synchronize()
        (wait,) = found[0].waits
        assert wait.stop - wait.start > 0.5 * TICK


class TestTurns:
    def test_what_compute_turned_to(self, inline: InlineStreams) -> None:
        with recorded(inline) as found:
            assert inline.observer is not None
            inline.observer.turn_to(Label("forward", "a"))
            inline.compute(sleep, label=Label("update", "a", tile=0))
        assert [str(what) for _, what in found[0].compute] == ["forward a", "update a tile 0", ""]
        (update,) = [s for s in TraceTimeline(found[0]).rows["compute"] if str(s.label) == "update a tile 0"]
        assert seconds(update) >= TICK

    def test_compute_runs_the_same_without_an_observer(self, inline: InlineStreams) -> None:
        ran: list[int] = []
        inline.compute(lambda: ran.append(1), label=Label("update", "a"))
        assert ran == [1]


class TestEnd:
    def test_work_under_way_is_left_out_where_nobody_may_wait(self, late: SimulatedStreams) -> None:
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
    def test_notes_are_bounded_and_the_trace_ends_there(self, inline: InlineStreams, notes: str) -> None:
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


class FakeTime:
    """The host's clock, which only moves when the host waits."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class FakeAccelerator:
    """A device's module: each stream is a point in time, which work, events and waits move."""

    def __init__(self, time: FakeTime) -> None:
        self.time = time
        self.slow = 5.0  # how far the device's clock is from the host's
        self.timed = 0
        self._current = threading.local()
        accelerator = self

        class Stream:
            now = time.now + self.slow

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                self.enable_timing = enable_timing
                accelerator.timed += enable_timing

            def record(self, stream: Stream) -> None:
                stream.now = max(stream.now, time.now + accelerator.slow)
                self.at = stream.now

            def wait(self, stream: Stream) -> None:
                stream.now = max(stream.now, self.at)

            def query(self) -> bool:
                return self.at <= time.now + accelerator.slow

            def synchronize(self) -> None:
                time.now = max(time.now, self.at - accelerator.slow)

            def elapsed_time(self, end: "Event") -> float:
                assert self.enable_timing
                assert end.enable_timing
                assert end.query(), "a device refuses to tell the time of what it has not reached"
                return (end.at - self.at) * 1e3

        self.streams: list[Stream] = []
        self.compute = Stream()
        self.Event = Event

        def stream() -> Stream:
            self.streams.append(Stream())
            return self.streams[-1]

        self.Stream = stream

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        yield
        self._current.stream = before

    def current_stream(self, device: torch.device | None = None) -> Any:
        return getattr(self._current, "stream", self.compute)

    def synchronize(self, device: torch.device) -> None:
        self.time.now = max(self.time.now, *(s.now - self.slow for s in (*self.streams, self.compute)))

    def work(self, seconds: float) -> None:
        """Enqueue a kernel or a copy."""
        self.current_stream().now += seconds


class TestDevices:
    """The device's own time, by the events of its streams; nobody waits for it before the end."""

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
        clock = FakeTime()
        fake = FakeAccelerator(clock)
        monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
        monkeypatch.setattr(hardware, "time", clock)
        monkeypatch.setattr(observer, "time", clock)
        return fake

    @pytest.fixture
    def streams(self, device: FakeAccelerator) -> Iterator[AcceleratorStreams]:
        streams = AcceleratorStreams(CPU)
        yield streams
        streams.close()

    def test_spans_and_waits_are_in_the_devices_time(
        self, streams: AcceleratorStreams, device: FakeAccelerator
    ) -> None:
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

    def test_streams_that_wait_for_each_other_are_no_waits_of_compute(
        self, streams: AcceleratorStreams, device: FakeAccelerator
    ) -> None:
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

    def test_the_host_waits_beside_compute(self, streams: AcceleratorStreams, device: FakeAccelerator) -> None:
        with recorded(streams) as found:
            streams.observer.turn_to(Label("backward", "a"))
            device.work(2)
            streams.observer.turn_to(Label())
            streams.submit(DOWNLOAD, partial(device.work, 3), label=Label("save", "a", "grad")).synchronize()
        assert [(w.start, w.stop, w.by_host) for w in found[0].waits] == [(1000, 1005, True)]
        timeline = TraceTimeline(found[0])
        assert [(s.start, s.stop) for s in timeline.waits] == [(1002, 1005)], "compute went on for two seconds"
        assert timeline.summary().rows["compute"].busy_seconds == pytest.approx(2)

    def test_device_work_that_follows_a_read_is_seen_when_a_thread_enqueues_it(
        self, streams: AcceleratorStreams, device: FakeAccelerator
    ) -> None:
        gate = threading.Event()
        with recorded(streams) as found:
            read = streams.submit(READ, partial(hold, gate))
            upload = streams.submit(UPLOAD, partial(device.work, 4), after=(read,))
            gate.set()
            upload.synchronize()
        rows = {span.row: span for span in found[0].spans}
        assert seconds(rows[UPLOAD]) == pytest.approx(4)
        assert rows[UPLOAD].after == (0,)

    def test_device_work_after_device_work_is_enqueued_by_its_caller(
        self, streams: AcceleratorStreams, device: FakeAccelerator
    ) -> None:
        """As without an observer: a watched event must not make a thread of it."""
        threads = []
        with recorded(streams):
            upload = streams.submit(UPLOAD, partial(device.work, 4))
            streams.submit(DOWNLOAD, lambda: threads.append(threading.current_thread()), after=(upload,))
            assert threads == [threading.current_thread()]

    def test_without_an_observer_no_event_is_timed(self, streams: AcceleratorStreams, device: FakeAccelerator) -> None:
        streams.submit(UPLOAD, partial(device.work, 4)).wait()
        streams.compute(lambda: None, label=Label("update", "a"))
        assert device.timed == 0

    def test_marks_that_the_device_has_not_reached_have_no_time(
        self, streams: AcceleratorStreams, device: FakeAccelerator
    ) -> None:
        watching = observe(streams)
        watching.begin_trace()
        watching.turn_to(Label("forward", "a"))
        device.work(3)
        watching.turn_to(Label("forward", "b"))
        found = watching.end_trace(wait=False)
        assert found.compute == [], "the first is where the trace ends"
