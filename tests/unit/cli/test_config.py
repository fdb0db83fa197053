import json
import re
from typing import Any

import pytest

from penstock.cli.training.config import TrainConfig
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "--steps 0 is too small. Use 1 or more."),
        ({"batch_size": 0}, "--batch-size 0 is too small. Use 1 or more."),
        ({"accumulation": -1}, "--accumulation -1 is too small. Use 1 or more."),
        ({"seq_length": 1}, "--seq-length 1 is too small. Use 2 or more."),
        ({"warmup": -1}, "--warmup -1 is too small. Use 0 or more."),
        ({"log_every": 0}, "--log-every 0 is too small. Use 1 or more."),
        ({"eval_sequences": -1}, "--eval-sequences -1 is too small. Use 0 or more."),
        ({"sample_tokens": -1}, "--sample-tokens -1 is too small. Use 0 or more."),
        ({"seed": -1}, "--seed -1 is too small. Use 0 or more."),
        ({"stage": 4}, "--stage 4 is not a ZeRO stage. Use 0, 1, 2 or 3."),
        ({"lr": 0.0}, "--lr 0 does not train. Use a number above 0."),
        ({"lr": float("nan")}, "--lr nan does not train."),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 is negative. Use 0 or more."),
        ({"betas": (0.9, 1.0)}, "--betas 0.9,1: use two numbers from 0 to below 1."),
        ({"max_grad_norm": -1.0}, "--max-grad-norm -1 clips everything. Use a number above 0."),
        ({"warmup": 11, "steps": 10}, "--warmup 11 is longer than the run of --steps 10. Shorten it."),
        ({"precision": "fp8"}, "--precision 'fp8': use one of auto, fp32, bf16."),
        ({"overlap": "always"}, "--overlap 'always': use one of none, forward, backward, auto."),
    ],
)
def test_values_out_of_range_are_refused_by_option(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        TrainConfig(**settings)


def test_warmup_is_a_tenth_of_the_steps_unless_given() -> None:
    assert TrainConfig(steps=600).warmup_steps == 60
    assert TrainConfig(steps=5).warmup_steps == 0
    assert TrainConfig(steps=600, warmup=7).warmup_steps == 7


def test_settings_as_json() -> None:
    config = TrainConfig(optimizer={"device": 0.5, "cpu": 0.5}, tile_bytes=4096, data=("a", "b"))
    values = json.loads(json.dumps(config.to_dict()))
    assert values["optimizer"] == {"device": 0.5, "cpu": 0.5}
    assert values["options"] == {"tile_bytes": 4096}
    assert values["data"] == ["a", "b"]
    assert values["out"] == "penstock-out"
