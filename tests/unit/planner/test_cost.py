"""What a machine takes for a job, a segment and a collective, figure by figure."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from penstock.errors import ConfigError
from penstock.planner.cost import MachineCosts
from penstock.planner.simulation.fair_share import Demand
from penstock.planner.simulation.program import Collective, Op, Program, ProgramJob
from penstock.trace import Label
from tests.lib.paper import Machine, Script

RATES = {
    "devices": 4.0,
    "flops_float32": 10.0,
    "flops_bfloat16": 100.0,
    "device_bandwidth": 50.0,
    "device_update": 25.0,
    "op_seconds": 0.5,
    "op_host_seconds": 0.25,
    "job_seconds": 0.125,
    "h2d": 8.0,
    "d2h": 4.0,
    "h2d_pageable": 2.0,
    "d2h_pageable": 1.0,
    "host_bandwidth": 16.0,
    "update": 8.0,
    "update_sgd": 10.0,
    "disk_read": 4.0,
    "disk_write": 2.0,
    "disk_seconds": 0.5,
    "link_bandwidth": 20.0,
    "link_seconds": 1.0,
    "net_bandwidth": 5.0,
    "net_seconds": 2.0,
}
MACHINE = Machine(**RATES)
DEVICE = Script("accelerator").program()
CPU = Script("threads").program()


def without(*names: str, **more: float) -> Machine:
    return Machine(**{name: value for name, value in (RATES | more).items() if name not in names})


def job(stream: str, nbytes: int = 80, verb: str = "do", **rest: Any) -> ProgramJob:
    return ProgramJob(stream, Label(verb, "unit"), nbytes, **rest)


UPDATE = job("update", verb="update")
GATHER = Collective("all_gather", 80, 4)
ON_DISK_1 = {"disk 1, one way": 20 / 20.5, "disk 1, other way": 20 / 20.5, "host memory": 5 / 20.5}


def cost(what: ProgramJob, program: Program = DEVICE, machine: Machine = MACHINE) -> Demand:
    return MachineCosts(machine).job(what, program)


def computing(*ops: tuple[Op, int], program: Program = DEVICE) -> Program:
    return replace(program, ops=[op for op, _ in ops], segments=[tuple((n, c) for n, (_, c) in enumerate(ops))])


MM, ADD = Op("mm", 200, 1, "bfloat16"), Op("add", 1, 500, "float32")


def segment(*ops: tuple[Op, int], program: Program = CPU, machine: Machine = MACHINE, **how: Any) -> Demand:
    return MachineCosts(machine, **how).segment(computing(*ops, program=program), 0)


def test_a_host_that_computes_does_its_own_work_between_operations() -> None:
    machine = without(op_host_seconds=2.5)
    assert segment((ADD, 3), machine=machine).seconds == 3 * (10 + 2.5 - 0.5)
    assert segment((ADD, 3), machine=machine, measured={ADD: 4}).seconds == 3 * (4 + 2.5 - 0.5)


@pytest.mark.parametrize(
    ("op", "seconds"),
    [
        (MM, 2),
        (Op("mm", 200, 1, "float32"), 20),
        (ADD, 10),
        (Op("add", 1, 1, "bfloat16"), 0.5),  # an operation's least time
        (Op("empty", 0, 0, "bfloat16"), 0),
        (Op("mm", 200, 1, "bfloat16", "2x2"), 7),  # as it was measured
    ],
)
def test_an_operation_is_as_slow_as_its_arithmetic_or_its_memory(op: Op, seconds: float) -> None:
    assert MachineCosts(MACHINE, measured={Op("mm", 200, 1, "bfloat16", "2x2"): 7.0}).op(op) == seconds


@pytest.mark.parametrize(("ranks", "factor"), [(1, 1), (2, 1), (4, 2)])
def test_ranks_that_were_timed_with_half_of_the_cores_are_in_nobodys_way_until_there_are_three(
    ranks: int, factor: int
) -> None:
    """Figures are of a host with all its cores, and a time that was measured is of those that a rank has."""
    program, how = replace(CPU, world_size=ranks), {"measured": {MM: 3.0}, "measured_share": 0.5}
    assert segment((MM, 1), program=program, machine=without("devices"), **how).seconds == 3.0 * factor


def test_of_a_cpu_it_takes_the_cores_and_the_hosts_memory() -> None:
    """No more of it than it has time for: what caches hold back is no load."""
    small = (Op("add", 0, 100, "float32"), 1)
    assert segment(small, machine=without(device_bandwidth=10)) == Demand(
        10, {"cores": 1, "host memory": 100 / 16 / 10}
    )
    assert segment(small) == Demand(2, {"cores": 1, "host memory": 1})
    assert MachineCosts(MACHINE).host_seconds(computing(small, program=CPU), 0) == 0
    two = replace(CPU, world_size=2)
    assert segment((Op("mm", 20, 1, "float32"), 1), program=two, machine=without("devices")).seconds == 4, (
        "ranks share it"
    )


def test_computes_own_update_is_as_fast_as_updates_are() -> None:
    update = (Op("penstock.update", 0, 100, "float32"), 1)
    assert segment(update, program=DEVICE).seconds == 4
    assert segment(update, program=replace(CPU, rule="sgd")).seconds == 10


TWO, EIGHT = replace(DEVICE, world_size=2), replace(DEVICE, world_size=8)
LANE = 10 / 10.125  # of a copy without an accelerator, beside what a job takes


class Case(NamedTuple):
    """What a job takes: its seconds, and what it uses of capacities, or of some of them."""

    job: ProgramJob
    seconds: float
    uses: dict[str, float] = {}  # noqa: RUF012 - read only
    program: Program = DEVICE
    machine: Machine = MACHINE


UP, DOWN, READ = job("upload"), job("download"), job("read", folder=0)
TURNS, LITTLE = {"link, one way": 1, "link, other way": 0}, {"link, one way": 1, "link, other way": 1}
BOTH = job("collective", collectives=(GATHER, GATHER), segment=((0, 1),))
COPIES = replace(computing((Op("copy", 0, 100, "float32"), 1)), world_size=4)
JOBS = {
    "a copy up takes its way": Case(UP, 10, {"host memory": 0.5}, machine=without(duplex=12)),
    "two full ways do not touch each other": Case(UP, 10, TURNS, machine=without(d2h=8, duplex=16)),
    "memory that is not pinned is touched three times": Case(job("upload", pageable=True), 40, {"host memory": 0.375}),
    "the host's memory may be what is slow": Case(UP, 20, machine=without(host_bandwidth=4)),
    "without an accelerator": Case(UP, 10.125, {"host memory": LANE, "cores": LANE}, CPU),
    "an update is as fast as its rule": Case(UPDATE, 10, {"cores": 1, "host memory": 0.5}),
    "other arithmetic touches three bytes for each": Case(
        job("update", verb="save"), 15, {"host memory": 1, "cores": 0}
    ),
    "of the device it takes its memory": Case(job("device update", 100), 4, {"device memory": 0.5}),
    "a cpu updates itself": Case(job("device update", verb="update"), 10.125, {}, CPU),
    "the stream of a cpu spends what a job takes": Case(UPDATE, 10.125, {}, CPU),
    "ranks of a host share its cores": Case(UPDATE, 40, {}, EIGHT),
    "a transfer is read from its disk": Case(job("read", folder=1), 20.5, ON_DISK_1 | {"cores": 0}),
    "or written": Case(job("write", folder=1), 40.5, {"disk 1, one way": 40 / 40.5}),
    "a transfer keeps cores busy": Case(READ, 20.5, {"cores": 10 / 20.5}, machine=without(disk_cores=8)),
    "and is no faster than its checksums": Case(READ, 40.5, machine=without(disk_cores=2)),
    "ranks of a host share its disks": Case(READ, 40.5, {}, TWO),
    # They are as many as was asked, whatever devices a launcher shows.
    "with one device": Case(READ, 40.5, {}, replace(TWO, hosts=1), without(devices=1)),
    "on hosts of their own": Case(READ, 20.5, {}, replace(TWO, hosts=2)),
    "collectives and what is computed": Case(BOTH, 10, {"links between ranks": 0.6, "device memory": 0.2}, COPIES),
}


@pytest.mark.parametrize("case", JOBS.values(), ids=JOBS)
def test_jobs(case: Case) -> None:
    taken = cost(case.job, case.program, case.machine)
    assert taken.seconds == case.seconds
    assert {name: taken.uses.get(name, 0) for name in case.uses} == pytest.approx(case.uses)


@pytest.mark.parametrize("of", ["link", "disk"])
def test_both_ways_together_move_what_the_figure_says(of: str) -> None:
    if of == "link":  # equal bytes each way, at 6 bytes/s each, of 8 alone
        machine, rate, name = without(d2h=8, duplex=12), 6 / 8, "link"
        one, other = (cost(job(stream, 60), machine=machine) for stream in ("upload", "download"))
    else:  # 3 bytes/s each, of 4 alone
        machine, rate, name = without(disk_write=4, disk_mixed=6, disk_seconds=0), 3 / 4, "disk 0"
        one, other = (cost(job(stream, folder=0), machine=machine) for stream in ("read", "write"))
    for way in (f"{name}, one way", f"{name}, other way"):
        assert (one.uses[way] + other.uses[way]) * rate == pytest.approx(1)


LINKS, NETWORK = "links between ranks", "network"
#: A collective, its ranks, all ranks, its seconds, and what it uses.
COLLECTIVES: dict[str, tuple[str, int, int, float, dict[str, float]]] = {
    "a ring sends all but its own part": ("all_gather", 4, 4, 4, {LINKS: 0.75}),
    "an all-reduce goes around twice": ("all_reduce", 4, 4, 8, {LINKS: 0.75}),
    "a broadcast sends all of it": ("broadcast", 4, 4, 5, {LINKS: 0.8}),
    "alone there is nothing to do": ("all_gather", 1, 4, 0, {}),
    "the network is what is slow": ("all_gather", 8, 8, 3 + 70 / 5, {NETWORK: 14 / 17, LINKS: 3.5 / 17}),
}


@pytest.mark.parametrize("case", COLLECTIVES)
def test_collectives(case: str) -> None:
    name, ranks, world, seconds, uses = COLLECTIVES[case]
    found = MachineCosts(MACHINE).meeting(Collective(name, 80, ranks), replace(DEVICE, world_size=world))
    assert found.seconds == pytest.approx(seconds)
    assert found.uses == pytest.approx(uses)


def test_the_host_of_a_device_spends_what_a_submission_takes() -> None:
    assert MachineCosts(MACHINE).submit_seconds(DEVICE) == 0.125
    assert MachineCosts(MACHINE).submit_seconds(CPU) == 0


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("h2d", job("upload")),
        ("update", job("update", verb="update")),
        ("link_bandwidth", job("collective", collectives=(Collective("all_gather", 8, 2),))),
    ],
)
def test_a_figure_that_is_needed_is_missed(name: str, what: ProgramJob) -> None:
    with pytest.raises(ConfigError, match=name):
        cost(what, replace(DEVICE, world_size=2), without(name))
    cost(job("update", verb="save"), machine=without(name))  # nothing else needs it
