"""Small pipelines, timed by brute force: what a step takes if every stream does one thing after the other.

Written beside the bound, and not with it: units, streams, and what follows what, as `docs/overlap.md` says. It is as
quick as an engine could be: the host costs nothing, and nothing waits that need not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from penstock.config import TierName
from penstock.planner.workload import Load

TIERS: tuple[TierName, ...] = ("device", "cpu", "nvme")
RATES = ("h2d", "d2h", "disk_read", "disk_write", "update", "device_update")


class Machine:
    """Figures by name."""

    def __init__(self, **figures: float) -> None:
        self.figures = figures

    def value(self, name: str) -> float:
        return self.figures[name]

    def has(self, name: str) -> bool:
        return name in self.figures

    def replace(self, **figures: float) -> "Machine":
        return Machine(**{**self.figures, **figures})


@dataclass(frozen=True)
class Pipeline:
    """Equal units, each of one tile, and where their kinds are: cut in order, fastest tier first.

    Attributes:
        cuts: for each kind, how many units are on the device, and how many on the cpu; the others are on nvme.
        ahead: how many units are gathered ahead of their use.
        one_at_a_time: whether everything that moves takes turns at the host's memory.
        shared: whether the device's memory is the host's.
        one_set_of_cores: whether updates take turns with compute.
    """

    units: int
    params: int
    grads: int
    optimizer: int
    forward_s: float
    backward_s: float
    cuts: Mapping[str, tuple[int, int]]
    ahead: int = 1
    micro_batches: int = 1
    one_at_a_time: bool = False
    shared: bool = False
    one_set_of_cores: bool = False

    def tier(self, kind: str, unit: int) -> TierName:
        device, cpu = self.cuts[kind]
        return "device" if unit < device else "cpu" if unit < device + cpu else "nvme"

    @property
    def fractions(self) -> dict[str, dict[TierName, float]]:
        found: dict[str, dict[TierName, float]] = {}
        for kind in ("params", "grads", "optimizer"):
            tiers = [self.tier(kind, unit) for unit in range(self.units)]
            found[kind] = {tier: tiers.count(tier) / self.units for tier in TIERS if tier in tiers}
        return found

    @property
    def load(self) -> Load:
        n = self.units
        return Load(
            params_bytes=n * self.params,
            own_params_bytes=n * self.params,
            grads_bytes=n * self.grads,
            optimizer_bytes=n * self.optimizer,
            update_bytes=n * self.update_bytes,
            reduced_bytes=n * self.grads,
            reductions=self.micro_batches,
            micro_batches=self.micro_batches,
            forward_s=n * self.forward_s,
            backward_s=n * self.backward_s,
            forward_gathered_bytes=n * self.params,
            backward_gathered_bytes=n * self.params,
            ahead_bytes=self.ahead * self.params,
            kept_bytes=0,
        )

    @property
    def update_bytes(self) -> int:
        return self.grads + 2 * (self.params + self.optimizer)


@dataclass
class Clock:
    """When each stream is free, and what takes turns at what."""

    machine: Machine
    pipeline: Pipeline
    free: dict[str, float] = field(default_factory=dict)

    def run(self, stream: str, seconds: float, *after: float) -> float:
        turns = [stream]
        if self.pipeline.one_at_a_time and stream != "compute":
            turns.append("memory")
        if self.pipeline.one_set_of_cores and stream in ("compute", "update"):
            turns.append("cores")
        start = max([self.free.get(turn, 0.0) for turn in turns] + list(after))
        for turn in turns:
            self.free[turn] = start + seconds
        return start + seconds

    def move(self, figure: str, nbytes: float, *after: float) -> float:
        return self.run(figure, nbytes / self.machine.value(figure), *after)


def simulate(pipeline: Pipeline, machine: Machine, steps: int = 24, measured: int = 8) -> float:
    """Seconds of a step once it goes on as before."""
    clock = Clock(machine, pipeline)
    units = range(pipeline.units)
    storage = [0.0 for _ in units]  # when a unit's parameters are home
    record = {(kind, unit): 0.0 for kind, unit in product(("params", "grads", "optimizer"), units)}
    began, ends = 0.0, []
    for _ in range(steps):
        for unit in units:
            storage[unit] = _update(pipeline, clock, record, unit, began)
        grads_home = began
        for batch in range(pipeline.micro_batches):
            used: list[float] = []
            for unit in units:
                asked = max(began, storage[unit], used[-1 - pipeline.ahead] if len(used) > pipeline.ahead else 0.0)
                used.append(clock.run("compute", pipeline.forward_s, _gather(pipeline, clock, record, unit, asked)))
            over = used[-1]
            used = []
            for number, unit in enumerate(reversed(units)):
                # The first units are there, or come, while forward runs; others once those before them were used.
                asked = began if number < pipeline.ahead else max([over, *used[: number - pipeline.ahead]])
                asked = max(asked, storage[unit])
                used.append(clock.run("compute", pipeline.backward_s, _gather(pipeline, clock, record, unit, asked)))
                grads_home = max(grads_home, _send(pipeline, clock, record, unit, used[-1], adds=batch > 0))
        began = max(clock.free["compute"], grads_home)
        ends.append(began)
    return (ends[-1] - ends[-1 - measured]) / measured


Records = dict[tuple[str, int], float]


def _gather(pipeline: Pipeline, clock: Clock, record: Records, unit: int, asked: float) -> float:
    tier = pipeline.tier("params", unit)
    if tier == "nvme":
        asked = clock.move("disk_read", pipeline.params, asked, record["params", unit])
    return asked if tier == "device" or pipeline.shared else clock.move("h2d", pipeline.params, asked)


def _send(pipeline: Pipeline, clock: Clock, record: Records, unit: int, made: float, *, adds: bool) -> float:
    """When `step` need not wait for a gradient any more."""
    tier = pipeline.tier("grads", unit)
    if tier == "nvme":
        if adds:
            there = clock.move("disk_read", pipeline.grads, made, record["grads", unit])
            made = there if pipeline.shared else clock.move("h2d", pipeline.grads, there)
        down = made if pipeline.shared else clock.move("d2h", pipeline.grads, made)
        record["grads", unit] = clock.move("disk_write", pipeline.grads, down)
        return made
    return made if tier == "device" or pipeline.shared else clock.move("d2h", pipeline.grads, made)


def _update(pipeline: Pipeline, clock: Clock, record: Records, unit: int, began: float) -> float:
    """When a unit's new parameters are where forward gathers them."""
    tiers = {kind: pipeline.tier(kind, unit) for kind in ("params", "grads", "optimizer")}
    sizes = {"params": pipeline.params, "grads": pipeline.grads, "optimizer": pipeline.optimizer}
    ready = began
    in_place = tiers["optimizer"] == "device"
    for kind, tier in tiers.items():
        there = began
        if tier == "nvme":
            there = clock.move("disk_read", sizes[kind], began, record[kind, unit])
        if pipeline.shared:
            pass
        elif in_place and tier != "device" and not (kind == "params" and tier == "cpu"):
            there = clock.move("h2d", sizes[kind], there)
        elif not in_place and tier == "device" and not (kind == "params" and tiers["optimizer"] == "cpu"):
            there = clock.move("d2h", sizes[kind], there)
        ready = max(ready, there)
    if in_place:
        rate = clock.machine.value("update" if pipeline.shared else "device_update")
        updated = clock.run("compute", pipeline.update_bytes / rate, ready)
    else:
        updated = clock.move("update", pipeline.update_bytes, ready)
    done = updated
    if not pipeline.shared:
        if in_place and tiers["params"] != "device":
            done = clock.move("d2h", pipeline.params, updated)
        elif not in_place and tiers["params"] == "device":
            done = clock.move("h2d", pipeline.params, updated)
    for kind, back in (("params", done), ("optimizer", updated)):
        if tiers[kind] == "nvme":
            record[kind, unit] = clock.move("disk_write", sizes[kind], back)
    return max(done, record["params", unit]) if tiers["params"] == "nvme" else done


def all_cuts(units: int, tiers: Sequence[TierName]) -> list[tuple[int, int]]:
    """Every way to cut a kind: units on the device, and on the cpu."""
    found = []
    for device, cpu in product(range(units + 1), repeat=2):
        if device + cpu > units or (cpu and "cpu" not in tiers) or (device + cpu < units and "nvme" not in tiers):
            continue
        found.append((device, cpu))
    return found


def at_rest(load: Load, cuts: Pipeline) -> dict[TierName, float]:
    """Bytes on each tier, shadows as well, unit by unit."""
    found = {tier: float(load.there(tier)) for tier in TIERS}
    for unit in range(cuts.units):
        for kind, nbytes in (("params", cuts.params), ("grads", cuts.grads), ("optimizer", cuts.optimizer)):
            found[cuts.tier(kind, unit)] += nbytes
        params, state = cuts.tier("params", unit), cuts.tier("optimizer", unit)
        if {params, state} == {"device", "cpu"} and not cuts.shared:
            found[state] += cuts.params
    return found
