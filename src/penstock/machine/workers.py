"""Threads of the host that run submitted work in order."""

import logging
import os
import queue
import threading

from penstock.errors import EngineError
from penstock.machine.border import ours
from penstock.machine.events import HostEvent, Work
from penstock.machine.lifetime import Ending, Phase, at_end, exiting

# That a thread nobody closed is waited for, at most: it may wait for a rank that is gone, or for what collection holds.
DROP_SECONDS = 10.0

_logger = logging.getLogger("penstock")


class WorkerThread(threading.Thread):
    """The thread of a `HostWorker`: neither compute nor the caller's."""


def on_worker() -> bool:
    """Whether the calling thread is one of ours, which compute never runs on."""
    return isinstance(threading.current_thread(), WorkerThread)


class _Inbox:
    """What a worker's thread knows of it: the thread must not keep the worker alive.

    Attributes:
        queue: work, and `None` after the last of it.
        dropped: nobody wants what is queued.
        promised: what its work is, where that is finished at the end; else it is given up.
        last: the event of the last of it. Of no other work: an error that failed it holds all that it was about.
    """

    def __init__(self, promised: str) -> None:
        self.queue: queue.SimpleQueue[tuple[HostEvent, list[Work]] | None] = queue.SimpleQueue()
        self.dropped = False
        self.promised = promised
        self.last: HostEvent | None = None

    def serve(self) -> None:
        """Run what comes, in order."""
        with ours():
            while (item := self.queue.get()) is not None:
                event, box = item
                if self.dropped or exiting():
                    box[:] = [_given_up]
                event.run_from(box)
                del item, event, box  # a waiting worker must not keep the last event alive

    def finish(self, thread: threading.Thread, seconds: float | None = None) -> None:
        """End the thread after the work that is queued.

        A thread of this kind does not wait for it: it may be what that work waits for, and collection runs on any.
        """
        self.queue.put(None)
        if not on_worker():
            thread.join(seconds)

    def drop(self, thread: threading.Thread) -> None:
        """End the thread after the work that it is in."""
        self.dropped = True
        self.finish(thread, DROP_SECONDS)

    def keep(self, thread: threading.Thread) -> None:
        """Finish the work, which nobody asked for the end of, and say if it failed."""
        self.finish(thread, None if exiting(Phase.PROMISED) else DROP_SECONDS)
        if self.last is not None:
            try:
                self.last.check()
            except Exception as error:
                _logger.error("%s failed: %s", self.promised, error)


class HostWorker:
    """One persistent thread that runs submitted work in order.

    It ends with `close`, when the worker is collected, and when the interpreter exits.

    Arguments:
        name: of the thread.
        promised: what its work is, where that is finished also if nobody closes the worker; else what is queued then is
            given up.

    Raises:
        EngineError: the interpreter exits.
    """

    def __init__(self, name: str, *, promised: str = "") -> None:
        if exiting():
            raise EngineError("The interpreter exits: work that needs a thread cannot be started any more.")
        self._inbox = _Inbox(promised)
        self._process = os.getpid()
        self._closed = False
        self._last: HostEvent | None = None
        self._thread = WorkerThread(target=self._inbox.serve, name=f"penstock-{name}", daemon=True)
        self._thread.start()
        end, phase = (self._inbox.keep, Phase.PROMISED) if promised else (self._inbox.drop, Phase.THREADS)
        self._end = at_end(self, end, self._thread, phase=phase)

    def submit(self, work: Work, event: HostEvent | None = None) -> HostEvent:
        """Queue the work; returns its event (the one given, if any).

        Raises:
            EngineError: the thread has ended, or is one of the process that this one was forked from.
        """
        if os.getpid() != self._process:
            raise EngineError(
                f"The threads of this engine are in another process ({self._process}), which forked this one."
            )
        if self._closed or exiting():
            raise EngineError("The threads of this engine have ended: it is closed, or the interpreter exits.")
        event = event or HostEvent()
        self._last = event
        self._inbox.last = event if self._inbox.promised else None
        self._inbox.queue.put((event, [work]))
        return event

    @property
    def ending(self) -> Ending:
        """Ends the thread where nobody closed it. Does not refer to the worker."""
        return self._end

    def idle(self) -> bool:
        """Whether everything submitted has run; what it started may go on."""
        return self._last is None or self._last.ran()

    def close(self) -> None:
        """Run what is queued, then end the thread."""
        if not self._closed and os.getpid() == self._process:
            self._closed = True
            self._end.cancel()
            self._inbox.finish(self._thread)


def _given_up() -> None:
    raise EngineError("This work was given up: nobody waits for it any more, or the interpreter exits.")
