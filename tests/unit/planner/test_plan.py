"""`plan`: limits hold, more is never worse, each argument changes what it should; and the words of a plan."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import Options, Placement
from penstock.errors import ConfigError
from penstock.planner import search
from penstock.planner.machine import Machine, Rate
from penstock.planner.make_plan import LEAST_SAVING, savings
from penstock.planner.plans import Plan
from penstock.planner.simulation import operation_times
from tests.lib.planning import ON_HOST, Tellable, desktop, planned

TIGHT = 300_000
IN_FILES = Placement(params="cpu", grads="cpu", optimizer="nvme", nvme_path="/nowhere/at/all")


@pytest.fixture(scope="module")
def auto() -> Plan:
    """The best placement on a device that is too small for all state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "SIMULATIONS", 2)
        return planned(device_bytes=TIGHT)


@pytest.fixture(scope="module")
def on_host() -> Plan:
    return planned(placement=ON_HOST)


@pytest.fixture(scope="module")
def on_device() -> Plan:
    return planned(placement=Placement())


@pytest.fixture(scope="module")
def two() -> Plan:
    """Of two ranks on a host."""
    return planned(placement=ON_HOST, world_size=2)


def test_what_does_not_fit_on_the_device_goes_elsewhere_and_peaks_stay_within_limits(
    auto: Plan, on_device: Plan
) -> None:
    assert auto.fits
    assert auto.bytes["cpu"] > 0
    assert auto.peak_bytes["device"] <= auto.limit_bytes["device"] == TIGHT - TIGHT // 20
    assert planned().placement == Placement()
    assert on_device.bytes["device"] > auto.bytes["device"]
    assert on_device.step_s <= 1.01 * auto.step_s
    low, high = auto.step_range_s
    assert low <= auto.step_s <= high


def test_the_same_question_has_the_same_answer_and_a_trace_where_one_is_asked_for(
    on_host: Plan, tmp_path: Path
) -> None:
    assert planned(placement=ON_HOST, trace=tmp_path / "step.json").to_json() == on_host.to_json()
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"upload", "download", "update"} <= threads
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    with pytest.raises(ConfigError, match=r"^The trace cannot be written: "):
        planned(placement=ON_HOST, trace=tmp_path)


def test_what_can_be_told_computes_again_where_the_device_is_short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SIMULATIONS", 2)
    found = planned(lambda: Tellable(), device_bytes=500_000)
    assert found.fits
    assert found.recompute


# Ranks


def test_ranks_share_state_and_a_network_is_slower_than_a_host(on_host: Plan, two: Plan) -> None:
    apart = planned(placement=ON_HOST, world_size=2, hosts=2)
    assert two.bytes["cpu"] < on_host.bytes["cpu"]
    assert two.limit_bytes["cpu"] * 2 == pytest.approx(on_host.limit_bytes["cpu"], abs=2)
    assert apart.limit_bytes["cpu"] == on_host.limit_bytes["cpu"]
    assert apart.step_s > two.step_s
    assert (two.world_size, two.hosts, apart.hosts) == (2, 1, 2)


def test_copies_of_shards_have_the_state_of_one_copy_and_their_own_sums(two: Plan) -> None:
    hybrid = planned(placement=ON_HOST, mesh={"dp_replicate": 2, "dp_shard": 2}, hosts=2)
    flat = planned(placement=ON_HOST, world_size=4, hosts=2)
    assert (hybrid.world_size, hybrid.mesh) == (4, {"dp_replicate": 2, "dp_shard": 2, "tp": 1})
    assert hybrid.bytes == two.bytes
    assert flat.bytes["cpu"] < hybrid.bytes["cpu"]
    assert flat.mesh == {}
    # Over the network go sums of a shard of the gradients in place of all gathers.
    assert hybrid.step_s < flat.step_s
    assert "one of 4 ranks on 2 hosts, dp_replicate 2 x dp_shard 2" in " ".join(str(hybrid).split())
    assert hybrid.tokens_per_s == pytest.approx(2 * two.tokens_per_s * two.step_s / hybrid.step_s)
    assert planned(placement=ON_HOST, mesh={"dp_shard": 4}, hosts=2).to_json() == flat.to_json()


def test_two_ranks_on_a_cpu_have_links_and_no_devices() -> None:
    """They share the cores and the memory of their host."""
    with pytest.raises(ConfigError, match=r"has no figure link_bandwidth .* state it: link_bandwidth=NUMBER"):
        planned(machine=Machine.read("cpu-laptop"), world_size=2)
    machine = Machine.read("cpu-laptop").replace(link_bandwidth=1e9, link_seconds=1e-5)
    bare = replace(machine, figures={name: f for name, f in machine.figures.items() if name != "devices"})
    one, two = planned(machine=bare), planned(machine=bare, world_size=2)
    assert two.fits
    assert two.step_s > one.step_s
    assert planned(machine=machine.replace(devices=1), world_size=2).step_s == two.step_s


# Other arguments


def test_micro_batches_take_longer_and_updates_have_the_threads_that_were_asked_for(on_host: Plan) -> None:
    """The simulation starts no thread, and its one was what runs of plans were updated with."""
    several = planned(placement=ON_HOST, micro_batches=2, options=Options(update_threads=3))
    assert (on_host.options.update_threads, several.options.update_threads) == (None, 3)
    assert on_host.step_s < several.step_s < 2 * on_host.step_s
    assert several.tokens_per_s == pytest.approx(2 * 8 * 16 / several.step_s)
    assert several.batch == "2 of ids int64[8, 16]"
    ids = torch.zeros(4, 8, dtype=torch.long)
    assert planned(placement=Placement(), batch=lambda: ids).batch == "int64[4, 8]"


def test_who_plans_is_not_warned_of_memory_that_is_not_pinned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(placement=ON_HOST, machine=desktop().replace(pinnable_memory=1 << 16)).fits


def test_the_users_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_times, "_LEAST_SECONDS", 1e-5)
    model = Tellable()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    planned(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), placement=Placement(), measure=True)
    assert not model.gradient_checkpointing
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_goes_to_files_is_written_and_faster_disks_do_not_lengthen_a_step(on_device: Plan) -> None:
    machine = desktop().replace(disk_endurance=6e14)
    folders = ["/nowhere/at/all"]
    slow = planned(placement=IN_FILES, folders=folders, machine=machine)
    speeds = {name: 2 * machine.value(name) for name in ("disk_read", "disk_write")}
    fast = planned(placement=IN_FILES, folders=folders, machine=machine.replace(**speeds))
    assert fast.step_s <= slow.step_s
    assert not Path("/nowhere").exists()
    # Records are whole pages.
    assert slow.bytes["nvme"] <= slow.written_bytes["nvme"] <= 1.2 * slow.bytes["nvme"]
    assert on_device.written_bytes == {}
    assert slow.disk_endurance_bytes == 6e14


def test_one_memory_is_counted_once_and_nothing_is_offloaded_within_it() -> None:
    machine = replace(desktop().replace(host_memory=1e9), unified_memory=True)
    found = planned(machine=machine)
    assert found.unified_memory
    assert found.placement == Placement()
    tight = planned(machine=machine, host_bytes=TIGHT)
    assert "cpu" not in {tier for home in tight.kind_bytes.values() for tier in home if home[tier]}
    assert tight.peak_bytes["device"] + tight.peak_bytes.get("cpu", 0) <= tight.limit_bytes["cpu"] or tight.lacks


# What would change a plan, and what is missing where nothing fits


def test_savings_are_seen_and_a_batch_twice_as_large_says_whether_it_fits(on_host: Plan, on_device: Plan) -> None:
    saved = [each.saved_s for each in on_host.what_ifs if each.saved_s is not None]
    assert saved
    assert all(each >= LEAST_SAVING * on_host.step_s for each in saved)
    assert "a batch twice as large" in [each.name for each in on_device.what_ifs]
    tight = planned(placement=Placement(), device_bytes=550_000)
    assert tight.fits
    assert "a batch twice as large (which does not fit as it is placed)" in [each.name for each in tight.what_ifs]


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


def stated(**figures: float) -> Machine:
    return Machine("a desktop", "cuda", {name: Rate(value, value, value, "made up") for name, value in figures.items()})


class TestSavings:
    WHOLE = stated(folders=1, disk_read=4.0, host_bandwidth=40.0, update=20.0, update_adamw=30.0, h2d=10.0, d2h=10.0)

    def step_s(self, there: Machine) -> float:
        """A step that reads, updates and uploads, one after the other."""
        return 8 / there.value("disk_read") + 60 / there.value("update_adamw") + 5 / there.value("h2d")

    def test_each_upgrade_of_what_a_machine_has_is_timed_and_the_best_comes_first(self) -> None:
        assert savings(self.WHOLE, self.step_s(self.WHOLE), self.step_s, "adamw") == [
            ("a second disk", pytest.approx(1.0)),
            ("host memory twice as fast", pytest.approx(1.0)),
            ("a link to the device twice as fast", pytest.approx(0.25)),
        ]
        assert savings(stated(host_bandwidth=40.0), 1.0, lambda better: 1.0) == [("host memory twice as fast", 0.0)]

    def test_a_rule_has_its_own_figure(self) -> None:
        seen: dict[str, list[Any]] = {"adamw": [], "lion": []}
        for rule, values in seen.items():
            savings(self.WHOLE, 1.0, lambda better, to=values: to.append(better.value("update_adamw")) or 1.0, rule)
        assert 60.0 in seen["adamw"]
        assert 60.0 not in seen["lion"]
