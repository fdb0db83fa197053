"""The bound of a step is below what pipelines take that were timed by brute force, and fits what fits."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import TierName
from penstock.planner.bounds import Bound, bound
from penstock.planner.shortfall import Infeasible, fits, missing
from penstock.planner.workload import Limits, Load
from tests.property.pipelines import TIERS, Machine, Pipeline, all_cuts, at_rest, simulate

ROOMY = Limits(dict.fromkeys(TIERS, 1 << 40))
RATE = st.sampled_from([1e6, 3e6, 1e7, 4e7, 1e8])
CLOSE = 1e-5


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    figures = {name: draw(RATE) for name in ("h2d", "d2h", "disk_read", "disk_write", "update", "device_update")}
    return Machine(**figures)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    units = draw(st.integers(1, 6))
    cuts = {}
    for kind in ("params", "grads", "optimizer"):
        device = draw(st.integers(0, units))
        cuts[kind] = device, draw(st.integers(0, units - device))
    size = st.integers(1, 2_000_000)
    seconds = st.sampled_from([0.0, 0.01, 0.1, 0.5])
    return Pipeline(
        units,
        draw(size),
        draw(size),
        draw(size),
        draw(seconds),
        draw(seconds),
        cuts,
        ahead=draw(st.integers(0, 2)),
        micro_batches=draw(st.integers(1, 3)),
    )


def least(load: Load, machine: Machine, limits: Limits = ROOMY, **how: object) -> Bound:
    found = bound(load, machine, limits, **{"back_end": "accelerator", "overlap": "forward", **how})  # type: ignore[arg-type]
    assert isinstance(found, Bound)
    return found


@settings(max_examples=60, deadline=None)
@given(pipelines(), machines())
def test_no_pipeline_is_quicker_than_its_bound(pipeline: Pipeline, machine: Machine) -> None:
    step_s = simulate(pipeline, machine)
    of_its_placement = least(pipeline.load, machine, fractions=pipeline.fractions).step_s
    assert of_its_placement <= step_s * (1 + CLOSE) + 1e-9
    assert least(pipeline.load, machine).step_s <= of_its_placement * (1 + CLOSE)


@settings(max_examples=40, deadline=None)
@given(pipelines(), RATE)
def test_no_pipeline_that_takes_turns_at_the_memory_is_quicker(pipeline: Pipeline, rate: float) -> None:
    names = ("h2d", "d2h", "disk_read", "disk_write", "update", "device_update", "host_bandwidth", "duplex")
    machine = Machine(**dict.fromkeys((*names, "disk_mixed"), rate))
    pipeline = replace(pipeline, one_at_a_time=True)
    step_s = simulate(pipeline, machine)
    assert least(pipeline.load, machine, fractions=pipeline.fractions).step_s <= step_s * (1 + CLOSE) + 1e-9


@settings(max_examples=30, deadline=None)
@given(pipelines(), machines(), st.sampled_from(["inline", "threads"]))
def test_no_pipeline_in_one_memory_is_quicker(pipeline: Pipeline, machine: Machine, back_end: str) -> None:
    """A cpu as the device: what is in memory is updated by compute, as it reaches all of it."""
    cuts = {kind: (device + cpu, 0) for kind, (device, cpu) in pipeline.cuts.items()}
    pipeline = replace(pipeline, cuts=cuts, shared=True, one_set_of_cores=back_end == "inline")
    limits = Limits({"cpu": 1 << 40, "nvme": 1 << 40}, shared=True)
    step_s = simulate(pipeline, machine)
    found = least(pipeline.load, machine, limits, back_end=back_end, fractions=pipeline.fractions)
    assert found.step_s <= step_s * (1 + CLOSE) + 1e-9


@st.composite
def tight(draw: st.DrawFn) -> tuple[Pipeline, Limits]:
    """A pipeline of few bytes, and limits of about as many."""
    sizes = [draw(st.integers(1, 9)) for _ in range(3)]
    units = draw(st.integers(1, 3))
    pipeline = Pipeline(units, *sizes, 0.1, 0.2, dict.fromkeys(("params", "grads", "optimizer"), (0, 0)))
    tiers = draw(st.sampled_from([("device",), ("device", "cpu"), ("device", "cpu", "nvme"), ("device", "nvme")]))
    total = units * sum(sizes)
    return pipeline, Limits({tier: draw(st.integers(0, total)) for tier in tiers})


@settings(max_examples=40, deadline=None)
@given(tight())
def test_what_fits_in_whole_units_fits(drawn: tuple[Pipeline, Limits]) -> None:
    """Placements of whole units are some of all, so what fits of them fits; and what does not fit is of no use."""
    pipeline, limits = drawn
    kinds = ("params", "grads", "optimizer")
    placed = (
        replace(pipeline, cuts=dict(zip(kinds, cuts, strict=True)))
        for cuts in product(all_cuts(pipeline.units, limits.tiers), repeat=3)
    )
    any_fits = any(not limits.excess(at_rest(pipeline.load, each)) for each in placed)
    if any_fits:
        assert fits(pipeline.load, limits)
    machine = Machine(**dict.fromkeys(("h2d", "d2h", "disk_read", "disk_write", "update", "device_update"), 1e6))
    found = bound(pipeline.load, machine, limits, back_end="accelerator", overlap="forward")
    assert isinstance(found, Bound) == fits(pipeline.load, limits)


@settings(max_examples=40, deadline=None)
@given(tight())
def test_what_is_missing_is_missing_to_the_byte(drawn: tuple[Pipeline, Limits]) -> None:
    pipeline, limits = drawn
    lacking = missing(pipeline.load, limits)
    for tier, nbytes in lacking.items():
        limits = limits.with_room(tier, limits.of(tier) + nbytes)
    assert fits(pipeline.load, limits)
    for tier in lacking:
        assert not fits(pipeline.load, limits.with_room(tier, limits.of(tier) - 1)), f"a byte of {tier} too many"


@settings(max_examples=25, deadline=None)
@given(tight())
def test_what_fits_fits_on_a_grid_with_a_little_more_room(drawn: tuple[Pipeline, Limits]) -> None:
    """Brute force over eighths, shadows as well: what is lost by rounding is no more than a part of each kind."""
    pipeline, limits = drawn
    if "nvme" in limits.tiers or not fits(pipeline.load, limits):
        return  # with files the bound may pair tiles as no cut does, so that none has a shadow
    parts = replace(pipeline, units=8)
    slack = max(1, pipeline.units) * (2 * pipeline.params + pipeline.grads + pipeline.optimizer) / 8
    kinds = ("params", "grads", "optimizer")
    scale = pipeline.units / 8
    assert any(
        all(scale * nbytes <= limits.of(tier) + slack for tier, nbytes in at_rest(parts.load, placed).items())
        for cuts in product(all_cuts(8, limits.tiers), repeat=3)
        for placed in [replace(parts, cuts=dict(zip(kinds, cuts, strict=True)))]
    )


@settings(max_examples=40, deadline=None)
@given(tight())
def test_without_shadows_what_is_missing_is_what_there_is_too_much(drawn: tuple[Pipeline, Limits]) -> None:
    pipeline, limits = drawn
    load = replace(pipeline.load, own_params_bytes=0, params_bytes=0)  # no parameters: nothing has a shadow
    short = load.grads_bytes + load.optimizer_bytes - sum(limits.of(tier) for tier in limits.tiers)
    assert sum(missing(load, limits).values()) == max(0, short)


FASTER = st.sampled_from(["h2d", "d2h", "disk_read", "disk_write", "update", "device_update"])


@settings(max_examples=40, deadline=None)
@given(pipelines(), machines(), FASTER, st.floats(1, 10), st.sampled_from(TIERS), st.integers(0, 1 << 22))
def test_more_never_raises_the_bound(
    pipeline: Pipeline, machine: Machine, name: str, times: float, tier: TierName, more: int
) -> None:
    load = pipeline.load
    limits = Limits(
        {"device": sum(load.kind_bytes.values()) // 3, "cpu": sum(load.kind_bytes.values()), "nvme": 1 << 30}
    )
    before = least(load, machine, limits).step_s
    faster = machine.replace(**{name: times * machine.value(name)})
    assert least(load, faster, limits).step_s <= before * (1 + CLOSE)
    assert least(load, machine, limits.with_room(tier, limits.of(tier) + more)).step_s <= before * (1 + CLOSE)


@settings(max_examples=20, deadline=None)
@given(pipelines(), machines())
def test_the_same_question_has_the_same_answer(pipeline: Pipeline, machine: Machine) -> None:
    limits = Limits({"device": 1 << 20, "cpu": 1 << 21, "nvme": 1 << 30})
    answers = [bound(pipeline.load, machine, limits, back_end="accelerator", overlap="forward") for _ in range(2)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("overlap", ["none", "backward", "auto"])
@settings(max_examples=20, deadline=None)
@given(pipeline=pipelines(), machine=machines())
def test_other_modes_are_ordered(overlap: str, pipeline: Pipeline, machine: Machine) -> None:
    """Updates that may begin earlier take no longer, and those that are waited for no less."""
    forward, other = (
        least(pipeline.load, machine, fractions=pipeline.fractions, overlap=mode).step_s
        for mode in ("forward", overlap)
    )
    if overlap == "none":
        assert other >= forward * (1 - CLOSE)
    else:
        assert other <= forward * (1 + CLOSE)
    assert not isinstance(other, Infeasible)
