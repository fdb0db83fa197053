"""A run that took place as a program: what was submitted, computed and waited for, and how long compute took."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from penstock.forecast.program import Item, Job, Kind, Op, Program
from penstock.machine import recorder
from penstock.machine.streams import Event, Streams, Work, on_worker
from penstock.trace import Label

#: Compute is noted as bytes of one operation; one takes this long.
TICK_SECONDS = 1e-6


class NotingRecorder(recorder.Recorder):
    """Takes notes for a trace, and of the order of things beside.

    Compute is the time between two events in which the thread that computes does not wait.
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        self._numbers: dict[recorder.Job, int] = {}
        self._noted: list[Job] = []
        self._items: list[Item] = []
        self._ticks: list[int] = []
        self._ends = [0]
        self._order = threading.RLock()
        self._since = time.monotonic()
        self.marks = [self._since]

    def submitted(self, stream: str, work: Work, after: Sequence[Event], nbytes: int, label: Label) -> recorder.Job:
        """Note a job, and what it follows."""
        job = super().submitted(stream, work, after, nbytes, label)
        with self._order:
            self._note_compute()
            self._numbers[job] = len(self._noted)
            before = tuple(sorted({self._numbers[other] for other in job.before if other in self._numbers}))
            self._items.append(Item(Kind.SUBMIT, len(self._noted)))
            self._noted.append(Job(stream, label, nbytes, before))
        return job

    def waiting(self, job: recorder.Job, event: Event, block: Callable[[], None], *, by_host: bool) -> None:
        """Note who waits for what."""
        noted = not on_worker() and job in self._numbers
        if noted:
            with self._order:
                self._note_compute()
                self._items.append(Item(Kind.WAIT, self._numbers[job]))
        super().waiting(job, event, block, by_host=by_host)
        if noted:
            self._since = time.monotonic()

    def end_step(self) -> None:
        """Note that a step is over."""
        with self._order:
            self._note_compute()
            self._ends.append(len(self._items))
            self.marks.append(time.monotonic())

    def _note_compute(self) -> None:
        now = time.monotonic()
        if on_worker():  # submitted beside compute, which goes on
            return
        self._items.append(Item(Kind.COMPUTE, len(self._ticks), Label("compute")))
        self._ticks.append(max(0, round((now - self._since) / TICK_SECONDS)))
        self._since = now

    def program(self) -> Program:
        """Give what was noted, as of threads."""
        ops = [Op("compute", 0, ticks, "float32") for ticks in self._ticks]
        segments = [((number, 1),) for number in range(len(ops))]
        return Program("threads", ops, segments, self._noted, [], self._items, self._ends, {})


def delays(bandwidths: Mapping[str, float]) -> Callable[[str, int], float]:
    """How long simulated streams sleep before work: bytes over a bandwidth."""
    return lambda stream, nbytes: nbytes / bandwidths[stream] if stream in bandwidths else 0.0
