"""The words of a plan: what binds, what would change that, and what is missing where nothing fits."""

from dataclasses import replace

import pytest
import torch

from penstock.config import Placement
from penstock.planner.machine import Machine, Rate
from penstock.planner.make_plan import LEAST_SAVING, _words, savings
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
    assert planned(placement=Placement(), batch=lambda: {"ids": ids}).batch == "ids int64[4, 8]"
    assert planned(placement=Placement(), batch=lambda: ids).batch == "int64[4, 8]"


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
    smallest = best.lacking.changes[0]
    assert (smallest.what, smallest.amount > 0) == ("nvme", True)
    found = planned(placement=Placement(), machine=without_disks(), device_bytes=TIGHT, host_bytes=100_000)
    assert found.lacks[0].change.endswith("of an nvme tier")


def stated(**figures: float) -> Machine:
    return Machine("a desktop", "cuda", {name: Rate(value, value, value, "made up") for name, value in figures.items()})


class TestSavings:
    WHOLE = stated(folders=1, disk_read=4.0, host_bandwidth=40.0, update=20.0, update_adamw=30.0, h2d=10.0, d2h=10.0)

    def step_s(self, there: Machine) -> float:
        """A step that reads, updates and uploads, one after the other."""
        return 8 / there.value("disk_read") + 60 / there.value("update_adamw") + 5 / there.value("h2d")

    def test_each_upgrade_is_timed_and_the_best_comes_first(self) -> None:
        found = savings(self.WHOLE, self.step_s(self.WHOLE), self.step_s, "adamw")
        assert found == [
            ("a second disk", pytest.approx(1.0)),
            ("host memory twice as fast", pytest.approx(1.0)),
            ("a link to the device twice as fast", pytest.approx(0.25)),
        ]

    def test_figures_that_a_machine_lacks_are_not_asked_for(self) -> None:
        assert savings(stated(host_bandwidth=40.0), 1.0, lambda better: 1.0) == [("host memory twice as fast", 0.0)]

    def test_a_rule_has_its_own_figure(self) -> None:
        seen: list[float] = []
        for rule in ("adamw", "lion"):
            savings(self.WHOLE, 1.0, lambda better: seen.append(better.value("update_adamw")) or 1.0, rule)
        assert 60.0 in seen[:3]
        assert 60.0 not in seen[3:]


def test_what_is_written_is_what_goes_to_files() -> None:
    """Records are whole pages."""
    found = planned(placement=Placement(optimizer="nvme", nvme_path="/nowhere/at/all"))
    assert found.bytes["nvme"] <= found.written_bytes["nvme"] <= 1.2 * found.bytes["nvme"]
    assert planned(placement=Placement()).written_bytes == {}


def test_the_endurance_of_a_disk_is_the_machines() -> None:
    assert planned(placement=Placement(), machine=desktop().replace(disk_endurance=6e14)).disk_endurance_bytes == 6e14


def test_one_memory_is_counted_once_and_nothing_is_offloaded_within_it() -> None:
    machine = replace(desktop().replace(host_memory=1e9), unified_memory=True)
    found = planned(machine=machine)
    assert found.unified_memory
    assert found.placement == Placement()
    tight = planned(machine=machine, host_bytes=TIGHT)
    assert "cpu" not in {tier for home in tight.kind_bytes.values() for tier in home if home[tier]}
    assert tight.peak_bytes["device"] + tight.peak_bytes.get("cpu", 0) <= tight.limit_bytes["cpu"] or tight.lacks
