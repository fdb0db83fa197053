"""A program that runs on paper: who starts what, and who waits for whom; by the rules of its back end.

Accelerator: the host gives work away and goes on. Compute does what it was given in order. A job starts after the job
before it on its stream and those that it names; where the stream is the device's own also after all that compute was
given before the job was. Such a stream cannot follow a thread of the host: what does is enqueued by a thread once the
host's part is over, and until then whoever has compute wait for it stands still himself. A thread that has slept until
something is over takes some time to wake up. Threads: the host computes, each stream is a thread. Inline: a job that
could start at once runs in the thread that computes, unless it transfers a file: then it goes on by itself; what has to
wait is for a thread of its stream.

Transfers of a disk in one direction follow each other; the thread of a stream is free once it has started one.
"""

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from penstock.ext.observe.timeline import Recording, TraceSpan, Wait
from penstock.planner.simulation.fair_share import Demand, Fluid
from penstock.planner.simulation.program import OF_MODEL, Collective, Item, Program, ProgramJob, WorkKind
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


class _State:
    """Where a job is.

    Attributes:
        missing: how many things it waits for.
        unqueued: how many things have to happen before the device's stream can be given it.
        queued: whether the device's stream has it.
        begun: whether it is under way, or over.
        over: whether it is over.
        inline: whether it runs in the thread that computes.
        start: when it began.
        stop: when it was over.
        once_queued: what to do when the device's stream has it.
        once_begun: what to do when it begins.
        once_over: what to do when it is over.
    """

    __slots__ = (
        *("begun", "inline", "missing", "once_begun", "once_over", "once_queued", "over", "queued", "start", "stop"),
        "unqueued",
    )

    def __init__(self) -> None:
        self.missing = self.unqueued = 0
        self.queued = self.begun = self.over = self.inline = False
        self.start = self.stop = 0.0
        self.once_queued: list[Callable[[], None]] = []
        self.once_begun: list[Callable[[], None]] = []
        self.once_over: list[Callable[[], None]] = []


class _Queue:
    """What compute of a device was given, in order. An entry says whether compute is through with it at once."""

    def __init__(self) -> None:
        self._entries: deque[Callable[[], bool]] = deque()
        self._busy = False

    def put(self, entry: Callable[[], bool]) -> None:
        """Give compute something to do."""
        self._entries.append(entry)
        self._work()

    def then(self, call: Callable[[], None]) -> None:
        """Do something once compute is through with all that it was given until now."""

        def entry() -> bool:
            call()
            return True

        self.put(entry)

    def go_on(self) -> None:
        """Let compute go on with what comes next."""
        self._busy = False
        self._work()

    def _work(self) -> None:
        while self._entries and not self._busy:
            # Before the call: what it does may ask for more, which is not its turn yet.
            self._busy = True
            self._busy = not self._entries.popleft()()


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
        self._submit_seconds = costs.submit_seconds(program)
        self._wake_seconds = costs.wake_seconds(program)
        self._on_device = program.back_end == "accelerator"
        self._fluid = Fluid()
        self._compute = _Queue()
        # Jobs that were submitted before the program begins are over.
        self._states = {item.index: _State() for item in program.items if item.kind is WorkKind.SUBMIT}
        self._next = 0
        self._blocked = False
        self._last: dict[str, int] = {}  # job by stream
        self._last_transfer: dict[tuple[str, int], int] = {}  # job by stream and folder
        self._queued: Counter[str] = Counter()  # inline: jobs that the thread of a stream has still to run
        self._waits: list[tuple[int, float, float, bool]] = []
        self._turns: list[tuple[float, Label]] = []
        self._bounds = deque(program.steps)
        self.marks: list[float] = []

    def run(self) -> Recording:
        """Run it to the end.

        Returns:
            All that happens, from 0 on.

        Raises:
            ValueError: it waits for work that it never submits.
        """
        self._go_on()
        while over := self._fluid.advance():
            for then in over:
                then()
            self._go_on()  # after all that is over at this moment: it may ask whether something is
        if self._blocked or not all(state.over for state in self._states.values()):
            raise ValueError("This program waits for work that it never submits.")
        return self._recording()

    # The host

    def _go_on(self) -> None:
        """Do what comes next, until the host has to stand still."""
        items, bounds = self._program.items, self._bounds
        while not self._blocked:
            while bounds and bounds[0] <= self._next:
                bounds.popleft()
                self._mark()
            if self._next == len(items):
                return
            self._next += 1
            self._do(items[self._next - 1])

    def _mark(self) -> None:
        """Note when compute is through with all that it was given until now."""
        place = len(self.marks)
        self.marks.append(0.0)

        def through() -> None:
            self.marks[place] = self._fluid.now

        self._compute.then(through)

    def _do(self, item: Item) -> None:
        if item.kind is WorkKind.COMPUTE:
            self._give(item)
        elif item.kind is WorkKind.SUBMIT:
            self._stand(Demand(self._submit_seconds), partial(self._submit, item.index))
        elif item.kind is WorkKind.WAIT and self._is_of_device(item.index):
            self._until_queued(item.index, partial(self._compute.put, partial(self._hold, item.index)))
        elif item.kind in (WorkKind.WAIT, WorkKind.HOST_WAIT):
            self._wait(item.index, _nothing)
        elif item.kind is WorkKind.MEET:
            self._stand(self._costs.meeting(self._program.meetings[item.index], self._program), _nothing)
        else:
            self._blocked = True
            begun = self._fluid.now
            self._compute.then(lambda: self._wake(self._unblock, self._fluid.now > begun))

    def _unblock(self) -> None:
        self._blocked = False

    def _wake(self, then: Callable[[], None], slept: bool = True) -> None:
        """Let a thread of the host wake up, if it has slept, and do something after that."""
        if slept and self._wake_seconds > 0:
            self._fluid.start(Demand(self._wake_seconds), then)
        else:
            then()

    def _stand(self, taken: Demand, then: Callable[[], None]) -> None:
        """Keep the host busy, and do something after that."""
        if taken.seconds <= 0:
            then()
            return
        self._blocked = True

        def free() -> None:
            self._blocked = False
            then()

        self._fluid.start(taken, free)

    def _wait(self, job: int, then: Callable[[], None]) -> None:
        """Let the host stand still until a job is over, and do something after that."""
        if self._is_over(job):
            then()
        else:
            self._stand_still(job, self._states[job].once_over, then)

    def _until_queued(self, job: int, then: Callable[[], None]) -> None:
        """Let the host stand still until the device's stream has a job, and do something after that."""
        state = self._states.get(job)
        if state is None or state.queued:
            then()
        else:
            self._stand_still(job, state.once_queued, then)

    def _stand_still(self, job: int, until: list[Callable[[], None]], then: Callable[[], None]) -> None:
        """Let the host stand still for a job, until it is told to go on, and do something after that."""
        self._blocked = True
        begun = self._fluid.now

        def free() -> None:
            self._blocked = False
            self._note_wait(job, begun, by_host=self._on_device)
            then()

        until.append(partial(self._wake, free))

    def _note_wait(self, job: int, begun: float, *, by_host: bool) -> None:
        if self._fluid.now > begun:
            self._waits.append((job, begun, self._fluid.now, by_host))

    # Compute

    def _give(self, item: Item) -> None:
        """Give a segment to compute, once the host has enqueued it; or compute on the host itself."""
        taken = self._costs.segment(self._program, item.index)
        if self._on_device:
            enqueued = Demand(self._costs.host_seconds(self._program, item.index))
            self._stand(enqueued, lambda: self._compute.put(partial(self._work, taken, item.label)))
        else:
            self._turn(item.label)
            self._stand(taken, partial(self._turn, NO_LABEL))

    def _work(self, taken: Demand, label: Label) -> bool:
        """Let compute of the device begin a segment."""
        self._turn(label)

        def free() -> None:
            self._turn(NO_LABEL)
            self._compute.go_on()

        self._fluid.start(taken, free)
        return False

    def _hold(self, job: int) -> bool:
        """Let compute of the device stand still until a job is over."""
        if self._is_over(job):
            return True
        begun = self._fluid.now

        def free() -> None:
            self._note_wait(job, begun, by_host=False)
            self._compute.go_on()

        self._states[job].once_over.append(free)
        return False

    def _turn(self, label: Label) -> None:
        """Note what compute does from here on."""
        turns = self._turns
        if turns and turns[-1][0] == self._fluid.now:
            turns.pop()
        if label != (turns[-1][1] if turns else NO_LABEL):
            turns.append((self._fluid.now, label))

    # Jobs

    def _is_over(self, job: int) -> bool:
        state = self._states.get(job)
        return state is None or state.over

    def _is_of_device(self, job: int) -> bool:
        """Whether a stream of the device itself runs a job."""
        return self._on_device and self._program.jobs[job].stream in ON_DEVICE

    def _submit(self, number: int) -> None:
        job = self._program.jobs[number]
        if self._on_device:
            self._hand_over(number)
            return
        if self._program.back_end == "threads":
            self._queue(number)
            return
        ahead = [other for other in job.after if not self._is_over(other)]
        if job.stream == _COLLECTIVE and ahead:
            self._wait(ahead[0], partial(self._submit, number))
        elif job.stream != _COLLECTIVE and (ahead or self._queued[job.stream]):
            self._queued[job.stream] += 1
            state = self._states[number]
            # The thread is through with a transfer once it has started it.
            (state.once_begun if job.folder >= 0 else state.once_over).append(partial(self._run_by_thread, job.stream))
            self._queue(number)
        elif job.folder >= 0:
            self._queue(number)
        else:
            self._states[number].inline = True
            self._begin(number, on_host=True)

    def _run_by_thread(self, stream: str) -> None:
        self._queued[stream] -= 1

    def _hand_over(self, number: int) -> None:
        """Give a job to a thread of the host, or to a stream of the device."""
        if not self._is_of_device(number):
            self._queue(number)
            return
        state = self._states[number]
        state.unqueued = 1
        queued = partial(self._ready_to_queue, number)
        last = self._last.get(self._program.jobs[number].stream)
        for other in self._program.jobs[number].after:
            if self._is_of_device(other):
                self._follow_queued(other, state, queued)
            elif not self._is_over(other):
                state.unqueued += 1
                self._states[other].once_over.append(queued)
        if last is not None:
            # The thread that has enqueued the one before is awake.
            self._follow_queued(last, state, partial(queued, slept=False))
        self._queue(number)
        queued(slept=False)
        if self._program.jobs[number].stream == _COLLECTIVE:  # enqueued by the caller, on every rank in one order
            self._until_queued(number, _nothing)

    def _follow_queued(self, job: int, state: _State, ready: Callable[[], None]) -> None:
        other = self._states.get(job)
        if other is not None and not other.queued:
            state.unqueued += 1
            other.once_queued.append(ready)

    def _ready_to_queue(self, number: int, *, slept: bool = True) -> None:
        """Count one thing off that has to happen before the device's stream can be given a job."""
        state = self._states[number]
        state.unqueued -= 1
        if not state.unqueued:
            self._wake(partial(self._has_queued, number), slept)

    def _has_queued(self, number: int) -> None:
        state = self._states[number]
        state.queued = True
        for call in state.once_queued:
            call()
        self._ready(number)

    def _queue(self, number: int) -> None:
        """Let a job begin after all that it follows."""
        job, state = self._program.jobs[number], self._states[number]
        ready = partial(self._ready, number)
        state.missing = 1
        for other in job.after:
            if not self._is_over(other):
                state.missing += 1
                self._states[other].once_over.append(ready)
        before = self._before(job, number)
        for waited in before:
            state.missing += 1
            waited.append(partial(ready, slept=False))
        if self._is_of_device(number):
            state.missing += 1  # until its stream has it
            self._compute.then(ready)
        else:
            ready()

    def _before(self, job: ProgramJob, number: int) -> list[list[Callable[[], None]]]:
        """Find what a job follows on its stream, and make it the last one there."""
        found = []
        before = self._last.get(job.stream)
        self._last[job.stream] = number
        if before is not None:
            state = self._states[before]
            if self._program.jobs[before].folder < 0:
                found += [] if state.over else [state.once_over]
            else:
                found += [] if state.begun else [state.once_begun]
        if job.folder >= 0:
            before = self._last_transfer.get((job.stream, job.folder))
            self._last_transfer[job.stream, job.folder] = number
            if before is not None and not self._states[before].over:
                found.append(self._states[before].once_over)
        return found

    def _ready(self, number: int, *, slept: bool = True) -> None:
        """Count one thing off that a job waits for. A thread that was at the job before has not slept."""
        state = self._states[number]
        state.missing -= 1
        if not state.missing:
            self._wake(partial(self._begin, number, on_host=False), slept and not self._is_of_device(number))

    def _begin(self, number: int, *, on_host: bool) -> None:
        job, state = self._program.jobs[number], self._states[number]
        state.begun, state.start = True, self._fluid.now
        taken, finish = self._costs.job(job, self._program), partial(self._finish, number)
        if on_host:
            self._stand(taken, finish)
        else:
            self._fluid.start(taken, finish)
        for call in state.once_begun:
            call()

    def _finish(self, number: int) -> None:
        state = self._states[number]
        state.over, state.stop = True, self._fluid.now
        for call in state.once_over:
            call()

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


def _nothing() -> None:
    """Do nothing."""
