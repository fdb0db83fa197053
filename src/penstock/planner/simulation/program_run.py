"""A program that runs on paper: who starts what, and who waits for whom; by the rules of its back end.

Accelerator: the host gives work away and goes on. Compute does what it was given in order. A job starts after the job
before it on its stream and those that it names; on a stream of the device also after all that compute was given before
the job was. Such a stream cannot follow a thread of the host: a job that does is enqueued by a thread once the host's
part is over, and until then the host stands still if compute is to wait for that job. A thread that has slept takes
some time to wake up. Threads: the host computes, each stream is a thread. Inline: a job that could start at once runs
in the thread that computes, unless it transfers a file: then it goes on by itself; a job that has to wait is for a
thread of its stream.

Transfers of a disk in one direction follow each other; the thread of a stream is free once it has started one.

Each thing that takes part is a process: a generator that yields what takes it time (a `Demand`) or an `Event` that it
waits for.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from penstock.ext.observe.timeline import Recording, TraceSpan, Wait
from penstock.planner.simulation.fair_share import Demand, Fluid
from penstock.planner.simulation.program import OF_MODEL, Collective, Program, ProgramJob, WorkKind
from penstock.trace import NO_LABEL, Label

#: Streams of the device itself, where there is an accelerator: their work follows what compute was given before it.
ON_DEVICE = frozenset(("upload", "download", "collective", "device update", "save", OF_MODEL))
_COLLECTIVE = "collective"


class Costs(Protocol):
    """What a machine takes for the parts of a program."""

    def submit_seconds(self, program: Program) -> float:
        """Give the host's time to submit a job."""

    def wake_seconds(self, program: Program) -> float:
        """Give the time from the end of what a thread of the host sleeps for until the thread goes on."""

    def job(self, job: ProgramJob, program: Program) -> Demand:
        """Give what a job takes."""

    def segment(self, program: Program, number: int) -> Demand:
        """Give what compute takes for a segment."""

    def meeting(self, meeting: Collective, program: Program) -> Demand:
        """Give what a collective takes that the host issues and waits for."""

    def host_seconds(self, program: Program, number: int) -> float:
        """Give the host's time to enqueue a segment on a device."""


class Event:
    """A thing that happens once, and the processes that wait for it."""

    __slots__ = ("happened", "waiting")

    def __init__(self, *, happened: bool = False) -> None:
        self.happened = happened
        self.waiting: list[Process] = []


Process = Iterator[Demand | Event]
_HAPPENED = Event(happened=True)


class _State:
    """A job, once it was submitted.

    Attributes:
        over: it is over.
        free: its thread is free for the next job: a transfer goes on by itself.
        queued: the device's stream has it; of a job of the host, it is over.
        start: when it began.
        stop: when it was over.
        inline: whether it runs in the thread that computes.
    """

    __slots__ = ("free", "inline", "over", "queued", "start", "stop")

    def __init__(self, job: ProgramJob | None = None, *, on_device: bool = False) -> None:
        self.over = _HAPPENED if job is None else Event()
        self.free = Event() if job is not None and job.folder >= 0 else self.over
        self.queued = Event() if on_device else self.over
        self.start = self.stop = 0.0
        self.inline = False


class Run:
    """A run of a program, on paper.

    Arguments:
        program: what is to happen.
        costs: what that takes.

    Attributes:
        marks: when the steps begin and when the last one is over, once the program has run.
    """

    def __init__(self, program: Program, costs: Costs) -> None:
        self._program, self._costs = program, costs
        self._submits, self._wakes = Demand(costs.submit_seconds(program)), Demand(costs.wake_seconds(program))
        self._on_device = program.back_end == "accelerator"
        self._fluid = Fluid[Process]()
        # Jobs that were submitted before the program begins have no state: they are over.
        submitted = (item.index for item in program.items if item.kind is WorkKind.SUBMIT)
        self._states = {n: _State(program.jobs[n], on_device=self._is_of_device(n)) for n in submitted}
        self._through = _HAPPENED  # compute is through with all that it was given until now
        # By stream, of jobs for a thread or the device; before the first one all is over.
        self._last: defaultdict[str, _State] = defaultdict(_State)
        self._last_transfer: dict[tuple[str, int], Event] = {}  # by stream and folder: the end of the last one
        self._waits: list[tuple[int, float, float, bool]] = []
        self._turns: list[tuple[float, Label]] = []
        self._ready: deque[Process] = deque()
        self.marks: list[float] = []

    def run(self) -> Recording:
        """Run it to the end.

        Returns:
            All that happens, from 0 on.

        Raises:
            ValueError: it waits for work that it never submits.
        """
        host = self._host()
        ready, fluid = self._ready, self._fluid
        ready.append(host)
        while ready:
            while ready:
                process = ready.popleft()
                if process is host and ready:  # after all that is over at this moment: it may ask whether something is
                    ready.append(host)
                else:
                    self._go_on(process)
            ready.extend(fluid.advance())
        if len(self.marks) < len(self._program.steps) or not all(each.over.happened for each in self._states.values()):
            raise ValueError("This program waits for work that it never submits.")
        return self._recording()

    def _go_on(self, process: Process) -> None:
        """Let a process go on until it has to wait."""
        for what in process:
            if isinstance(what, Event):
                if what.happened:
                    continue
                what.waiting.append(process)
                return
            if what.seconds > 0:
                self._fluid.start(what, process)
                return

    def _set(self, event: Event) -> None:
        """Let an event happen."""
        event.happened = True
        self._ready.extend(event.waiting)

    # The host

    def _host(self) -> Process:
        """Do what the program says, in order."""
        program, costs = self._program, self._costs
        steps = Counter(program.steps)
        for number, item in enumerate(program.items):
            self._mark(steps[number])
            kind, index = item.kind, item.index
            if kind is WorkKind.COMPUTE and self._on_device:
                yield Demand(costs.host_seconds(program, index))
                self._give(self._compute(costs.segment(program, index), item.label))
            elif kind is WorkKind.COMPUTE:
                yield from self._compute(costs.segment(program, index), item.label)
            elif kind is WorkKind.SUBMIT:
                yield self._submits
                yield from self._submit(index)
            elif kind is WorkKind.MEET:
                yield costs.meeting(program.meetings[index], program)
            elif kind is WorkKind.SYNCHRONIZE:
                if not self._through.happened:
                    yield self._through
                    yield self._wakes
            elif index in self._states:
                if kind is WorkKind.WAIT and self._is_of_device(index):
                    yield from self._stand_still(index, self._states[index].queued)
                    self._give(self._hold(index))
                else:
                    yield from self._stand_still(index, self._states[index].over)
        self._mark(steps[len(program.items)])

    def _mark(self, steps: int) -> None:
        """Note that steps begin once compute is through with all that it was given until now."""

        def mark(through: Event) -> Process:
            yield through
            self.marks.append(self._fluid.now)

        for _ in range(steps):
            self._go_on(mark(self._through))

    def _stand_still(self, job: int, until: Event) -> Process:
        """Let the host stand still for a job until something has happened."""
        if not until.happened:
            begun = self._fluid.now
            yield until
            yield self._wakes
            self._note_wait(job, begun, by_host=self._on_device)

    def _note_wait(self, job: int, begun: float, *, by_host: bool) -> None:
        if self._fluid.now > begun:
            self._waits.append((job, begun, self._fluid.now, by_host))

    # Compute

    def _give(self, work: Process) -> None:
        """Give compute of the device something to do, after all that it was given."""
        before, self._through = self._through, Event()

        def given(through: Event) -> Process:
            yield before
            yield from work
            self._set(through)

        self._go_on(given(self._through))

    def _compute(self, taken: Demand, label: Label) -> Process:
        self._turn(label)
        yield taken
        self._turn(NO_LABEL)

    def _hold(self, job: int) -> Process:
        """Let compute of the device stand still until a job is over."""
        begun = self._fluid.now
        yield self._states[job].over
        self._note_wait(job, begun, by_host=False)

    def _turn(self, label: Label) -> None:
        """Note what compute does from here on."""
        turns = self._turns
        if turns and turns[-1][0] == self._fluid.now:
            turns.pop()
        if label != (turns[-1][1] if turns else NO_LABEL):
            turns.append((self._fluid.now, label))

    # Jobs

    def _is_of_device(self, job: int) -> bool:
        """Whether a stream of the device itself runs a job."""
        return self._on_device and self._program.jobs[job].stream in ON_DEVICE

    def _submit(self, number: int) -> Process:
        """Give a job to whoever runs it: the device, a thread of the host, or the host itself."""
        job, state = self._program.jobs[number], self._states[number]
        after = [self._states[other] for other in job.after if other in self._states]
        if self._program.back_end == "inline":
            if job.stream == _COLLECTIVE:  # every rank issues them in one order
                for other in (each for each in job.after if each in self._states):
                    yield from self._stand_still(other, self._states[other].over)
            waits = not all(each.happened for each in (*(other.over for other in after), self._last[job.stream].free))
            if not waits or job.stream == _COLLECTIVE:
                state.inline = job.folder < 0
                if state.inline:
                    yield from self._work(job, state)
                else:
                    self._go_on(self._work(job, state))
                return
        last, self._last[job.stream] = self._last[job.stream], state
        if not self._is_of_device(number):
            self._go_on(self._by_thread(job, state, after, last))
            return
        self._go_on(self._by_device(job, state, after, last, self._through))
        if job.stream == _COLLECTIVE:  # enqueued by the caller, on every rank in one order
            yield from self._stand_still(number, state.queued)

    def _by_thread(self, job: ProgramJob, state: _State, after: Iterable[_State], last: _State) -> Process:
        """Run a job on the thread of its stream, which has slept unless it comes from the job before."""
        slept = last.free.happened
        yield last.free
        yield from self._woken([other.over for other in after], slept=slept)
        if state.free is state.over:
            yield from self._work(job, state)
        else:
            yield self._last_transfer.get((job.stream, job.folder), _HAPPENED)
            self._go_on(self._work(job, state))
            self._set(state.free)

    def _woken(self, events: Iterable[Event], *, slept: bool) -> Process:
        """Wait for events in turn, and wake up if the thread has slept meanwhile."""
        for event in events:
            slept = slept or not event.happened
            yield event
        if slept:
            yield self._wakes

    def _by_device(
        self, job: ProgramJob, state: _State, after: Iterable[_State], last: _State, through: Event
    ) -> Process:
        """Enqueue a job, by a thread where it follows the host; then run it on its stream of the device."""
        yield last.queued
        yield from self._woken([other.queued for other in after], slept=False)
        self._set(state.queued)
        for before in (last, *after):
            yield before.over
        yield through
        yield from self._work(job, state)

    def _work(self, job: ProgramJob, state: _State) -> Process:
        """Run a job: of a file, after the transfer before it."""
        if job.folder >= 0:
            before = self._last_transfer.get((job.stream, job.folder), _HAPPENED)
            self._last_transfer[job.stream, job.folder] = state.over
            yield before
        state.start = self._fluid.now
        yield self._costs.job(job, self._program)
        state.stop = self._fluid.now
        self._set(state.over)

    # The end

    def _recording(self) -> Recording:
        places = {number: place for place, number in enumerate(self._states)}
        spans = []
        for number, state in self._states.items():
            job = self._program.jobs[number]
            after = tuple(places[other] for other in job.after if other in places)
            spans.append(TraceSpan(job.stream, job.label, state.start, state.stop, job.nbytes, state.inline, after))
        waits = [Wait(places[job], start, stop, by_host) for job, start, stop, by_host in self._waits]
        return Recording(0.0, self._fluid.now, spans, waits, self._turns)
