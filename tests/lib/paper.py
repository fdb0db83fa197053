"""Small programs, and machines of a few figures, to time on paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import ConfigError
from penstock.planner.simulation.fair_share import Demand, demand
from penstock.planner.simulation.program import BackEnd, Collective, Item, Op, Program, ProgramJob, WorkKind
from penstock.trace import Label


@dataclass
class Script:
    """Writes a program down, a line for each thing that it does.

    Attributes:
        back_end: who runs what is submitted.
    """

    back_end: BackEnd
    rule: str = "adamw"
    world_size: int = 1
    ops: list[Op] = field(default_factory=list)
    jobs: list[ProgramJob] = field(default_factory=list)
    segments: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    meetings: list[Collective] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    steps: list[int] = field(default_factory=lambda: [0])

    def write(self, text: str) -> "Script":
        """Write lines down, which `;` ends: streams with bytes, `after` jobs, on a `disk`; or what else there is."""
        for line in text.split(";"):
            verb, *words = line.split()
            if verb in ("wait", "host_wait"):
                getattr(self, verb)(int(words[0]))
            elif verb == "compute":
                self.compute(int(words[0]), *words[1:])
            elif verb in ("synchronize", "end_step"):
                getattr(self, verb)()
            elif verb == "meet":
                self.meet(int(words[0]))
            else:
                folder = int(words[words.index("disk") + 1]) if "disk" in words else -1
                after = words[words.index("after") + 1 :] if "after" in words else []
                self.submit(verb, int(words[0]), *map(int, after), folder=folder)
        return self

    def submit(self, stream: str, nbytes: int = 0, *after: int, folder: int = -1, verb: str = "do") -> int:
        """Submit a job; return its number."""
        number = len(self.jobs)
        self.jobs.append(ProgramJob(stream, Label(verb, f"job {number}"), nbytes, after, folder=folder))
        self.items.append(Item(WorkKind.SUBMIT, number))
        return number

    def compute(self, nbytes: int, unit: str = "unit") -> None:
        """Compute on so many bytes, with one operation."""
        self.ops.append(Op("op", 0, nbytes, "float32"))
        self.segments.append(((len(self.ops) - 1, 1),))
        self.items.append(Item(WorkKind.COMPUTE, len(self.segments) - 1, Label("forward", unit)))

    def wait(self, job: int) -> None:
        """Let compute go on after a job."""
        self.items.append(Item(WorkKind.WAIT, job))

    def host_wait(self, job: int) -> None:
        """Let the host go on after a job."""
        self.items.append(Item(WorkKind.HOST_WAIT, job))

    def synchronize(self) -> None:
        """Let the host go on after compute."""
        self.items.append(Item(WorkKind.SYNCHRONIZE))

    def meet(self, nbytes: int) -> None:
        """Let the host take part in a collective."""
        self.meetings.append(Collective("all_reduce", nbytes, 2))
        self.items.append(Item(WorkKind.MEET, len(self.meetings) - 1))

    def end_step(self) -> None:
        """End a step."""
        self.steps.append(len(self.items))

    def program(self) -> Program:
        """Give the program; what follows the last step's end, or all if there was none, is a step."""
        steps = (
            self.steps if self.steps[-1] == len(self.items) and len(self.steps) > 1 else [*self.steps, len(self.items)]
        )
        return Program(
            self.back_end,
            self.ops,
            self.segments,
            self.jobs,
            self.meetings,
            self.items,
            steps,
            {},
            self.rule,
            self.world_size,
        )


@dataclass
class Rates:
    """Costs of a machine whose streams have a rate each, and whose capacities are shared.

    Attributes:
        rates: bytes/s of each stream, of "compute" and of "meeting"; 1 where there is none.
        shared: of capacities, their names with bytes/s, and of which streams.
        latency: seconds that every job takes beside.
        submit: the host's seconds to submit a job.
        enqueue: the host's seconds to enqueue a segment.
        wake: seconds until a thread that slept goes on.
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    shared: Mapping[str, tuple[float, Sequence[str]]] = field(default_factory=dict)
    latency: float = 0.0
    submit: float = 0.0
    enqueue: float = 0.0
    wake: float = 0.0

    def take(self, name: str, nbytes: int, latency: float = 0.0) -> Demand:
        """Give what work of a stream takes."""
        loads = {each: nbytes / rate for each, (rate, names) in self.shared.items() if name in names}
        return demand(latency + nbytes / self.rates.get(name, 1.0), loads)

    def submit_seconds(self, program: Program) -> float:
        return self.submit

    def wake_seconds(self, program: Program) -> float:
        return self.wake

    def host_seconds(self, program: Program, number: int) -> float:
        return self.enqueue

    def job(self, job: ProgramJob, program: Program) -> Demand:
        return self.take(job.stream, job.nbytes, self.latency)

    def segment(self, program: Program, number: int) -> Demand:
        return self.take("compute", sum(program.ops[op].nbytes * count for op, count in program.segments[number]))

    def meeting(self, meeting: Collective, program: Program) -> Demand:
        return self.take("meeting", meeting.nbytes)


class Machine:
    """A machine of a few figures."""

    def __init__(self, **figures: float) -> None:
        self.figures = figures

    def has(self, name: str) -> bool:
        """Whether there is a figure."""
        return name in self.figures

    def value(self, name: str) -> float:
        """Give a figure."""
        if name not in self.figures:
            raise ConfigError(f"no figure {name}")
        return self.figures[name]
