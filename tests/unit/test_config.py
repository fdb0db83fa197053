"""Placement and Options are values that refuse what does not exist, by name."""

import dataclasses
import math
from typing import Any

import pytest

from penstock import ConfigError, Options, Placement
from penstock.config import Tier, parse_home, parse_tier


@pytest.mark.parametrize(
    ("spelling", "tier"),
    [
        ("device", Tier.DEVICE),
        ("gpu", Tier.DEVICE),
        ("cuda", Tier.DEVICE),
        ("cpu", Tier.CPU),
        ("nvme", Tier.NVME),
        ("disk", Tier.NVME),
    ],
)
def test_tiers_have_several_spellings(spelling: str, tier: Tier) -> None:
    assert parse_tier(spelling, what="params") is tier
    assert Placement(params=spelling).home("params") == {tier: 1.0}


def test_fractions_are_kept_and_shares_of_zero_left_out() -> None:
    placement = Placement(optimizer={"gpu": 0.25, "cpu": 0.75, "disk": 0})
    assert placement.home("optimizer") == {Tier.DEVICE: 0.25, Tier.CPU: 0.75}
    rounded = {"cpu": 1 / 3, "device": 1 / 3, "nvme": 0.3333333}
    assert parse_home(rounded, what="params").keys() == set(Tier)


@pytest.mark.parametrize(
    ("home", "text"),
    [
        ("ram", "grads='ram' is not a tier. Use one of 'device', 'cpu', 'nvme'."),
        (None, "grads=None is not a tier. Use one of 'device', 'cpu', 'nvme'."),
        (["cpu"], r"grads=['cpu'] is not a tier. Use one of 'device', 'cpu', 'nvme'."),
        ({"cpu": 0.5}, "The fractions of grads={'cpu': 0.5} sum to 0.5. Make them sum to 1."),
        ({}, "The fractions of grads={} sum to 0. Make them sum to 1."),
        ({"cpu": 0.5, "ram": 0.5}, "grads='ram' is not a tier. Use one of 'device', 'cpu', 'nvme'."),
        ({"gpu": 0.5, "cuda": 0.5}, "grads={'gpu': 0.5, 'cuda': 0.5} names the tier 'device' twice."),
        ({"cpu": 1.5, "gpu": -0.5}, "grads['cpu']=1.5 is not a fraction. Use a number from 0 to 1."),
        ({"cpu": math.nan}, "grads['cpu']=nan is not a fraction. Use a number from 0 to 1."),
        ({"cpu": True}, "grads['cpu']=True is not a fraction. Use a number from 0 to 1."),
        ({"cpu": "all"}, "grads['cpu']='all' is not a fraction. Use a number from 0 to 1."),
    ],
)
def test_a_home_that_is_none_is_refused(home: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Placement(grads=home)
    assert text in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_twin_flow_splits_the_optimizer() -> None:
    assert Placement.twin_flow(0.4).home("optimizer") == {Tier.CPU: 0.4, Tier.DEVICE: 0.6}
    assert Placement.twin_flow(1).home("optimizer") == {Tier.CPU: 1.0}
    assert Placement.twin_flow(0, grads="cpu").home("grads") == {Tier.CPU: 1.0}
    for ratio in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match=r"twin_flow\(ratio="):
            Placement.twin_flow(ratio)


WHOLE_NUMBERS = {
    "prefetch_bytes": 0,
    "live_bytes": 1,
    "persistent_bytes": 0,
    "tile_bytes": 4096,
    "device_bytes": 1,
    "pinned_bytes": 0,
    "host_bytes": 1,
    "update_threads": 1,
    "io_queue_depth": 1,
    "rounding_seed": 0,
    "max_skipped_steps": 1,
    "secondary_shard": 2,
}


@pytest.mark.parametrize(("name", "least"), WHOLE_NUMBERS.items())
def test_sizes_are_whole_numbers_from_their_least(name: str, least: int) -> None:
    assert getattr(Options(**{name: least}), name) == least
    for wrong in (least - 1, least + 0.5, True, "many"):
        with pytest.raises(ConfigError) as caught:
            Options(**{name: wrong})
        unit = " of bytes" if name.endswith("_bytes") else ""
        assert str(caught.value) == f"Options({name}={wrong!r}): use a whole number{unit}, {least} or more."


def test_only_some_sizes_may_be_left_to_penstock() -> None:
    optional = set()
    for name in WHOLE_NUMBERS:
        try:
            Options(**{name: None})
        except ConfigError:
            continue
        optional.add(name)
    assert optional == {
        "device_bytes",
        "host_bytes",
        "pinned_bytes",
        "update_threads",
        "max_skipped_steps",
        "secondary_shard",
    }


CHOICES = {
    "on_nonfinite": ("ignore", "'skip', 'raise'"),
    "reduce_op": ("max", "'mean', 'sum'"),
    "state_dtype": ("fp8", "'fp32', 'bf16', 'int8'"),
    "rounding": ("up", "'stochastic', 'nearest'"),
    "checksums": ("yes", "True, False"),
    "dynamic_loss_scale": (None, "True, False"),
    "debug_release": ("late", "True, False"),
    "cast_inputs": ("blocks", "'units', 'model', 'none'"),
    "gather_format": ("int4", "'exact', 'int8', 'fp8'"),
    "whole_updates": ("cpu", "'device', 'home'"),
    "reduce_format": ("fp8", "'exact', 'int8', 'int4'"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_named(name: str) -> None:
    wrong, choices = CHOICES[name]
    with pytest.raises(ConfigError) as caught:
        Options(**{name: wrong})
    assert str(caught.value) == f"Options({name}={wrong!r}): use one of {choices}."


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, "large", None])
def test_the_loss_scale_is_finite_and_above_zero(scale: Any) -> None:
    with pytest.raises(ConfigError, match=r"Options\(initial_loss_scale=.*use a finite number above 0"):
        Options(initial_loss_scale=scale)
    with pytest.raises(ConfigError, match=r"Options\(timeout_s=.*use a finite number above 0"):
        Options(timeout_s=scale)


def test_every_option_is_checked() -> None:
    checked = {*WHOLE_NUMBERS, *CHOICES, "initial_loss_scale", "timeout_s", "streamed_updates"}
    assert {f.name for f in dataclasses.fields(Options)} == checked
