"""Collectives that were issued: counted, and waited for; and where the other ranks stand once one has failed."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from penstock.machine.groups import limit_of
from penstock.machine.uneven import Together
from penstock.machine.whereabouts import Whereabouts

HEARING_S = 5.0  # how long to wait for the other ranks' words once a collective has failed
_MOST_QUOTED = 8  # ranks in one message


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
        waiting: a context in which to wait.
    """

    def __init__(
        self,
        work: dist.Work | Together,
        failed: Callable[[RuntimeError], Exception],
        waiting: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._left: tuple[dist.Work | Together, Callable[[RuntimeError], Exception]] | None = work, failed
        self._waiting = waiting
        self._error: Exception | None = None
        self._ended: float | None = None

    def wait(self) -> None:
        """Block until the collective is over; raise its error."""
        left = self._left  # two threads may wait: the other one may clear the attribute at any moment
        if left is not None:
            work, failed = left
            try:
                with self._waiting():
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


def others_stand(
    members: Sequence[int], own: int, what: str, whereabouts: Whereabouts, host_of: Callable[[int], str]
) -> str:
    """Tell the other ranks where this one stands, and hear where they do.

    By way of the job's store: a group in which a collective has failed carries nothing more.

    Arguments:
        members: the ranks that are heard.
        own: this one's number among all ranks of the job.
        what: what it could not finish.
        whereabouts: where it is, and what others have said before.
        host_of: names the host of a rank, in brackets, where there are several.
    """
    if not dist.is_initialized():
        return "torch.distributed has been ended meanwhile"
    store = dist.distributed_c10d._get_default_store()
    said: list[str] = []
    # A rank that is stuck in another collective finds out later than this one: give all of them some seconds.
    ends = time.monotonic() + HEARING_S
    try:
        store.set(_stopped(own), f"could not finish {what}")
        for rank in (member for member in members if member != own):
            if len(said) == _MOST_QUOTED:
                said.append("others are not asked")
                break
            said.append(f"rank {rank}{host_of(rank)} {_heard(store, rank, ends) or whereabouts.said(rank) or _SILENT}")
    except RuntimeError:
        said.append("the others cannot be asked: the rank that has the job's store has ended")
    return "; ".join(said)


_SILENT = "says nothing: it has ended, or runs something else"


def _stopped(rank: int) -> str:
    return f"penstock stopped {rank}"


def _heard(store: dist.distributed_c10d.Store, rank: int, ends: float) -> str:
    """Wait for what a rank could not finish, until a moment of `time.monotonic`; empty where it does not say."""
    try:
        store.wait([_stopped(rank)], limit_of(ends - time.monotonic()))
    except RuntimeError:  # the time is over
        return ""
    said: str = store.get(_stopped(rank)).decode()
    return said
