"""How short a step can be at best, for one choice of activations and recomputing: a linear programme.

A step is two windows, forward and backward (`traffic.py`). For every resource r, with what it has to do in seconds:

    forward window   >= what r does in it
    backward window  >= what r does in it
    both together    >= all that r does
    every tier: what rests there, with what is there anyway, <= its limit

and the sum of both windows is the least. It knows nothing of who waits for whom within a window, so no step of the
engine is shorter; it may well be longer. Latencies count only where nothing hides them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from penstock.config import Overlap
from penstock.planner.bytes_moved import Flow, Spread, Traffic, add, fractions_of, variants
from penstock.planner.collective_cost import rounds, spread_of
from penstock.planner.linear import CONSTANT, Linear, Solution
from penstock.planner.shortfall import Infeasible, lacks
from penstock.planner.simulation.program import BackEnd, Collective
from penstock.planner.workload import Figures, Fractions, Limits, Load

#: How much a second of work counts beside a second of a step: of placements that are alike, the one that moves least is
#: to be found. No resource works longer than a step takes, so this costs a bound no more than it times the resources.
WORK = 1e-6
#: What several kinds of work share; each kind is counted by itself as well.
SHARED = ("link", "disk", "host memory", "cores")
FORWARD, BACKWARD = "forward window", "backward window"
STEP = {FORWARD: 1.0, BACKWARD: 1.0}


@dataclass(frozen=True)
class Bound:
    """The least seconds that a step takes, and the fractions of a placement that may come near it.

    Attributes:
        step_s: no step is shorter.
        fractions: by kind and tier: of those at the bound, the one that moves least.
        streamed: the share of the updates of what rests off the device that the device does.
        busy_s: seconds of work by resource.
        slack_s: seconds in which each resource has nothing to do.
        prices: what would shorten the step: by tier, seconds for each byte more of it; by resource, seconds for each
            second less of its work.
    """

    step_s: float
    fractions: Fractions
    streamed: float
    busy_s: Mapping[str, float] = field(default_factory=dict)
    slack_s: Mapping[str, float] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)

    @property
    def work_s(self) -> float:
        """Seconds of all work, if one thing were done after the other."""
        return sum(seconds for name, seconds in self.busy_s.items() if name not in SHARED)


def bound(
    load: Load,
    machine: Figures,
    limits: Limits,
    *,
    back_end: BackEnd,
    overlap: Overlap,
    fractions: Fractions | None = None,
    haste: float = 0.0,
) -> Bound | Infeasible:
    """Find the least seconds of a step over all placements that fit.

    Arguments:
        load: what the step consists of.
        machine: figures, in bytes and operations in a second.
        limits: what there is of each tier.
        back_end: who runs what is submitted: inline, updates take compute's own time.
        overlap: when updates run; "auto" as "forward".
        fractions: those of the placement, where it is given.
        haste: 0 for a placement at the bound. Above it, seconds of all work count so much beside the bound: little
            work, though it may be hidden. `step_s` is the same.

    Returns:
        The bound, or what is missing where nothing fits.

    Raises:
        ConfigError: the machine lacks a figure that the step needs.
    """
    found = least_step(load, machine, limits, back_end=back_end, overlap=overlap, fractions=fractions, haste=haste)
    return lacks(load, limits, fractions) if found is None else found


def least_step(
    load: Load,
    machine: Figures,
    limits: Limits,
    *,
    back_end: BackEnd,
    overlap: Overlap,
    fractions: Fractions | None = None,
    haste: float = 0.0,
) -> Bound | None:
    """Do as `bound`, and give `None` where nothing fits, without a look at what is missing."""
    found: list[Bound] = []
    for variant in variants(load, limits, fractions):
        answer = _Step(variant, machine, limits, back_end, overlap, fractions).solve(haste)
        if answer is not None:
            found.append(answer)
    return min(found, key=lambda each: each.step_s, default=None)


class _Rates:
    """Bytes that a resource does in a second. Where two figures could apply it is the faster one."""

    def __init__(self, machine: Figures, load: Load) -> None:
        self._machine = machine
        self._update = f"update_{load.rule}"

    def fastest(self, *names: str) -> float:
        """Give the fastest of some figures; those that the machine lacks do not count, unless it lacks all."""
        return max(self._machine.value(name) for name in [n for n in names if self._machine.has(n)] or names[:1])

    def of(self, flow: Flow, *, shared: bool) -> float:
        """Give the rate of a flow that has a resource to itself."""
        if flow in ("in place", "device update"):
            names = (self._update_figure,) if shared else ("device_update",)
            return self.fastest(*[name for name in names if self._machine.has(name)] or ["device_bandwidth"])
        if flow == "update":
            return self._machine.value(self._update_figure)
        if flow in ("read", "write"):
            return self._machine.value(f"disk_{flow}") * self.folders
        return self._machine.value(flow)

    @property
    def folders(self) -> float:
        """How many folders there are."""
        return self._machine.value("folders") if self._machine.has("folders") else 1.0

    @property
    def _update_figure(self) -> str:
        return self._update if self._machine.has(self._update) else "update"

    def link(self) -> float:
        """Give the rate of both ways of the link together: one at a time is possible as well."""
        return self.fastest("h2d", "d2h", "duplex") if self._machine.has("duplex") else inf

    def disk(self) -> float:
        """Give the rate of reads and writes together: one at a time is possible as well."""
        if not self._machine.has("disk_mixed"):
            return inf
        return self.fastest("disk_read", "disk_write", "disk_mixed") * self.folders

    def memory(self) -> float:
        """Give the rate of the host's memory."""
        if not self._machine.has("host_bandwidth"):
            return inf
        return self.fastest("host_bandwidth", "update", self._update)


def collective_s(machine: Figures, collective: Collective, ranks_of_host: int = 0) -> float:
    """Give the least seconds of a collective, as a ring does it: each rank has all but its own part to receive.

    Arguments:
        machine: its figures.
        collective: of a rank.
        ranks_of_host: how many ranks are on a host; 0 for as many as the machine has devices, if it says so.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """
    ranks = collective.ranks
    if ranks < 2:
        return 0.0
    devices = int(machine.value("devices")) if machine.has("devices") else ranks * collective.stride
    _, hosts, rings = spread_of(collective, ranks_of_host or devices)
    if hosts < 2:
        part = collective.nbytes * (ranks - 1) / ranks
        return machine.value("link_seconds") + rounds(collective) * part / machine.value("link_bandwidth")
    # One from each host at least: the part of the others comes over the network, that of other rings as well.
    return rounds(collective) * rings * collective.nbytes * (hosts - 1) / hosts / machine.value("net_bandwidth")


class _Step:
    """The linear programme of one step."""

    def __init__(
        self,
        load: Load,
        machine: Figures,
        limits: Limits,
        back_end: BackEnd,
        overlap: Overlap,
        fractions: Fractions | None,
    ) -> None:
        self._load, self._machine, self._limits = load, machine, limits
        self._rates = _Rates(machine, load)
        self._linear = Linear()
        self._traffic = Traffic(load, limits, self._linear, overlap)
        self._back_end = back_end
        self._resources = self._work()
        self._hold_windows()
        if overlap == "none":
            self._hold_updates_before_forward()
        self._hold_memory()
        if fractions is not None:
            self._traffic.pin(fractions)

    def solve(self, haste: float) -> Bound | None:
        """Find the least step, and of the placements that come near it the one that works least."""
        work = dict[str, float]()
        for name, spread in self._resources.items():
            add(work, spread.total if name not in SHARED else {})
        least = self._linear.least(_sum(STEP, work, WORK))
        if least is None:
            return None
        # step + WORK * work <= (1 + WORK * resources) * step, for the least step of all too.
        step_s = least.value / (1 + WORK * len(self._resources))
        chosen = self._linear.least(_sum(STEP, work, haste)) if haste else least
        return self._bound(step_s, least.prices, chosen or least)

    def _bound(self, step_s: float, by_row: Mapping[str, float], chosen: Solution) -> Bound:
        elsewhere = sum(chosen.values[cell.variable] for cell in self._traffic.cells if cell.optimizer != "device")
        streamed = sum(chosen.values[cell.variable] for cell in self._traffic.cells if cell.streamed)
        busy = {name: chosen.of(spread.total) for name, spread in self._resources.items()}
        prices = {name: sum(-by_row[f"{name}, {row}"] for row in _ROWS) for name in self._resources}
        prices |= {tier: -by_row[f"memory of {tier}"] for tier in self._limits.tiers}
        return Bound(
            step_s,
            fractions_of(self._traffic, self._load, chosen.values),
            streamed / elsewhere if elsewhere > WORK else 0.0,
            busy,
            {name: max(0.0, step_s - seconds) for name, seconds in busy.items()},
            {name: price for name, price in prices.items() if price > 0},
        )

    def _work(self) -> dict[str, Spread]:
        """List the resources, each with its seconds of work by window."""
        load, flows = self._load, self._traffic.flows
        work: dict[str, Spread] = {"compute": Spread()}
        later = load.micro_batches - 1
        # The device runs one kernel after another: passes, and updates in its reach.
        work["compute"].add("forward", {CONSTANT: load.forward_s})
        work["compute"].add("backward", {CONSTANT: load.backward_s * (later + 1) + load.forward_s * later})
        alone: Mapping[Flow, str] = {
            "h2d": "upload",
            "d2h": "download",
            "read": "read",
            "write": "write",
            "update": "update",
            "device update": "device update",
            "in place": "update in place" if self._limits.shared and self._back_end == "threads" else "compute",
        }
        for flow, name in alone.items():
            if flow in flows and flows[flow].total:
                rate = self._rates.of(flow, shared=self._limits.shared)
                work.setdefault(name, Spread()).take(flows[flow], 1 / rate)
        together: Sequence[tuple[str, Sequence[Flow], float]] = (
            ("link", ("h2d", "d2h"), inf if self._limits.shared else self._rates.link()),
            ("disk", ("read", "write"), self._rates.disk() if "read" in work or "write" in work else inf),
            ("host memory", ("h2d", "d2h", "read", "write", "update"), self._rates.memory()),
        )
        for name, sharing, rate in together:
            work[name] = Spread()
            for flow in sharing:
                work[name].take(flows.get(flow, Spread()), 1 / rate)
        if self._limits.shared and self._back_end == "inline":
            work["cores"] = Spread()  # those that compute are those that update, whichever thread does it
            for name in ("compute", "update", "device update"):
                work["cores"].take(work.get(name, Spread()), 1.0)
        work["collective"] = Spread()
        by_host = self._load.ranks_of_host
        seconds = [sum(collective_s(self._machine, each, by_host) for each in pass_) for pass_ in self._passes()]
        work["collective"].add("forward", {CONSTANT: seconds[0]})
        work["collective"].add("backward", {CONSTANT: seconds[0] * later + seconds[1] * later + seconds[2]})
        work["collective"].add("any", {CONSTANT: seconds[1] - seconds[2]})
        return work

    def _passes(self) -> Sequence[Sequence[Collective]]:
        """List the collectives of a forward, of a backward, and of the first one those that cannot begin before it."""
        spared, soon = self._load.ahead_bytes, list[Collective]()
        for each in self._load.backward_collectives:
            if each.name == "all_gather" and spared > 0:
                spared -= each.nbytes
            else:
                soon.append(each)
        return self._load.forward_collectives, self._load.backward_collectives, soon

    def _hold_windows(self) -> None:
        for name, spread in self._resources.items():
            for row, terms, step in zip(
                _ROWS,
                (spread.forward, spread.backward, spread.total),
                ({FORWARD: -1.0}, {BACKWARD: -1.0}, {FORWARD: -1.0, BACKWARD: -1.0}),
                strict=True,
            ):
                self._linear.at_most(f"{name}, {row}", {**terms, **step})

    def _hold_updates_before_forward(self) -> None:
        """Forward begins once `step` has returned: after the host's updates of what is in memory."""
        if self._limits.shared:
            return  # compute itself does these
        rate = self._rates.of("update", shared=False)
        in_memory = [c for c in self._traffic.cells if c.optimizer == "cpu" and not c.streamed and c.params != "nvme"]
        terms = {cell.variable: self._load.update_bytes / rate for cell in in_memory}
        add(terms, {CONSTANT: self._load.forward_s, FORWARD: -1.0})
        self._linear.at_most("updates before forward", terms)

    def _hold_memory(self) -> None:
        for tier in self._limits.tiers:
            self._linear.at_most(f"memory of {tier}", self._traffic.memory(tier), self._limits.room(tier))


_ROWS = ("forward", "backward", "step")


def _sum(one: Mapping[str, float], other: Mapping[str, float], times: float) -> dict[str, float]:
    total = dict(one)
    add(total, other, times)
    return total
