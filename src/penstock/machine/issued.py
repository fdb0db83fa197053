"""Collectives that were issued: counted, and waited for."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from penstock.machine.uneven import Together


class Tally(Counter[str]):
    """How many collectives were issued, by name.

    Attributes:
        nbytes: the bytes of their whole buffers, by name and dimension of the mesh, as a rehearsal notes them
            (`forecast.program.Collective`): what goes over a link follows from them and the number of ranks.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.nbytes: Counter[tuple[str, str]] = Counter()

    def note(self, name: str, dimension: str, buffer: Tensor) -> None:
        """Count one.

        Arguments:
            name: "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast" or "reduce".
            dimension: of the mesh, along which it is.
            buffer: the whole of it: what is there on every rank after a gather, or before a reduction.
        """
        self[name] += 1
        self.nbytes[name, dimension] += buffer.nbytes

    def clear(self) -> None:
        """Begin again."""
        super().clear()
        self.nbytes.clear()


class UnderWay:
    """A collective that was issued and goes on, on the threads of its process group.

    Arguments:
        work: torch's handle. It holds the buffers; once the collective is over nothing here refers to it.
        failed: makes the error that whoever waits gets, of torch's own.
    """

    def __init__(self, work: dist.Work | Together, failed: Callable[[RuntimeError], Exception]) -> None:
        self._left: tuple[dist.Work | Together, Callable[[RuntimeError], Exception]] | None = work, failed
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
