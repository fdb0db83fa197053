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

# How long to wait, at most, for the end of a thread that nobody has closed. It may itself wait for a rank that is gone,
# or for a lock that is held by whoever runs the collection which ends the thread.
DROP_SECONDS = 10.0

_logger = logging.getLogger("penstock")


class WorkerThread(threading.Thread):
    """The thread of a `HostWorker`: it is neither the user's nor autograd's, so it has no compute."""


def on_worker() -> bool:
    """Whether the calling thread is one of ours, which compute never runs on."""
    return isinstance(threading.current_thread(), WorkerThread)


class _Inbox:
    """What a worker shares with its thread. The thread does not know the worker: else it would keep it alive.

    Attributes:
        queue: the work, each piece with its event; `None` after the last one.
        dropped: whether nobody wants what is queued any more.
        promised: what the work is, in a word, where it is finished at the end; empty where it is given up.
        alone: whether the thread computes without others.
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
                    box[:] = [_given_up]  # run all the same: somebody may wait for the event
                event.run_from(box)
                # The next `get` may block for long. These names would keep the last event alive meanwhile, and with it
                # the buffers of its work.
                del item, event, box

    def finish(self, thread: threading.Thread, seconds: float | None = None) -> None:
        """End the thread after the work that is queued, and wait for that, at most so many seconds."""
        self.queue.put(None)  # by each call: an interrupt may have kept the one before from it
        # The collection that ends a worker runs on any thread. One of ours must not wait here: the work in the queue
        # may itself wait for what this thread does next.
        if not on_worker():
            thread.join(seconds)

    def drop(self, thread: threading.Thread) -> None:
        """End the thread after the piece of work that it is in; give up the rest."""
        self.dropped = True
        self.finish(thread, DROP_SECONDS)

    def keep(self, thread: threading.Thread) -> None:
        """Finish promised work that nobody waits for, and log its error if it fails."""
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
        promised: what the work is ("the save"), if it has to be finished also where nobody closes the worker; empty:
            what is queued then is given up.
        alone: whether torch's operations there run in this thread alone: where compute needs the cores.

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
            event: the event that is to stand for it; `None` makes one.

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
        # Before the work is queued: a thread that asks `idle` from then on must not hear that all of it has run.
        self._last = event
        self._inbox.last = event if self._inbox.promised else None
        self._inbox.queue.put((event, [work]))
        return event

    @property
    def ending(self) -> Finalizer:
        """What ends the thread where nobody has closed the worker. It does not refer to the worker."""
        return self._end

    def idle(self) -> bool:
        """Whether everything submitted has run; what it started may go on."""
        return self._last is None or self._last.ran()

    def close(self) -> None:
        """Run what is queued, then end the thread. Called again after an interrupt, it waits for the rest."""
        if os.getpid() != self._process:
            return
        self._closed = True  # first: what was submitted behind the end of the queue would never run
        self._end.cancel()
        self._inbox.finish(self._thread)


def _given_up() -> None:
    """Raise the error of work that is not run any more, in its place."""
    raise EngineError("This work was given up: nobody waits for it any more, or the interpreter exits.")
