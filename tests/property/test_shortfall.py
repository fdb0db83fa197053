"""What is missing is what is missing: with so many bytes more it fits, with fewer it does not."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.workload import Limits, StepWorkload, fits, lacks, missing
from tests.lib.fuzz import examples

SIZES = st.integers(1000, 1 << 40)


@st.composite
def tight(draw: st.DrawFn) -> tuple[StepWorkload, Limits]:
    """A step, and limits of about as many bytes."""
    params, grads, optimizer = (draw(SIZES) for _ in range(3))
    shared = draw(st.booleans())
    workload = StepWorkload(
        params_bytes=params,
        own_params_bytes=params // draw(st.sampled_from([1, 4])),
        grads_bytes=grads,
        optimizer_bytes=optimizer,
        update_bytes=1,
        reduced_bytes=grads,
        there_bytes={"device": draw(SIZES)},
        activation_peak_bytes={"device": draw(SIZES), "cpu": draw(SIZES)},
        one_memory=shared,
        sharded=frozenset(("params", "grads", "optimizer")),
    )
    whole = sum(workload.kind_bytes.values())
    tiers = (
        draw(st.sampled_from([("cpu",), ("cpu", "nvme")]))
        if shared
        else draw(st.sampled_from([("device", "cpu"), ("device", "cpu", "nvme")]))
    )
    return workload, Limits({tier: draw(st.integers(0, whole)) for tier in tiers}, shared=shared)


@examples(50)
@given(tight())
def test_with_what_is_missing_it_fits_and_with_less_it_does_not(drawn: tuple[StepWorkload, Limits]) -> None:
    workload, limits = drawn
    lacking = missing(workload, limits)
    enough = limits
    for tier, nbytes in lacking.items():
        enough = enough.with_room(tier, enough.room(tier) + nbytes)
    assert fits(workload, enough)
    for tier, nbytes in lacking.items():
        assert not fits(workload, enough.with_room(tier, enough.room(tier) - max(1, nbytes // 50)))


@examples(50)
@given(tight())
def test_each_change_is_enough(drawn: tuple[StepWorkload, Limits]) -> None:
    workload, limits = drawn
    if fits(workload, limits):
        return
    for change in lacks(workload, limits).changes:
        if change.what == "nvme":
            assert fits(workload, limits.with_room("nvme", limits.bytes.get("nvme", 0) + int(change.amount)))
        elif change.what == "batch":
            peak = {tier: nbytes * change.amount for tier, nbytes in workload.activation_peak_bytes.items()}
            assert sum(missing(replace(workload, activation_peak_bytes=peak), limits).values()) <= 4
        else:
            assert fits(workload.over(int(change.amount)), limits)
            assert not fits(workload.over(int(change.amount) - 1), limits)
