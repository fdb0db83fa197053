"""`prepare(placement="auto")`: what it is done by, what it refuses, and that it asks for what arguments by hand do."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import preparing
from penstock.blueprint import PrepareRequest
from penstock.config import Options, Placement
from penstock.errors import ConfigError, MemoryBudgetError
from penstock.footprint import footprint
from penstock.planner import make_plan
from penstock.planner.machine import Machine
from penstock.planner.make_plan import plan_here
from penstock.planner.plans import Plan, Shortfall, model_fingerprint
from penstock.planner.this_machine import remember
from penstock.probe.fingerprint import fingerprint
from penstock.runtime.host_memory import HostMemory
from penstock.runtime.topology import Grid
from tests.lib.memory import disks
from tests.lib.plans import small

CPU = torch.device("cpu")
TILES = Options(tile_bytes=1 << 14)
UNMADE: dict[str, Any] = {"step_s": 0, "step_range_s": (0, 0), "busy_s": {}}


def net(width: int = 32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


class Recomputing(nn.Module):
    """A model of one's own that computes activations again, and says so."""

    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


class Tellable(nn.Sequential):
    def gradient_checkpointing_enable(self) -> None:
        self.gradient_checkpointing = True


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plan(**changes: Any) -> Plan:
    """A plan for `net` on one rank in fp32."""
    return small(**{"model_fingerprint": model_fingerprint(net()), **changes})


def prepare(model: nn.Module | None = None, **arguments: Any) -> penstock.Optimizer:
    model = net() if model is None else model
    return penstock.prepare(model, adamw(model), **{"placement": "auto", "precision": "fp32", **arguments})


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[PrepareRequest]:
    """What `build` is asked for."""
    seen: list[PrepareRequest] = []
    build = preparing.build

    def noted(model: Any, optimizer: Any, request: PrepareRequest, *rest: Any) -> penstock.Optimizer:
        seen.append(request)
        return build(model, optimizer, request, *rest)

    monkeypatch.setattr(preparing, "build", noted)
    return seen


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("something was taken before the error")

    monkeypatch.setattr(preparing, "streams_for", forbidden)


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """This machine, as if it had been probed before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known = Machine.read("cpu-laptop")
    figures = {name: figure for name, figure in known.figures.items() if not name.startswith(("disk", "folders"))}
    machine = replace(known, figures=figures, fingerprint=fingerprint(CPU), probed=True)
    remember(machine)
    return machine


class TestWithAPlan:
    @pytest.mark.parametrize("as_file", [str, Path])
    def test_a_file_does_as_well(self, as_file, tmp_path, requests):
        file = tmp_path / "plan.json"
        file.write_text(plan().to_json())
        optimizer = prepare(plan=as_file(file))
        assert optimizer.plan == plan()
        with pytest.raises(AttributeError):
            optimizer.plan = None
        assert requests[0].placement == plan().placement
        by_hand = prepare(placement=plan().placement, overlap="forward", options=TILES)
        assert by_hand.plan is None
        assert requests[0] == requests[1]
        assert optimizer.locations().rows == by_hand.locations().rows
        assert {row.tier for row in optimizer.locations().rows} == {"device", "cpu"}
        optimizer.close()
        by_hand.close()

    def test_a_plan_is_done_without_the_planner(self, monkeypatch):
        for name in ("penstock.planner.make_plan", "penstock.planner.search"):
            monkeypatch.setitem(sys.modules, name, None)  # to import it fails
        prepare(plan=plan()).close()

    def test_the_log_says_what_was_chosen_and_nothing_is_printed(self, caplog, capsys):
        with caplog.at_level(logging.INFO, logger="penstock"):
            prepare(plan=plan()).close()
        assert [record.getMessage() for record in caplog.records] == [
            f"prepare(placement='auto') did what this plan says:\n{plan()}"
        ]
        assert capsys.readouterr() == ("", "")

    def test_a_model_for_inference_takes_the_plan_of_the_one_in_training(self):
        model = net().requires_grad_(False)
        made = plan(recompute=True, placement=Placement(params="cpu"))
        optimizer = penstock.prepare(model, None, placement="auto", precision="fp32", plan=made)
        assert optimizer.plan == made
        assert optimizer.locations().bytes(kind="param", tier="device") == 0
        optimizer.close()

    def test_a_machine_that_differs_in_what_a_launcher_decides_is_the_same(self):
        other = {**fingerprint(CPU), "threads": 99, "ranks": 7, "kernel": "9.9", "disks": ["ext4 1:2"], "torch": "9"}
        prepare(plan=plan(machine_fingerprint=other)).close()

    def test_a_model_that_recomputes_takes_a_plan_that_does(self):
        model = Recomputing()
        prepare(model, plan=plan(recompute=True, model_fingerprint="")).close()


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "nothing": (
        dict,
        "placement='auto' needs to know what it is for: give plan=, the file that penstock plan wrote, or",
    ),
    "plan for a placement": (lambda: {"placement": None, "plan": plan()}, "plan= goes with placement='auto' alone."),
    "batch for a placement": (
        lambda: {"placement": Placement(), "batch": net},
        "batch= goes with placement='auto' alone. Give that, or leave batch= out.",
    ),
    "another precision": (lambda: {"plan": plan(), "precision": "bf16"}, "precision fp32, this run has bf16"),
    "more ranks": (lambda: {"plan": plan(world_size=2)}, "The plan is for world size 2, this run has 1: plan again"),
    "another model": (
        lambda: {"plan": plan(model_fingerprint="9 tensors")},
        "for a model of 9 tensors, this one has 6",
    ),
    "another processor": (
        lambda: {"plan": plan(machine_fingerprint={"cpu": "Z80"})},
        "The plan is for a machine whose cpu is 'Z80', here it is",
    ),
    "options": (
        lambda: {"plan": plan(), "options": Options(tile_bytes=1 << 12)},
        "Options(tile_bytes) is 4096 here and 16384 in the plan.",
    ),
    "what does not fit": (
        lambda: {"plan": plan(fits=False, lacks=(Shortfall("device", 5 << 20, "2 more ranks, 3 in all"),), **UNMADE)},
        "The plan does not fit: ",
    ),
    "a model that does not recompute": (
        lambda: {"plan": plan(recompute=True)},
        "The plan has the model compute activations again in backward. Nothing tells whether this Sequential does: "
        "wrap its blocks with torch.utils.checkpoint, and say so by its attribute gradient_checkpointing = True",
    ),
    "folders that nobody named": (
        lambda: {"plan": plan(placement=Placement(optimizer="nvme", nvme_path=("nvme0", "nvme1")))},
        "The plan was made without names of folders, and nvme0, nvme1 stand for 2 of them. Plan again with penstock "
        "plan --folders, or name them as placement.nvme_path in the plan.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, nothing_built):
    arguments, words = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        prepare(**arguments())
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_that_can_be_told_to_recompute_is_said_how(nothing_built):
    model = Tellable(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"Call model\.gradient_checkpointing_enable\(\) before prepare\(\)\.$"):
        prepare(model, plan=plan(recompute=True, model_fingerprint=""))


def test_no_batch_is_rehearsed_for_a_model_that_nothing_trains(nothing_built):
    with pytest.raises(ConfigError, match=r"prepare\(model, None\) trains nothing\. Give plan="):
        penstock.prepare(net(), None, placement="auto", batch=lambda: torch.zeros(2, 32))


class TestWithABatch:
    def test_what_was_planned_is_done(self, laptop, requests):
        sides = []

        def batch() -> torch.Tensor:
            sides.append(torch.is_grad_enabled())
            return torch.randn(4, 32)

        model = net()
        before = torch.get_rng_state()
        optimizer = prepare(model, batch=batch, options=TILES)
        assert torch.equal(torch.get_rng_state(), before)
        assert sides
        assert all(sides)  # on the user's side
        found = optimizer.plan
        assert found.model_fingerprint == model_fingerprint(net())
        assert (found.world_size, found.stage, found.precision, found.batch) == (1, 3, "fp32", "float32[4, 32]")
        assert requests[-1].placement == found.placement
        assert requests[-1].options == found.options
        optimizer.backward(model(torch.randn(4, 32)).square().mean())
        assert not optimizer.step().skipped
        optimizer.close()

    @pytest.mark.parametrize(
        ("shares", "options", "limits"),
        [
            (True, Options(), (None, 5440)),  # the model's own 440 bytes are in the host's memory
            (False, Options(), (1440, 5000)),
            (False, Options(device_bytes=600), (600, 5000)),
        ],
    )
    def test_what_is_planned_for_is_the_memory_that_is_free(self, monkeypatch, shares, options, limits):
        monkeypatch.setattr(make_plan, "shares_host_memory", lambda device: shares)
        monkeypatch.setattr(make_plan, "free_device_memory", lambda device: 1000)
        monkeypatch.setattr(make_plan, "host_memory", lambda options: HostMemory(5000, "the host has"))
        asked: list[dict[str, Any]] = []
        monkeypatch.setattr(make_plan, "plan", lambda *_, **arguments: asked.append(arguments))
        model, machine = nn.Linear(10, 10), Machine.read("cpu-laptop")
        plan_here(model, adamw(model), net, {"options": options}, machine=machine, device=CPU, grid=Grid())
        assert (asked[0]["device_bytes"], asked[0]["host_bytes"]) == limits
        assert asked[0]["options"] == options

    def test_a_failing_batch_is_said(self, laptop, nothing_built):
        def batch() -> torch.Tensor:
            raise ZeroDivisionError("no data")

        with pytest.raises(ConfigError, match=r"batch\(\) failed: .*no data"):
            prepare(batch=batch)


class TestFootprint:
    def test_it_is_that_of_the_same_arguments_by_hand(self, tmp_path):
        file = tmp_path / "plan.json"
        placement = Placement(params="cpu", optimizer="nvme", nvme_path=disks()[0])
        file.write_text(plan(placement=placement).to_json())
        model = net()
        found = footprint(model, adamw(model), placement="auto", plan=file, precision="fp32")
        by_hand = footprint(
            model, adamw(model), placement=placement, overlap="forward", options=TILES, precision="fp32"
        )
        assert found.at_rest.rows == by_hand.at_rest.rows
        assert found.device == by_hand.device
        assert found.checkpoint_bytes == by_hand.checkpoint_bytes

    @pytest.mark.parametrize("arguments", [{}, {"batch": net}])
    def test_it_rehearses_nothing(self, arguments):
        model = net()
        with pytest.raises(ConfigError, match=r"footprint\(placement='auto'\) simulates nothing: give plan=, the file"):
            footprint(model, adamw(model), placement="auto", **arguments)


def test_a_plan_within_a_budget_that_the_device_lacks_is_refused_like_arguments_by_hand():
    model = net()
    with pytest.raises(MemoryBudgetError, match=r"Options\(device_bytes=100\) gives it 100"):
        prepare(model, plan=plan(), options=Options(device_bytes=100))
