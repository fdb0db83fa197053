"""Waits that are added up by stream: whose fault they are, and that nothing is kept for them."""

import threading
import weakref

from penstock.ext.observe.observer import WaitSums, observe
from penstock.runtime.streams import FETCH, UPDATE, UPLOAD, WRITE, Streams
from tests.lib.streams import simulated, until_waited_for


def metered(streams: Streams) -> WaitSums:
    """Have waits counted from here on."""
    waits = observe(streams).waits = WaitSums(streams)
    return waits


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
    assert not gone.alive
    assert last.job.before == ()  # type: ignore[attr-defined]
    streams.close()


def test_a_trace_goes_before_a_record_which_goes_on_behind_it() -> None:
    streams = simulated(most_seconds=0.0)
    waits, observer = metered(streams), observe(streams)
    under_way = streams.submit(FETCH, until_waited_for)
    observer.begin_trace()
    streams.submit(UPDATE, lambda: None, after=[under_way]).wait()
    go = threading.Event()
    late = streams.submit(UPLOAD, lambda: go.wait() and until_waited_for())
    recording = observer.end_trace(wait=False)
    assert [(span.row, span.after) for span in recording.spans] == [(UPDATE, ())]
    assert [wait.span for wait in recording.waits] == [0]
    assert waits.take() == {}
    go.set()
    late.wait()  # of what was submitted during the trace
    streams.submit(WRITE, until_waited_for).wait()
    assert list(waits.take()) == [UPLOAD, WRITE]
    assert streams.observer is observer
    observer.waits = None
    observer.leave()
    assert streams.observer is None
    streams.close()
