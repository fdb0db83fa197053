"""`plan`: limits hold, more is never worse, and each argument changes what it should."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config import Options, Placement
from penstock.errors import ConfigError
from penstock.planner import search
from penstock.planner.machine import Machine
from penstock.planner.plans import Plan
from tests.planning import ON_HOST, Tellable, desktop, planned

SMALL, TIGHT = 500_000, 300_000


@pytest.fixture(scope="module")
def auto() -> Plan:
    """The best placement on a device that is too small for all state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "SIMULATIONS", 2)
        return planned(device_bytes=TIGHT)


@pytest.fixture(scope="module")
def on_host() -> Plan:
    return planned(placement=ON_HOST)


def test_what_does_not_fit_on_the_device_goes_elsewhere_and_peaks_stay_within_limits(auto: Plan) -> None:
    assert auto.fits
    assert auto.bytes["cpu"] > 0
    assert auto.peak_bytes["device"] <= auto.limit_bytes["device"] == TIGHT - TIGHT // 20
    roomy = planned()
    assert roomy.placement == Placement()
    assert roomy.bytes["device"] > auto.bytes["device"]
    assert roomy.step_s <= 1.01 * auto.step_s


def test_a_step_is_within_its_range(auto: Plan) -> None:
    low, high = auto.step_range_s
    assert low <= auto.step_s <= high


def test_the_placement_that_was_found_takes_as_long_when_it_is_given(auto: Plan) -> None:
    again = planned(placement=auto.placement, device_bytes=TIGHT)
    assert again.step_s == auto.step_s
    assert again.peak_bytes == auto.peak_bytes
    assert again.fits


def test_the_same_question_has_the_same_answer(on_host: Plan) -> None:
    assert planned(placement=ON_HOST).to_json() == on_host.to_json()


@pytest.mark.thorough  # a search
def test_what_can_be_told_computes_again_where_the_device_is_short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SIMULATIONS", 2)
    found = planned(lambda: Tellable(), device_bytes=SMALL)
    assert found.fits
    assert found.recompute


class TestRanks:
    def steps(self, **changes: Any) -> Plan:
        return planned(placement=ON_HOST, **changes)

    def test_ranks_share_state_and_a_network_is_slower_than_a_host(self, on_host: Plan) -> None:
        one, two, apart = on_host, self.steps(world_size=2), self.steps(world_size=2, hosts=2)
        assert two.bytes["cpu"] < one.bytes["cpu"]
        assert two.limit_bytes["cpu"] * 2 == pytest.approx(one.limit_bytes["cpu"], abs=2)
        assert apart.limit_bytes["cpu"] == one.limit_bytes["cpu"]
        assert apart.step_s > two.step_s
        assert (two.world_size, two.hosts, apart.hosts) == (2, 1, 2)

    def test_copies_of_shards_have_the_state_of_one_copy_and_their_own_sums(self) -> None:
        shards, hybrid = self.steps(world_size=2), self.steps(mesh={"dp_replicate": 2, "dp_shard": 2}, hosts=2)
        flat = self.steps(world_size=4, hosts=2)
        assert (hybrid.world_size, hybrid.mesh) == (4, {"dp_replicate": 2, "dp_shard": 2, "tp": 1})
        assert hybrid.bytes == shards.bytes
        assert flat.bytes["cpu"] < hybrid.bytes["cpu"]
        assert flat.mesh == {}
        # Over the network go sums of a shard of the gradients in place of all gathers.
        assert hybrid.step_s < flat.step_s
        assert "one of 4 ranks on 2 hosts, dp_replicate 2 x dp_shard 2" in " ".join(str(hybrid).split())
        assert hybrid.tokens_per_s == pytest.approx(2 * shards.tokens_per_s * shards.step_s / hybrid.step_s)
        same = self.steps(mesh={"dp_shard": 4}, hosts=2)
        assert same.to_json() == flat.to_json()

    def test_two_ranks_on_a_cpu_have_links_and_no_devices(self) -> None:
        """They share the cores and the memory of their host."""
        machine = Machine.read("cpu-laptop").replace(link_bandwidth=1e9, link_seconds=1e-5)
        bare = replace(machine, figures={name: f for name, f in machine.figures.items() if name != "devices"})
        one, two = planned(machine=bare), planned(machine=bare, world_size=2)
        assert two.fits
        assert two.step_s > one.step_s
        assert planned(machine=machine.replace(devices=1), world_size=2).step_s == two.step_s

    def test_a_machine_without_links_says_what_to_state(self) -> None:
        with pytest.raises(ConfigError, match=r"has no figure link_bandwidth .* state it: link_bandwidth=NUMBER"):
            planned(machine=Machine.read("cpu-laptop"), world_size=2)


def test_a_plan_has_the_threads_of_updates_that_were_asked_for(on_host: Plan) -> None:
    """The simulation starts none, and its one thread was what runs of plans were updated with."""
    assert on_host.options.update_threads is None
    assert planned(placement=ON_HOST, options=Options(update_threads=3)).options.update_threads == 3


def test_several_micro_batches_take_longer_and_have_their_tokens(on_host: Plan) -> None:
    one, two = on_host, planned(placement=ON_HOST, micro_batches=2)
    assert one.step_s < two.step_s < 2 * one.step_s
    assert two.tokens_per_s == pytest.approx(2 * 8 * 16 / two.step_s)
    assert two.batch == "2 of ids int64[8, 16]"


def test_a_trace_is_written(tmp_path: Path) -> None:
    planned(placement=ON_HOST, trace=tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [event for event in events if event["ph"] == "X"]


def test_the_users_model_stays_as_it_is() -> None:
    model = Tellable()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    planned(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), placement=Placement(), measure=True)
    assert not model.gradient_checkpointing
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_faster_disks_do_not_lengthen_a_step() -> None:
    placement = Placement(params="cpu", grads="cpu", optimizer="nvme", nvme_path="/nowhere/at/all")
    slow = planned(placement=placement, folders=["/nowhere/at/all"])
    machine = desktop()
    fast = planned(
        placement=placement,
        folders=["/nowhere/at/all"],
        machine=machine.replace(disk_read=2 * machine.value("disk_read"), disk_write=2 * machine.value("disk_write")),
    )
    assert fast.step_s <= slow.step_s
    assert not Path("/nowhere").exists()
