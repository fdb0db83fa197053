"""Waits that are added up by stream: whose fault they are, and that nothing is kept for them."""

import gc
import threading
import time
import weakref

import pytest

from penstock.ext.observe.observer import WaitSums, observe
from penstock.runtime.events import DONE
from penstock.runtime.streams import FETCH, UPDATE, UPLOAD, WRITE, Streams
from tests.lib.streams import inline, simulated


def metered(streams: Streams) -> WaitSums:
    """Have waits counted from here on."""
    waits = observe(streams).waits = WaitSums(streams)
    return waits


def test_a_wait_is_put_down_to_the_stream_that_is_waited_for() -> None:
    streams = simulated(most_seconds=0.0)
    meter = metered(streams)
    read = streams.submit(FETCH, lambda: time.sleep(0.2))
    update = streams.submit(UPDATE, lambda: None, after=[read])
    upload = streams.submit(UPLOAD, lambda: time.sleep(0.1), after=[update, DONE])
    upload.wait()
    assert meter.take() == {UPLOAD: pytest.approx(0.3, abs=0.15)}
    assert meter.take() == {}
    streams.submit(WRITE, lambda: time.sleep(0.1), after=[read, update]).synchronize()  # which are over
    assert list(meter.take()) == [WRITE]
    streams.close()


def test_what_is_done_costs_nothing_and_work_that_waits_is_not_counted() -> None:
    streams = inline()
    meter = metered(streams)
    assert streams.submit(UPDATE, lambda: None) is DONE
    streams.close()
    late = simulated(most_seconds=0.0)
    meter = metered(late)
    before = late.submit(FETCH, lambda: time.sleep(0.05))
    behind = late.submit(UPDATE, before.synchronize, after=[before])
    while not behind.done():
        time.sleep(0.005)
    behind.wait()
    assert meter.take() == {}
    late.close()


def test_a_chain_of_events_is_let_go_of() -> None:
    """Each event knows what it follows, and that what it followed: kept, a run would keep all of its steps."""
    streams = simulated(most_seconds=0.0)
    metered(streams)
    go = threading.Event()

    def held() -> None:
        go.wait()

    first = streams.submit(UPDATE, held)
    gone = weakref.finalize(streams.submit(FETCH, lambda: None, after=[first]), lambda: None)
    last = first
    for _ in range(50):
        last = streams.submit(UPLOAD, lambda: None, after=[last])
    go.set()
    last.synchronize()
    streams.submit(UPLOAD, lambda: None, after=[last]).synchronize()
    streams.submit(UPLOAD, lambda: None).synchronize()
    gc.collect()
    assert not gone.alive
    assert last.job.before == ()  # type: ignore[attr-defined]
    streams.close()


def test_a_trace_goes_before_a_record_which_goes_on_behind_it() -> None:
    streams = simulated(most_seconds=0.0)
    waits, observer = metered(streams), observe(streams)
    under_way = streams.submit(FETCH, lambda: time.sleep(0.1))
    observer.begin_trace()
    streams.submit(UPDATE, lambda: time.sleep(0.1), after=[under_way]).wait()
    late = streams.submit(UPLOAD, lambda: time.sleep(0.2))
    recording = observer.end_trace(wait=False)
    assert [(span.row, span.after) for span in recording.spans] == [(UPDATE, ())]
    assert [wait.span for wait in recording.waits] == [0]
    assert waits.take() == {}
    late.wait()  # of what was submitted during the trace
    streams.submit(WRITE, lambda: time.sleep(0.1)).wait()
    assert list(waits.take()) == [UPLOAD, WRITE]
    assert streams.observer is observer
    observer.waits = None
    observer.leave()
    assert streams.observer is None
    streams.close()
