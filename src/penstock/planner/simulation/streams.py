"""Streams on which nothing runs: what is submitted is noted, with what it follows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from penstock.config import Tier
from penstock.planner.simulation.engine_internals import COLLECTIVE, ON_DEVICE, Event, Streams, Work
from penstock.planner.simulation.fake_tensor import mark
from penstock.planner.simulation.program import ProgramJob
from penstock.planner.simulation.recorder import Recorder
from penstock.planner.simulation.resources import FakeRecords
from penstock.trace import NO_LABEL, Label

#: What runs its jobs in order: a stream; of files a stream in one folder.
_Row = tuple[str, int]


class RecordedStreams(Streams):
    """Streams of a device that need not be there.

    Arguments:
        recorder: take what is submitted and waited for.
        debug_release: whether units are released also where compute reads them in place.
        fill: gives a buffer that gets its memory values; `None` where nobody reads them.
    """

    def __init__(
        self, recorder: Recorder, *, debug_release: bool = False, fill: Callable[[Tensor], None] | None = None
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.aliases_host = recorder.back_end == "inline" and not debug_release
        self.reads_in_place = not debug_release
        self._recorder = recorder
        self._fill = fill
        self._last: WeakKeyDictionary[Event, Mapping[_Row, int]] = WeakKeyDictionary()  # of events of several
        self.observer = recorder  # compute is told apart by unit, as in a trace

    @property
    def computes_on_host(self) -> bool:
        """Whether compute is the host's own thread, on the machine that is meant."""
        return self._recorder.back_end != "accelerator"

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
        """Note a job. Collectives alone are looked into: they say what they issue, and what is computed with it."""
        del writes
        self._let_go()
        follows = tuple(sorted(self._last_of_each(after).values()))
        job = ProgramJob(stream, label, nbytes, follows, folder=_folder(work))
        if stream == COLLECTIVE:
            parts = [part for event in after for part in event.parts() if isinstance(part, RecordedEvent)]
            for event in parts:  # issued by the caller, who waits for what the host does first
                if self.computes_on_host or self._recorder.jobs[event.number].stream not in ON_DEVICE:
                    self._recorder.wait(event.number, by_host=True)
            collectives, segment = self._recorder.look_into(work)
            job = job._replace(collectives=collectives, segment=segment)
        return RecordedEvent(self._recorder.submit(job), self._recorder, (job.stream, job.folder))

    def _last_of_each(self, events: Iterable[Event]) -> dict["_Row", int]:
        """Find the last job of each row that events stand for: it is over no sooner than those before it there.

        A home stands for a job of each tile, and each tile follows the home: all of them would be a job's square.
        """
        found: dict[_Row, int] = {}
        for event in events:
            if isinstance(event, RecordedEvent):
                last: Mapping[_Row, int] = {event.row: event.number}
            elif event.members() == (event,):
                continue
            elif event in self._last:
                last = self._last[event]
            else:
                last = self._last[event] = self._last_of_each(event.members())
            for row, number in last.items():
                if number > found.get(row, -1):
                    found[row] = number
        return found

    def _submit(self, stream: str, work: Work, after: Sequence[Event], writes: Sequence[Tensor]) -> Event:
        raise AssertionError("work is noted by `submit`")

    def compute(self, work: Callable[[], None], *, label: Label, nbytes: int = 0) -> None:
        """Note what compute itself would do."""
        del work
        self._recorder.turn_to(label)
        self._recorder.touch("penstock.update", nbytes)
        self._recorder.turn_to(NO_LABEL)

    def allocate(self, buffer: Tensor) -> None:
        """Note that a buffer is given its memory, which nobody touches."""
        before = buffer.untyped_storage().nbytes()
        super().allocate(buffer)
        self._recorder.add(Tier.DEVICE, buffer.untyped_storage().nbytes() - before)
        if self._fill is not None and not before:
            with _disable_current_modes():
                self._fill(buffer)

    def make_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make a flat buffer with memory."""
        with _disable_current_modes():  # of memory that can be taken and given back
            buffer = super().make_buffer(numel, dtype)
        if self._fill is None:
            mark(buffer)
        self._recorder.add(Tier.DEVICE, buffer.nbytes)
        return buffer

    def deallocate(self, buffer: Tensor) -> None:
        """Note that a buffer's memory goes."""
        self._recorder.add(Tier.DEVICE, -buffer.untyped_storage().nbytes())
        self._resize(buffer, 0)

    def poison(self, buffer: Tensor) -> None:
        """Leave it: it has no values."""

    def return_free_memory(self) -> None:
        """Do nothing: none was taken."""

    def close(self) -> None:
        """Do nothing: there are no threads."""


class RecordedEvent(Event):
    """The completion of a job that is not run.

    Arguments:
        number: of the job.
        recorder: take who waits for it.
        row: what runs it after the jobs before it there.
    """

    __slots__ = ("_is_over", "_recorder", "_step", "_was_awaited", "number", "row")

    def __init__(self, number: int, recorder: Recorder, row: _Row) -> None:
        self.number, self.row = number, row
        self._recorder = recorder
        self._step = recorder.step
        self._is_over = False
        self._was_awaited = False

    def wait(self) -> None:
        """Note that compute goes on after it."""
        if not (self._is_over or self._was_awaited):
            self._was_awaited = True
            self._recorder.wait(self.number, by_host=False)
            self._is_over = self._recorder.back_end != "accelerator"

    def synchronize(self) -> None:
        """Note that the host goes on after it."""
        if not self._is_over:
            self._is_over = True
            self._recorder.wait(self.number, by_host=True)

    def done(self) -> bool:
        """Say whether it must be over: for what somebody has waited for, or because a whole step has ended since."""
        if self._is_over or self._step + 1 < self._recorder.step:
            return True
        return self._recorder.back_end == "accelerator" and self._recorder.order.is_over(self.row[0], self.number)

    def check(self) -> None:
        """Do nothing: nothing fails."""


def _folder(work: Work) -> int:
    """Find the folder that the record is in which work loads or stores; -1 for other work."""
    if isinstance(work, partial):
        records = getattr(work.func, "__self__", None)
        if isinstance(records, FakeRecords):
            return records.folder(work.args[0])
    return -1
