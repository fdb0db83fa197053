"""A plan is checked like what somebody wrote by hand, is held against a run, and says what `prepare` is to do."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from penstock import ConfigError, Options, Placement
from penstock.blueprint import request_for
from penstock.planner.plans import PLANNED_OPTIONS, Plan, Reason, Shortfall, model_fingerprint
from tests.lib.plans import DESKTOP, plan


def net(bias: bool = True, width: int = 3, **factory) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width, bias=bias, **factory), nn.Linear(width, 2, bias=bias, **factory))


def check(made: Plan, model: nn.Module, machine=None, world_size=1, stage=3, precision="bf16", **ranks) -> None:
    made.check_for(model, machine, world_size, stage, precision, **ranks)


def said(refused: pytest.ExceptionInfo) -> str:
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("lacks", lambda: Shortfall("gpu", 1), "'tier' is 'gpu': use one of 'device'"),
        ("lacks", lambda: Shortfall("cpu", 0), "'bytes' is 0: use a whole number, 1 or more"),
        ("why", lambda: Reason("stage", "3", "2", math.inf), "'cost_s' is inf: use a finite number"),
        ("overlap", "sometimes", "'overlap' is 'sometimes': use one of 'none', 'forward', 'backward', 'auto'"),
        ("mesh", {"pp": 1}, "'mesh.pp' is no key that is read. Correct it, or leave it out."),
        (
            "mesh",
            {"dp_replicate": 2, "dp_shard": 3},
            "'dp_shard': 3, 'tp': 1} contradict each other: use as many ranks",
        ),
        ("hosts", 2, "world_size=1 and hosts=2 contradict each other"),
        ("fits", False, "fits=False and 0 lacks contradict each other"),
        ("step_s", 5, "step_range_s=(3.81, 4.52) and step_s=5 contradict each other"),
        ("why", (DESKTOP.what_ifs[0],), "'why[0]' is WhatIf("),
    ],
)
def test_what_no_plan_can_say_is_refused_by_name(field, value, words):
    with pytest.raises(ConfigError) as refused:
        plan(**{field: [value()] if callable(value) else value})
    assert words in said(refused)


def test_a_placement_is_kept_in_one_way_and_its_homes_to_the_bit():
    third = 1 / 3
    given = Placement(
        params={"disk": 1 - third, "gpu": third, "cpu": 0.0},
        grads={"cpu": 1.0},
        optimizer="cuda",
        activations="gpu",
        nvme_path=[Path("/a"), "/b"],
    )
    kept = plan(placement=given).placement
    assert kept == Placement(
        params={"device": third, "nvme": 1 - third},
        grads="cpu",
        optimizer="device",
        activations="device",
        nvme_path=("/a", "/b"),
    )
    for kind in ("params", "grads", "optimizer"):
        assert kept.home(kind) == given.home(kind)
    assert plan(placement=Placement(nvme_path=[Path("/a")])).placement.nvme_path == "/a"
    assert plan(placement=Placement()).placement == Placement()


class TestPrepare:
    def test_the_plan_decides_what_nobody_said_and_saying_the_same_is_no_conflict(self):
        options = Options(streamed_updates=0.25, tile_bytes=1 << 20, checksums=False)
        made = plan(options=options)
        arguments = {"placement": DESKTOP.placement, "overlap": "forward", "options": options}
        assert made.prepare_arguments() == arguments
        assert made.prepare_arguments(Options(), overlap="forward") == arguments
        assert made.prepare_arguments(options) == arguments
        by_hand = request_for(net(), **arguments)
        assert request_for(net(), **made.prepare_arguments()) == by_hand

    @pytest.mark.parametrize(
        ("device", "planned", "said", "merged"),
        [("cuda", 0.25, "auto", 0.25), ("cuda", 0.0, "auto", 0.0), ("cpu", 0.0, "auto", "auto")],
    )
    def test_auto_says_nothing_of_streamed_updates_and_a_cpu_has_none(self, device, planned, said, merged):
        made = plan(device=device, options=Options(streamed_updates=planned))
        given = made.prepare_arguments(Options(streamed_updates=said))["options"]
        assert given == Options(streamed_updates=merged)

    def test_options_that_change_no_figure_are_the_users(self):
        made = plan(options=Options(streamed_updates=0.25, checksums=False, timeout_s=5.0))
        users = Options(timeout_s=7.0, rounding_seed=3, on_nonfinite="raise", device_bytes=1 << 30)
        merged = made.prepare_arguments(users)["options"]
        assert merged == replace(users, streamed_updates=0.25, checksums=False)

    def test_an_option_that_the_plan_is_for_cannot_be_another(self):
        others = {"prefetch_bytes": 0, "live_bytes": 1 << 20, "persistent_bytes": 1, "tile_bytes": 1 << 20}
        others |= {"pinned_bytes": 0, "update_threads": 3, "io_queue_depth": 1, "state_dtype": "int8"}
        others |= {"streamed_updates": 0.5}
        assert others.keys() <= set(PLANNED_OPTIONS) <= {field.name for field in fields(Options)}
        for name, value in others.items():
            planned = getattr(Options(), name)
            words = f"Options({name}) is {value!r} here and {planned!r} in the plan. Leave it out, or plan again"
            with pytest.raises(ConfigError, match=re.escape(words)):
                DESKTOP.prepare_arguments(Options(**{name: value}))


class TestCheck:
    def test_a_plan_for_this_run_passes(self):
        model = net()
        made = plan(model_fingerprint=model_fingerprint(model))
        check(made, model, dict(DESKTOP.machine_fingerprint))
        check(made, net(device="meta"))
        check(DESKTOP, nn.Linear(7, 7))  # names no model

    @pytest.mark.parametrize(
        ("run", "words"),
        [
            ({"stage": 1, "world_size": 2}, "for world size 1, this run has 2; for stage 3, this run has 1: plan"),
            ({"machine": {"accelerators": ("L40S",)}}, "accelerators is ['RTX 4090'], here it is ['L40S']"),
        ],
    )
    def test_another_run_is_named(self, run, words):
        with pytest.raises(ConfigError) as refused:
            check(DESKTOP, net(), **run)
        assert words in said(refused)

    def test_ranks_that_lie_otherwise_are_named(self):
        flat, hybrid = plan(world_size=8), plan(world_size=8, mesh={"dp_shard": 4, "dp_replicate": 2})
        sizes = {"dp_replicate": 2, "dp_shard": 4, "tp": 1}
        check(flat, net(), world_size=8)
        check(hybrid, net(), world_size=8, sizes=sizes)
        for made, run, words in (
            (hybrid, {}, "for a mesh of dp_replicate 2 x dp_shard 4, this run has dp_shard 8: plan again"),
            (flat, {"sizes": sizes}, "for a mesh of dp_shard 8, this run has dp_replicate 2 x dp_shard 4: plan"),
        ):
            with pytest.raises(ConfigError) as refused:
                check(made, net(), world_size=8, **run)
            assert words in said(refused)
        with pytest.raises(ConfigError) as refused:
            check(hybrid, net(), world_size=2)
        assert said(refused) == "The plan is for world size 8, this run has 2: plan again with penstock plan."
        copies = {**sizes, "dp_replicate": 8, "dp_shard": 1}
        check(plan(world_size=8, stage=0), net(), world_size=8, stage=0, sizes=copies)

    def test_what_only_one_fingerprint_says_is_not_compared(self):
        for machine in (None, {}, {"kernel": "6.1"}, {"cores": 16, "accelerators": ("RTX 4090",)}):
            check(DESKTOP, net(), machine)
        check(plan(machine_fingerprint={}), net(), {"cpu": "another"})  # was not probed


class TestFingerprint:
    def test_values_and_devices_do_not_count(self):
        assert model_fingerprint(net()) == model_fingerprint(net()) == model_fingerprint(net(device="meta"))

    @pytest.mark.parametrize(
        "other",
        [
            net(bias=False),
            net(dtype=torch.bfloat16),
            nn.Sequential(*net(), nn.Linear(1, 1)),
            nn.ModuleDict({"0": net()[0], "2": net()[1]}),
            net().requires_grad_(False),
            nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)),  # of as many elements
        ],
    )
    def test_names_shapes_dtypes_and_what_is_trained_count(self, other):
        assert model_fingerprint(other) != model_fingerprint(net())

    def test_which_of_two_equal_parameters_is_trained_counts(self):
        first, second = net(), net()
        first[0].weight.requires_grad_(False)
        second[1].weight.requires_grad_(False)
        assert model_fingerprint(first).startswith("4 tensors, 17 parameters, 11 trained, ")
        assert model_fingerprint(second).startswith("4 tensors, 17 parameters, 11 trained, ")
        assert model_fingerprint(first) != model_fingerprint(second)

    def test_tied_parameters_differ_from_two_of_the_same_shape(self):
        tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        apart = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        tied[1].weight = tied[0].weight
        assert model_fingerprint(tied).startswith("1 tensors, 9 parameters, 9 trained, digest ")
        assert model_fingerprint(tied) != model_fingerprint(apart)

    def test_wrappers_that_recompute_or_compile_do_not_count(self):
        plain, wrapped = net(), net()
        wrapped[0] = checkpoint_wrapper(wrapped[0])
        assert next(wrapped.named_parameters())[0] == "0._checkpoint_wrapped_module.weight"
        assert model_fingerprint(wrapped) == model_fingerprint(plain)
        compiled = nn.ModuleDict({"_orig_mod": net()})  # as torch.compile names it
        assert model_fingerprint(compiled) == model_fingerprint(plain)
