"""Bounds that can be worked out by hand, and pipelines of `tests/property/pipelines.py` that just meet them."""

import time
from dataclasses import replace

import pytest

from penstock.config import Overlap, TierName
from penstock.errors import ConfigError
from penstock.planner.bounds import Bound, bound, collective_s
from penstock.planner.machine import Machine as RealMachine
from penstock.planner.shortfall import Infeasible
from penstock.planner.simulation.program import BackEnd, Collective
from penstock.planner.workload import Fractions, Limits, Load
from tests.property.pipelines import TIERS, Machine, Pipeline, simulate

ROOMY = Limits(dict.fromkeys(TIERS, 1 << 40))
MACHINE = Machine(h2d=10, d2h=10, disk_read=4, disk_write=2, update=20, device_update=1000, folders=1)
LOAD = Load(
    params_bytes=20,
    own_params_bytes=20,
    grads_bytes=20,
    optimizer_bytes=100,
    update_bytes=260,
    reduced_bytes=20,
    forward_s=1.0,
    backward_s=2.0,
    forward_gathered_bytes=20,
    backward_gathered_bytes=20,
    ahead_bytes=0,
    kept_bytes=0,
)


def on(params: TierName, grads: TierName, optimizer: TierName) -> Fractions:
    return {"params": {params: 1.0}, "grads": {grads: 1.0}, "optimizer": {optimizer: 1.0}}


def least(
    load: Load = LOAD,
    fractions: Fractions | None = None,
    *,
    machine: Machine = MACHINE,
    limits: Limits = ROOMY,
    back_end: BackEnd = "accelerator",
    overlap: Overlap = "forward",
) -> Bound:
    found = bound(load, machine, limits, back_end=back_end, overlap=overlap, fractions=fractions)
    assert isinstance(found, Bound), found
    return found


# Each placement, and what binds it: forward window + backward window.
BY_HAND: dict[str, tuple[Fractions, float, float]] = {
    "all on the device: compute and its updates": (on("device", "device", "device"), 1 + 0.26, 2.0),
    "all on the cpu: updates, then compute": (on("cpu", "cpu", "cpu"), 260 / 20, 2.0),
    "state on the cpu: updates": (on("device", "device", "cpu"), 260 / 20, 2.0),
    "state in files: reads, then writes go on until the next": (on("device", "device", "nvme"), 100 / 4, 50 - 25),
    "gradients on the cpu: one link": (on("device", "cpu", "device"), 2.0, 2.0),
    "gradients in files: writes of all, reads in forward": (on("device", "nvme", "device"), 5.0, 5.0),
    "parameters on the cpu: up twice, down once": (on("cpu", "device", "device"), 2.0, 2.0),
    "parameters in files: read by update and backward": (on("nvme", "device", "device"), 5.0, 5.0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    fractions, forward_s, backward_s = BY_HAND[name]
    assert least(fractions=fractions).step_s == pytest.approx(forward_s + backward_s, rel=1e-5)


def test_bytes_of_every_way_of_a_streamed_tile() -> None:
    """State and shadow come up and go down, and the shadow is published: nothing of it is the host's."""
    load = replace(LOAD, streamed=1.0)
    machine = MACHINE.replace(update=1e-3)  # so slow that the device does all
    found = least(load, on("device", "cpu", "cpu"), machine=machine)
    assert found.streamed == pytest.approx(1.0, abs=1e-4)
    assert found.busy_s["upload"] * 10 == pytest.approx(100 + 20 + 20 + 20, rel=1e-3)
    assert found.busy_s["download"] * 10 == pytest.approx(100 + 20 + 20, rel=1e-3)


def test_the_device_does_no_more_of_the_updates_than_it_may() -> None:
    machine = MACHINE.replace(update=1e-3)
    shares = [
        least(replace(LOAD, streamed=share), on("cpu", "cpu", "cpu"), machine=machine).streamed for share in (0.0, 0.25)
    ]
    assert shares == pytest.approx([0.0, 0.25], abs=1e-6)


def test_a_write_goes_on_while_backward_runs() -> None:
    load = replace(LOAD, backward_s=40.0)
    assert least(load, on("device", "device", "nvme")).step_s == pytest.approx(25 + 40, rel=1e-5)


def test_what_is_gathered_ahead_of_backward_does_not_count_in_it() -> None:
    slow = MACHINE.replace(h2d=1, update=1e3)
    late, ahead = (
        least(replace(LOAD, ahead_bytes=nbytes, forward_s=30.0), on("cpu", "cpu", "cpu"), machine=slow).step_s
        for nbytes in (0, 5)
    )
    assert late == pytest.approx(30 + 20, rel=1e-5)
    assert ahead == pytest.approx(30 + 15, rel=1e-5)


def test_what_rings_keep_is_not_read_again() -> None:
    load = replace(LOAD, kept_bytes=40, backward_s=100.0)
    assert least(load, on("device", "device", "nvme")).step_s == pytest.approx(15 + 100, rel=1e-5)


def test_micro_batches_gather_anew_and_send_gradients_again() -> None:
    load = replace(LOAD, micro_batches=3, reductions=3)
    found = least(load, on("cpu", "cpu", "cpu"))
    assert found.busy_s["upload"] * 10 == pytest.approx(3 * (20 + 20))
    assert found.busy_s["download"] * 10 == pytest.approx(3 * 20)
    assert found.step_s == pytest.approx(260 / 20 + 10.0, rel=1e-5)  # uploads of what follows the first forward


def test_what_a_pass_does_not_gather_may_be_what_rests_elsewhere() -> None:
    """A tenth rests on the cpu and a tenth is never gathered again: it may be the same tenth."""
    load = replace(LOAD, backward_gathered_bytes=18)
    fractions = {**on("device", "device", "device"), "params": {"device": 0.9, "cpu": 0.1}}
    assert least(load, fractions).busy_s["upload"] * 10 == pytest.approx(2.0, abs=1e-3)


def test_activations_go_down_and_come_back() -> None:
    load = replace(LOAD, activations="nvme", activations_bytes=40)
    found = least(load, on("device", "device", "device"))
    assert found.busy_s["download"] == found.busy_s["upload"] == pytest.approx(4.0)
    assert found.step_s == pytest.approx(20.0, rel=1e-5)  # writes, in either window
    quick = least(load, on("device", "device", "device"), machine=MACHINE.replace(disk_write=1e3))
    assert quick.step_s == pytest.approx(4 + 10, rel=1e-5)  # down in forward, read in backward


MODES: dict[Overlap, float] = {"none": 1 + 13 + 2, "forward": 13 + 2, "auto": 13 + 2, "backward": 13}


@pytest.mark.parametrize("overlap", MODES)
def test_modes_differ_in_what_updates_may_hide_behind(overlap: Overlap) -> None:
    found = least(fractions=on("device", "cpu", "cpu"), overlap=overlap)
    assert found.step_s == pytest.approx(MODES[overlap], rel=1e-5)


@pytest.mark.parametrize(("back_end", "step_s"), [("inline", 1 + 13 + 2), ("threads", 13 + 2)])
def test_on_a_cpu_updates_take_the_time_of_compute(back_end: BackEnd, step_s: float) -> None:
    machine = Machine(update=20)
    limits = Limits({"cpu": 1000}, shared=True)
    found = least(machine=machine, limits=limits, back_end=back_end)
    assert found.step_s == pytest.approx(step_s, rel=1e-5)
    assert found.fractions == {kind: {"device": pytest.approx(1.0)} for kind in ("params", "grads", "optimizer")}


def test_a_cpu_has_one_memory_under_two_names() -> None:
    limits = Limits({"cpu": 1000}, shared=True)
    found = [
        least(fractions=on(tier, tier, tier), machine=Machine(update=20), limits=limits, back_end="inline").step_s
        for tier in ("device", "cpu")
    ]
    assert found[0] == found[1]
    assert limits.excess({"device": 600, "cpu": 500}) == {"device": 100}


def test_a_figure_that_is_missing_is_named() -> None:
    machine = RealMachine("a laptop", "cuda", {})
    with pytest.raises(ConfigError, match="has no figure h2d"):
        bound(LOAD, machine, ROOMY, back_end="accelerator", overlap="forward")


def test_a_placement_at_the_bound_moves_as_little_as_it_can() -> None:
    """Everything could be hidden behind long passes; nothing moves for no reason."""
    found = least(replace(LOAD, forward_s=1000.0, backward_s=1000.0), machine=MACHINE.replace(device_update=1e12))
    assert found.fractions == {
        kind: {"device": pytest.approx(1.0), "cpu": pytest.approx(0.0), "nvme": pytest.approx(0.0)}
        for kind in ("params", "grads", "optimizer")
    }
    assert found.busy_s["upload"] == found.busy_s["read"] == 0


def test_prices_say_what_would_shorten_a_step() -> None:
    limits = Limits({"device": 100, "cpu": 1000})
    found = least(limits=limits)
    longer = least(limits=Limits({"device": 99, "cpu": 1000}))
    assert found.prices["device"] == pytest.approx(longer.step_s - found.step_s, rel=1e-3)
    assert found.prices["update"] == pytest.approx(1.0)
    assert "cpu" not in found.prices
    assert found.slack_s["update"] == pytest.approx(found.step_s - found.busy_s["update"])


def test_a_shadow_takes_memory_where_the_update_is() -> None:
    """20 of parameters on the device, 100 of state on the host and 20 of shadows beside it."""
    fractions = on("device", "device", "cpu")
    assert isinstance(least(fractions=fractions, limits=Limits({"device": 40, "cpu": 120})), Bound)
    found = bound(
        LOAD,
        MACHINE,
        Limits({"device": 40, "cpu": 119}),
        back_end="accelerator",
        overlap="forward",
        fractions=fractions,
    )
    assert found == Infeasible({"cpu": 1})


def test_replicated_parameters_are_in_shards_where_a_part_is_in_files() -> None:
    load = replace(LOAD, own_params_bytes=5, grads_bytes=0, optimizer_bytes=0, reduced_bytes=0)
    tight = Limits({"device": 10})
    assert isinstance(bound(load, MACHINE, tight, back_end="accelerator", overlap="forward"), Infeasible)
    assert isinstance(least(load, limits=Limits({"device": 10, "nvme": 10})), Bound)


COLLECTIVES = {
    "within a host": (Collective("all_gather", 800, 4), 1 + 600 / 100),
    "summed and handed round": (Collective("all_reduce", 800, 4), 1 + 2 * 600 / 100),
    "between hosts": (Collective("all_gather", 800, 16), 400 / 10),
    "alone": (Collective("all_gather", 800, 1), 0.0),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_priced_by_what_each_rank_receives(name: str) -> None:
    machine = Machine(devices=8, link_bandwidth=100, link_seconds=1, net_bandwidth=10)
    collective, seconds = COLLECTIVES[name]
    assert collective_s(machine, collective) == pytest.approx(seconds)


def test_ranks_of_a_host_come_before_the_devices_of_a_machine() -> None:
    machine = Machine(devices=1, link_bandwidth=100, link_seconds=1, net_bandwidth=10)
    gather = Collective("all_gather", 800, 4)
    assert collective_s(machine, gather, 4) == pytest.approx(1 + 600 / 100)
    assert collective_s(machine, gather, 2) == pytest.approx(400 / 10)
    assert collective_s(machine, gather) == pytest.approx(600 / 10)


def test_collectives_bind_where_they_are_slow() -> None:
    machine = MACHINE.replace(devices=8, link_bandwidth=10, link_seconds=0)
    gather, reduce = Collective("all_gather", 160, 4), Collective("reduce_scatter", 160, 4)
    load = replace(LOAD, forward_collectives=(gather,), backward_collectives=(gather, reduce))
    assert least(load, on("device", "device", "device"), machine=machine).step_s == pytest.approx(12 + 24, rel=1e-5)
    ahead = replace(load, ahead_bytes=160, forward_s=30.0)
    assert least(ahead, on("device", "device", "device"), machine=machine).step_s == pytest.approx(30.26 + 12, rel=1e-5)


@pytest.mark.parametrize(
    "cuts",
    [
        {"params": (0, 4), "grads": (0, 4), "optimizer": (0, 4)},
        {"params": (4, 0), "grads": (4, 0), "optimizer": (4, 0)},
        {"params": (4, 0), "grads": (0, 4), "optimizer": (0, 0)},
    ],
)
def test_a_pipeline_of_many_units_comes_near_its_bound(cuts: dict[str, tuple[int, int]]) -> None:
    """So that the bound is not low for want of counting."""
    pipeline = Pipeline(40, 2000, 2000, 12000, 0.01, 0.02, {kind: (10 * d, 10 * c) for kind, (d, c) in cuts.items()})
    machine = Machine(h2d=2e5, d2h=2e5, disk_read=3e5, disk_write=2e5, update=1e6, device_update=1e7)
    found = least(pipeline.load, pipeline.fractions, machine=machine).step_s
    assert found <= simulate(pipeline, machine) <= 1.2 * found


def test_one_programme_is_solved_in_milliseconds() -> None:
    load = replace(LOAD, streamed=1.0, micro_batches=2, reductions=2, frozen_bytes=10, activations="cpu")
    limits = Limits({"device": 50, "cpu": 100, "nvme": 1000})
    machine = MACHINE.replace(duplex=15, host_bandwidth=30, disk_mixed=3)
    least(load, machine=machine, limits=limits)
    seconds = []
    for _ in range(5):
        began = time.process_time()
        least(load, machine=machine, limits=limits)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.04  # two programmes, of 20 ms each at most
