"""A collective that was issued, until it is over."""

import time
from collections.abc import Callable

import torch.distributed as dist


class UnderWay:
    """A collective that was issued and goes on, on the threads of its process group.

    Arguments:
        work: torch's handle. It holds the buffers; once the collective is over nothing here refers to it.
        failed: makes the error that whoever waits gets, of torch's own.
    """

    def __init__(self, work: dist.Work, failed: Callable[[RuntimeError], Exception]) -> None:
        self._left: tuple[dist.Work, Callable[[RuntimeError], Exception]] | None = work, failed
        self._error: Exception | None = None
        self._ended: float | None = None

    def wait(self) -> None:
        """Block until the collective is over; raise its error."""
        left = self._left  # two threads may wait: the other one may clear the attribute at any moment
        if left is not None:
            work, failed = left
            try:
                work.wait()
            except RuntimeError as error:
                self._error = self._error or failed(error)
                self._error.__cause__ = error
            self._left = None  # torch's handle, and with it the buffers: whoever counts their users counts right
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether the collective is over."""
        left = self._left
        return left is None or bool(left[0].is_completed())

    @property
    def ended(self) -> float:
        """When it was first asked for once it was over, in seconds of `time.monotonic`: torch does not tell more."""
        self._ended = self._ended or time.monotonic()
        return self._ended
