"""Threads of the host that run submitted work in order."""

import logging
import os
import queue
import threading

from penstock.errors import EngineError
from penstock.runtime.events import HostEvent, Work
from penstock.runtime.finalizers import Finalizer, Phase, at_end, exiting
from penstock.runtime.modes import engine_mode
from penstock.runtime.system import stay_alone

# The longest wait for the end of a thread that was not closed. The thread may itself wait for a rank that has ended, or
# for a lock of the thread that runs the garbage collection.
DROP_SECONDS = 10.0

_logger = logging.getLogger("penstock")


class WorkerThread(threading.Thread):
    """Thread of a `HostWorker`: it is neither the user's nor autograd's, so it has no compute."""


def on_worker() -> bool:
    """Return True if the calling thread is a worker thread, on which compute never runs."""
    return isinstance(threading.current_thread(), WorkerThread)


class _Inbox:
    """State that a worker shares with its thread. The thread does not refer to the worker: it would keep it alive.

    Attributes:
        queue: the work, each piece with its event; `None` after the last one.
        dropped: True once queued work is not run any more.
        promised: a name of the work, if it is finished at the end; empty if it is dropped then.
        alone: True if the thread computes without others.
        last: the event of the last piece of promised work. Of other work none is kept: if it has failed, its error
            holds all that it was about.
    """

    def __init__(self, promised: str, *, alone: bool) -> None:
        self.alone = alone
        self.queue: queue.SimpleQueue[tuple[HostEvent, list[Work]] | None] = queue.SimpleQueue()
        self.dropped = False
        self.promised = promised
        self.last: HostEvent | None = None

    def serve(self) -> None:
        """Run the work as it comes, in order, until the end; on the thread."""
        if self.alone:
            stay_alone()
        with engine_mode():
            while (item := self.queue.get()) is not None:
                event, box = item
                if self.dropped or exiting():
                    box[:] = [_kept_alive]  # in the place of the work: a thread may wait for its event
                event.run_from(box)
                # The next `get` may block for long. These names would keep the last event alive, and the buffers of its
                # work.
                del item, event, box

    def finish(self, thread: threading.Thread, seconds: float | None = None) -> None:
        """End the thread after the work that is queued, and wait for that, at most so many seconds."""
        self.queue.put(None)  # by each call: an interrupt may have kept the one before from it
        # The garbage collection that ends a worker runs on any thread. A worker thread must not wait here: the work in
        # the queue may itself wait for what this thread does next.
        if not on_worker():
            thread.join(seconds)

    def drop(self, thread: threading.Thread) -> None:
        """End the thread after the work that it is in; drop the rest."""
        self.dropped = True
        self.finish(thread, DROP_SECONDS)

    def keep(self, thread: threading.Thread) -> None:
        """Finish promised work of a worker that was not closed, and log its error."""
        self.finish(thread, None if exiting(Phase.PROMISED) else DROP_SECONDS)
        if self.last is not None:
            try:
                self.last.check()
            except Exception as error:
                _logger.error("%s failed: %s", self.promised, error)


class HostWorker:
    """A thread of the host that runs submitted work in order.

    It ends with `close`, when the worker is collected, and when the interpreter exits.

    Arguments:
        name: the name of the thread, behind "penstock-".
        promised: a name of the work ("the save"), if it has to be finished also if the worker is not closed; empty:
            queued work is dropped then.
        alone: True to run torch's operations there in this thread alone, as compute needs the cores.

    Raises:
        EngineError: the interpreter is exiting, or the system starts no thread.
    """

    def __init__(self, name: str, *, promised: str = "", alone: bool = False) -> None:
        if exiting():
            raise EngineError("The interpreter exits: work that needs a thread cannot be started any more.")
        self._inbox = _Inbox(promised, alone=alone)
        self._process = os.getpid()
        self._closed = False
        self._last: HostEvent | None = None
        self._thread = WorkerThread(target=self._inbox.serve, name=f"penstock-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise EngineError(
                f"The system starts no thread for '{name}': {error}. Raise its limit (ulimit -u)."
            ) from error
        end, phase = (self._inbox.keep, Phase.PROMISED) if promised else (self._inbox.drop, Phase.THREADS)
        self._end = at_end(self, end, self._thread, phase=phase)

    def submit(self, work: Work, event: HostEvent | None = None) -> HostEvent:
        """Queue a piece of work.

        Arguments:
            work: what to run. It may return a transfer that goes on afterwards.
            event: the event of its completion; `None` makes one.

        Returns:
            The event.

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
        # Before the work is queued: from then on `idle` must not return True until the work ran.
        self._last = event
        self._inbox.last = event if self._inbox.promised else None
        self._inbox.queue.put((event, [work]))
        return event

    @property
    def ending(self) -> Finalizer:
        """The finalizer that ends the thread of a worker that was not closed. It does not refer to the worker."""
        return self._end

    def idle(self) -> bool:
        """Return True if all submitted work has run; transfers that it started may go on."""
        return self._last is None or self._last.ran()

    def close(self) -> None:
        """Run what is queued, then end the thread. Called again after an interrupt, it waits for the rest."""
        if os.getpid() != self._process:
            return
        self._closed = True  # first: work submitted behind the end of the queue would never run
        self._end.cancel()
        self._inbox.finish(self._thread)


def _kept_alive() -> None:
    """Raise the error of work that is not run any more, in its place."""
    raise EngineError("This work was given up: nobody waits for it any more, or the interpreter exits.")
