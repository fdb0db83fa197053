"""What jobs, segments and collectives cost on a machine: seconds alone, and what of each shared capacity.

Capacities are what a rank has of them: ranks of a host do the same at the same time, so each has its part of the host's
memory, cores and disks. Two directions of one link, or of one disk, may both be fast alone and slower together.
"""

from collections.abc import Mapping
from math import ceil, inf
from typing import NamedTuple

from penstock.planner.simulation.fair_share import Demand, Figures, demand, total_loads
from penstock.planner.simulation.program import OF_MODEL, Collective, Op, Program, ProgramJob

HOST_MEMORY, CORES, DEVICE_MEMORY = "host memory", "cores", "device memory"
LINKS, NETWORK = "links between ranks", "network"

#: Bytes of the host's memory that are read or written for each byte that arithmetic on the host is said to move: adding
#: reads two numbers and writes one. A cast reads one and writes one of another size, and the caches hold back a read
#: for what is written (write-allocate), so that it comes to as much.
_TOUCHED = 3
#: The same of a copy within the host's memory; and from or to a device: what is not pinned goes through a buffer that
#: is, so it is read, written there, and read again.
_COPIED, _PINNED, _PAGEABLE = 2, 1, 3

#: From so many bytes on the threads of a cpu share an operation (torch's grain is 32,768 elements).
_OF_THREADS_BYTES = 1 << 18

_ARITHMETIC = frozenset(("float32", "bfloat16", "float16"))
#: Compute's own update, as a simulation calls it (`streams.compute`).
_UPDATE_IN_PLACE = "penstock.update"
#: How often the other ranks' part of the buffer goes through each link, where that is not once. Of a ring an all-gather
#: and a reduce-scatter send (n-1)/n of the buffer, an all-reduce is one after the other (R. Thakur, R. Rabenseifner, W.
#: Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, sections 3 and 4). In an all-to-all each
#: rank keeps its own part, and sends the others. A broadcast in a pipeline sends all of it once. NCCL's "bus bandwidth"
#: divides by the same numbers (nccl-tests, doc/PERFORMANCE.md), and so do our figures.
_ROUNDS = {"all_reduce": 2}


class MachineCosts:
    """The costs of a program's parts on a machine.

    Arguments:
        figures: of the machine (`penstock.planner.Machine`).
        measured: seconds of operations that were run for real on it; others follow from the figures.
        measured_share: the part of the host's cores that they had, where the host computes.

    Example:
        >>> from penstock.planner import Machine
        >>> costs = MachineCosts(Machine.read("h100-node"))
        >>> costs.op(Op("aten.mm.default", flops=10**12, nbytes=10**8, dtype="bfloat16")) > 1e-3
        True
    """

    def __init__(
        self, figures: Figures, measured: Mapping[Op, float] | None = None, measured_share: float = 1.0
    ) -> None:
        self.figures = figures
        self._measured = measured or {}
        self._measured_share = measured_share
        self._known: dict[object, Demand] = {}  # by what of a program takes it
        self._program: Program | None = None

    def submit_seconds(self, program: Program) -> float:
        """Return the host's seconds to submit a job: 0 where it runs the job itself."""
        return self.figures.value("job_seconds") if program.back_end == "accelerator" else 0.0

    def wake_seconds(self, program: Program) -> float:
        """Return the seconds from the end of the work that a host thread sleeps for until the thread continues."""
        return self._value("wake_seconds") if program.back_end == "accelerator" else 0.0

    def host_seconds(self, program: Program, number: int) -> float:
        """Return the host's seconds to enqueue a segment on a device."""
        if program.back_end != "accelerator":
            return 0.0
        return sum(count for _, count in program.segments[number]) * self.figures.value("op_host_seconds")

    def op(self, op: Op) -> float:
        """Return the seconds of an operation: measured, or the longer of its arithmetic and its memory traffic."""
        if op in self._measured:
            return self._measured[op]
        if not op.flops and not op.nbytes:
            return 0.0  # nothing runs
        seconds = max(self.figures.value("op_seconds"), op.nbytes / self.figures.value("device_bandwidth"))
        if op.flops:
            dtype = op.dtype if op.dtype in _ARITHMETIC else "float32"
            seconds = max(seconds, op.flops / self.figures.value(f"flops_{dtype}"))
        return seconds + (self._value("op_threads_seconds") if op.nbytes >= _OF_THREADS_BYTES else 0.0)

    def segment(self, program: Program, number: int) -> Demand:
        """Return the demand of a segment of compute."""
        known = self._of(program)
        if number not in known:
            known[number] = self._compute(program, program.segments[number])
        return known[number]

    def meeting(self, meeting: Collective, program: Program) -> Demand:
        """Return the demand of a collective that the host issues and waits for."""
        return ring(meeting, self.figures, self.by_host(program))

    def job(self, job: ProgramJob, program: Program) -> Demand:
        """Return the demand of a job."""
        known = self._of(program)
        key = (job.stream, job.label.verb, job.nbytes, job.collectives, job.segment, job.pageable, job.folder)
        if key not in known:
            taken = self._job(job, program)
            if program.back_end != "accelerator":  # there the host spends it, before the job
                taken = demand(taken.seconds + self.figures.value("job_seconds"), total_loads([taken]))
            known[key] = taken
        return known[key]

    def by_host(self, program: Program) -> int:
        """Return the number of ranks on a host: as requested, else as many as the machine has devices."""
        if program.hosts:
            return max(1, program.world_size // program.hosts)
        if program.world_size == 1:
            return 1
        if program.back_end != "accelerator" and not self.figures.has("devices"):
            return program.world_size
        return max(1, min(program.world_size, int(self.figures.value("devices"))))

    def _of(self, program: Program) -> dict[object, Demand]:
        """Return the known demands of a program; those of one program at a time are kept."""
        if self._program is not program:
            self._known, self._program = {}, program
        return self._known

    def _value(self, name: str) -> float:
        """Look up a figure; 0 where the machine lacks it."""
        return self.figures.value(name) if self.figures.has(name) else 0.0

    # Compute

    def _compute(self, program: Program, segment: tuple[tuple[int, int], ...]) -> Demand:
        seconds, nbytes = 0.0, 0
        on_host = program.back_end != "accelerator"
        for number, count in segment:
            op = program.ops[number]
            if op.name == _UPDATE_IN_PLACE:
                taken = op.nbytes / self._update_rate(program, on_device=not on_host)
            else:
                taken = self.op(op)
            if op in self._measured and on_host:
                # With a part of the cores: ranks that have as many each are in nobody's way until all are taken.
                taken *= max(1 / self.by_host(program), self._measured_share)
            seconds += count * taken
            nbytes += count * op.nbytes
        if not on_host:
            # What caches keep from memory is not known: no more than it had time for.
            return demand(seconds, {DEVICE_MEMORY: min(seconds, nbytes / self.figures.value("device_bandwidth"))})
        seconds *= self.by_host(program)  # ranks of a host share its cores
        # The host's own work for an operation is in the way of what it computes.
        own = max(0.0, self._value("op_host_seconds") - self._value("op_seconds"))
        seconds += own * sum(count for _, count in segment)
        memory = {name: min(seconds, load) for name, load in self._memory(nbytes, program).items()}
        return demand(seconds, {CORES: seconds} | memory)

    def _update_rate(self, program: Program, *, on_device: bool) -> float:
        """Look up the bytes/s of the rule's update, by an accelerator or by the host."""
        own = f"update_{program.rule}"
        return self.figures.value("device_update" if on_device else own if self.figures.has(own) else "update")

    # Jobs

    def _job(self, job: ProgramJob, program: Program) -> Demand:
        if job.folder >= 0:
            return self._transfer(job, program)
        if job.stream in ("collective", OF_MODEL):
            return self._collective(job, program)
        if job.stream == "device update" and program.back_end == "accelerator":
            seconds = job.nbytes / self._update_rate(program, on_device=True)
            return demand(seconds, {DEVICE_MEMORY: min(seconds, job.nbytes / self.figures.value("device_bandwidth"))})
        if job.stream in ("update", "device update"):
            return self._host_update(job, program)
        if program.back_end == "accelerator" and job.stream in ("upload", "download", "save"):
            return self._link(job, program)
        return self._host_pass(job.nbytes, _COPIED, program)

    def _host_update(self, job: ProgramJob, program: Program) -> Demand:
        if job.label.verb != "update":
            return self._host_pass(job.nbytes, _TOUCHED, program)
        seconds = job.nbytes * self.by_host(program) / self._update_rate(program, on_device=False)
        return demand(seconds, {CORES: seconds} | self._memory(job.nbytes, program))

    def _host_pass(self, nbytes: int, touched: int, program: Program) -> Demand:
        """Return the demand of one host thread's pass over some memory.

        Where the host computes, the thread of an operation whose core it takes holds up the others.
        """
        seconds = nbytes * touched * self.by_host(program) / self.figures.value("host_bandwidth")
        return demand(seconds, {HOST_MEMORY: seconds} | ({} if program.back_end == "accelerator" else {CORES: seconds}))

    def _link(self, job: ProgramJob, program: Program) -> Demand:
        pageable = "_pageable" if job.pageable else ""
        up, down = (self.figures.value(f"{way}{pageable}") for way in ("h2d", "d2h"))
        together = self.figures.value("duplex") if self.figures.has("duplex") else inf
        loads = _both_ways("link", job.nbytes, job.stream == "upload", up, down, together)
        return demand(0.0, loads | self._memory(job.nbytes * (_PAGEABLE if job.pageable else _PINNED), program))

    def _transfer(self, job: ProgramJob, program: Program) -> Demand:
        read, write = self.figures.value("disk_read"), self.figures.value("disk_write")
        nbytes, reads = job.nbytes * self.by_host(program), job.stream != "write"
        loads = _both_ways(f"disk {job.folder}", nbytes, reads, read, write, self._value("disk_mixed"))
        if self.figures.has("disk_cores"):
            loads[CORES] = nbytes / self.figures.value("disk_cores")
        seconds = self.figures.value("disk_seconds") + max(loads.values())
        return demand(seconds, loads | self._memory(job.nbytes, program))

    def _collective(self, job: ProgramJob, program: Program) -> Demand:
        by_host = self.by_host(program)
        parts = [ring(each, self.figures, by_host) for each in job.collectives]
        parts.append(self._compute(program, job.segment))
        if not job.collectives and not job.segment:  # nothing is known but its bytes: a copy
            parts.append(self._host_pass(job.nbytes, _COPIED, program) if program.back_end != "accelerator" else NONE)
        return demand(sum(part.seconds for part in parts), total_loads(parts))

    def _memory(self, nbytes: float, program: Program) -> dict[str, float]:
        """Return the seconds for which bytes would need all of the host's memory bandwidth."""
        rate = self._value("host_bandwidth")
        return {HOST_MEMORY: nbytes * self.by_host(program) / rate} if rate else {}


NONE = Demand(0.0)


def _both_ways(name: str, nbytes: float, first: bool, one: float, other: float, together: float) -> dict[str, float]:
    """Return the loads of bytes on a link or a disk that works both ways.

    What it can do at once, `a` bytes/s one way and `b` the other, is all that lies below the lines from (`one`, 0) to
    (`together`/2, `together`/2) and on to (0, `other`): each line is a capacity. Where the point in the middle lies
    below the line from end to end it is left out: the two ways could take turns. What can be done grows with each of
    the three figures.
    """
    half = 2 / together if together else 1 / one + 1 / other
    own, opposite = (one, other) if first else (other, one)
    beside = nbytes * min(max(half - 1 / opposite, 0.0), 1 / own)
    ways = (f"{name}, one way", f"{name}, other way")
    return dict(zip(ways, (nbytes / own, beside) if first else (beside, nbytes / own), strict=True))


class Spread(NamedTuple):
    """Where the ranks of a collective are.

    Attributes:
        here: how many of them are on this host.
        hosts: on how many hosts they are.
        rings: how many collectives of the kind ranks of this host take part in at the same time, each with ranks of
            its own: they share the host's network.
    """

    here: int
    hosts: int
    rings: int


def spread_of(collective: Collective, by_host: int) -> Spread:
    """Return where the ranks of a collective are, by their stride.

    Arguments:
        collective: of this rank.
        by_host: how many ranks are on a host, one after the other.
    """
    here = max(1, min(collective.ranks, by_host // collective.stride))
    return Spread(here, ceil(collective.ranks / here), max(1, by_host // here))


def through(collective: Collective) -> float:
    """Count the bytes that a rank sends, and receives."""
    ranks = collective.ranks
    part = 1.0 if collective.name in ("broadcast", "reduce") else (ranks - 1) / ranks
    return collective.nbytes * _ROUNDS.get(collective.name, 1) * part


def ring(collective: Collective, figures: Figures, by_host: int) -> Demand:
    """Return the demand of a collective.

    Arguments:
        collective: of this rank.
        figures: of the machine.
        by_host: how many ranks are on a host.

    Raises:
        ConfigError: the machine lacks the bandwidth or the latency of its links, or of its network.
    """
    if collective.ranks < 2:
        return Demand(0.0)
    nbytes = through(collective)
    here, hosts, rings = spread_of(collective, by_host)
    loads: dict[str, float] = {}
    latency = 0.0
    if here > 1:
        loads[LINKS] = nbytes / figures.value("link_bandwidth")
        latency += figures.value("link_seconds")
    if hosts > 1:
        loads[NETWORK] = nbytes * rings / figures.value("net_bandwidth")
        latency += figures.value("net_seconds")
    # The slowest link sets the pace of a ring, and what it waits for comes on top.
    slowest = max(loads.values())
    return demand(latency * _ROUNDS.get(collective.name, 1) + slowest, loads)
