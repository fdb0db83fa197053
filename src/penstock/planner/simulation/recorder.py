"""What a simulation notes while the engine runs: the program, and how many bytes are where."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NoReturn

from penstock.config import Tier
from penstock.planner.simulation.engine_internals import ON_DEVICE, Event, Work
from penstock.planner.simulation.fake_tensor import Memory
from penstock.planner.simulation.program import (
    OF_MODEL,
    BackEnd,
    Collective,
    Item,
    Op,
    Program,
    ProgramJob,
    Segment,
    WorkKind,
)
from penstock.trace import NO_LABEL, Label


class Recorder:
    """Writes a program down. As the observer of streams it notes what compute turns to.

    Arguments:
        back_end: who would run what is submitted.

    Attributes:
        jobs: what was submitted so far.
        step: the number of the step that is under way.
        order: which jobs of the device must be over.
        items: what the program does so far.
        phases: each forward, backward and step, and the number of its first item.
        steps: the number of the first item of each step, and of the one that comes next.
        memory: bytes that were taken, or given back, since the program began: the number of the item that comes next,
            the tier, and how many.
        rests: bytes of each tier that were there before.
    """

    is_traced = True

    def __init__(self, back_end: BackEnd) -> None:
        self.back_end = back_end
        self.jobs: list[ProgramJob] = []
        self.step = 0
        self.order = Order()
        self._ops: dict[Op, int] = {}
        self._segments: dict[Segment, int] = {}
        self._meetings: list[Collective] = []
        self.items: list[Item] = []
        self.steps = [0]
        self._counted: dict[int, int] = {}  # operations since the last event, by their number
        self._issued: list[Collective] = []  # inside of a job
        self._label = NO_LABEL
        self.phases: list[tuple[str, int]] = []
        self.memory: list[tuple[int, Tier, int]] = []
        self.rests: Counter[Tier] = Counter()

    # Compute

    def op(self, op: Op) -> None:
        """Note an operation of compute, or of the job that is being noted."""
        number = self._ops.setdefault(op, len(self._ops))
        self._counted[number] = self._counted.get(number, 0) + 1

    def touch(self, name: str, nbytes: int) -> None:
        """Note a pass over memory that is no operation of torch's."""
        self.op(Op(name, 0, nbytes, "float32"))

    def submitted(self, stream: str, work: Work, after: Sequence[Event], nbytes: int, label: Label) -> NoReturn:
        """Refuse; `RecordedStreams.submit` notes jobs."""
        raise AssertionError("jobs are noted where they are submitted")

    def step_made(self, *told: Any) -> None:
        """Note nothing: `end_step` counts steps."""

    def where(self) -> str:
        """Name the unit whose forward or backward is under way; empty where it is none."""
        return self._label.unit

    def turn_to(self, label: Label) -> None:
        """Note what compute does from here on."""
        if label != self._label:
            self._end_segment()
            self._label = label

    def _end_segment(self) -> None:
        if self._counted:
            segment = self._segments.setdefault(self._take_segment(), len(self._segments))
            self.items.append(Item(WorkKind.COMPUTE, segment, self._label))

    def _take_segment(self) -> Segment:
        counted, self._counted = self._counted, {}
        return tuple(counted.items())

    # Streams

    def look_into(self, work: Work) -> tuple[tuple[Collective, ...], Segment]:
        """Run the work of a job, and return the collectives that it issues and what it computes."""
        outside = self._counted, self._issued
        self._counted, self._issued = {}, []
        try:
            work()
            return tuple(self._issued), self._take_segment()
        finally:
            self._counted, self._issued = outside

    def submit(self, job: ProgramJob) -> int:
        """Note a job; return its number."""
        self._end_segment()
        self.jobs.append(job)
        self.items.append(Item(WorkKind.SUBMIT, len(self.jobs) - 1, self._label))
        return len(self.jobs) - 1

    def wait(self, job: int, *, by_host: bool) -> None:
        """Note that compute, or the host, goes on after a job."""
        self._end_segment()
        self.items.append(Item(WorkKind.HOST_WAIT if by_host else WorkKind.WAIT, job, self._label))
        stream = self.jobs[job].stream
        if stream in ON_DEVICE:
            (self.order.await_by_host if by_host else self.order.await_by_compute)(stream, job)

    def synchronize(self) -> None:
        """Note that the host waits for all that compute was given."""
        self._end_segment()
        self.order.synchronize()
        self.items.append(Item(WorkKind.SYNCHRONIZE, 0, self._label))

    # Ranks

    def issue(self, collective: Collective) -> None:
        """Note a collective of the job that is being noted."""
        self._issued.append(collective)

    def communicate(self, collective: Collective) -> None:
        """Note a collective that the model issues, for which compute waits at once."""
        self.wait(
            self.submit(ProgramJob(OF_MODEL, self._label, collective.nbytes, collectives=(collective,))), by_host=False
        )

    def meet(self, collective: Collective) -> None:
        """Note a collective that the host issues and waits for."""
        self._end_segment()
        self._meetings.append(collective)
        self.items.append(Item(WorkKind.MEET, len(self._meetings) - 1, self._label))

    # Memory

    def add(self, tier: Tier, nbytes: int) -> None:
        """Note that bytes of a tier are taken, or with a negative number given back."""
        self.memory.append((len(self.items), tier, nbytes))

    def _peak_bytes(self) -> dict[str, int]:
        """Return the most bytes of each tier that were there at once."""
        changes = {tier: [nbytes for _, of, nbytes in self.memory if of is tier] for tier in Tier}
        peak = {str(tier): max(accumulate(of_tier, initial=self.rests[tier])) for tier, of_tier in changes.items()}
        return {tier: nbytes for tier, nbytes in peak.items() if nbytes}

    # The end

    def enter(self, phase: str) -> None:
        """Note that a forward, a backward or a step begins."""
        self._end_segment()
        self.phases.append((phase, len(self.items)))

    def items_of(self, phase: str) -> list[range]:
        """List the numbers of the items of each forward, backward or step."""
        ends = [first for _, first in self.phases[1:]] + [len(self.items)]
        return [range(first, end) for (name, first), end in zip(self.phases, ends, strict=True) if name == phase]

    def end_step(self) -> None:
        """Note that a step is over."""
        self.turn_to(NO_LABEL)
        self._end_segment()
        self.steps.append(len(self.items))
        self.step += 1

    def begin(self) -> None:
        """Begin the program here: of the start only the bytes that are there count."""
        self._end_segment()
        for _, tier, nbytes in self.memory:
            self.rests[tier] += nbytes
        self.memory.clear()
        self.items.clear()
        self.phases.clear()
        self.steps = [0]

    def operations(self, segment: int) -> dict[Op, int]:
        """Return the operations of a segment, and how often each is there."""
        ops, counted = list(self._ops), list(self._segments)[segment]
        return {ops[number]: count for number, count in counted}

    def segment(self, operations: Mapping[Op, int]) -> int:
        """Return the number of the segment of some operations."""
        counted = tuple((self._ops.setdefault(op, len(self._ops)), count) for op, count in operations.items())
        return self._segments.setdefault(counted, len(self._segments))

    def program(self, *, rule: str, world_size: int, tokens: int, hosts: int = 0) -> Program:
        """Give all that was noted."""
        return Program(
            back_end=self.back_end,
            ops=tuple(self._ops),
            segments=tuple(self._segments),
            jobs=tuple(self.jobs),
            meetings=tuple(self._meetings),
            items=tuple(self.items),
            steps=tuple(self.steps),
            peak_bytes=self._peak_bytes(),
            rule=rule,
            world_size=world_size,
            hosts=hosts,
            tokens=tokens,
        )


class Order:
    """Which jobs of a device must be over, without a clock, as far as the host knows.

    A stream of a device runs its jobs one after the other: where one is over, so are those before it. What compute
    waits for is over once the host has waited for compute.
    """

    def __init__(self) -> None:
        self._over: dict[str, int] = {}
        self._awaited: dict[str, int] = {}

    def await_by_compute(self, stream: str, number: int) -> None:
        """Note that compute goes on after a job."""
        self._awaited[stream] = max(number, self._awaited.get(stream, -1))

    def await_by_host(self, stream: str, number: int) -> None:
        """Note that the host goes on after a job."""
        self._over[stream] = max(number, self._over.get(stream, -1))

    def synchronize(self) -> None:
        """Note that the host goes on after all that compute was given."""
        for stream, number in self._awaited.items():
            self.await_by_host(stream, number)

    def is_over(self, stream: str, number: int) -> bool:
        """Whether a job must be over."""
        return number <= self._over.get(stream, -1)


class RecordedMemory(Memory):
    """Device memory of tensors, counted in notes.

    Arguments:
        recorder: take the bytes.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def add(self, nbytes: int) -> None:
        """Count memory that somebody takes."""
        self._recorder.add(Tier.DEVICE, nbytes)
