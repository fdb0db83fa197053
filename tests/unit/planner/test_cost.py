"""What a machine takes for a job, a segment and a collective, figure by figure."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.planner.cost import MachineCosts
from penstock.planner.machine import Machine as Shipped
from penstock.planner.simulation.fair_share import Demand
from penstock.planner.simulation.program import Collective, Op, Program, ProgramJob
from penstock.trace import Label
from tests.paper import Machine, Script

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


def cost(what: ProgramJob, program: Program = DEVICE, machine: Machine = MACHINE) -> Demand:
    return MachineCosts(machine).job(what, program)


def computing(*ops: tuple[Op, int], program: Program = DEVICE) -> Program:
    return replace(program, ops=[op for op, _ in ops], segments=[tuple((n, c) for n, (_, c) in enumerate(ops))])


class TestCompute:
    def test_a_host_that_computes_does_its_own_work_between_operations(self) -> None:
        program = computing((Op("add", 1, 500, "float32"), 3), program=CPU)
        machine = Machine(**RATES | {"op_host_seconds": 2.5})
        assert MachineCosts(machine).segment(program, 0).seconds == 3 * (10 + 2.5 - 0.5)
        assert MachineCosts(machine, measured={program.ops[0]: 4}).segment(program, 0).seconds == 3 * (4 + 2.5 - 0.5)

    def test_threads_that_share_an_operation_begin_and_end_it_together(self) -> None:
        machine = Machine(**RATES | {"op_threads_seconds": 7.0})
        small, large = Op("add", 1, 500, "float32"), Op("add", 1, 1 << 18, "float32")
        assert MachineCosts(machine).op(small) == 10
        assert MachineCosts(machine).op(large) == (1 << 18) / 50 + 7

    @pytest.mark.parametrize(
        ("op", "seconds"),
        [
            (Op("mm", 200, 1, "bfloat16"), 2),
            (Op("mm", 200, 1, "float32"), 20),
            (Op("mm", 200, 1, "float64"), 20),  # no figure of its own
            (Op("add", 1, 500, "bfloat16"), 10),
            (Op("add", 1, 1, "bfloat16"), 0.5),  # an operation's least time
            (Op("empty", 0, 0, "bfloat16"), 0),
        ],
    )
    def test_an_operation_is_as_slow_as_its_arithmetic_or_its_memory(self, op: Op, seconds: float) -> None:
        assert MachineCosts(MACHINE).op(op) == seconds

    @pytest.mark.parametrize(("ranks", "factor"), [(1, 1), (2, 1), (4, 2)])
    def test_ranks_that_were_timed_with_half_of_the_cores_are_in_nobodys_way_until_there_are_three(
        self, ranks: int, factor: int
    ) -> None:
        """Figures are of a host with all its cores, and a time that was measured is of those that a rank has."""
        op = Op("mm", 0, 0, "float32")
        program = replace(computing((op, 1), program=CPU), world_size=ranks)
        costs = MachineCosts(without("devices"), measured={op: 3.0}, measured_share=0.5)
        assert costs.segment(program, 0).seconds == 3.0 * factor

    def test_a_time_that_was_measured_counts(self) -> None:
        op, other = Op("mm", 200, 1, "bfloat16", "2x2"), Op("mm", 200, 1, "bfloat16", "1x4")
        costs = MachineCosts(MACHINE, measured={op: 7.0})
        assert (costs.op(op), costs.op(other)) == (7, 2)

    def test_a_segment_is_the_sum_of_its_operations(self) -> None:
        program = computing((Op("mm", 200, 10, "bfloat16"), 3), (Op("add", 0, 500, "bfloat16"), 1))
        assert MachineCosts(MACHINE).segment(program, 0) == Demand(16, {"device memory": (530 / 50) / 16})
        assert MachineCosts(MACHINE).host_seconds(program, 0) == 1

    def test_of_a_cpu_it_takes_the_cores_and_the_hosts_memory(self) -> None:
        program = computing((Op("add", 0, 100, "float32"), 1), program=CPU)
        assert MachineCosts(without(device_bandwidth=10)).segment(program, 0) == Demand(
            10, {"cores": 1, "host memory": 100 / 16 / 10}
        )
        assert MachineCosts(MACHINE).host_seconds(program, 0) == 0

    def test_it_does_not_take_more_memory_than_it_has_time_for(self) -> None:
        """What caches hold back is no load."""
        program = computing((Op("add", 0, 100, "float32"), 1), program=CPU)
        assert MachineCosts(MACHINE).segment(program, 0) == Demand(2, {"cores": 1, "host memory": 1})

    def test_computes_own_update_is_as_fast_as_updates_are(self) -> None:
        op = Op("penstock.update", 0, 100, "float32")
        assert MachineCosts(MACHINE).segment(computing((op, 1)), 0).seconds == 4
        program = computing((op, 1), program=replace(CPU, rule="sgd"))
        assert MachineCosts(MACHINE).segment(program, 0).seconds == 10

    def test_ranks_of_a_cpu_share_it(self) -> None:
        program = computing((Op("mm", 20, 1, "float32"), 1), program=replace(CPU, world_size=2))
        assert MachineCosts(without("devices")).segment(program, 0).seconds == 4

    def test_two_programs_are_told_apart(self) -> None:
        costs = MachineCosts(MACHINE)
        one, two = computing((Op("mm", 200, 1, "float32"), 1)), computing((Op("mm", 300, 1, "float32"), 1))
        assert [costs.segment(each, 0).seconds for each in (one, two, one)] == [20, 30, 20]


class TestLinks:
    def test_a_copy_takes_its_way_and_the_hosts_memory(self) -> None:
        up, down = cost(job("upload"), machine=without(duplex=12)), cost(job("download"), machine=without(duplex=12))
        assert (up.seconds, down.seconds) == (10, 20)
        assert up.uses["host memory"] == pytest.approx(0.5)
        assert down.uses["host memory"] == pytest.approx(0.25)

    def test_both_ways_together_move_what_the_figure_says(self) -> None:
        up = cost(job("upload", 60), machine=without(d2h=8, duplex=12))
        down = cost(job("download", 60), machine=without(d2h=8, duplex=12))
        for way in ("link, one way", "link, other way"):  # equal bytes each way, at 6 bytes/s each
            assert (up.uses[way] + down.uses[way]) * 6 / 8 == pytest.approx(1)

    def test_a_figure_below_what_turns_would_do_changes_nothing(self) -> None:
        up = cost(job("upload"), machine=without(d2h=8, duplex=5))
        assert (up.uses["link, one way"], up.uses["link, other way"]) == pytest.approx((1, 1))

    def test_two_full_ways_do_not_touch_each_other(self) -> None:
        up = cost(job("upload"), machine=without(d2h=8, duplex=16))
        assert up.uses == {"link, one way": 1, "host memory": 0.5}

    def test_where_nothing_is_known_of_both_ways_neither_slows_the_other(self) -> None:
        up, down = cost(job("upload")), cost(job("download"))
        assert not {name for name in up.uses if name.startswith("link")} & set(down.uses)

    def test_memory_that_is_not_pinned_is_touched_three_times(self) -> None:
        up = cost(job("upload", pageable=True))
        assert up.seconds == 40
        assert up.uses["host memory"] == pytest.approx(3 * 80 / 16 / 40)

    def test_a_copy_for_a_checkpoint_comes_down_as_well(self) -> None:
        assert cost(job("save")).seconds == cost(job("download")).seconds

    def test_the_hosts_memory_may_be_what_is_slow(self) -> None:
        assert cost(job("upload"), machine=without(host_bandwidth=4)).seconds == 20

    def test_without_an_accelerator_a_copy_is_read_and_written(self) -> None:
        share = pytest.approx(10 / 10.125)
        assert cost(job("upload"), CPU) == Demand(10.125, {"host memory": share, "cores": share})


class TestUpdates:
    def test_an_update_is_as_fast_as_its_rule(self) -> None:
        assert cost(job("update", verb="update")).seconds == 10
        assert cost(job("update", verb="update"), replace(DEVICE, rule="sgd")).seconds == 8

    def test_it_takes_the_cores_and_its_bytes_of_memory(self) -> None:
        assert cost(job("update", verb="update")).uses == {"cores": 1, "host memory": 0.5}

    def test_other_arithmetic_touches_three_bytes_for_each(self) -> None:
        assert cost(job("update", verb="save")) == Demand(15, {"host memory": 1})

    def test_of_the_device_it_takes_its_memory(self) -> None:
        assert cost(job("device update", 100)) == Demand(4, {"device memory": 0.5})

    def test_a_cpu_updates_itself(self) -> None:
        assert cost(job("device update", verb="update"), CPU).seconds == 10.125

    def test_ranks_of_a_host_share_its_cores(self) -> None:
        assert cost(job("update", verb="update"), replace(DEVICE, world_size=8)).seconds == 40
        assert cost(job("update", verb="update"), replace(DEVICE, world_size=2)).seconds == 20


class TestDisks:
    def test_a_transfer_takes_its_disk(self) -> None:
        read, write = cost(job("read", folder=1)), cost(job("write", folder=1))
        assert (read.seconds, write.seconds) == (20.5, 40.5)
        assert cost(job("fetch", folder=1)) == read
        for taken, alone in ((read, 20), (write, 40)):
            loads = {name: share * taken.seconds for name, share in taken.uses.items()}
            assert loads == pytest.approx({"disk 1, one way": alone, "disk 1, other way": alone, "host memory": 5})

    def test_a_transfer_keeps_cores_busy_that_would_compute(self) -> None:
        taken = cost(job("read", folder=1), machine=Machine(**RATES | {"disk_cores": 8}))
        assert taken.seconds == 20.5, "no longer than before, alone"
        assert taken.uses["cores"] * taken.seconds == pytest.approx(10)
        few = cost(job("read", folder=1), machine=Machine(**RATES | {"disk_cores": 2}))
        assert few.seconds == 40.5, "no faster than its checksums"

    def test_disks_are_told_apart(self) -> None:
        assert not set(cost(job("read", folder=0)).uses) & set(cost(job("read", folder=1)).uses) - {"host memory"}

    def test_both_ways_together_move_what_the_figure_says(self) -> None:
        machine = without(disk_write=4, disk_mixed=6, disk_seconds=0)
        read, write = cost(job("read", folder=0), machine=machine), cost(job("write", folder=0), machine=machine)
        for way in ("disk 0, one way", "disk 0, other way"):  # 3 bytes/s each, of 4 alone
            assert (read.uses[way] + write.uses[way]) * 3 / 4 == pytest.approx(1)

    def test_ranks_of_a_host_share_its_disks(self) -> None:
        assert cost(job("read", folder=0), replace(DEVICE, world_size=2)).seconds == 40.5

    def test_ranks_of_a_host_are_as_many_as_was_asked_whatever_devices_a_launcher_shows(self) -> None:
        one_device = Machine(**RATES | {"devices": 1})
        assert cost(job("read", folder=0), replace(DEVICE, world_size=2, hosts=1), one_device).seconds == 40.5
        assert cost(job("read", folder=0), replace(DEVICE, world_size=2, hosts=2)).seconds == 20.5
        assert cost(job("read", folder=0), replace(DEVICE, world_size=2, hosts=1), without("devices")).seconds == 40.5


class TestCollectives:
    def gather(self, name: str = "all_gather", ranks: int = 4, dimension: str = "shard", world: int = 4) -> Demand:
        program, stride = replace(DEVICE, world_size=world), 1 if dimension == "shard" else world // ranks
        return MachineCosts(MACHINE).meeting(Collective(name, 80, ranks, dimension, stride), program)

    def test_a_ring_sends_all_but_its_own_part(self) -> None:
        assert self.gather() == Demand(4, {"links between ranks": 0.75})
        assert self.gather("reduce_scatter") == self.gather()

    def test_an_all_reduce_goes_around_twice(self) -> None:
        assert self.gather("all_reduce").seconds == 8

    def test_a_broadcast_sends_all_of_it(self) -> None:
        assert self.gather("broadcast").seconds == 5

    def test_alone_there_is_nothing_to_do(self) -> None:
        assert self.gather(ranks=1) == Demand(0)

    def test_between_hosts_the_network_is_what_is_slow(self) -> None:
        found = self.gather(ranks=8, world=8)
        assert found.seconds == pytest.approx(3 + 70 / 5)
        assert found.uses == pytest.approx({"network": 14 / 17, "links between ranks": 3.5 / 17})

    def test_copies_of_shards_meet_over_the_network_all_at_once(self) -> None:
        """Each of a host's four ranks has a ring of its own to the other host."""
        found = self.gather("all_reduce", ranks=2, dimension="replicate", world=8)
        assert found.seconds == 2 * 2 + 4 * 80 / 5
        assert found.uses == pytest.approx({"network": 64 / 68})

    def test_copies_on_one_host_stay_there(self) -> None:
        assert set(self.gather(ranks=2, dimension="replicate", world=4).uses) == {"links between ranks"}

    def test_hosts_say_which_links_ranks_have(self) -> None:
        gather, costs = Collective("all_gather", 80, 4), MachineCosts(Machine(**RATES | {"devices": 1}))
        here = costs.meeting(gather, replace(DEVICE, world_size=4, hosts=1))
        assert set(here.uses) == {"links between ranks"}
        apart = costs.meeting(gather, replace(DEVICE, world_size=4, hosts=4))
        assert set(apart.uses) == {"network"}

    def test_a_job_takes_its_collectives_and_what_it_computes(self) -> None:
        program = replace(computing((Op("copy", 0, 100, "float32"), 1)), world_size=4)
        gather = Collective("all_gather", 80, 4)
        found = MachineCosts(MACHINE).job(job("collective", collectives=(gather, gather), segment=((0, 1),)), program)
        assert found.seconds == 10
        assert found.uses == pytest.approx({"links between ranks": 0.6, "device memory": 0.2})


class TestOverheads:
    def test_the_host_of_a_device_spends_it(self) -> None:
        assert MachineCosts(MACHINE).submit_seconds(DEVICE) == 0.125
        assert cost(job("update", verb="update")).seconds == 10

    def test_else_the_stream_does(self) -> None:
        assert MachineCosts(MACHINE).submit_seconds(CPU) == 0
        assert cost(job("update", verb="update"), CPU).seconds == 10.125


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("h2d", job("upload")),
        ("update", job("update", verb="update")),
        ("disk_read", job("read", folder=0)),
        ("device_update", job("device update")),
        ("link_bandwidth", job("collective", collectives=(Collective("all_gather", 8, 2),))),
    ],
)
def test_a_figure_that_is_needed_is_missed(name: str, what: ProgramJob) -> None:
    with pytest.raises(ConfigError, match=name):
        cost(what, replace(DEVICE, world_size=2), without(name))
    cost(job("update", verb="save"), machine=without(name))  # nothing else needs it


@pytest.mark.parametrize("name", ["rtx4090-desktop", "h100-node"])
def test_machines_that_come_along_have_what_is_needed(name: str) -> None:
    costs = MachineCosts(Shipped.read(name))
    ranks = min(2, int(Shipped.read(name).value("devices")))
    program = replace(computing((Op("mm", 10**12, 10**8, "bfloat16"), 1)), world_size=ranks)
    streams = ("upload", "download", "save", "update", "device update", "collective")
    jobs = [
        job(stream, 1 << 26, "update", collectives=(Collective("all_gather", 1 << 26, ranks),)) for stream in streams
    ]
    jobs += [job(stream, 1 << 26, folder=0) for stream in ("read", "fetch", "write")]
    for each in jobs:
        taken = costs.job(each, program)
        assert 1e-5 < taken.seconds < 1 or (each.stream, taken.seconds, ranks) == ("collective", 0, 1)
        assert all(0 < share <= 1 for share in taken.uses.values())
    assert 1e-4 < costs.segment(program, 0).seconds < 1
