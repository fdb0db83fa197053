"""Simulated asynchronous streams on a cpu: all submitted work runs late, so that a missing wait shows.

Each stream is a worker thread that sleeps before it works: a random time, or bytes / bandwidth. Buffers are filled with
NaN from allocation to completion and after release, so that a read without a wait is a wrong number, not luck. A buffer
that is freed or poisoned while work writes it is an error. Collectives are late as well, and issued on the thread of
their stream: in the order of submission, on groups of their own (ordering rule 4).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.runtime.streams import (
    STREAMS,
    Event,
    HostWorker,
    Pending,
    Streams,
    Work,
    after_all,
    close_workers,
    poison,
)
from penstock.trace import NO_LABEL, Label

Delay = Callable[[str, int], float]  # (stream, bytes) -> seconds


class SimulatedStreams(Streams):
    """Worker threads with delays in place of a device's streams.

    Arguments:
        delay: seconds that a piece of work on a stream waits before it runs, given its bytes.
    """

    aliases_host = False

    def __init__(self, delay: Delay) -> None:
        super().__init__(torch.device("cpu"))
        self._delay = delay
        self._writing: list[tuple[int, Event]] = []  # storages that submitted work overwrites
        self._workers = {name: HostWorker(name) for name in STREAMS}

    def submit(
        self,
        stream: str,
        work: Work,
        *,
        after: Sequence[Event] = (),
        writes: Sequence[Tensor] = (),
        nbytes: int = 0,
        label: Label = NO_LABEL,
    ) -> Event:
        """Queue `work` on the stream's thread; what it overwrites is NaN while it is delayed."""
        seconds = self._delay(stream, nbytes)

        def late() -> Pending | None:
            for tensor in writes:  # not before: earlier work that this one follows may still use it (ordering rule 3)
                poison(tensor)
            time.sleep(seconds)
            return work()

        return super().submit(stream, late, after=after, writes=writes, nbytes=nbytes, label=label)

    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        event = self._workers[stream].submit(partial(after_all, tuple(after), work))
        self._writing = [(storage, other) for storage, other in self._writing if not other.done()]
        self._writing += [(tensor.untyped_storage().data_ptr(), event) for tensor in writes]
        return event

    def allocate(self, buffer: Tensor) -> None:
        """Allocate the buffer's memory, full of NaN."""
        super().allocate(buffer)
        self._check_quiet(buffer)
        poison(buffer)

    def deallocate(self, buffer: Tensor) -> None:
        """Fill the buffer with NaN and keep its memory: a late reader gets NaN, not a fault."""
        self.poison(buffer)

    def poison(self, buffer: Tensor) -> None:
        """Fill the buffer with NaN."""
        self._check_quiet(buffer)
        poison(buffer)

    def _check_quiet(self, buffer: Tensor) -> None:
        """Refuse to free or poison memory that work still writes (ordering rule 1)."""
        storage = buffer.untyped_storage().data_ptr()
        assert all(event.done() for other, event in self._writing if other == storage), "the buffer is being written"

    def close(self) -> None:
        """Run what is queued and end the threads."""
        close_workers(self._workers)
