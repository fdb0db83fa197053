"""The words of a plan: what binds, what would change that, and what is missing where nothing fits."""

from dataclasses import replace

import torch

from penstock.config import Placement
from penstock.planner.plan_result import LEAST_SAVING, _words
from penstock.planner.search import given
from penstock.planner.trials import Trials
from tests.planning import ON_HOST, asked, desktop, planned

TIGHT = 300_000


def without_disks():
    machine = desktop()
    figures = {name: f for name, f in machine.figures.items() if not name.startswith(("disk", "folders"))}
    return replace(machine, figures=figures)


def test_shares_are_in_percent_fastest_tier_first() -> None:
    assert _words({"cpu": 0.878, "device": 0.122}) == "12% device, 88% cpu"
    assert _words({"device": 1.0, "cpu": 0.0}) == "100% device"


def test_savings_that_nobody_would_see_are_left_out() -> None:
    found = planned(placement=ON_HOST)
    assert found.what_ifs
    savings = [each.saved_s for each in found.what_ifs if each.saved_s is not None]
    assert savings
    assert all(saved >= LEAST_SAVING * found.step_s for saved in savings)


def test_a_batch_twice_as_large_says_whether_it_fits() -> None:
    named = [each.name for each in planned(placement=Placement()).what_ifs]
    assert "a batch twice as large" in named
    tight = planned(placement=Placement(), device_bytes=550_000)
    assert tight.fits
    assert "a batch twice as large (which does not fit as it is placed)" in [each.name for each in tight.what_ifs]


def test_a_batch_is_said_by_names_shapes_and_dtypes() -> None:
    ids = torch.zeros(4, 8, dtype=torch.long)
    assert planned(placement=Placement(), batch=lambda: {"ids": ids}).batch == "ids 4x8 int64"
    assert planned(placement=Placement(), batch=lambda: ids).batch == "4x8 int64"


def test_a_given_placement_that_does_not_fit_says_that_another_does() -> None:
    found = planned(placement=Placement(), device_bytes=TIGHT)
    assert not found.fits
    (lack,) = found.lacks
    assert lack.tier == "device"
    assert lack.bytes == found.peak_bytes["device"] - found.limit_bytes["device"]
    assert lack.change == "another placement, which placement='auto' finds"
    assert found.what_ifs == ()
    exactly = -(-(found.limit_bytes["device"] + lack.bytes) * 20 // 19) + 1  # some is left free
    assert planned(placement=Placement(), device_bytes=exactly).fits
    assert planned(placement=ON_HOST, device_bytes=TIGHT).fits


def test_more_of_the_nvme_tier_is_named_where_memory_is_short() -> None:
    request = asked(machine=without_disks(), device_bytes=TIGHT, host_bytes=100_000)
    best = given(request, Trials(request), Placement())
    assert best.lacking is not None
    assert best.lacking.smallest is not None
    assert (best.lacking.smallest.what, best.lacking.smallest.amount > 0) == ("nvme", True)
    found = planned(placement=Placement(), machine=without_disks(), device_bytes=TIGHT, host_bytes=100_000)
    assert found.lacks[0].change.endswith("of an nvme tier")
